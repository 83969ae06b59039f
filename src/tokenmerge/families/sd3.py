"""SD3 and SD3.5: SD3Transformer2DModel. Joint blocks; positions are added before the first one."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention import JointTransformerBlock

from .base import Block, BlockKind, Component, Family, Ports, arguments, as_tensor, keys_values, random_input
from .calls import DenoiserCall

_CALL = arguments(SD3Transformer2DModel)
_BLOCK = arguments(JointTransformerBlock)
_JOINT = BlockKind(
    Ports(_BLOCK("hidden_states"), outputs=(1,), text_tokens=_BLOCK("encoder_hidden_states")),
    {
        # The second attention, of images alone, is there in SD3.5-medium's first blocks.
        "self_attention": (Component("attn", Ports(outputs=(0,))), Component("attn2")),
        "mlp": (Component("ff"),),
    },
    keys_values("attn", "attn2"),
)

# Of CLIP and T5 together, as the pipeline gives them.
_TEXT_TOKENS = 77 + 256


def _blocks(transformer: SD3Transformer2DModel) -> list[Block]:
    return [
        Block(f"transformer_blocks.{number}", block, _JOINT, "joint", width=transformer.inner_dim)
        for number, block in enumerate(transformer.transformer_blocks)
    ]


def _read(transformer: SD3Transformer2DModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
    latent = _CALL("hidden_states").read(args, kwargs)
    batch, _, height, width = latent.shape
    patch = transformer.config.patch_size
    timestep = as_tensor(_CALL("timestep").read(args, kwargs))
    text = _CALL("encoder_hidden_states").read(args, kwargs).shape[1]
    return DenoiserCall(batch, latent.dtype, latent.device, timestep, height // patch, width // patch, text_tokens=text)


def _plan_call(transformer: SD3Transformer2DModel, height: int, width: int) -> DenoiserCall:
    patch = transformer.config.patch_size
    return DenoiserCall(1, torch.float32, torch.device("cpu"), torch.zeros(()), height // patch, width // patch)


def _example(transformer: SD3Transformer2DModel, batch: int, height: int, width: int) -> dict[str, Any]:
    config = transformer.config
    return {
        "hidden_states": random_input(transformer, batch, config.in_channels, height, width),
        "timestep": torch.full((batch,), 500.0, device=transformer.device),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.joint_attention_dim),
        "pooled_projections": random_input(transformer, batch, config.pooled_projection_dim),
    }


FAMILY = Family(
    name="sd3",
    denoiser=SD3Transformer2DModel,
    merging="dit",
    blocks=_blocks,
    read=_read,
    plan_call=_plan_call,
    unit=lambda transformer, scale: transformer.config.patch_size * scale,
    example=_example,
    between_blocks=(_CALL("block_controlnet_hidden_states"), _CALL("skip_layers")),
    attention_kwargs=_CALL("joint_attention_kwargs"),
)

"""SD3 and SD3.5: SD3Transformer2DModel. Joint blocks; positions are added before the first one."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import SD3Transformer2DModel

from .calls import DenoiserCall
from ..presets import Defaults
from .base import Argument, Ports
from .base import Block, BlockKind, Component, Family, as_tensor, keys_values, noise

_TEXT = Argument("encoder_hidden_states", 1)
_JOINT = BlockKind(
    Ports(outputs=(1,), text_tokens=_TEXT),
    {
        # The second attention, of images alone, is there in SD3.5-medium's first blocks.
        "self_attention": (Component("attn", Ports(outputs=(0,))), Component("attn2")),
        "mlp": (Component("ff"),),
    },
    keys_values("attn", "attn2"),
)

_HIDDEN_STATES = Argument("hidden_states", 0)
_TIMESTEP = Argument("timestep", 3)
# Of CLIP and T5 together, as the pipeline gives them.
_TEXT_TOKENS = 77 + 256


def _blocks(transformer: SD3Transformer2DModel) -> list[Block]:
    return [
        Block(f"transformer_blocks.{number}", block, _JOINT, "joint", width=transformer.inner_dim)
        for number, block in enumerate(transformer.transformer_blocks)
    ]


def _read(transformer: SD3Transformer2DModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
    latent = _HIDDEN_STATES.read(args, kwargs)
    batch, _, height, width = latent.shape
    patch = transformer.config.patch_size
    timestep = as_tensor(_TIMESTEP.read(args, kwargs))
    text = _TEXT.read(args, kwargs).shape[1]
    return DenoiserCall(batch, latent.dtype, latent.device, timestep, height // patch, width // patch, text_tokens=text)


def _plan_call(transformer: SD3Transformer2DModel, height: int, width: int) -> DenoiserCall:
    patch = transformer.config.patch_size
    return DenoiserCall(1, torch.float32, torch.device("cpu"), torch.zeros(()), height // patch, width // patch)


def _example(transformer: SD3Transformer2DModel, batch: int, height: int, width: int) -> dict[str, Any]:
    config = transformer.config
    return {
        "hidden_states": noise(transformer, batch, config.in_channels, height, width),
        "timestep": torch.full((batch,), 500.0, device=transformer.device),
        "encoder_hidden_states": noise(transformer, batch, _TEXT_TOKENS, config.joint_attention_dim),
        "pooled_projections": noise(transformer, batch, config.pooled_projection_dim),
    }


FAMILY = Family(
    name="sd3",
    denoiser=SD3Transformer2DModel,
    defaults=Defaults(merging="dit-anchored"),
    blocks=_blocks,
    read=_read,
    plan_call=_plan_call,
    unit=lambda transformer, scale: transformer.config.patch_size * scale,
    example=_example,
    span_breakers=(Argument("block_controlnet_hidden_states", 4), Argument("skip_layers", 7)),
    attention_kwargs=Argument("joint_attention_kwargs", 5),
)

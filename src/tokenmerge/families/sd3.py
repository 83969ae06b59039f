"""SD3 and SD3.5: joint blocks; positions are added before the first one."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention import JointTransformerBlock

from .base import BlockKind, Component, Family, Ports, arguments, joint_ports, keys_values, listed, random_input
from .reading import Latents

_CALL = arguments(SD3Transformer2DModel)
_JOINT = BlockKind(
    joint_ports(JointTransformerBlock, output=1, rotary=None),
    {
        # The first blocks of SD3.5-medium have a second attention, of image tokens only.
        "self_attention": (Component("attn", Ports(outputs=(0,))), Component("attn2")),
        "mlp": (Component("ff"),),
    },
    keys_values("attn", "attn2"),
)
# The pipeline appends T5's tokens to CLIP's.
_TEXT_TOKENS = 77 + 256


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config = transformer.config
    return {
        "hidden_states": random_input(transformer, batch, config.in_channels, height, width),
        "timestep": torch.full((batch,), 500.0, device=transformer.device),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.joint_attention_dim),
        "pooled_projections": random_input(transformer, batch, config.pooled_projection_dim),
    }


FAMILIES = (
    Family(
        name="sd3",
        title="Stable Diffusion 3, 3.5",
        denoiser=SD3Transformer2DModel,
        pipelines=tuple(f"StableDiffusion3{kind}Pipeline" for kind in ("", "Img2Img", "ControlNet")),
        steps="28 to 40",
        blocks=listed(("transformer_blocks", _JOINT, "joint")),
        calls=Latents(_CALL),
        example=_example,
        between_blocks=(_CALL("block_controlnet_hidden_states"), _CALL("skip_layers")),
        attention_kwargs=_CALL("joint_attention_kwargs"),
    ),
)

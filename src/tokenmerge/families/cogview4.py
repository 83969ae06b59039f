"""CogView4: joint blocks that return image before text; rotary positions for the image only."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogView4Transformer2DModel
from diffusers.models.transformers.transformer_cogview4 import CogView4TransformerBlock

from .base import BlockKind, Family, arguments, joint_ports, listed, random_input
from .reading import Latents

_JOINT = BlockKind(joint_ports(CogView4TransformerBlock, output=0))
_TEXT_TOKENS = 64


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    size = torch.tensor([[8 * height, 8 * width]] * batch, device=device, dtype=transformer.dtype)
    return {
        "hidden_states": random_input(transformer, batch, config.in_channels, height, width),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.text_embed_dim),
        "timestep": torch.full((batch,), 500, device=device),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros_like(size),
    }


FAMILIES = (
    Family(
        name="cogview4",
        title="CogView4",
        denoiser=CogView4Transformer2DModel,
        pipelines=("CogView4Pipeline",),
        steps="50",
        blocks=listed(("transformer_blocks", _JOINT, "joint")),
        calls=Latents(arguments(CogView4Transformer2DModel)),
        example=_example,
    ),
)

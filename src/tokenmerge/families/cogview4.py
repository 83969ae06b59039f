"""CogView4: joint blocks that return image before text; rotary positions for the image only."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogView4Transformer2DModel
from diffusers.models.transformers.transformer_cogview4 import CogView4TransformerBlock

from .base import BlockKind, Family, Ports, arguments, cos_sin, listed, random_input
from .reading import Latents

_BLOCK = arguments(CogView4TransformerBlock)
_JOINT = BlockKind(
    Ports(
        _BLOCK("hidden_states"),
        outputs=(0,),
        text_tokens=_BLOCK("encoder_hidden_states"),
        per_token=cos_sin(_BLOCK("image_rotary_emb")),
    )
)
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

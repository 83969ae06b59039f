"""Wan 2.1 and 2.2: text by cross-attention; TI2V gives every token a timestep, A14B has two denoisers."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from .base import BlockKind, Family, PerToken, Ports, arguments, cos_sin, listed, random_input
from .reading import Latents, beside_channels

_BLOCK = arguments(WanTransformerBlock)
_KIND = BlockKind(
    Ports(
        _BLOCK("hidden_states"),
        per_token=(*cos_sin(_BLOCK("rotary_emb"), axis=1), PerToken(_BLOCK("temb"), 1, ndim=4)),
    )
)
# The pipeline pads prompts to this length.
_TEXT_TOKENS = 512


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config = transformer.config
    return {
        "hidden_states": random_input(transformer, batch, config.in_channels, frames, height, width),
        "timestep": torch.full((batch,), 500, device=transformer.device),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.text_dim),
    }


FAMILIES = (
    Family(
        name="wan",
        title="Wan 2.1, Wan 2.2 (T2V, I2V, TI2V)",
        denoiser=WanTransformer3DModel,
        pipelines=("WanPipeline", "WanImageToVideoPipeline"),
        steps="50, Lightning 4",
        merging="video",
        frames=81,
        blocks=listed(("blocks", _KIND, "blocks")),
        calls=Latents(arguments(WanTransformer3DModel), may_be_given=beside_channels),
        example=_example,
        note="Wan 2.2 A14B has two denoisers: one `apply` serves both, and `summary` reports both.",
    ),
)

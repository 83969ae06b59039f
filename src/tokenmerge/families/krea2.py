"""Krea-2: one sequence with text first."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Krea2Transformer2DModel
from diffusers.models.transformers.transformer_krea2 import Krea2TransformerBlock

from .base import BlockKind, Family, PerToken, Ports, arguments, cos_sin, listed, random_input
from .reading import Ids, ids_of

_BLOCK = arguments(Krea2TransformerBlock)
_JOINT = BlockKind(
    Ports(
        _BLOCK("hidden_states"),
        text="first",
        per_token=(*cos_sin(_BLOCK("image_rotary_emb")), PerToken(_BLOCK("attention_mask"), -1)),
    )
)
_TEXT_TOKENS = 64


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    ids = ids_of(height // 2, width // 2)
    text = (batch, _TEXT_TOKENS, config.num_text_layers, config.text_hidden_dim)
    return {
        "hidden_states": random_input(transformer, batch, len(ids), config.in_channels),
        "encoder_hidden_states": random_input(transformer, *text),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=transformer.dtype),
        "position_ids": torch.cat([torch.zeros(_TEXT_TOKENS, 3), ids]).to(device),
        "encoder_attention_mask": torch.ones(batch, _TEXT_TOKENS, dtype=torch.bool, device=device),
    }


FAMILIES = (
    Family(
        name="krea2",
        title="Krea-2, Krea-2-Turbo",
        denoiser=Krea2Transformer2DModel,
        pipelines=("Krea2Pipeline",),
        steps="28, Turbo 8",
        blocks=listed(("transformer_blocks", _JOINT, "joint")),
        calls=Ids(arguments(Krea2Transformer2DModel), ids="position_ids"),
        example=_example,
    ),
)

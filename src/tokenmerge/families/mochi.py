"""Mochi: joint blocks that return video before text; text tokens are narrower. Timesteps rise."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import MochiTransformer3DModel
from diffusers.models.transformers.transformer_mochi import MochiTransformerBlock

from .base import BlockKind, Family, arguments, joint_ports, listed, random_input
from .reading import Latents

_JOINT = BlockKind(joint_ports(MochiTransformerBlock, output=0))


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    text = config.max_sequence_length
    return {
        "hidden_states": random_input(transformer, batch, config.in_channels, frames, height, width),
        "encoder_hidden_states": random_input(transformer, batch, text, config.text_embed_dim),
        "timestep": torch.full((batch,), 500, device=device),
        "encoder_attention_mask": torch.ones(batch, text, dtype=torch.bool, device=device),
    }


FAMILIES = (
    Family(
        name="mochi",
        title="Mochi 1",
        denoiser=MochiTransformer3DModel,
        pipelines=("MochiPipeline",),
        steps="64",
        merging="video",
        frames=85,
        scales=(8, 6),
        blocks=listed(("transformer_blocks", _JOINT, "joint")),
        calls=Latents(arguments(MochiTransformer3DModel), rises=True),
        example=_example,
    ),
)

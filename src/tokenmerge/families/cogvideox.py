"""CogVideoX: joint blocks that return video before text; rotary positions, or none."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock

from .base import BlockKind, Family, arguments, joint_ports, listed, random_input
from .reading import Latents, beside_channels

_JOINT = BlockKind(joint_ports(CogVideoXBlock, output=0))
_CALLS = Latents(arguments(CogVideoXTransformer3DModel), frames_axis=1, may_be_given=beside_channels)


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    given: dict[str, Any] = {
        "hidden_states": random_input(transformer, batch, frames, config.in_channels, height, width),
        "encoder_hidden_states": random_input(transformer, batch, config.max_text_seq_length, config.text_embed_dim),
        "timestep": torch.full((batch,), 500, device=device),
    }
    if config.use_rotary_positional_embeddings:
        tokens = _CALLS.plan(transformer, height, width, frames).tokens
        angles = torch.zeros(tokens, config.attention_head_dim, device=device)
        given["image_rotary_emb"] = (angles.cos(), angles.sin())
    return given


FAMILIES = (
    Family(
        name="cogvideox",
        title="CogVideoX",
        denoiser=CogVideoXTransformer3DModel,
        pipelines=("CogVideoXPipeline",),
        steps="50",
        merging="video",
        frames=49,
        blocks=listed(("transformer_blocks", _JOINT, "joint")),
        calls=_CALLS,
        example=_example,
    ),
)

"""Lumina Image 2: one sequence with text first; each sample has its own text length. Timesteps rise."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Lumina2Transformer2DModel
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock

from .base import BlockKind, Family, PerToken, Ports, arguments, listed, random_input
from .reading import Latents

_CALL = arguments(Lumina2Transformer2DModel)
_BLOCK = arguments(Lumina2TransformerBlock)
_JOINT = BlockKind(Ports(_BLOCK("hidden_states"), text="first", per_token=(PerToken(_BLOCK("image_rotary_emb"), 1),)))
_TEXT_TOKENS = 64


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    return {
        "hidden_states": random_input(transformer, batch, config.in_channels, height, width),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=transformer.dtype),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.cap_feat_dim),
        "encoder_attention_mask": torch.ones(batch, _TEXT_TOKENS, dtype=torch.bool, device=device),
    }


def _unmergeable_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    mask = _CALL("encoder_attention_mask").read(args, kwargs)
    # The model reads the lengths too, so it waits for the device anyway.
    if mask.shape[0] == 1 or len(mask.sum(1).unique()) == 1:
        return ""
    return "the prompts of a batch have different lengths, so its images begin at different places"


FAMILIES = (
    Family(
        name="lumina2",
        title="Lumina Image 2.0",
        denoiser=Lumina2Transformer2DModel,
        pipelines=("Lumina2Pipeline",),
        steps="30",
        blocks=listed(("layers", _JOINT, "layers")),
        calls=Latents(_CALL, rises=True),
        example=_example,
        unmergeable_call=_unmergeable_call,
        note="Prompts of different lengths in one batch: Hold only. Their images begin at different places.",
    ),
)

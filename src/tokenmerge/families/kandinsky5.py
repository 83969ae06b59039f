"""Kandinsky 5: text by cross-attention; channels come last in latents."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Kandinsky5Transformer3DModel
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5TransformerDecoderBlock

from .base import BlockKind, Family, PerToken, Ports, arguments, listed, random_input
from .reading import Latents

_CALL = arguments(Kandinsky5Transformer3DModel)
_BLOCK = arguments(Kandinsky5TransformerDecoderBlock)
_KIND = BlockKind(Ports(_BLOCK("visual_embed"), per_token=(PerToken(_BLOCK("rope"), axis=1),)))
_TEXT_TOKENS = 256


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    channels = 2 * config.in_visual_dim + 1 if config.visual_cond else config.in_visual_dim
    sides = (size // each for size, each in zip((frames, height, width), config.patch_size, strict=True))
    return {
        "hidden_states": random_input(transformer, batch, frames, height, width, channels),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.in_text_dim),
        "timestep": torch.full((batch,), 500.0, device=device),
        "pooled_projections": random_input(transformer, batch, config.in_text_dim2),
        "visual_rope_pos": tuple(torch.arange(side, device=device) for side in sides),
        "text_rope_pos": torch.arange(_TEXT_TOKENS, device=device),
    }


def _unmergeable_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    sparse = _CALL("sparse_params").read(args, kwargs) is not None
    return "its sparse attention needs tokens in blocks of its own order" if sparse else ""


FAMILIES = (
    Family(
        name="kandinsky5",
        title="Kandinsky 5.0",
        denoiser=Kandinsky5Transformer3DModel,
        pipelines=("Kandinsky5T2VPipeline",),
        steps="50, distilled 16",
        merging="video",
        frames=121,
        blocks=listed(("visual_transformer_blocks", _KIND, "blocks")),
        calls=Latents(_CALL, frames_axis=1, channels_last=True, may_be_given=lambda config: config.visual_cond),
        example=_example,
        unmergeable_call=_unmergeable_call,
        note="Sparse attention (10-second videos): Hold only. It needs tokens in blocks of its own order.",
    ),
)

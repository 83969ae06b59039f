"""LTX-Video: text by cross-attention; packed tokens, with frames, height and width as arguments."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock

from .base import BlockKind, Calls, Family, PerToken, Ports, arguments, cos_sin, listed, random_input
from .calls import DenoiserCall, TokenGrid, planned
from .reading import conditioned, latest, length

_CALL = arguments(LTXVideoTransformer3DModel)
_BLOCK = arguments(LTXVideoTransformerBlock)
_KIND = BlockKind(
    Ports(
        _BLOCK("hidden_states"),
        per_token=(*cos_sin(_BLOCK("image_rotary_emb"), axis=1), PerToken(_BLOCK("temb"), 1)),
    )
)
_TEXT_TOKENS = 128


def _sides(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int, int]:
    height, width, frames = (_CALL(name).read(args, kwargs) or 0 for name in ("height", "width", "num_frames"))
    return height, width, frames


class _Calls(Calls):
    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        tokens, timestep = _CALL("hidden_states").read(args, kwargs), _CALL("timestep").read(args, kwargs)
        height, width, frames = _sides(args, kwargs)
        # Held tokens need not lie on a grid.
        laid = height * width * frames == tokens.shape[1]
        grids = conditioned(height, width, frames, timestep) if laid else (TokenGrid(1, tokens.shape[1]),)
        text = length(_CALL("encoder_hidden_states"), args, kwargs)
        return DenoiserCall(tokens.shape[0], tokens.dtype, tokens.device, latest(timestep), grids, text_tokens=text)

    def plan(self, denoiser: Any, height: int, width: int, frames: int = 1) -> DenoiserCall:
        return planned(TokenGrid(height, width, frames))


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    return {
        "hidden_states": random_input(transformer, batch, frames * height * width, config.in_channels),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.caption_channels),
        "timestep": torch.full((batch,), 500.0, device=device, dtype=transformer.dtype),
        "encoder_attention_mask": torch.ones(batch, _TEXT_TOKENS, device=device),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def _unmergeable_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    height, width, frames = _sides(args, kwargs)
    tokens = _CALL("hidden_states").read(args, kwargs).shape[1]
    return "" if height * width * frames == tokens else f"the {tokens} tokens of this call lie on no grid"


FAMILIES = (
    Family(
        name="ltx",
        title="LTX-Video",
        denoiser=LTXVideoTransformer3DModel,
        pipelines=("LTXPipeline",),
        steps="50, distilled 8",
        merging="video",
        frames=161,
        scales=(32, 8),
        blocks=listed(("transformer_blocks", _KIND, "blocks")),
        calls=_Calls(),
        example=_example,
        unmergeable_call=_unmergeable_call,
        note="LTXConditionPipeline: Hold only. Its conditioning tokens lie on no grid.",
    ),
)

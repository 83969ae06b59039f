"""PixArt alpha and Sigma: a sequence of the blocks that UNets have; positions are added before the first one."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import PixArtTransformer2DModel

from .base import Family, arguments, listed, random_input
from .reading import Latents
from .unet import BASIC_BLOCK

_CALL = arguments(PixArtTransformer2DModel)
_TEXT_TOKENS = 120


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    return {
        "hidden_states": random_input(transformer, batch, config.in_channels, height, width),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.caption_channels),
        "timestep": torch.full((batch,), 500, device=device),
        "added_cond_kwargs": {
            "resolution": torch.full((batch, 2), 8.0 * height, device=device, dtype=transformer.dtype),
            "aspect_ratio": torch.ones(batch, 1, device=device, dtype=transformer.dtype),
        },
    }


FAMILIES = (
    Family(
        name="pixart",
        title="PixArt alpha, PixArt Sigma",
        denoiser=PixArtTransformer2DModel,
        pipelines=("PixArtAlphaPipeline", "PixArtSigmaPipeline"),
        steps="20",
        blocks=listed(("transformer_blocks", BASIC_BLOCK, "blocks")),
        calls=Latents(_CALL),
        example=_example,
        masks=(_CALL("attention_mask"),),
        attention_kwargs=_CALL("cross_attention_kwargs"),
    ),
)

"""Flux.2: joint blocks, then single blocks on one sequence with text first."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock

from .base import BlockKind, Family, Ports, arguments, cos_sin, joint_ports, listed, random_input
from .reading import Ids, ids_of

_CALL = arguments(Flux2Transformer2DModel)
_BLOCK = arguments(Flux2SingleTransformerBlock)
_JOINT = BlockKind(joint_ports(Flux2TransformerBlock, output=1))
_SINGLE = BlockKind(Ports(_BLOCK("hidden_states"), text="first", per_token=cos_sin(_BLOCK("image_rotary_emb"))))
# The pipeline pads prompts to this length.
_TEXT_TOKENS = 512


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device, dtype = transformer.config, transformer.device, transformer.dtype
    ids = ids_of(height // 2, width // 2, 4).to(device, dtype)
    given = {
        "hidden_states": random_input(transformer, batch, len(ids), config.in_channels),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.joint_attention_dim),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=dtype),
        "img_ids": ids,
        "txt_ids": torch.zeros(_TEXT_TOKENS, 4, device=device, dtype=dtype),
    }
    if config.guidance_embeds:
        given["guidance"] = torch.full((batch,), 4.0, device=device)
    return given


def _unmergeable_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if _CALL("kv_cache_mode").read(args, kwargs) is None:
        return ""
    return "a cache of keys and values has a place for every token of the reference images"


FAMILIES = (
    Family(
        name="flux2",
        title="Flux.2 dev, klein, klein-base",
        denoiser=Flux2Transformer2DModel,
        pipelines=("Flux2Pipeline", "Flux2KleinPipeline"),
        steps="50, klein 4",
        blocks=listed(("transformer_blocks", _JOINT, "joint"), ("single_transformer_blocks", _SINGLE, "single")),
        calls=Ids(_CALL),
        example=_example,
        unmergeable_call=_unmergeable_call,
    ),
)

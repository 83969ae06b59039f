"""Chroma: joint blocks, then single blocks on one sequence with text first; all blocks mask text."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ChromaTransformer2DModel
from diffusers.models.transformers.transformer_chroma import ChromaSingleTransformerBlock, ChromaTransformerBlock

from .base import BlockKind, Family, PerToken, Ports, arguments, cos_sin, listed, random_input
from .reading import Ids, ids_of

_CALL = arguments(ChromaTransformer2DModel)
_BLOCK, _SINGLE_BLOCK = arguments(ChromaTransformerBlock), arguments(ChromaSingleTransformerBlock)
_JOINT = BlockKind(
    Ports(
        _BLOCK("hidden_states"),
        outputs=(1,),
        text_tokens=_BLOCK("encoder_hidden_states"),
        per_token=(*cos_sin(_BLOCK("image_rotary_emb")), PerToken(_BLOCK("attention_mask"), -1)),
    )
)
_SINGLE = BlockKind(
    Ports(
        _SINGLE_BLOCK("hidden_states"),
        text="first",
        per_token=(*cos_sin(_SINGLE_BLOCK("image_rotary_emb")), PerToken(_SINGLE_BLOCK("attention_mask"), -1)),
    )
)
_TEXT_TOKENS = 512


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device, dtype = transformer.config, transformer.device, transformer.dtype
    ids = ids_of(height // 2, width // 2).to(device, dtype)
    return {
        "hidden_states": random_input(transformer, batch, len(ids), config.in_channels),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.joint_attention_dim),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=dtype),
        "img_ids": ids,
        "txt_ids": torch.zeros(_TEXT_TOKENS, 3, device=device, dtype=dtype),
        "attention_mask": torch.ones(batch, _TEXT_TOKENS + len(ids), dtype=torch.bool, device=device),
    }


FAMILIES = (
    Family(
        name="chroma",
        title="Chroma",
        denoiser=ChromaTransformer2DModel,
        pipelines=("ChromaPipeline",),
        steps="35",
        blocks=listed(("transformer_blocks", _JOINT, "joint"), ("single_transformer_blocks", _SINGLE, "single")),
        calls=Ids(_CALL),
        example=_example,
        between_blocks=(_CALL("controlnet_block_samples"), _CALL("controlnet_single_block_samples")),
    ),
)

"""Qwen-Image and its editing models: joint blocks; separate complex rotary tables for image and text."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

from .base import BlockKind, Family, PerToken, Ports, arguments, listed, random_input
from .calls import DenoiserCall, TokenGrid
from .reading import Ids, latest, length

_CALL = arguments(QwenImageTransformer2DModel)
_BLOCK = arguments(QwenImageTransformerBlock)
_JOINT = BlockKind(
    Ports(
        _BLOCK("hidden_states"),
        outputs=(1,),
        text_tokens=_BLOCK("encoder_hidden_states"),
        # Edit-2511 marks the tokens of its reference images in an index.
        per_token=(PerToken(_BLOCK("image_rotary_emb"), 0, 0), PerToken(_BLOCK("modulate_index"), 1)),
    )
)
_TEXT_TOKENS = 64


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Frames, height and width of every image, sample by sample."""
    return [[shape] if isinstance(shape, tuple) else shape for shape in _CALL("img_shapes").read(args, kwargs)]


class _Calls(Ids):
    """Packed tokens, as in Flux, but with the shapes of images in place of ids."""

    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        tokens = _CALL("hidden_states").read(args, kwargs)
        grids = tuple(TokenGrid(height, width, frames) for frames, height, width in _shapes(args, kwargs)[0])
        timestep = latest(_CALL("timestep").read(args, kwargs))
        text = length(_CALL("encoder_hidden_states"), args, kwargs)
        return DenoiserCall(tokens.shape[0], tokens.dtype, tokens.device, timestep, grids, text_tokens=text)


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    rows, columns = height // 2, width // 2
    # No mask of ones, as in pipelines: with one, diffusers copies a number from the host, which CUDA graphs forbid.
    return {
        "hidden_states": random_input(transformer, batch, rows * columns, config.in_channels),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.joint_attention_dim),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=transformer.dtype),
        "img_shapes": [[(1, rows, columns)]] * batch,
    }


def _unmergeable_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    first, *others = _shapes(args, kwargs)
    return "" if all(each == first for each in others) else "the samples of a batch have images of different sizes"


FAMILIES = (
    Family(
        name="qwen",
        title="Qwen-Image, Edit, Edit-2509, Edit-2511",
        denoiser=QwenImageTransformer2DModel,
        pipelines=(
            "QwenImagePipeline",
            "QwenImageEditPipeline",
            "QwenImageEditPlusPipeline",
            "QwenImageControlNetPipeline",
        ),
        steps="50, Lightning 4 or 8",
        blocks=listed(("transformer_blocks", _JOINT, "joint")),
        calls=_Calls(_CALL),
        example=_example,
        between_blocks=(_CALL("controlnet_block_samples"),),
        unmergeable_call=_unmergeable_call,
    ),
)

"""Flux.1: FluxTransformer2DModel. Joint blocks, then single blocks; rotary positions, shared by a batch."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from ..hooks import Argument, Ports
from ..state import DenoiserCall
from .base import Block, BlockKind, Component, Family, as_tensor

_ROTARY = Argument("image_rotary_emb", 3)
_WHOLE = Ports(outputs=(1,), rotary=_ROTARY)

_JOINT = BlockKind(
    _WHOLE,
    {
        # With an IP-Adapter the attention has a third output, for image tokens too.
        "self_attention": (Component("attn", Ports(outputs=(0, 2), rotary=_ROTARY)),),
        "mlp": (Component("ff"),),
    },
)
_SINGLE = BlockKind(
    _WHOLE,
    {
        "self_attention": (Component("attn", Ports(text_first=True, rotary=_ROTARY)),),
        "mlp": (Component("proj_mlp", Ports(Argument("input", 0), text_first=True), leave="act_mlp"),),
    },
)

_HIDDEN_STATES = Argument("hidden_states", 0)
_TEXT = Argument("encoder_hidden_states", 1)
_TIMESTEP = Argument("timestep", 3)
_IDS = Argument("img_ids", 4)


def _blocks(transformer: FluxTransformer2DModel) -> list[Block]:
    width = transformer.inner_dim
    joint = [
        Block(f"transformer_blocks.{number}", block, _JOINT, "joint", width=width)
        for number, block in enumerate(transformer.transformer_blocks)
    ]
    single = [
        Block(f"single_transformer_blocks.{number}", block, _SINGLE, "single", width=width)
        for number, block in enumerate(transformer.single_transformer_blocks)
    ]
    return joint + single


def _read(transformer: FluxTransformer2DModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
    tokens = _HIDDEN_STATES.read(args, kwargs)
    ids = _IDS.read(args, kwargs)
    return DenoiserCall(
        tokens.shape[0],
        tokens.dtype,
        tokens.device,
        as_tensor(_TIMESTEP.read(args, kwargs)),
        tokens=tokens.shape[1],
        ids=ids[0] if ids.ndim == 3 else ids,
        text_tokens=_TEXT.read(args, kwargs).shape[1],
        rotary_width=sum(transformer.config.axes_dims_rope),
    )


def _plan_call(transformer: FluxTransformer2DModel, height: int, width: int) -> DenoiserCall:
    # The pipeline packs 2x2 latents into a token; the transformer's own patch size is 1.
    return DenoiserCall(1, torch.float32, torch.device("cpu"), torch.zeros(()), height // 2, width // 2)


FAMILY = Family(
    name="flux",
    denoiser=FluxTransformer2DModel,
    preset="dit",
    blocks=_blocks,
    read=_read,
    plan_call=_plan_call,
    shared=True,
    span_breakers=(Argument("controlnet_block_samples", 8), Argument("controlnet_single_block_samples", 9)),
)

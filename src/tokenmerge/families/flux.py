"""Flux.1: FluxTransformer2DModel. Joint blocks, then single blocks; rotary positions, shared by a batch."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import nn

from .base import Block, BlockKind, Component, Family, Ports, arguments, as_tensor, random_input
from .calls import DenoiserCall

_CALL = arguments(FluxTransformer2DModel)
_ATTENTION_ROTARY = arguments(FluxAttention)("image_rotary_emb")


def _whole(block: type[nn.Module]) -> Ports:
    """Of a block: tokens and text enter and leave beside each other."""
    argument = arguments(block)
    rotary, text = argument("image_rotary_emb"), argument("encoder_hidden_states")
    return Ports(argument("hidden_states"), outputs=(1,), text_tokens=text, rotary=rotary)


_JOINT = BlockKind(
    _whole(FluxTransformerBlock),
    {
        # With an IP-Adapter the attention has a third output, for image tokens too.
        "self_attention": (Component("attn", Ports(outputs=(0, 2), rotary=_ATTENTION_ROTARY)),),
        "mlp": (Component("ff"),),
    },
)
_SINGLE = BlockKind(
    _whole(FluxSingleTransformerBlock),
    {
        "self_attention": (Component("attn", Ports(text_first=True, rotary=_ATTENTION_ROTARY)),),
        "mlp": (Component("proj_mlp", Ports(arguments(nn.Linear)("input"), text_first=True), leave="act_mlp"),),
    },
)
# Of T5, as the pipeline pads them.
_TEXT_TOKENS = 512


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
    tokens = _CALL("hidden_states").read(args, kwargs)
    ids = _CALL("img_ids").read(args, kwargs)
    return DenoiserCall(
        tokens.shape[0],
        tokens.dtype,
        tokens.device,
        as_tensor(_CALL("timestep").read(args, kwargs)),
        tokens=tokens.shape[1],
        ids=ids[0] if ids.ndim == 3 else ids,
        text_tokens=_CALL("encoder_hidden_states").read(args, kwargs).shape[1],
        rotary_width=sum(transformer.config.axes_dims_rope),
    )


def _plan_call(transformer: FluxTransformer2DModel, height: int, width: int) -> DenoiserCall:
    # The pipeline packs 2x2 latents into a token; the transformer's own patch size is 1.
    return DenoiserCall(1, torch.float32, torch.device("cpu"), torch.zeros(()), height // 2, width // 2)


def _example(transformer: FluxTransformer2DModel, batch: int, height: int, width: int) -> dict[str, Any]:
    config, device = transformer.config, transformer.device
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3)
    arguments = {
        "hidden_states": random_input(transformer, batch, len(ids), config.in_channels),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=transformer.dtype),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.joint_attention_dim),
        "pooled_projections": random_input(transformer, batch, config.pooled_projection_dim),
        "img_ids": ids.to(device, transformer.dtype),
        "txt_ids": torch.zeros(_TEXT_TOKENS, 3, device=device, dtype=transformer.dtype),
    }
    if config.guidance_embeds:
        arguments["guidance"] = torch.full((batch,), 3.5, device=device)
    return arguments


FAMILY = Family(
    name="flux",
    denoiser=FluxTransformer2DModel,
    merging="dit",
    blocks=_blocks,
    read=_read,
    plan_call=_plan_call,
    unit=lambda transformer, scale: 2 * scale,
    example=_example,
    shares_positions=True,
    between_blocks=(_CALL("controlnet_block_samples"), _CALL("controlnet_single_block_samples")),
    attention_kwargs=_CALL("joint_attention_kwargs"),
)

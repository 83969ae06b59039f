"""SD 1.5, SD 2.x and SDXL: UNet2DConditionModel. Groups are resolution levels."""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor

from .base import Block, BlockKind, Component, Family, Ports, arguments, as_tensor, keys_values, random_input
from .calls import DenoiserCall

_BLOCK = BlockKind(
    Ports(),
    {
        "self_attention": (Component("attn1"),),
        "cross_attention": (Component("attn2"),),
        "mlp": (Component("ff"),),
    },
    keys_values("attn1"),
)

_STAGE = BlockKind(Ports(), {})

_CALL = arguments(UNet2DConditionModel)
# Of CLIP.
_TEXT_TOKENS = 77


def _blocks(unet: UNet2DConditionModel) -> list[Block]:
    found = []
    for stage, level in _stages(unet):
        for name, module in unet.get_submodule(stage).named_modules(prefix=stage):
            if isinstance(module, BasicTransformerBlock):
                line = name.rpartition(".")[0]
                found.append(Block(name, module, _BLOCK, f"level-{2**level}", level, line, module.dim))
    return found


def _held_stages(unet: UNet2DConditionModel) -> list[Block]:
    """With all their layers. What enters the first and what leaves the last have the same shape."""
    width = unet.config.block_out_channels[0]
    return [Block(name, unet.get_submodule(name), _STAGE, "stages", width=width) for name, _ in _stages(unet)]


def _stages(unet: UNet2DConditionModel) -> list[tuple[str, int]]:
    """Names of the UNet's stages in the order they run, each with how often the latent was halved before it."""
    stages, level = [], 0
    for number, stage in enumerate(unet.down_blocks):
        stages.append((f"down_blocks.{number}", level))
        level += bool(getattr(stage, "downsamplers", None))
    if unet.mid_block is not None:
        stages.append(("mid_block", level))
    for number, stage in enumerate(unet.up_blocks):
        stages.append((f"up_blocks.{number}", level))
        level -= bool(getattr(stage, "upsamplers", None))
    return stages


def _read(unet: UNet2DConditionModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
    sample = _CALL("sample").read(args, kwargs)
    batch, _, height, width = sample.shape
    timestep = as_tensor(_CALL("timestep").read(args, kwargs))
    return DenoiserCall(batch, sample.dtype, sample.device, timestep, height, width)


def _between_stages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Of T2I-Adapters, which once came as a ControlNet's residuals do. Those of a ControlNet are not taken away."""
    given = _CALL("down_intrablock_additional_residuals").read(args, kwargs)
    if given is None and _CALL("mid_block_additional_residual").read(args, kwargs) is None:
        given = _CALL("down_block_additional_residuals").read(args, kwargs)
    return [] if given is None else given


def _plan_call(unet: UNet2DConditionModel, height: int, width: int) -> DenoiserCall:
    return DenoiserCall(1, torch.float32, torch.device("cpu"), torch.zeros(()), height, width)


def _example(unet: UNet2DConditionModel, batch: int, height: int, width: int) -> dict[str, Any]:
    config = unet.config
    arguments: dict[str, Any] = {
        "sample": random_input(unet, batch, config.in_channels, height, width),
        "timestep": torch.full((), 500.0, device=unet.device),
        "encoder_hidden_states": random_input(unet, batch, _TEXT_TOKENS, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        ids = 6
        text = config.projection_class_embeddings_input_dim - ids * config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {
            "text_embeds": random_input(unet, batch, text),
            "time_ids": random_input(unet, batch, ids),
        }
    return arguments


FAMILY = Family(
    name="unet",
    denoiser=UNet2DConditionModel,
    merging="unet",
    blocks=_blocks,
    read=_read,
    plan_call=_plan_call,
    # Whatever their decoder is, the pipelines refuse other sides than multiples of 8.
    unit=lambda unet, scale: math.lcm(8, scale),
    example=_example,
    stages=_held_stages,
    between_stages=_between_stages,
    masks=(_CALL("attention_mask"),),
    attention_kwargs=_CALL("cross_attention_kwargs"),
)

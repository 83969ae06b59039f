"""UNets: SD 1.5, SD 2.x, SDXL, Kolors and Stable Video Diffusion. Groups are resolution levels."""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import UNet2DConditionModel, UNetSpatioTemporalConditionModel
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor

from .base import Block, BlockKind, Component, Family, Ports, arguments, as_tensor, keys_values, random_input
from .calls import DenoiserCall, TokenGrid
from .reading import Latents

BASIC_BLOCK = BlockKind(
    Ports(),
    {
        "self_attention": (Component("attn1"),),
        "cross_attention": (Component("attn2"),),
        "mlp": (Component("ff"),),
    },
    keys_values("attn1"),
)

_STAGE = BlockKind(Ports())

_CALL = arguments(UNet2DConditionModel)
# CLIP's context length.
_TEXT_TOKENS = 77


def _blocks(unet: Any) -> list[Block]:
    found = []
    for stage, level in _stages(unet):
        for name, module in unet.get_submodule(stage).named_modules(prefix=stage):
            if isinstance(module, BasicTransformerBlock):
                # In video models a temporal block, which always runs, follows each spatial one.
                line = name if isinstance(unet, UNetSpatioTemporalConditionModel) else name.rpartition(".")[0]
                found.append(Block(name, module, BASIC_BLOCK, f"level-{2**level}", level, line, module.dim))
    return found


def _held_stages(unet: Any) -> list[Block]:
    """Stages with all their layers. The input of the first and the output of the last have the same shape."""
    width = unet.config.block_out_channels[0]
    return [Block(name, unet.get_submodule(name), _STAGE, "stages", width=width) for name, _ in _stages(unet)]


def _stages(unet: Any) -> list[tuple[str, int]]:
    """The UNet's stages in running order: their names, and how often the latent was halved before each."""
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


class _ImageCalls(Latents):
    def unit(self, denoiser: Any, scale: int) -> int:
        # Whatever their decoder, the pipelines refuse sides that are not multiples of 8.
        return math.lcm(8, scale)


class _VideoCalls(_ImageCalls):
    """Each frame is a sample: spatial blocks see one frame at a time."""

    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        sample = self.argument("sample").read(args, kwargs)
        batch, frames, _, height, width = sample.shape
        timestep = as_tensor(self.argument("timestep").read(args, kwargs))
        return DenoiserCall(batch * frames, sample.dtype, sample.device, timestep, (TokenGrid(height, width),))

    def plan(self, denoiser: Any, height: int, width: int, frames: int = 1) -> DenoiserCall:
        return super().plan(denoiser, height, width)


def _between_stages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The residuals of a T2I-Adapter; those of a ControlNet stay.

    Older pipelines pass an adapter's residuals as a ControlNet's, without one for the mid block.
    """
    given = _CALL("down_intrablock_additional_residuals").read(args, kwargs)
    if given is None and _CALL("mid_block_additional_residual").read(args, kwargs) is None:
        given = _CALL("down_block_additional_residuals").read(args, kwargs)
    return [] if given is None else given


def _example(unet: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config = unet.config
    arguments: dict[str, Any] = {
        "sample": random_input(unet, batch, config.in_channels, height, width),
        "timestep": torch.full((), 500.0, device=unet.device),
        # Kolors passes its text unprojected.
        "encoder_hidden_states": random_input(
            unet, batch, _TEXT_TOKENS, config.encoder_hid_dim or config.cross_attention_dim
        ),
    }
    if config.addition_embed_type == "text_time":
        ids = 6
        text = config.projection_class_embeddings_input_dim - ids * config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {
            "text_embeds": random_input(unet, batch, text),
            "time_ids": random_input(unet, batch, ids),
        }
    return arguments


def _video_example(unet: Any, batch: int, height: int, width: int, frames: int = 14) -> dict[str, Any]:
    config = unet.config
    return {
        "sample": random_input(unet, batch, frames, config.in_channels, height, width),
        "timestep": torch.full((), 500.0, device=unet.device),
        "encoder_hidden_states": random_input(unet, batch, 1, config.cross_attention_dim),
        "added_time_ids": random_input(unet, batch, 3),
    }


FAMILIES = (
    Family(
        name="unet",
        title="Stable Diffusion 1.5, 2.x, SDXL, Kolors",
        denoiser=UNet2DConditionModel,
        pipelines=(
            *(f"StableDiffusion{kind}Pipeline" for kind in ("", "Img2Img", "Inpaint", "ControlNet")),
            *(f"StableDiffusionXL{kind}Pipeline" for kind in ("", "Img2Img", "Inpaint", "ControlNet")),
            "KolorsPipeline",
        ),
        trained="tiny-sdxl",
        steps="30 to 50, Lightning 4 or 8",
        merging="unet",
        blocks=_blocks,
        calls=_ImageCalls(_CALL, latent="sample", text=None),
        example=_example,
        stages=_held_stages,
        between_stages=_between_stages,
        masks=(_CALL("attention_mask"),),
        attention_kwargs=_CALL("cross_attention_kwargs"),
    ),
    Family(
        name="svd",
        title="Stable Video Diffusion",
        denoiser=UNetSpatioTemporalConditionModel,
        pipelines=("StableVideoDiffusionPipeline",),
        steps="25",
        merging="unet",
        frames=25,
        scales=(8, 1),
        blocks=_blocks,
        calls=_VideoCalls(arguments(UNetSpatioTemporalConditionModel), latent="sample", text=None),
        example=_video_example,
        stages=_held_stages,
        note="Merge acts within frames, in spatial blocks; temporal blocks run on all tokens.",
    ),
)

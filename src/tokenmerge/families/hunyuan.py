"""HunyuanImage, HunyuanVideo and HunyuanVideo 1.5: blocks that return image before text; masks over both."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    HunyuanImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
)
from diffusers.models.transformers import (
    transformer_hunyuan_video,
    transformer_hunyuan_video15,
    transformer_hunyuanimage,
)
from torch import nn

from .base import BlockKind, Family, PerToken, Ports, arguments, cos_sin, listed, random_input
from .reading import Latents

_TEXT_TOKENS = 256


def _kind(block: type[nn.Module], rotary: str, *, masks_image: bool = True) -> BlockKind:
    argument = arguments(block)
    mask = (PerToken(argument("attention_mask"), -1, text="after"),) if masks_image else ()
    return BlockKind(
        Ports(
            argument("hidden_states"),
            outputs=(0,),
            text_tokens=argument("encoder_hidden_states"),
            per_token=(*cos_sin(argument(rotary)), *mask),
        )
    )


_IMAGE = tuple(
    _kind(block, "image_rotary_emb")
    for block in (
        transformer_hunyuanimage.HunyuanImageTransformerBlock,
        transformer_hunyuanimage.HunyuanImageSingleTransformerBlock,
    )
)
# Image-to-video models have other block classes with the same arguments.
_VIDEO = tuple(
    _kind(block, rotary)
    for block, rotary in (
        (transformer_hunyuan_video.HunyuanVideoTransformerBlock, "freqs_cis"),
        (transformer_hunyuan_video.HunyuanVideoSingleTransformerBlock, "image_rotary_emb"),
    )
)
# HunyuanVideo 1.5 masks text only.
_VIDEO15 = _kind(transformer_hunyuan_video15.HunyuanVideo15TransformerBlock, "freqs_cis", masks_image=False)


def _texts(transformer: Any, batch: int) -> dict[str, Any]:
    """The arguments beside the latent that all three share."""
    mask = torch.ones(batch, _TEXT_TOKENS, dtype=torch.int64, device=transformer.device)
    return {
        "timestep": torch.full((batch,), 500.0, device=transformer.device, dtype=transformer.dtype),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, transformer.config.text_embed_dim),
        "encoder_attention_mask": mask,
    }


def _second_text(transformer: Any, batch: int) -> dict[str, Any]:
    width = transformer.config.text_embed_2_dim
    if width is None:
        return {}
    mask = torch.ones(batch, _TEXT_TOKENS, dtype=torch.int64, device=transformer.device)
    text = random_input(transformer, batch, _TEXT_TOKENS, width)
    return {"encoder_hidden_states_2": text, "encoder_attention_mask_2": mask}


def _image_example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    latent = random_input(transformer, batch, transformer.config.in_channels, height, width)
    return {"hidden_states": latent, **_texts(transformer, batch), **_second_text(transformer, batch)}


def _video_example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config = transformer.config
    given = {
        "hidden_states": random_input(transformer, batch, config.in_channels, frames, height, width),
        **_texts(transformer, batch),
        "pooled_projections": random_input(transformer, batch, config.pooled_projection_dim),
    }
    if config.guidance_embeds:
        given["guidance"] = torch.full((batch,), 6000.0, device=transformer.device, dtype=transformer.dtype)
    return given


def _video15_example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config = transformer.config
    return {
        "hidden_states": random_input(transformer, batch, config.in_channels, frames, height, width),
        **_texts(transformer, batch),
        **_second_text(transformer, batch),
        "image_embeds": torch.zeros(batch, 2, config.image_embed_dim, device=transformer.device).to(transformer.dtype),
    }


def _unmergeable_video(transformer: Any) -> str:
    if transformer.config.image_condition_type != "token_replace":
        return ""
    return "HunyuanVideo I2V counts the tokens of its first frame, to modulate them differently"


FAMILIES = (
    Family(
        name="hunyuanimage",
        title="HunyuanImage 2.1",
        denoiser=HunyuanImageTransformer2DModel,
        pipelines=("HunyuanImagePipeline",),
        steps="50",
        scales=(32, 1),
        blocks=listed(
            ("transformer_blocks", _IMAGE[0], "joint"), ("single_transformer_blocks", _IMAGE[1], "single"), line=""
        ),
        calls=Latents(arguments(HunyuanImageTransformer2DModel)),
        example=_image_example,
    ),
    Family(
        name="hunyuanvideo",
        title="HunyuanVideo",
        denoiser=HunyuanVideoTransformer3DModel,
        pipelines=("HunyuanVideoPipeline",),
        steps="50",
        merging="video",
        frames=129,
        blocks=listed(
            ("transformer_blocks", _VIDEO[0], "joint"), ("single_transformer_blocks", _VIDEO[1], "single"), line=""
        ),
        calls=Latents(
            arguments(HunyuanVideoTransformer3DModel),
            may_be_given=lambda config: config.image_condition_type is not None,
        ),
        example=_video_example,
        unmergeable=_unmergeable_video,
        note="Image-to-video by token replacement: Hold only. It counts the tokens of the first frame.",
    ),
    Family(
        name="hunyuanvideo15",
        title="HunyuanVideo 1.5",
        denoiser=HunyuanVideo15Transformer3DModel,
        pipelines=("HunyuanVideo15Pipeline",),
        steps="50",
        merging="video",
        frames=121,
        scales=(16, 4),
        blocks=listed(("transformer_blocks", _VIDEO15, "joint")),
        calls=Latents(
            arguments(HunyuanVideo15Transformer3DModel), may_be_given=lambda config: config.task_type != "t2v"
        ),
        example=_video15_example,
    ),
)

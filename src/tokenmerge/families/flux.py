"""Flux.1 and models built like it: joint blocks, then single blocks; rotary positions, shared by a batch."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    BriaTransformer2DModel,
    FluxTransformer2DModel,
    LongCatImageTransformer2DModel,
    OvisImageTransformer2DModel,
)
from diffusers.models.transformers import (
    transformer_bria,
    transformer_flux,
    transformer_longcat_image,
    transformer_ovis_image,
)
from torch import nn

from .base import (
    LINEAR_INPUT,
    BlockKind,
    Component,
    Family,
    Ports,
    arguments,
    cos_sin,
    joint_ports,
    listed,
    random_input,
)
from .reading import Ids, ids_of

_ATTENTION_ROTARY = cos_sin(arguments(transformer_flux.FluxAttention)("image_rotary_emb"))
_JOINT_COMPONENTS = {
    # With an IP-Adapter, attention has a third output, also of image tokens.
    "self_attention": (Component("attn", Ports(outputs=(0, 2), per_token=_ATTENTION_ROTARY)),),
    "mlp": (Component("ff"),),
}
_SINGLE_COMPONENTS = {
    "self_attention": (Component("attn", Ports(text="first", per_token=_ATTENTION_ROTARY)),),
    "mlp": (Component("proj_mlp", Ports(LINEAR_INPUT, text="first"), leave="act_mlp"),),
}
# The pipeline pads T5's tokens to this length.
_TEXT_TOKENS = 512


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config, device, dtype = transformer.config, transformer.device, transformer.dtype
    ids = ids_of(height // 2, width // 2)
    given = {
        "hidden_states": random_input(transformer, batch, len(ids), config.in_channels),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=dtype),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.joint_attention_dim),
        "img_ids": ids.to(device, dtype),
        "txt_ids": torch.zeros(_TEXT_TOKENS, 3, device=device, dtype=dtype),
    }
    if isinstance(transformer, FluxTransformer2DModel):
        given["pooled_projections"] = random_input(transformer, batch, config.pooled_projection_dim)
    if config.get("guidance_embeds"):
        given["guidance"] = torch.full((batch,), 3.5, device=device)
    return given


def _family(
    name: str, title: str, denoiser: type[nn.Module], joint: BlockKind, single: BlockKind, **others: Any
) -> Family:
    lists = ("transformer_blocks", joint, "joint"), ("single_transformer_blocks", single, "single")
    return Family(
        name=name,
        title=title,
        denoiser=denoiser,
        blocks=listed(*lists, line=""),
        calls=Ids(arguments(denoiser)),
        example=_example,
        **others,
    )


def _controlnet(denoiser: type[nn.Module]) -> dict[str, Any]:
    argument = arguments(denoiser)
    names = ("controlnet_block_samples", "controlnet_single_block_samples")
    return {"between_blocks": tuple(map(argument, names))}


FLUX = _family(
    "flux",
    "Flux.1 dev, schnell, Kontext, Fill, Control, Redux",
    FluxTransformer2DModel,
    BlockKind(joint_ports(transformer_flux.FluxTransformerBlock, output=1), _JOINT_COMPONENTS),
    BlockKind(joint_ports(transformer_flux.FluxSingleTransformerBlock, output=1), _SINGLE_COMPONENTS),
    pipelines=tuple(
        f"Flux{kind}Pipeline" for kind in ("", "Img2Img", "Inpaint", "ControlNet", "Kontext", "Fill", "Control")
    ),
    steps="28 to 50, schnell 4",
    trained="tiny-flux",
    note="Redux only gives embeddings to FluxPipeline, so it works too.",
    attention_kwargs=arguments(FluxTransformer2DModel)("joint_attention_kwargs"),
    **_controlnet(FluxTransformer2DModel),
)
OVIS = _family(
    "ovis",
    "Ovis-Image",
    OvisImageTransformer2DModel,
    BlockKind(joint_ports(transformer_ovis_image.OvisImageTransformerBlock, output=1)),
    BlockKind(joint_ports(transformer_ovis_image.OvisImageSingleTransformerBlock, output=1)),
    pipelines=("OvisImagePipeline",),
    steps="50",
)
LONGCAT = _family(
    "longcat",
    "LongCat-Image",
    LongCatImageTransformer2DModel,
    BlockKind(joint_ports(transformer_longcat_image.LongCatImageTransformerBlock, output=1)),
    BlockKind(joint_ports(transformer_longcat_image.LongCatImageSingleTransformerBlock, output=1)),
    pipelines=("LongCatImagePipeline",),
    steps="50",
)
BRIA = _family(
    "bria",
    "Bria 3.2",
    BriaTransformer2DModel,
    BlockKind(joint_ports(transformer_bria.BriaTransformerBlock, output=1)),
    BlockKind(joint_ports(transformer_bria.BriaSingleTransformerBlock, output=1)),
    pipelines=("BriaPipeline",),
    steps="30",
    **_controlnet(BriaTransformer2DModel),
)
FAMILIES = (FLUX, OVIS, LONGCAT, BRIA)

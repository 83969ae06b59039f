"""AuraFlow: joint blocks, then single blocks on one sequence with text and registers first; added positions."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AuraFlowTransformer2DModel
from diffusers.models.transformers.auraflow_transformer_2d import (
    AuraFlowJointTransformerBlock,
    AuraFlowSingleTransformerBlock,
)

from .base import BlockKind, Family, Ports, arguments, joint_ports, listed, random_input
from .reading import Latents

_JOINT = BlockKind(joint_ports(AuraFlowJointTransformerBlock, output=1, rotary=None))
_SINGLE = BlockKind(Ports(arguments(AuraFlowSingleTransformerBlock)("hidden_states"), text="first"))
_TEXT_TOKENS = 256


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config = transformer.config
    return {
        "hidden_states": random_input(transformer, batch, config.in_channels, height, width),
        "encoder_hidden_states": random_input(transformer, batch, _TEXT_TOKENS, config.joint_attention_dim),
        "timestep": torch.full((batch,), 0.5, device=transformer.device, dtype=transformer.dtype),
    }


FAMILIES = (
    Family(
        name="auraflow",
        title="AuraFlow",
        denoiser=AuraFlowTransformer2DModel,
        pipelines=("AuraFlowPipeline",),
        steps="50",
        blocks=listed(("joint_transformer_blocks", _JOINT, "joint"), ("single_transformer_blocks", _SINGLE, "single")),
        calls=Latents(arguments(AuraFlowTransformer2DModel)),
        example=_example,
    ),
)

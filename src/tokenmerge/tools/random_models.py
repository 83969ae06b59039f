"""Published denoisers with random weights. Speed depends on their sizes, not on weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SDXL = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_FLUX = {"_class_name": "FluxTransformer2DModel", "guidance_embeds": True}
_SD35_LARGE = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 128,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 38,
    "attention_head_dim": 64,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
}
# Flux.2 klein 4B.
_FLUX2_KLEIN = {
    "_class_name": "Flux2Transformer2DModel",
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
# The defaults of these diffusers classes are the published models.
_QWEN = {"_class_name": "QwenImageTransformer2DModel"}
_Z_IMAGE = {"_class_name": "ZImageTransformer2DModel"}
_WAN_14B = {"_class_name": "WanTransformer3DModel"}
_WAN_1_3B = {**_WAN_14B, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}


@dataclass(frozen=True)
class RandomModel:
    """A config, the usual dtype, and the size (width, height) and steps from the model card."""

    config: dict[str, Any]
    dtype: str = "bfloat16"
    size: tuple[int, int] | None = None
    steps: int = 30


RANDOM_MODELS: dict[str, RandomModel] = {
    "sdxl-random": RandomModel(_SDXL, "float16"),
    "flux-random": RandomModel(_FLUX),
    "sd35-random": RandomModel(_SD35_LARGE),
    "flux2-klein-random": RandomModel(_FLUX2_KLEIN, size=(1024, 1024), steps=4),
    "qwen-random": RandomModel(_QWEN, size=(1328, 1328), steps=50),
    "z-image-random": RandomModel(_Z_IMAGE, size=(1024, 1024), steps=8),
    "wan-random": RandomModel(_WAN_14B, size=(832, 480), steps=50),
    "wan-1.3b-random": RandomModel(_WAN_1_3B, size=(832, 480), steps=50),
}

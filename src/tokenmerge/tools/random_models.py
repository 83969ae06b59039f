"""Published denoisers by their sizes alone: speed does not depend on weights, which are random here."""

from __future__ import annotations

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

# Name, config, and the dtype that people run it in.
RANDOM_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "sdxl-random": (_SDXL, "float16"),
    "flux-random": (_FLUX, "bfloat16"),
    "sd35-random": (_SD35_LARGE, "bfloat16"),
}

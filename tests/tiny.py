"""Tiny random pipelines: real diffusers classes with a few thousand parameters each, built without any download.

`build(kind)` makes one, always with the same weights; `draw(pipe)` runs it, always with the same inputs. Prompts enter
as embeddings, so no tokenizer or text encoder is needed. An image of 64 pixels has 16x16 tokens at the finest level.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor, nn

TEXT_TOKENS = 5
TEXT_WIDTH = 16
POOLED_WIDTH = 8


def _seeded(build: Callable[[], nn.Module]) -> Any:
    """The module with weights that depend on nothing drawn before, and large enough to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build().eval()
        for parameter in module.parameters():
            # Layers that start at zero (ControlNet's, and some outputs) would hide what passes through them.
            if parameter.ndim > 1 and not parameter.any():
                nn.init.normal_(parameter, std=0.1)
    return module


def sd_unet(**changes: Any) -> UNet2DConditionModel:
    """SD 1.5 in miniature: attention on three of four levels and in the middle; 10 blocks instead of 16."""
    config = {
        "sample_size": 16,
        "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 2,
        "cross_attention_dim": TEXT_WIDTH,
    }
    return _seeded(lambda: UNet2DConditionModel(**{**config, **changes}))


_XL_ADDED = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 6 * 4 + POOLED_WIDTH,
}
_XL_BLOCKS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "block_out_channels": (8, 8, 16),
    "transformer_layers_per_block": (1, 1, 2),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": (1, 2, 4),
    "cross_attention_dim": TEXT_WIDTH,
    "use_linear_projection": True,
    **_XL_ADDED,
}


def sdxl_unet(**changes: Any) -> UNet2DConditionModel:
    """SDXL in miniature: no attention on the first level, one layer on the second, two on the third; 11 blocks."""
    up_blocks = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    return _seeded(
        lambda: UNet2DConditionModel(**{"sample_size": 32, "up_block_types": up_blocks, **_XL_BLOCKS, **changes})
    )


_SD3_CONFIG = {
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
    "caption_projection_dim": 16,
    "pooled_projection_dim": POOLED_WIDTH,
    "pos_embed_max_size": 48,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}


def sd3_transformer(**changes: Any) -> SD3Transformer2DModel:
    """SD3.5-medium in miniature: four joint blocks, the first with a second attention."""
    return _seeded(lambda: SD3Transformer2DModel(**{**_SD3_CONFIG, **changes}))


_FLUX_CONFIG = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
    "pooled_projection_dim": POOLED_WIDTH,
    "axes_dims_rope": (4, 2, 2),
}


def flux_transformer(**changes: Any) -> FluxTransformer2DModel:
    """Flux.1-schnell in miniature: two joint and three single blocks; `guidance_embeds=True` makes it a dev."""
    return _seeded(lambda: FluxTransformer2DModel(**{**_FLUX_CONFIG, **changes}))


def vae(levels: int, channels: int = 4) -> AutoencoderKL:
    """A latent is smaller than its image by a factor of 2 ** (levels - 1)."""
    return _seeded(
        lambda: AutoencoderKL(
            block_out_channels=(4,) * levels,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            latent_channels=channels,
            norm_num_groups=2,
            shift_factor=0.0,
            scaling_factor=1.0,
            force_upcast=False,
        )
    )


def unet_controlnet(unet: UNet2DConditionModel) -> ControlNetModel:
    def load() -> ControlNetModel:
        scale = 4 if unet.config.addition_embed_type is None else 2
        return ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4,) * (scale.bit_length()))

    return _seeded(load)


def flux_controlnet() -> FluxControlNetModel:
    return _seeded(lambda: FluxControlNetModel(**{**_FLUX_CONFIG, "num_layers": 1, "num_single_layers": 1}))


def sd3_controlnet() -> SD3ControlNetModel:
    return _seeded(lambda: SD3ControlNetModel(**{**_SD3_CONFIG, "num_layers": 1, "dual_attention_layers": ()}))


def ddim(**changes: Any) -> DDIMScheduler:
    return DDIMScheduler(**{"beta_schedule": "scaled_linear", "clip_sample": False, "steps_offset": 1, **changes})


def _no_text(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


def _sd(pipeline: type[DiffusionPipeline], unet: dict[str, Any] | None = None, **parts: Any) -> Any:
    missing = _no_text("text_encoder", "tokenizer", "safety_checker", "feature_extractor", "image_encoder")
    denoiser = sd_unet(**(unet or {}))
    if "controlnet" in inspect.signature(pipeline.__init__).parameters:
        parts["controlnet"] = unet_controlnet(denoiser)
    return pipeline(
        vae=vae(3), unet=denoiser, scheduler=ddim(), requires_safety_checker=False, **missing, **parts
    )


def _sdxl(pipeline: type[DiffusionPipeline], unet: dict[str, Any] | None = None, **parts: Any) -> Any:
    missing = _no_text("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    denoiser = sdxl_unet(**(unet or {}))
    if "controlnet" in inspect.signature(pipeline.__init__).parameters:
        parts["controlnet"] = unet_controlnet(denoiser)
    scheduler = EulerDiscreteScheduler(beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading")
    return pipeline(vae=vae(2), unet=denoiser, scheduler=scheduler, add_watermarker=False, **(missing | parts))


def _sd3(pipeline: type[DiffusionPipeline], **parts: Any) -> Any:
    missing = _no_text(*(f"{part}{end}" for part in ("text_encoder", "tokenizer") for end in ("", "_2", "_3")))
    if "controlnet" in inspect.signature(pipeline.__init__).parameters:
        parts["controlnet"] = sd3_controlnet()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return pipeline(vae=vae(2), transformer=sd3_transformer(), scheduler=scheduler, **missing, **parts)


def _flux(pipeline: type[DiffusionPipeline], **parts: Any) -> Any:
    missing = _no_text("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    if "controlnet" in inspect.signature(pipeline.__init__).parameters:
        parts["controlnet"] = flux_controlnet()
    return pipeline(
        vae=vae(2), transformer=flux_transformer(), scheduler=FlowMatchEulerDiscreteScheduler(), **missing, **parts
    )


_BUILDERS: dict[str, tuple[Callable[..., Any], type[DiffusionPipeline]]] = {
    "sd": (_sd, StableDiffusionPipeline),
    "sd-img2img": (_sd, StableDiffusionImg2ImgPipeline),
    "sd-inpaint": (_sd, StableDiffusionInpaintPipeline),
    "sd-controlnet": (_sd, StableDiffusionControlNetPipeline),
    "sdxl": (_sdxl, StableDiffusionXLPipeline),
    "sdxl-img2img": (_sdxl, StableDiffusionXLImg2ImgPipeline),
    "sdxl-inpaint": (_sdxl, StableDiffusionXLInpaintPipeline),
    "sdxl-controlnet": (_sdxl, StableDiffusionXLControlNetPipeline),
    "sd3": (_sd3, StableDiffusion3Pipeline),
    "sd3-img2img": (_sd3, StableDiffusion3Img2ImgPipeline),
    "sd3-controlnet": (_sd3, StableDiffusion3ControlNetPipeline),
    "flux": (_flux, FluxPipeline),
    "flux-img2img": (_flux, FluxImg2ImgPipeline),
    "flux-inpaint": (_flux, FluxInpaintPipeline),
    "flux-controlnet": (_flux, FluxControlNetPipeline),
}
KINDS = tuple(_BUILDERS)
FAMILIES = ("sd", "sdxl", "sd3", "flux")


def build(kind: str, **parts: Any) -> Any:
    """A pipeline of one of `KINDS`, on the CPU in fp32."""
    builder, pipeline = _BUILDERS[kind]
    pipe = builder(pipeline, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def denoiser_of(pipe: Any) -> nn.Module:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call_arguments(
    pipe: Any, *, steps: int = 2, seed: int = 0, size: tuple[int, int] = (64, 64), batch: int = 1, guided: bool = True
) -> dict[str, Any]:
    """Arguments of a pipeline call: everything it needs, the same for the same `seed`."""
    accepted = inspect.signature(pipe.__call__).parameters
    denoiser = denoiser_of(pipe)
    flux = type(pipe).__name__.startswith("Flux")
    height, width = size
    arguments: dict[str, Any] = {
        "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "latent",
        "prompt_embeds": noise(batch, TEXT_TOKENS, TEXT_WIDTH, seed=seed + 1, dtype=denoiser.dtype),
        # Flux is distilled: its usual call is unguided, and true guidance has a name of its own.
        "true_cfg_scale" if flux else "guidance_scale": 4.0 if guided and not flux else 1.0,
    }
    if "height" in accepted:
        arguments |= {"height": height, "width": width}
    pooled = "pooled_prompt_embeds" in accepted
    if pooled:
        arguments["pooled_prompt_embeds"] = noise(batch, POOLED_WIDTH, seed=seed + 2, dtype=denoiser.dtype)
    if guided and not flux:
        arguments["negative_prompt_embeds"] = -arguments["prompt_embeds"]
        if pooled:
            arguments["negative_pooled_prompt_embeds"] = -arguments["pooled_prompt_embeds"]
    picture = noise(batch, 3, height, width, seed=seed + 3).sigmoid()
    for name in ("image", "control_image"):
        if name in accepted:
            arguments[name] = picture
    if "control_guidance_start" in accepted and not flux:
        arguments["controlnet_conditioning_scale"] = 1.0
    if "mask_image" in accepted:
        arguments["mask_image"] = (noise(batch, 1, height, width, seed=seed + 4) > 0).float()
    if "strength" in accepted:
        arguments["strength"] = 0.5
        arguments["num_inference_steps"] = 2 * steps
    return arguments


def draw(pipe: Any, **options: Any) -> Tensor:
    """The latent image of one call; `options` of `call_arguments`, then arguments of the pipeline itself."""
    names = ("steps", "seed", "size", "batch", "guided")
    arguments = call_arguments(pipe, **{name: options.pop(name) for name in names if name in options})
    # SD3's ControlNet pipeline draws from the global generator.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return pipe(**{**arguments, **options}).images

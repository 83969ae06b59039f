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
    """The module with random weights that do not depend on earlier random numbers."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        # Frozen from the start: loading a LoRA freezes a model, and frozen convolutions round differently.
        module = build().eval().requires_grad_(False)
        for parameter in module.parameters():
            # Zeros (ControlNet's outputs) and ones (norms) would hide what passes through them.
            if parameter.numel() and parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
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


def sdxl_unet(**changes: Any) -> UNet2DConditionModel:
    """SDXL in miniature: no attention on the first level, one layer on the second, two on the third; 11 blocks."""
    config = {
        "sample_size": 32,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (8, 8, 16),
        "transformer_layers_per_block": (1, 1, 2),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": (1, 2, 4),
        "cross_attention_dim": TEXT_WIDTH,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 6 * 4 + POOLED_WIDTH,
    }
    return _seeded(lambda: UNet2DConditionModel(**{**config, **changes}))


def short_sdxl_unet() -> UNet2DConditionModel:
    """SDXL with one level of attention, and just enough blocks to show what happens between them."""
    return sdxl_unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(8, 8),
        transformer_layers_per_block=(1, 1),
        attention_head_dim=(1, 2),
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
    """Flux.1-schnell in miniature: two joint and three single blocks; `guidance_embeds=True` makes it Flux.1-dev."""
    return _seeded(lambda: FluxTransformer2DModel(**{**_FLUX_CONFIG, **changes}))


def vae(levels: int, channels: int = 4) -> AutoencoderKL:
    """A VAE whose latents are smaller than images by a factor of 2 ** (levels - 1)."""
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


def unet_controlnet(unet: UNet2DConditionModel, latent_scale: int) -> ControlNetModel:
    # The hint is halved once per channel count after the first, down to the size of the latent.
    channels = (4,) * latent_scale.bit_length()
    return _seeded(lambda: ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=channels))


def sd3_controlnet() -> SD3ControlNetModel:
    return _seeded(lambda: SD3ControlNetModel(**{**_SD3_CONFIG, "num_layers": 1, "dual_attention_layers": ()}))


def flux_controlnet() -> FluxControlNetModel:
    return _seeded(lambda: FluxControlNetModel(**{**_FLUX_CONFIG, "num_layers": 1, "num_single_layers": 1}))


def ddim(**changes: Any) -> DDIMScheduler:
    return DDIMScheduler(**{"beta_schedule": "scaled_linear", "clip_sample": False, "steps_offset": 1, **changes})


def euler(**changes: Any) -> EulerDiscreteScheduler:
    return EulerDiscreteScheduler(
        **{"beta_schedule": "scaled_linear", "steps_offset": 1, "timestep_spacing": "leading", **changes}
    )


def _sd_parts() -> dict[str, Any]:
    absent = ("text_encoder", "tokenizer", "safety_checker", "feature_extractor", "image_encoder")
    return {"vae": vae(3), "unet": sd_unet(), "scheduler": ddim(), **dict.fromkeys(absent)}


def _sdxl_parts() -> dict[str, Any]:
    absent = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    return {"vae": vae(2), "unet": sdxl_unet(), "scheduler": euler(), **dict.fromkeys(absent)}


def _sd3_parts() -> dict[str, Any]:
    absent = [f"{part}{end}" for part in ("text_encoder", "tokenizer") for end in ("", "_2", "_3")]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return {"vae": vae(2), "transformer": sd3_transformer(), "scheduler": scheduler, **dict.fromkeys(absent)}


def _flux_parts() -> dict[str, Any]:
    absent = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    scheduler = FlowMatchEulerDiscreteScheduler()
    return {"vae": vae(2), "transformer": flux_transformer(), "scheduler": scheduler, **dict.fromkeys(absent)}


_PIPELINES: dict[str, type[DiffusionPipeline]] = {
    "sd": StableDiffusionPipeline,
    "sd-img2img": StableDiffusionImg2ImgPipeline,
    "sd-inpaint": StableDiffusionInpaintPipeline,
    "sd-controlnet": StableDiffusionControlNetPipeline,
    "sdxl": StableDiffusionXLPipeline,
    "sdxl-img2img": StableDiffusionXLImg2ImgPipeline,
    "sdxl-inpaint": StableDiffusionXLInpaintPipeline,
    "sdxl-controlnet": StableDiffusionXLControlNetPipeline,
    "sd3": StableDiffusion3Pipeline,
    "sd3-img2img": StableDiffusion3Img2ImgPipeline,
    "sd3-controlnet": StableDiffusion3ControlNetPipeline,
    "flux": FluxPipeline,
    "flux-img2img": FluxImg2ImgPipeline,
    "flux-inpaint": FluxInpaintPipeline,
    "flux-controlnet": FluxControlNetPipeline,
}
_PARTS = {"sd": _sd_parts, "sdxl": _sdxl_parts, "sd3": _sd3_parts, "flux": _flux_parts}
_CONTROLNETS: dict[str, Callable[[Any], nn.Module]] = {
    "sd": lambda parts: unet_controlnet(parts["unet"], 4),
    "sdxl": lambda parts: unet_controlnet(parts["unet"], 2),
    "sd3": lambda parts: sd3_controlnet(),
    "flux": lambda parts: flux_controlnet(),
}
KINDS = tuple(_PIPELINES)
FAMILIES = tuple(_PARTS)


def build(kind: str, **parts: Any) -> Any:
    """A pipeline of one of `KINDS`, on the CPU in fp32; `parts` replace its defaults."""
    pipeline = _PIPELINES[kind]
    family = kind.partition("-")[0]
    parts = {**_PARTS[family](), **parts}
    accepted = inspect.signature(pipeline.__init__).parameters
    if "controlnet" in accepted:
        parts.setdefault("controlnet", _CONTROLNETS[family](parts))
    for name in ("requires_safety_checker", "add_watermarker"):
        if name in accepted:
            parts[name] = False
    pipe = pipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def denoiser_of(pipe: Any) -> nn.Module:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call_arguments(
    pipe: Any, *, steps: int = 2, seed: int = 0, size: tuple[int, int] = (64, 64), batch: int = 1, guided: bool = True
) -> dict[str, Any]:
    """All arguments that a pipeline call needs, the same for the same `seed`.

    steps: denoising steps; pipelines with a strength run half of twice that number. guided: classifier-free guidance in
    one call per step, which Flux does not have.
    """
    accepted = inspect.signature(pipe.__call__).parameters
    height, width = size
    guided = guided and "true_cfg_scale" not in accepted
    dtype = denoiser_of(pipe).dtype
    text = {"prompt_embeds": noise(batch, TEXT_TOKENS, TEXT_WIDTH, seed=seed + 1, dtype=dtype)}
    if "pooled_prompt_embeds" in accepted:
        text["pooled_prompt_embeds"] = noise(batch, POOLED_WIDTH, seed=seed + 2, dtype=dtype)
    if guided:
        text |= {f"negative_{name}": -embeds for name, embeds in text.items()}
    picture = noise(batch, 3, height, width, seed=seed + 3).sigmoid()
    candidates = {
        "height": height,
        "width": width,
        "guidance_scale": 4.0 if guided else 1.0,
        "image": picture,
        "control_image": picture,
        "mask_image": (noise(batch, 1, height, width, seed=seed + 4) > 0).float(),
        "strength": 0.5,
        "controlnet_conditioning_scale": 1.0,
    }
    return {
        "num_inference_steps": 2 * steps if "strength" in accepted else steps,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "latent",
        **text,
        **{name: value for name, value in candidates.items() if name in accepted},
    }


def draw(pipe: Any, **options: Any) -> Tensor:
    """The latent image of one call; `options` of `call_arguments`, then arguments of the pipeline itself."""
    names = ("steps", "seed", "size", "batch", "guided")
    arguments = call_arguments(pipe, **{name: options.pop(name) for name in names if name in options})
    # SD3's ControlNet pipeline draws from the global generator.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return pipe(**{**arguments, **options}).images

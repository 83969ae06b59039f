"""Tiny random pipelines of many families, for tests that every family must pass.

`MODELS[name].build()` makes one, always with the same weights; `draw(pipe, model)` runs it, always with the same
inputs. Prompts enter as embeddings, so no tokenizer or text encoder is needed. Lists of blocks have three blocks: an
odd number reveals swapped outputs. The default size has 8x8 tokens, the next is not square, the last is odd.

Left out: ControlNets of Chroma and Bria (their denoisers accept ControlNet residuals, but no diffusers pipeline passes
any). `holding/test_holding.py` makes such calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.guiders import AdaptiveProjectedMixGuidance, ClassifierFreeGuidance
from diffusers.pipelines.kolors.pipeline_kolors import KolorsPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection

from tiny import POOLED_WIDTH, TEXT_WIDTH, _seeded, euler, flux_transformer, noise, sdxl_unet, vae

GRIDS = ((8, 8), (6, 10), (5, 7))


@dataclass(frozen=True)
class Model:
    """A pipeline, and how to call it.

    build: makes the pipeline. arguments: makes those of a call from (pipe, steps, seed, size, batch, guided, text,
    negative_text, padding). sizes: (height, width) in pixels that it accepts. guidance: "one call" for both prompts,
    "two calls", or "none". frames: of a video, before the VAE. uneven: the negative prompt may be longer or shorter
    than the prompt; elsewhere `negative_text` has no effect.
    """

    name: str
    build: Callable[[], Any]
    arguments: Callable[..., dict[str, Any]]
    sizes: tuple[tuple[int, int], ...]
    guidance: str
    frames: int = 1
    uneven: bool = False


MODELS: dict[str, Model] = {}


def denoisers(pipe: Any) -> list[nn.Module]:
    """The pipeline's denoisers: some have two."""
    parts = (getattr(pipe, name, None) for name in ("unet", "transformer", "transformer_2"))
    return [part for part in parts if part is not None]


def draw(pipe: Any, model: Model, **options: Any) -> Tensor:
    """The latents of one call; `options` of `model.arguments`, then arguments of the pipeline itself."""
    names = ("steps", "seed", "size", "batch", "guided", "text", "negative_text", "padding")
    arguments = model.arguments(pipe, **{name: options.pop(name) for name in names if name in options})
    # Some pipelines draw from the global generator.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = pipe(**{**arguments, **options})
    return output.frames if hasattr(output, "frames") else output.images


# Arguments that families name differently


def _mask(batch: int, tokens: int, padding: int) -> Tensor:
    """Ones, but zeros for the last `padding` tokens of all prompts after the first."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[1:, tokens - padding :] = 0
    return mask


def _plain(batch: int, tokens: int, padding: int, seed: int) -> dict[str, Any]:
    return {"prompt_embeds": noise(batch, tokens, TEXT_WIDTH, seed=seed)}


def _listed(batch: int, tokens: int, padding: int, seed: int) -> dict[str, Any]:
    embeds = noise(batch, tokens, TEXT_WIDTH, seed=seed)
    return {"prompt_embeds": [each[: tokens - (padding if i else 0)] for i, each in enumerate(embeds)]}


def _masked(name: str, dtype: torch.dtype = torch.long) -> Callable[..., dict[str, Any]]:
    return lambda batch, tokens, padding, seed: {
        **_plain(batch, tokens, padding, seed),
        name: _mask(batch, tokens, padding).to(dtype),
    }


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(each, dtype) for each in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _scale(name: str, on: float = 4.0, off: float = 1.0) -> Callable[[Any, bool], dict[str, Any]]:
    return lambda pipe, guided: {name: on if guided else off}


_SCALE = _scale("guidance_scale")


def _add(
    name: str,
    build: Callable[[], Any],
    *,
    guidance: str,
    text: Callable[..., dict[str, Any]] = _plain,
    scale: Callable[[Any, bool], dict[str, Any]] = _SCALE,
    pixels: int = 4,
    grids: tuple[tuple[int, int], ...] = GRIDS,
    frames: int = 1,
    uneven: bool = False,
    extra: Callable[[Any, int, int, int, int], dict[str, Any]] = lambda pipe, height, width, batch, seed: {},
) -> None:
    """Adds a model.

    text: embeddings and masks of a prompt, from (batch, tokens, padding, seed). scale: the argument that switches
    guidance, from (pipe, guided). pixels: along one side of a token. extra: further arguments, from (pipe, height,
    width, batch, seed).
    """
    sizes = tuple((height * pixels, width * pixels) for height, width in grids)
    prompt = text

    def arguments(
        pipe: Any,
        *,
        steps: int = 3,
        seed: int = 0,
        size: tuple[int, int] = sizes[0],
        batch: int = 1,
        guided: bool = True,
        text: int = 5,
        negative_text: int = 5,
        padding: int = 0,
    ) -> dict[str, Any]:
        height, width = size
        guided = guided and guidance != "none"
        prompts = prompt(batch, text, padding, seed + 1)
        if guided:
            negatives = prompt(batch, negative_text if uneven else text, padding, seed + 2)
            prompts |= {f"negative_{key}": value for key, value in negatives.items()}
        dtype = denoisers(pipe)[0].dtype
        found = {
            "height": height,
            "width": width,
            "num_inference_steps": steps,
            "generator": torch.Generator().manual_seed(seed),
            "output_type": "latent",
            **{key: _cast(value, dtype) for key, value in prompts.items()},
        }
        if guidance != "none":
            found |= scale(pipe, guided)
        if frames > 1:
            found["num_frames"] = frames
        return {**found, **extra(pipe, height, width, batch, seed)}

    MODELS[name] = Model(name, build, arguments, sizes, guidance, frames, uneven)


def _pipeline(name: str, **parts: Any) -> Any:
    """A pipeline of the class `name`; parts not given are None."""
    pipeline = getattr(diffusers, name)
    accepted = list(inspect.signature(pipeline.__init__).parameters.values())[1:]
    absent = {each.name: None for each in accepted if each.default is inspect.Parameter.empty}
    pipe = pipeline(**{**absent, **parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _loud(build: Callable[[], nn.Module]) -> Any:
    """The module with larger weights: otherwise blocks and texts would hardly affect its output."""
    module = _seeded(build)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.mul_(2)
    return module


def _picture(height: int, width: int, seed: int) -> Image.Image:
    pixels = noise(height, width, 3, seed=seed + 3).sigmoid().mul(255).byte()
    return Image.fromarray(pixels.numpy())


# Flux.2


def _flux2_parts(*, guidance_embeds: bool) -> dict[str, Any]:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": _seeded(
            lambda: diffusers.AutoencoderKLFlux2(
                block_out_channels=(4,) * 3,
                down_block_types=("DownEncoderBlock2D",) * 3,
                up_block_types=("UpDecoderBlock2D",) * 3,
                latent_channels=4,
                norm_num_groups=2,
            )
        ),
        "transformer": _loud(
            lambda: diffusers.Flux2Transformer2DModel(
                patch_size=1,
                in_channels=16,
                num_layers=3,
                num_single_layers=3,
                attention_head_dim=8,
                num_attention_heads=2,
                joint_attention_dim=TEXT_WIDTH,
                timestep_guidance_channels=16,
                axes_dims_rope=(2, 2, 2, 2),
                guidance_embeds=guidance_embeds,
            )
        ),
    }


def _flux2_dev() -> Any:
    return _pipeline("Flux2Pipeline", **_flux2_parts(guidance_embeds=True))


def _flux2_klein(*, is_distilled: bool) -> Any:
    return _pipeline("Flux2KleinPipeline", is_distilled=is_distilled, **_flux2_parts(guidance_embeds=False))


_add("flux2-dev", _flux2_dev, guidance="none", pixels=8)
_add(
    "flux2-dev-reference",
    _flux2_dev,
    guidance="none",
    pixels=8,
    # The smallest image that the pipeline accepts: 9x8 tokens.
    extra=lambda pipe, height, width, batch, seed: {"image": _picture(72, 64, seed)},
)
_add("flux2-klein", lambda: _flux2_klein(is_distilled=True), guidance="none", pixels=8)
_add(
    "flux2-klein-reference",
    lambda: _flux2_klein(is_distilled=True),
    guidance="none",
    pixels=8,
    extra=lambda pipe, height, width, batch, seed: {"image": [_picture(72, 64, seed), _picture(64, 96, seed + 1)]},
)
_add("flux2-klein-base", lambda: _flux2_klein(is_distilled=False), guidance="two calls", pixels=8, uneven=True)


# Z-Image


def _zimage_transformer() -> nn.Module:
    return _seeded(
        lambda: diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=16,
            n_layers=3,
            n_refiner_layers=3,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=TEXT_WIDTH,
            axes_dims=[4, 2, 2],
            axes_lens=[256, 32, 32],
        )
    )


def _zimage_parts(shift: float) -> dict[str, Any]:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=shift),
        "vae": vae(2),
        "transformer": _zimage_transformer(),
    }


def _zimage_controlnet() -> nn.Module:
    return _seeded(
        lambda: diffusers.ZImageControlNetModel(
            control_layers_places=[0, 2],
            control_in_dim=4,
            dim=16,
            n_refiner_layers=3,
            n_heads=2,
            n_kv_heads=2,
        )
    )


_ZERO_IS_OFF = _scale("guidance_scale", off=0.0)
_add(
    "zimage",
    lambda: _pipeline("ZImagePipeline", **_zimage_parts(6.0)),
    guidance="one call",
    text=_listed,
    scale=_ZERO_IS_OFF,
    uneven=True,
)
_add(
    "zimage-turbo",
    lambda: _pipeline("ZImagePipeline", **_zimage_parts(3.0)),
    guidance="none",
    text=_listed,
    extra=lambda pipe, height, width, batch, seed: {"guidance_scale": 0.0},
)
_add(
    "zimage-controlnet",
    lambda: _pipeline("ZImageControlNetPipeline", controlnet=_zimage_controlnet(), **_zimage_parts(6.0)),
    guidance="one call",
    text=_listed,
    scale=_ZERO_IS_OFF,
    uneven=True,
    extra=lambda pipe, height, width, batch, seed: {"control_image": _picture(height, width, seed)},
)


# Qwen-Image


def _qwen_vae() -> nn.Module:
    """A VAE whose latents are smaller than images by a factor of 4."""
    return _seeded(
        lambda: diffusers.AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, False],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        )
    )


_QWEN_CONFIG = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
    "axes_dims_rope": (4, 2, 2),
}


def _qwen_parts(**changes: Any) -> dict[str, Any]:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        "vae": _qwen_vae(),
        "transformer": _seeded(lambda: diffusers.QwenImageTransformer2DModel(**{**_QWEN_CONFIG, **changes})),
    }


def _qwen_controlnet() -> nn.Module:
    return _seeded(lambda: diffusers.QwenImageControlNetModel(**{**_QWEN_CONFIG, "num_layers": 2}))


def _qwen_edit(*, indexed: bool) -> Any:
    """Qwen-Image-Edit 2511, or 2509, which does not distinguish the picture from its references."""
    # The pipeline resizes all reference images to this area: 4x4 tokens.
    pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE = 32 * 32
    return _pipeline("QwenImageEditPlusPipeline", **_qwen_parts(zero_cond_t=indexed))


_TRUE_SCALE = _scale("true_cfg_scale")
_add(
    "qwen",
    lambda: _pipeline("QwenImagePipeline", **_qwen_parts()),
    guidance="two calls",
    text=_masked("prompt_embeds_mask"),
    scale=_TRUE_SCALE,
    pixels=8,
    uneven=True,
)
for _name, _images in (("qwen-edit-plus", 1), ("qwen-edit-2509", 2)):
    _add(
        _name,
        partial(_qwen_edit, indexed=_images == 1),
        guidance="two calls",
        text=lambda batch, tokens, padding, seed: _masked("prompt_embeds_mask")(1, tokens, padding, seed),
        scale=_TRUE_SCALE,
        pixels=8,
        uneven=True,
        # The pipeline takes only one prompt.
        extra=lambda pipe, height, width, batch, seed, images=_images: {
            "image": [_picture(48, 48 * (1 + i), seed + i) for i in range(images)],
            "num_images_per_prompt": batch,
        },
    )
_add(
    "qwen-controlnet",
    lambda: _pipeline("QwenImageControlNetPipeline", controlnet=_qwen_controlnet(), **_qwen_parts()),
    guidance="two calls",
    text=_masked("prompt_embeds_mask"),
    scale=_TRUE_SCALE,
    pixels=8,
    uneven=True,
    extra=lambda pipe, height, width, batch, seed: {"control_image": _picture(height, width, seed)},
)


# Wan


def _wan_transformer(**changes: Any) -> nn.Module:
    config = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 3,
        "rope_max_seq_len": 32,
    }
    return _seeded(lambda: diffusers.WanTransformer3DModel(**{**config, **changes}))


def _wan(name: str = "WanPipeline", *, shift: float = 3.0, transformers: int = 1, **parts: Any) -> Any:
    """`parts` may include arguments of the transformer."""
    accepted = inspect.signature(diffusers.WanTransformer3DModel.__init__).parameters
    changes = {key: parts.pop(key) for key in list(parts) if key in accepted}
    wan_vae = _seeded(
        lambda: diffusers.AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            # Each residual block would take longer than the steps of an image.
            num_res_blocks=0,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        )
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    parts |= {"vae": wan_vae, "scheduler": scheduler, "transformer": _wan_transformer(**changes)}
    if transformers == 2:
        # The weights must differ from the first transformer's.
        parts["transformer_2"] = _wan_transformer(**changes)
        for parameter in parts["transformer_2"].parameters():
            parameter.mul_(-1)
    return _pipeline(name, **parts)


def _first_frame(pipe: Any, height: int, width: int, batch: int, seed: int) -> dict[str, Any]:
    return {"image": _picture(height, width, seed)}


def _clip(model: type, size: int) -> dict[str, Any]:
    """An image encoder that makes five tokens, and its image processor."""
    config = CLIPVisionConfig(
        hidden_size=12,
        intermediate_size=16,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=size,
        patch_size=size // 2,
    )
    processor = CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return {"encoder": _seeded(lambda: model(config)), "processor": processor}


def _wan21_image() -> Any:
    clip = _clip(CLIPVisionModel, 32)
    return _wan(
        "WanImageToVideoPipeline",
        image_encoder=clip["encoder"],
        image_processor=clip["processor"],
        in_channels=12,
        image_dim=12,
        added_kv_proj_dim=24,
    )


_WAN = {"guidance": "two calls", "pixels": 16, "frames": 9, "uneven": True}
_add("wan2.1", _wan, **_WAN)
_add("wan2.1-i2v", _wan21_image, **_WAN, extra=_first_frame)
_add("wan2.2-a14b", lambda: _wan(transformers=2, boundary_ratio=0.875), **_WAN)
_add("wan2.2-ti2v", lambda: _wan(shift=5.0, expand_timesteps=True), **_WAN)
_add(
    "wan2.2-ti2v-image",
    lambda: _wan("WanImageToVideoPipeline", shift=5.0, expand_timesteps=True),
    **_WAN,
    extra=_first_frame,
)
_add(
    "wan2.2-i2v-a14b",
    lambda: _wan("WanImageToVideoPipeline", shift=5.0, transformers=2, boundary_ratio=0.875, in_channels=12),
    **_WAN,
    extra=_first_frame,
)


# Images: Flux.1 in other shapes


def _flow(**config: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**config)


_FLUX_LIKE = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 3,
    "num_single_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
    "axes_dims_rope": (4, 2, 2),
}


def _chroma() -> Any:
    transformer = _seeded(
        lambda: diffusers.ChromaTransformer2DModel(
            **_FLUX_LIKE, approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=3
        )
    )
    return _pipeline("ChromaPipeline", scheduler=_flow(use_beta_sigmas=True), vae=vae(2), transformer=transformer)


def _ovis() -> Any:
    transformer = _seeded(lambda: diffusers.OvisImageTransformer2DModel(**_FLUX_LIKE, out_channels=16))
    scheduler = _flow(shift=3.0, use_dynamic_shifting=True)
    return _pipeline("OvisImagePipeline", scheduler=scheduler, vae=vae(2), transformer=transformer)


def _bria() -> Any:
    transformer = _seeded(lambda: diffusers.BriaTransformer2DModel(**_FLUX_LIKE))
    scheduler = _flow(shift=3.0, use_dynamic_shifting=True)
    return _pipeline("BriaPipeline", scheduler=scheduler, vae=vae(2), transformer=transformer)


def _longcat() -> Any:
    # The pipeline hard-codes the number of latent channels.
    config = {**_FLUX_LIKE, "in_channels": 64, "pooled_projection_dim": 16}
    transformer = _seeded(lambda: diffusers.LongCatImageTransformer2DModel(**config))
    scheduler = _flow(shift=3.0, use_dynamic_shifting=True)
    pipe = _pipeline("LongCatImagePipeline", scheduler=scheduler, vae=vae(2, 16), transformer=transformer)

    def embeds(prompts: list[str]) -> Tensor:
        found = [noise(1, int(prompt.split()[0]), TEXT_WIDTH, seed=int(prompt.split()[1])) for prompt in prompts]
        return torch.cat(found).to(transformer.dtype)

    # The pipeline accepts no embeddings without a prompt, and no prompt with embeddings.
    pipe._encode_prompt = embeds
    return pipe


def _longcat_text(batch: int, tokens: int, padding: int, seed: int) -> dict[str, Any]:
    return {"prompt": [f"{tokens} {seed + 10 * i}" for i in range(batch)]}


# Chroma's masks are floats: ones and zeros that are added to the attention scores.
_CHROMA_TEXT = _masked("prompt_attention_mask", torch.float32)
_add("chroma", _chroma, guidance="two calls", text=_CHROMA_TEXT, uneven=True)
_add(
    "ovis",
    _ovis,
    guidance="two calls",
    uneven=True,
    extra=lambda pipe, height, width, batch, seed: {"negative_prompt": None},
)
_add(
    "longcat",
    _longcat,
    guidance="two calls",
    text=_longcat_text,
    uneven=True,
    extra=lambda pipe, height, width, batch, seed: {"enable_prompt_rewrite": False},
)
_add("bria", _bria, guidance="one call")


# Images: other transformers


def _krea2() -> Any:
    transformer = _loud(
        lambda: diffusers.Krea2Transformer2DModel(
            in_channels=16,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=16,
            timestep_embed_dim=8,
            text_hidden_dim=TEXT_WIDTH,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=16,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 2, 2),
        )
    )
    scheduler = _flow(use_dynamic_shifting=True)
    return _pipeline("Krea2Pipeline", scheduler=scheduler, vae=_qwen_vae(), transformer=transformer)


def _krea2_text(batch: int, tokens: int, padding: int, seed: int) -> dict[str, Any]:
    embeds = noise(batch, tokens, 2, TEXT_WIDTH, seed=seed)
    return {"prompt_embeds": embeds, "prompt_embeds_mask": _mask(batch, tokens, padding).bool()}


def _pixart(name: str) -> Any:
    transformer = _seeded(
        lambda: diffusers.PixArtTransformer2DModel(
            sample_size=16,
            num_layers=3,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=16,
            caption_channels=TEXT_WIDTH,
            use_additional_conditions=False,
        )
    )
    return _pipeline(name, vae=vae(3), transformer=transformer, scheduler=diffusers.DPMSolverMultistepScheduler())


def _auraflow() -> Any:
    transformer = _loud(
        lambda: diffusers.AuraFlowTransformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_mmdit_layers=3,
            num_single_dit_layers=3,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_projection_dim=16,
            joint_attention_dim=TEXT_WIDTH,
            pos_embed_max_size=256,
        )
    )
    return _pipeline("AuraFlowPipeline", vae=vae(2), transformer=transformer, scheduler=_flow(shift=1.73))


def _cogview4() -> Any:
    transformer = _seeded(
        lambda: diffusers.CogView4Transformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=TEXT_WIDTH,
            time_embed_dim=8,
            condition_dim=4,
        )
    )
    scheduler = _flow(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear")
    return _pipeline("CogView4Pipeline", vae=vae(4), transformer=transformer, scheduler=scheduler)


def _lumina2() -> Any:
    transformer = _seeded(
        lambda: diffusers.Lumina2Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=3,
            num_refiner_layers=3,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=2,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(128, 32, 32),
            cap_feat_dim=TEXT_WIDTH,
        )
    )
    return _pipeline("Lumina2Pipeline", vae=vae(4), transformer=transformer, scheduler=_flow(shift=6.0))


def _lumina2_text(batch: int, tokens: int, padding: int, seed: int) -> dict[str, Any]:
    """Prompts padded to 16 tokens, so that their lengths may differ."""
    found = _masked("prompt_attention_mask")(batch, 16, 0, seed)
    found["prompt_attention_mask"][:, tokens:] = 0
    found["prompt_attention_mask"][1:, tokens - padding :] = 0
    return found


# Krea 2 sizes rotary tables by the prompt, even for the negative prompt, so both have one length.
_add("krea2", _krea2, guidance="two calls", text=_krea2_text, scale=_ZERO_IS_OFF, pixels=8)
for _name in ("PixArtAlphaPipeline", "PixArtSigmaPipeline"):
    _add(
        "pixart-alpha" if "Alpha" in _name else "pixart-sigma",
        partial(_pixart, _name),
        guidance="one call",
        text=_masked("prompt_attention_mask"),
        pixels=8,
        extra=lambda pipe, height, width, batch, seed: {"negative_prompt": None, "use_resolution_binning": False},
    )
_add("auraflow", _auraflow, guidance="one call", text=_masked("prompt_attention_mask"))
_add("cogview4", _cogview4, guidance="two calls", pixels=16, uneven=True)
_add("lumina2", _lumina2, guidance="two calls", text=_lumina2_text, pixels=16, uneven=True)


# Images: Flux.1 with images, and a UNet


def _flux1(name: str, **changes: Any) -> Any:
    transformer = flux_transformer(num_layers=3, guidance_embeds=True, **changes)
    scheduler = _flow(shift=3.0, use_dynamic_shifting=True)
    return _pipeline(name, scheduler=scheduler, vae=vae(2), transformer=transformer)


def _pooled(batch: int, tokens: int, padding: int, seed: int) -> dict[str, Any]:
    pooled = noise(batch, POOLED_WIDTH, seed=seed + 10)
    return {**_plain(batch, tokens, padding, seed), "pooled_prompt_embeds": pooled}


def _kolors() -> Any:
    unet = sdxl_unet(
        encoder_hid_dim_type="text_proj",
        encoder_hid_dim=12,
        projection_class_embeddings_input_dim=6 * 4 + POOLED_WIDTH,
    )
    parts = dict.fromkeys(("text_encoder", "tokenizer"))
    # Imported from its module: `diffusers` exports it only where sentencepiece is installed.
    pipe = KolorsPipeline(vae=vae(2), unet=unet, scheduler=euler(beta_start=0.00085, beta_end=0.014), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _kolors_text(batch: int, tokens: int, padding: int, seed: int) -> dict[str, Any]:
    pooled = noise(batch, POOLED_WIDTH, seed=seed + 10)
    return {"prompt_embeds": noise(batch, tokens, 12, seed=seed), "pooled_prompt_embeds": pooled}


_add(
    "flux1-kontext",
    lambda: _flux1("FluxKontextPipeline"),
    guidance="two calls",
    text=_pooled,
    scale=_TRUE_SCALE,
    extra=lambda pipe, height, width, batch, seed: {
        "image": _picture(24, 16, seed),
        "max_area": height * width,
        "_auto_resize": False,
    },
)
_add(
    "flux1-fill",
    lambda: _flux1("FluxFillPipeline", in_channels=48, out_channels=16),
    guidance="none",
    text=_pooled,
    extra=lambda pipe, height, width, batch, seed: {
        "image": _picture(height, width, seed),
        "mask_image": _picture(height, width, seed + 1),
    },
)
_add(
    "flux1-control",
    lambda: _flux1("FluxControlPipeline", in_channels=32, out_channels=16),
    guidance="none",
    text=_pooled,
    extra=lambda pipe, height, width, batch, seed: {"control_image": _picture(height, width, seed)},
)
# Attention on two levels: 16x16 and 8x8 tokens.
_add("kolors", _kolors, guidance="one call", text=_kolors_text, pixels=8)


# Hunyuan


def _two_texts(batch: int, tokens: int, padding: int, seed: int) -> dict[str, Any]:
    return {
        **_masked("prompt_embeds_mask")(batch, tokens, padding, seed),
        "prompt_embeds_2": noise(batch, 3, 8, seed=seed + 10),
        "prompt_embeds_mask_2": _mask(batch, 3, 0),
    }


def _guider(pipe: Any, guided: bool) -> dict[str, Any]:
    """Guidance is switched by a part of the pipeline, not by an argument."""
    (pipe.guider.enable if guided else pipe.guider.disable)()
    return {}


def _hunyuanimage() -> Any:
    transformer = _seeded(
        lambda: diffusers.HunyuanImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=3,
            num_single_layers=3,
            num_refiner_layers=1,
            text_embed_dim=TEXT_WIDTH,
            text_embed_2_dim=8,
            rope_axes_dim=(4, 4),
        )
    )
    image_vae = _seeded(
        lambda: diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32),
            layers_per_block=1,
            spatial_compression_ratio=2,
            sample_size=32,
            scaling_factor=1.0,
        )
    )
    return _pipeline(
        "HunyuanImagePipeline",
        scheduler=_flow(shift=5.0),
        vae=image_vae,
        transformer=transformer,
        guider=AdaptiveProjectedMixGuidance(guidance_scale=3.5),
    )


def _hunyuanvideo_vae() -> nn.Module:
    return _seeded(
        lambda: diffusers.AutoencoderKLHunyuanVideo(
            block_out_channels=(4,) * 4, layers_per_block=1, latent_channels=4, norm_num_groups=2
        )
    )


def _hunyuanvideo(**changes: Any) -> Any:
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 3,
        "num_single_layers": 3,
        "num_refiner_layers": 1,
        "patch_size": 2,
        "patch_size_t": 1,
        "text_embed_dim": TEXT_WIDTH,
        "pooled_projection_dim": POOLED_WIDTH,
        "rope_axes_dim": (4, 2, 2),
    }
    transformer = _seeded(lambda: diffusers.HunyuanVideoTransformer3DModel(**{**config, **changes}))
    parts = {"scheduler": _flow(shift=7.0), "vae": _hunyuanvideo_vae(), "transformer": transformer}
    return _pipeline("HunyuanVideoPipeline", **parts)


def _hunyuanvideo15(task_type: str = "t2v") -> Any:
    transformer = _seeded(
        lambda: diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=3,
            num_refiner_layers=1,
            text_embed_dim=TEXT_WIDTH,
            text_embed_2_dim=8,
            image_embed_dim=12,
            rope_axes_dim=(4, 2, 2),
            task_type=task_type,
        )
    )
    video_vae = _seeded(
        lambda: diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(32,) * 5, layers_per_block=1
        )
    )
    pipe = _pipeline(
        "HunyuanVideo15Pipeline",
        scheduler=_flow(shift=5.0),
        vae=video_vae,
        transformer=transformer,
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )
    # Tokens reserved for a picture, which these calls lack. The default of 729 is three times the video's tokens.
    pipe.vision_num_semantic_tokens = 9
    return pipe


_add("hunyuanimage", _hunyuanimage, guidance="two calls", text=_two_texts, scale=_guider, pixels=2, uneven=True)
_add(
    "hunyuanvideo",
    _hunyuanvideo,
    guidance="two calls",
    text=lambda batch, tokens, padding, seed: {
        **_pooled(batch, tokens, padding, seed),
        "prompt_attention_mask": _mask(batch, tokens, padding),
    },
    scale=_TRUE_SCALE,
    pixels=16,
    frames=9,
    uneven=True,
)
_add(
    "hunyuanvideo15",
    _hunyuanvideo15,
    guidance="two calls",
    text=_two_texts,
    scale=_guider,
    pixels=16,
    frames=9,
    uneven=True,
)


# Other videos


def _cogvideox(scheduler: Any, **changes: Any) -> Any:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 4,
        "text_embed_dim": TEXT_WIDTH,
        "num_layers": 3,
        "sample_width": 16,
        "sample_height": 16,
        "sample_frames": 9,
        "max_text_seq_length": 5,
    }
    video_vae = _seeded(
        lambda: diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(4,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2
        )
    )
    transformer = _seeded(lambda: diffusers.CogVideoXTransformer3DModel(**{**config, **changes}))
    return _pipeline("CogVideoXPipeline", vae=video_vae, transformer=transformer, scheduler=scheduler)


def _ltx() -> Any:
    transformer = _seeded(
        lambda: diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=3,
            caption_channels=TEXT_WIDTH,
        )
    )
    video_vae = _seeded(
        lambda: diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(4,) * 4,
            decoder_block_out_channels=(4,) * 4,
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 5,
        )
    )
    scheduler = _flow(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
    )
    return _pipeline("LTXPipeline", scheduler=scheduler, vae=video_vae, transformer=transformer)


def _mochi() -> Any:
    transformer = _seeded(
        lambda: diffusers.MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=3,
            pooled_projection_dim=12,
            in_channels=12,
            text_embed_dim=TEXT_WIDTH,
            time_embed_dim=4,
        )
    )
    video_vae = _seeded(
        lambda: diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5
        )
    )
    parts = {"scheduler": _flow(invert_sigmas=True), "vae": video_vae, "transformer": transformer}
    return _pipeline("MochiPipeline", force_zeros_for_empty_prompt=False, **parts)


_COGVIDEOX_SCHEDULE = {
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "rescale_betas_zero_snr": True,
}
_add(
    "cogvideox-2b",
    lambda: _cogvideox(diffusers.CogVideoXDDIMScheduler(snr_shift_scale=3.0, **_COGVIDEOX_SCHEDULE)),
    guidance="one call",
    # Positions are added to text tokens too, so the text has one fixed length.
    text=lambda batch, tokens, padding, seed: _plain(batch, 5, padding, seed),
    pixels=16,
    frames=9,
)
_add(
    "cogvideox-5b",
    # The model's own scheduler adds noise, under which blocks are not held.
    lambda: _cogvideox(
        diffusers.CogVideoXDDIMScheduler(snr_shift_scale=1.0, **_COGVIDEOX_SCHEDULE),
        use_rotary_positional_embeddings=True,
    ),
    guidance="one call",
    pixels=16,
    frames=9,
)


def _kandinsky5(visual_cond: bool = False) -> Any:
    transformer = _loud(
        lambda: diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            visual_cond=visual_cond,
            in_text_dim=TEXT_WIDTH,
            in_text_dim2=POOLED_WIDTH,
            time_dim=16,
            out_visual_dim=4,
            model_dim=16,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=3,
            axes_dims=(4, 2, 2),
        )
    )
    parts = {"scheduler": _flow(shift=5.0), "vae": _hunyuanvideo_vae(), "transformer": transformer}
    return _pipeline("Kandinsky5T2VPipeline", **parts)


def _kandinsky5_text(batch: int, tokens: int, padding: int, seed: int) -> dict[str, Any]:
    return {
        "prompt_embeds_qwen": noise(batch, tokens, TEXT_WIDTH, seed=seed),
        "prompt_embeds_clip": noise(batch, POOLED_WIDTH, seed=seed + 10),
        "prompt_cu_seqlens": torch.arange(batch + 1) * tokens,
    }


_add("kandinsky5", _kandinsky5, guidance="two calls", text=_kandinsky5_text, pixels=16, frames=9, uneven=True)
_add("ltx", _ltx, guidance="one call", text=_masked("prompt_attention_mask"), pixels=32, frames=17)
_add("mochi", _mochi, guidance="one call", text=_masked("prompt_attention_mask"), pixels=16, frames=13)


def _svd() -> Any:
    # The UNet halves the grid once, so both sides of the larger grid must be even.
    unet = _seeded(
        lambda: diffusers.UNetSpatioTemporalConditionModel(
            sample_size=8,
            down_block_types=("CrossAttnDownBlockSpatioTemporal",) * 2,
            up_block_types=("CrossAttnUpBlockSpatioTemporal",) * 2,
            block_out_channels=(32, 32),
            layers_per_block=1,
            cross_attention_dim=TEXT_WIDTH,
            num_attention_heads=2,
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
        )
    )
    video_vae = _seeded(
        lambda: diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(32,) * 4, down_block_types=("DownEncoderBlock2D",) * 4, force_upcast=False
        )
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        prediction_type="v_prediction",
        timestep_type="continuous",
        timestep_spacing="leading",
        steps_offset=1,
        use_karras_sigmas=True,
        sigma_min=0.002,
        sigma_max=700.0,
    )
    clip = _clip(CLIPVisionModelWithProjection, 224)
    return _pipeline(
        "StableVideoDiffusionPipeline",
        vae=video_vae,
        image_encoder=clip["encoder"],
        unet=unet,
        scheduler=scheduler,
        feature_extractor=clip["processor"],
    )


_add(
    "svd",
    _svd,
    guidance="one call",
    text=lambda batch, tokens, padding, seed: {},
    scale=_scale("max_guidance_scale", on=3.0),
    pixels=8,
    grids=((8, 8), (6, 10), (10, 14)),
    frames=3,
    extra=lambda pipe, height, width, batch, seed: {
        "image": [_picture(height, width, seed + 10 * i) for i in range(batch)]
    },
)

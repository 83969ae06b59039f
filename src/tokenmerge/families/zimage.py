"""Z-Image: one sequence with text after the image; both are padded. Timesteps rise."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock

from .base import BlockKind, Calls, Family, PerToken, Ports, arguments, as_tensor, listed, random_input
from .calls import DenoiserCall, TokenGrid, planned

_CALL = arguments(ZImageTransformer2DModel)
_BLOCK = arguments(ZImageTransformerBlock)
# Padding lies after the image. Like text, it never merges.
_UNIFIED = BlockKind(
    Ports(
        _BLOCK("x"),
        text="after",
        per_token=tuple(PerToken(_BLOCK(name), 1, text="after") for name in ("attn_mask", "freqs_cis", "noise_mask")),
    )
)
_TEXT_TOKENS = 64


def _patch(denoiser: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> tuple[int, int]:
    """Latents along a side of a token, and latent frames in it."""
    given = [_CALL(name).read(args, kwargs or {}) for name in ("patch_size", "f_patch_size")]
    known = denoiser.config.all_patch_size[0], denoiser.config.all_f_patch_size[0]
    return given[0] or known[0], given[1] or known[1]


class _Calls(Calls):
    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        images, texts = _CALL("x").read(args, kwargs), _CALL("cap_feats").read(args, kwargs)
        # With reference images, a sample is a list whose last image is drawn.
        image = images[0][-1] if isinstance(images[0], list) else images[0]
        _, frames, height, width = image.shape
        side, depth = _patch(denoiser, args, kwargs)
        grid = TokenGrid(height // side, width // side, frames // depth)
        text = max(len(each) for each in texts)
        timestep = -as_tensor(_CALL("t").read(args, kwargs))
        return DenoiserCall(len(images), image.dtype, image.device, timestep, (grid,), text_tokens=text)

    def plan(self, denoiser: Any, height: int, width: int, frames: int = 1) -> DenoiserCall:
        side, _ = _patch(denoiser)
        return planned(TokenGrid(height // side, width // side))

    def unit(self, denoiser: Any, scale: int) -> int:
        return _patch(denoiser)[0] * scale


def _example(transformer: Any, batch: int, height: int, width: int, frames: int = 1) -> dict[str, Any]:
    config = transformer.config
    return {
        "x": list(random_input(transformer, batch, config.in_channels, 1, height, width)),
        "t": torch.full((batch,), 0.5, device=transformer.device, dtype=transformer.dtype),
        "cap_feats": list(random_input(transformer, batch, _TEXT_TOKENS, config.cap_feat_dim)),
    }


def _unmergeable_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    images = _CALL("x").read(args, kwargs)
    if isinstance(images[0], list):
        return "Z-Image with reference images mixes text between them"
    sizes = {image.shape for image in images}
    return "" if len(sizes) == 1 else "the samples of a batch have different sizes"


FAMILIES = (
    Family(
        name="zimage",
        title="Z-Image, Z-Image-Turbo",
        denoiser=ZImageTransformer2DModel,
        pipelines=("ZImagePipeline", "ZImageControlNetPipeline"),
        steps="50, Turbo 8",
        blocks=listed(("layers", _UNIFIED, "layers")),
        calls=_Calls(),
        example=_example,
        between_blocks=(_CALL("controlnet_block_samples"),),
        unmergeable_call=_unmergeable_call,
    ),
)

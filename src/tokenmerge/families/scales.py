"""What a latent stands for: pixels along a side, and frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import TokenMergeError, check_whole
from .base import Family


def latent_scales(vae: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Pixels along a side and frames that a latent stands for, as far as the config of a decoder says so."""
    scale = vae.get("scale_factor_spatial") or vae.get("spatial_compression_ratio")
    frames = vae.get("scale_factor_temporal") or vae.get("temporal_compression_ratio")
    if "spatio_temporal_scaling" in vae:
        # LTX-Video: patches of pixels, then halved by some blocks.
        halved = 2 ** sum(vae["spatio_temporal_scaling"])
        return scale or vae["patch_size"] * halved, frames or vae["patch_size_t"] * halved
    if scale is None and "temperal_downsample" in vae:
        scale = 2 ** len(vae["temperal_downsample"])
    if scale is None and "block_out_channels" in vae:
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
    return scale, frames


def latent_frames(family: Family, frames: int | None, scale: int) -> int:
    """Latents in time of a video of so many frames, or of the usual number. scale: frames that one stands for."""
    if frames is None:
        frames = family.frames
    check_whole(frames=frames)
    if frames > 1 and family.frames == 1:
        raise TokenMergeError(
            f"frames is {frames}, and {family.denoiser.__name__} makes single images; leave frames out"
        )
    return (frames - 1) // scale + 1


def known_scales(model: Any, family: Family) -> tuple[int, int]:
    """Pixels along a side and frames that a latent stands for, as the decoder of a pipeline says, or as usual."""
    decoder = getattr(model, "vae", None)
    scale, frames = latent_scales(decoder.config) if decoder is not None else (None, None)
    # Decoders in the place of a model's own need not say it.
    return scale or getattr(model, "vae_scale_factor", None) or family.scales[0], frames or family.scales[1]

"""Latent scales: the pixels along a side, and the frames, that one latent stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import TokenMergeError, check_whole
from .base import Family


def latent_scales(vae: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The latent scales from the config of a decoder; None where it does not give them."""
    scale = vae.get("scale_factor_spatial") or vae.get("spatial_compression_ratio")
    frames = vae.get("scale_factor_temporal") or vae.get("temporal_compression_ratio")
    if "spatio_temporal_scaling" in vae:
        # LTX-Video cuts pixels into patches, and some of its blocks halve these.
        halved = 2 ** sum(vae["spatio_temporal_scaling"])
        return scale or vae["patch_size"] * halved, frames or vae["patch_size_t"] * halved
    if scale is None and "temperal_downsample" in vae:
        scale = 2 ** len(vae["temperal_downsample"])
    if scale is None and "block_out_channels" in vae:
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
    return scale, frames


def latent_frames(family: Family, frames: int | None, scale: int) -> int:
    """The number of latent frames in a video. frames: None for the family's usual number; scale: frames per latent."""
    if frames is None:
        frames = family.frames
    check_whole(frames=frames)
    if frames > 1 and family.frames == 1:
        raise TokenMergeError(
            f"frames is {frames}, but {family.denoiser.__name__} makes single images; leave frames out"
        )
    return (frames - 1) // scale + 1


def known_scales(model: Any, family: Family) -> tuple[int, int]:
    """The latent scales of a model: from its pipeline's decoder, else the family's usual ones."""
    decoder = getattr(model, "vae", None)
    scale, frames = latent_scales(decoder.config) if decoder is not None else (None, None)
    # A decoder that replaces the model's own may not give its scale.
    return scale or getattr(model, "vae_scale_factor", None) or family.scales[0], frames or family.scales[1]

"""What a latent stands for: pixels along a side, and frames, from the config of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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

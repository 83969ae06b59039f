"""Healing LoRAs with random weights, in files such as `tokenmerge heal` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tokenmerge import Merge
from tokenmerge.families import family_of
from tokenmerge.merging.places import merge_places
from tokenmerge.tools.healing.adapter import Adapter


def adapter_of(denoiser: Any, merge: Merge) -> Adapter:
    """An untrained adapter."""
    return Adapter(denoiser, merge_places(denoiser, family_of(denoiser), merge), 2, 0)


def healed(denoiser: Any, merge: Merge, path: Path, dtype: torch.dtype = torch.float32) -> Merge:
    """The technique with a random LoRA in a file. The denoiser keeps the adapter, so do not use it afterwards."""
    adapter = adapter_of(denoiser, merge)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in adapter.weights.values():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    part = "unet" if "UNet" in type(denoiser).__name__ else "transformer"
    adapter.write(path, part, merge, dtype)
    return merge.replace(lora=path)

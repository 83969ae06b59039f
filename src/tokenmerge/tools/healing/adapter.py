"""The LoRA in training: peft's layers on a denoiser, and the files made from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config import Merge
from ...merging.lora import METADATA, metadata_of
from ...merging.places import MergePlace
from ..files import write_file

_NAME = "healing"
# The older names that ComfyUI reads for UNets, by peft's names.
_OLD_NAMES = {"lora_A": "lora_down", "lora_B": "lora_up"}


class Adapter:
    """A LoRA on the linear layers of blocks that merge. Its weights are fp32, whatever the denoiser's dtype.

    ends: what the names of the changed layers end with; by default all are changed.
    """

    def __init__(self, denoiser: Any, places: Iterable[MergePlace], rank: int, seed: int, *, ends: str = "") -> None:
        from peft import LoraConfig

        self.denoiser = denoiser
        self._rank = rank
        blocks = list({place.block.name: place.block for place in places if not place.skipped}.values())
        self._width = blocks[0].width
        names = [
            f"{block.name}.{name}"
            for block in blocks
            for name, module in block.module.named_modules()
            if _is_changed(name, module) and name.endswith(ends)
        ]
        denoiser.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LoraConfig(r=rank, lora_alpha=rank, target_modules=names, init_lora_weights=True)
            denoiser.add_adapter(config, adapter_name=_NAME)
        self.weights: dict[str, nn.Parameter] = {}
        for name, weight in denoiser.named_parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
                self.weights[name.replace(f".{_NAME}.", ".")] = weight

    def enable(self, on: bool) -> None:
        self.denoiser.enable_adapters() if on else self.denoiser.disable_adapters()

    def state(self) -> dict[str, Tensor]:
        return {name: weight.detach().cpu() for name, weight in self.weights.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state[name])

    def write(self, path: Path, part: str, technique: Merge, dtype: torch.dtype) -> None:
        """Write the file that `Merge(lora=...)` and `load_lora_weights` read. part: the denoiser's name in the
        pipeline."""
        self._write(path, {f"{part}.{name}": weight.to(dtype) for name, weight in self.state().items()}, technique)

    def write_for_comfyui(self, path: Path, technique: Merge, dtype: torch.dtype) -> None:
        """Write the LoRA under the older names by which ComfyUI knows the layers of UNets."""
        tensors = {}
        for name, weight in self.state().items():
            layer, end = name.removesuffix(".weight").rsplit(".", 1)
            layer = f"lora_unet_{layer.replace('.', '_')}"
            tensors[f"{layer}.{_OLD_NAMES[end]}.weight"] = weight.to(dtype)
            # ComfyUI multiplies the change by alpha / rank, which is 1 here.
            tensors[f"{layer}.alpha"] = torch.tensor(float(self._rank))
        self._write(path, tensors, technique)

    def _write(self, path: Path, tensors: dict[str, Tensor], technique: Merge) -> None:
        from safetensors.torch import save

        record = json.dumps(metadata_of(self.denoiser, self._width, technique))
        content = save({name: each.contiguous() for name, each in tensors.items()}, {"format": "pt", METADATA: record})
        write_file(path, lambda file: file.write(content))


def _is_changed(name: str, module: nn.Module) -> bool:
    """Whether the LoRA changes this layer: linear layers of attention and feed-forward, not of modulations."""
    return isinstance(module, nn.Linear) and "norm" not in name

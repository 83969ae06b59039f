"""A LoRA trained for merging by `tokenmerge heal`. It changes linear layers in merged calls only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Merge
from ..errors import TokenMergeError
from ..families.base import LINEAR_INPUT, Block, Ports
from ..runtime.installing import Installation
from .controller import Merging
from .groups import MergeGroup
from .sites import MergeSite

# Fields of Merge that decide what merged tokens look like. A LoRA is healed for their values.
HEALED_FOR = (
    "method",
    "ratio",
    "regions",
    "merge_regions",
    "selection",
    "similarity",
    "temperature",
    "unmerge",
    "sites",
    "components",
    "levels",
    "skip_first",
    "skip_last",
)
# The metadata key of what a file was healed for.
METADATA = "tokenmerge"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Lora:
    """The content of a file, on the CPU."""

    path: str
    healed: dict[str, Any]  # the fields `HEALED_FOR`, as plain data
    denoiser: str
    width: int
    layers: dict[str, tuple[Tensor, Tensor]]  # by name of the linear layer: down [r, in], up [out, r]


def settings_of(technique: Merge) -> dict[str, Any]:
    """The settings that a LoRA is healed for."""
    plain = technique.to_dict()
    return {name: plain[name] for name in HEALED_FOR}


def metadata_of(denoiser: nn.Module, width: int, technique: Merge) -> dict[str, Any]:
    """The metadata of a LoRA file."""
    return {"denoiser": type(denoiser).__name__, "width": width, "merge": settings_of(technique)}


def read_lora(path: str) -> Lora:
    """The LoRA in a file written by `tokenmerge heal`."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise TokenMergeError("a LoRA needs safetensors: pip install tokenmerge[diffusers]") from error
    if not Path(path).is_file():
        raise TokenMergeError(f"LoRA {path!r} does not exist; give a file written by `tokenmerge heal`")
    try:
        with safe_open(path, framework="pt") as file:
            record, names = (file.metadata() or {}).get(METADATA), file.keys()
            tensors = {name: file.get_tensor(name) for name in names} if record else {}
    except (SafetensorError, OSError) as error:
        raise TokenMergeError(f"LoRA {path!r} cannot be read ({error}); give a .safetensors file") from error
    if not record:
        raise TokenMergeError(
            f"LoRA {path!r} does not record which Merge it was healed for, so `tokenmerge heal` did not write it; load "
            "it into the pipeline with load_lora_weights, and leave lora out"
        )
    try:
        metadata = json.loads(record)
        healed, denoiser, width = dict(metadata["merge"]), str(metadata["denoiser"]), int(metadata["width"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"its metadata cannot be read: {error!r}") from error
    return Lora(path, healed, denoiser, width, _layers(path, tensors))


def _layers(path: str, tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of every layer, by its name in the denoiser."""
    named = {name.removeprefix("unet.").removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    layers = {}
    for name in dict.fromkeys(name.removesuffix(_DOWN).removesuffix(_UP) for name in named):
        down, up = named.get(name + _DOWN), named.get(name + _UP)
        if down is None or up is None:
            raise TokenMergeError(
                f"LoRA {path!r} lacks a matrix of {name!r} under its diffusers name; give lora.safetensors as "
                "`tokenmerge heal` wrote it, not the file for ComfyUI"
            )
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
            raise _damaged(path, f"the matrices of {name!r}, {list(down.shape)} and {list(up.shape)}, differ in rank")
        layers[name] = down, up
    if not layers:
        raise _damaged(path, "it has no layers")
    return layers


def _damaged(path: str, why: str) -> TokenMergeError:
    return TokenMergeError(f"LoRA {path!r} is damaged ({why}); copy it again from where it was healed, or heal again")


def check_lora(lora: Lora, technique: Merge, denoiser: nn.Module, merged: Sequence[Block]) -> None:
    """Refuse a LoRA healed for another model or other settings. merged: the blocks that merge."""
    width = merged[0].width if merged else lora.width
    if (lora.denoiser, lora.width) != (type(denoiser).__name__, width):
        raise TokenMergeError(
            f"LoRA {lora.path!r} was healed for a {lora.denoiser} of width {lora.width}, but this is a "
            f"{type(denoiser).__name__} of width {width}; give one for this model, or leave lora out"
        )
    now = settings_of(technique)
    differing = [name for name in HEALED_FOR if lora.healed.get(name) != now[name]]
    if differing:
        was, is_now = (", ".join(f"{name}={each.get(name)!r}" for name in differing) for each in (lora.healed, now))
        raise TokenMergeError(
            f"LoRA {lora.path!r} was healed for {was}, but {is_now} is applied; apply the settings of the LoRA, heal "
            "again for these, or leave lora out"
        )
    modules = dict(denoiser.named_modules(remove_duplicate=False))
    for name, (down, up) in lora.layers.items():
        if not any(name.startswith(f"{block.name}.") for block in merged):
            raise TokenMergeError(
                f"LoRA {lora.path!r} changes {name!r}, which is in no block of this model that merges; give one for "
                "this model, or leave lora out"
            )
        layer = modules.get(name)
        shape = (getattr(layer, "in_features", None), getattr(layer, "out_features", None))
        if shape != (down.shape[1], up.shape[0]):
            raise TokenMergeError(
                f"LoRA {lora.path!r} changes {name!r} from {down.shape[1]} to {up.shape[0]} channels, but this model "
                f"has {shape[0]} to {shape[1]} there; give one for this model, or leave lora out"
            )


@dataclass
class Layer:
    """The change to one linear layer, on the device and in the dtype of calls."""

    down: Tensor
    up: Tensor


class Adaptation:
    """A LoRA on one denoiser. Its copies stay on every device that a call has needed: recorded graphs read them."""

    def __init__(self, lora: Lora) -> None:
        self._lora = lora
        self.layers = {name: Layer(*tensors) for name, tensors in lora.layers.items()}
        self._copies: dict[tuple[torch.device, torch.dtype], dict[str, tuple[Tensor, Tensor]]] = {}
        self._now: tuple[torch.device, torch.dtype] | None = None

    def enter(self, device: torch.device, dtype: torch.dtype) -> None:
        """Switch to the copies on the device and in the dtype of a call."""
        if self._now == (device, dtype):
            return
        self._now = device, dtype
        if self._now not in self._copies:
            # Inference tensors could not be used outside of inference mode.
            with torch.inference_mode(False):
                self._copies[self._now] = {
                    name: (down.to(device, dtype), up.to(device, dtype))
                    for name, (down, up) in self._lora.layers.items()
                }
        for name, tensors in self._copies[self._now].items():
            self.layers[name].down, self.layers[name].up = tensors


class LoraSite(MergeSite):
    """A linear layer that a LoRA changes while tokens merge."""

    visits = False

    def __init__(self, name: str, merging: Merging, group: MergeGroup, layer: Layer) -> None:
        super().__init__(name, merging, group, Ports(LINEAR_INPUT))
        self.layer = layer

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        output = self.original(*args, **kwargs)
        if self.idle:
            return output
        tokens = self.ports.tokens.read(args, kwargs)
        down, up = (each.to(tokens.dtype) for each in (self.layer.down, self.layer.up))
        return output + F.linear(F.linear(tokens, down), up)


def install_lora(
    adaptation: Adaptation, block: Block, merging: Merging, group: MergeGroup, installation: Installation
) -> None:
    """Put a site on each layer of a block that the LoRA changes."""
    for name, layer in adaptation.layers.items():
        inside = name.removeprefix(f"{block.name}.")
        if inside != name:
            installation.add(LoraSite(name, merging, group, layer), block.module, inside)

"""Denoisers without a table. Their blocks can be held, once a call has shown how they follow each other."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import TokenMergeError
from .base import Block, BlockKind, Calls, Family, Ports
from .calls import DenoiserCall
from .reading import latest

_KIND = BlockKind(Ports())
# Argument names for the time of a step.
_TIMES = ("timestep", "timesteps", "t", "vision_timesteps", "decoder_noise_time")
# Classes whose times rise from step to step, with a table or without, by the start of their names.
RISING = ("Ideogram4", "LongCatAudio", "Lumina", "Mochi", "OmniGen", "ZImage")
# Modes in which blocks read a cache of keys and values, but do not write to it.
_READING = ("cached", "inject")
# Why some classes cannot be merged, by the start of their names.
OBSTACLES = {
    "Sana": "its feed-forward layers are convolutions, which need every token in its place",
    "HiDream": "its blocks cut their own sequence into image and text by a count of tokens",
    "OmniGen": "its attention mask has rows and columns for every token",
    "UNetMotion": "its motion blocks, which see one place in all frames, have the same class as its spatial blocks",
}
_UNKNOWN = "no table says where its image tokens are"


def generic_family(denoiser: nn.Module) -> Family:
    """A family for any denoiser that `unholdable` does not refuse."""
    name = type(denoiser).__name__
    obstacle = next((reason for start, reason in OBSTACLES.items() if name.startswith(start)), _UNKNOWN)
    return Family(
        name="generic",
        title="any other denoiser of diffusers",
        denoiser=type(denoiser),
        blocks=candidates,
        calls=_AnyCalls(),
        unmergeable=lambda denoiser: obstacle,
        learned=True,
    )


def unholdable(module: nn.Module) -> str:
    """Why a module cannot be held without a table, as far as this shows before it runs; else empty."""
    if not candidates(module):
        return "it has no list of blocks of one class"
    if not set(_names(module)).intersection(_TIMES):
        return "its forward has no timestep argument that we know, so steps cannot be told apart"
    return ""


def candidates(denoiser: nn.Module) -> list[Block]:
    """The blocks of every list whose members have one class. Lists inside such blocks do not count."""
    found: list[Block] = []
    inside: set[nn.Module] = set()
    for name, module in denoiser.named_modules():
        if module in inside or not isinstance(module, nn.ModuleList) or not len(module):
            continue
        kinds = {type(block) for block in module}
        # Plain torch layers are not blocks.
        if len(kinds) > 1 or next(iter(kinds)).__module__.startswith("torch.nn"):
            continue
        for number, block in enumerate(module):
            found.append(Block(f"{name}.{number}", block, _KIND, name, line=name))
            inside.update(block.modules())
    return found


def _names(denoiser: nn.Module) -> list[str]:
    """The names of its forward's arguments."""
    _, *names = inspect.signature(type(denoiser).forward).parameters
    return names


class _AnyCalls(Calls):
    """Calls of an unknown form: every tensor among the arguments counts."""

    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        given = {**dict(zip(_names(denoiser), args, strict=False)), **kwargs}
        if _writes_cache(given):
            raise TokenMergeError(
                "this call fills a cache of keys and values, which held blocks would not; turn the cache off, or "
                "call remove first"
            )
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        time = latest(next((given[name] for name in _TIMES if given.get(name) is not None), 0.0))
        first = tensors[0] if tensors else time
        batch = first.shape[0] if first.ndim else 1
        # Names count too: a ControlNet or a mask may be passed in some calls only.
        names = tuple(name for name, value in given.items() if value is not None)
        shapes = (names, tuple((tuple(each.shape), each.dtype) for each in tensors))
        rises = type(denoiser).__name__.startswith(RISING)
        return DenoiserCall(batch, first.dtype, first.device, -time if rises else time, shapes=shapes)


def _writes_cache(given: dict[str, Any]) -> bool:
    """Whether blocks write to a cache of keys and values in this call, judging by its arguments."""
    if given.get("kv_cache_flag") is not None:
        return bool(given["kv_cache_flag"]["is_cache_step"])
    if given.get("kv_caches") is not None:
        return given["kv_caches"][0].mode == "write"
    return given.get("kv_cache") is not None and given.get("kv_cache_mode") not in _READING

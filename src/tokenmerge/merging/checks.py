"""What merging cannot serve, with the way out: of a model, of its caches, and of the arguments of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..config import Merge
from ..errors import TokenMergeError
from ..families.base import Family
from ..runtime.foreign import INNER_CACHES, cache_hooks
from .methods import method_for
from .places import MergePlace


def check_mergeable(denoiser: nn.Module, technique: Merge) -> None:
    """Refuse what others have switched on, before an image begins."""
    for name in cache_hooks(denoiser):
        if name.startswith(INNER_CACHES):
            raise TokenMergeError(
                f"a cache ({name}) stores tensors inside of blocks, where tokens are merged; "
                "use FirstBlockCache or MagCache, call disable_cache(), or remove first"
            )
    if not method_for(technique).KEYS_VALUES:
        return
    processors = {type(getattr(module, "processor", None)).__name__ for module in denoiser.modules()}
    if any(name.startswith("Fused") for name in processors):
        raise TokenMergeError(
            f"fused projections make keys and values together with queries, and method {technique.method!r} gives them "
            "other tokens; call unfuse_qkv_projections() first"
        )
    perturbed = sorted(name for name in processors if name.startswith("PAG"))
    if perturbed:
        raise TokenMergeError(
            f"perturbed-attention guidance ({perturbed[0]}) adds values to queries one to one, and method "
            f"{technique.method!r} leaves fewer values; use another method, or a pipeline without it"
        )


def check_places(places: Sequence[MergePlace]) -> None:
    """Refuse chunked feed-forward, which can be switched on between calls."""
    block: Any = places[0].block.module
    if getattr(block, "_chunk_size", None) is not None:
        raise TokenMergeError(
            f"chunked feed-forward ({block._chunk_size} at a time) splits what merging joins; "
            "call disable_forward_chunking(), or set_chunk_feed_forward(None) on its blocks, first"
        )


def check_call(family: Family, technique: Merge, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments of a denoiser call that merged tokens cannot follow."""
    for argument in family.masks:
        if argument.read(args, kwargs) is not None:
            raise TokenMergeError(
                f"{argument.name} masks image tokens in self-attention, which merged tokens cannot follow; "
                "leave it out, or remove first"
            )
    extra = family.attention_kwargs.read(args, kwargs) or {}
    for name in ("attention_mask", "gligen"):
        if extra.get(name) is not None:
            raise TokenMergeError(
                f"{family.attention_kwargs.name} has {name!r}, which needs every image token in its place; "
                "leave it out, or remove first"
            )
    if extra.get("ip_adapter_masks") is not None and technique.sites != "component":
        raise TokenMergeError(
            "IP-Adapter masks need cross-attention over all image tokens; use Merge(sites='component'), which leaves "
            "masked cross-attention whole, or Hold, or leave the masks out"
        )

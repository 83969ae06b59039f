"""What merging cannot serve in a model and what others have put on it, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..config import Merge
from ..errors import TokenMergeError
from ..runtime.foreign import INNER_CACHES, cache_hooks, shard_of
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
    if technique.lora is not None and any(map(_is_fused, denoiser.modules())):
        raise TokenMergeError(
            f"fused projections run in place of layers that LoRA {technique.lora!r} changes; call "
            "unfuse_qkv_projections() first, or leave lora out"
        )
    method = method_for(technique)
    shard = shard_of(denoiser)
    if shard is not None and not method.splits(method.effective(technique)):
        raise TokenMergeError(
            f"context parallel shares the tokens of a picture out among {shard.ranks} processes, and this Merge needs "
            "them together; use method='toma', tiles or stripes for regions and merge_regions, and no random "
            "selection, or use Hold"
        )
    if not method.KEYS_VALUES:
        return
    if any(map(_is_fused, denoiser.modules())):
        raise TokenMergeError(
            f"fused projections make keys and values together with queries, and method {technique.method!r} gives them "
            "other tokens; call unfuse_qkv_projections() first"
        )
    perturbed = sorted(name for name in map(_processor_of, denoiser.modules()) if name.startswith("PAG"))
    if perturbed:
        raise TokenMergeError(
            f"perturbed-attention guidance ({perturbed[0]}) adds values to queries one to one, and method "
            f"{technique.method!r} leaves fewer values; use another method, or a pipeline without it (a call that "
            "failed leaves its attention processors on the model: set the usual ones again)"
        )


def _is_fused(module: nn.Module) -> bool:
    """Whether it is attention that makes queries, keys and values by one product."""
    # Where processors tell, a module that was unfused still has the mark of other kinds.
    marked = hasattr(module, "unfuse_projections") and getattr(module, "fused_projections", False)
    return marked or _processor_of(module).startswith("Fused")


def _processor_of(module: nn.Module) -> str:
    return type(getattr(module, "processor", None)).__name__


def check_places(places: Sequence[MergePlace]) -> None:
    """Refuse chunked feed-forward, which can be switched on between calls."""
    block: Any = places[0].block.module
    if getattr(block, "_chunk_size", None) is not None:
        raise TokenMergeError(
            f"chunked feed-forward ({block._chunk_size} at a time) splits what merging joins; "
            "call disable_forward_chunking(), or set_chunk_feed_forward(None) on its blocks, first"
        )

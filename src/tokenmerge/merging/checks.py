"""Refusals: what a model, or what others have put on it, does that merging cannot follow."""

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
    """Refuse what others have switched on. Called before an image begins."""
    for name in cache_hooks(denoiser):
        if name.startswith(INNER_CACHES):
            raise TokenMergeError(
                f"a cache ({name}) stores tensors inside of blocks, where tokens are merged; "
                "use FirstBlockCache or MagCache, call disable_cache(), or call remove first"
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
            f"context parallel splits the tokens of an image among {shard.ranks} processes, but this Merge needs all "
            "of them in one; use method='toma' with tiles or stripes for regions and merge_regions and no random "
            "selection, or use Hold"
        )
    if not method.KEYS_VALUES:
        return
    if any(map(_is_fused, denoiser.modules())):
        raise TokenMergeError(
            f"fused projections compute queries, keys and values from the same tokens, but method "
            f"{technique.method!r} merges only those of keys and values; call unfuse_qkv_projections() first"
        )
    perturbed = sorted(name for name in map(_processor_of, denoiser.modules()) if name.startswith("PAG"))
    if perturbed:
        raise TokenMergeError(
            f"perturbed-attention guidance ({perturbed[0]}) adds values to queries one to one, but method "
            f"{technique.method!r} leaves fewer values; use another method, or a pipeline without this guidance (a "
            "failed call leaves its attention processors on the model: set the usual ones again)"
        )


def _is_fused(module: nn.Module) -> bool:
    """Whether `module` is attention that computes queries, keys and values in one product."""
    # Classes without `unfuse_projections` keep the mark when they are unfused, so their processor decides.
    marked = hasattr(module, "unfuse_projections") and getattr(module, "fused_projections", False)
    return marked or _processor_of(module).startswith("Fused")


def _processor_of(module: nn.Module) -> str:
    return type(getattr(module, "processor", None)).__name__


def check_places(places: Sequence[MergePlace]) -> None:
    """Refuse chunked feed-forward. It can be switched on between calls."""
    block: Any = places[0].block.module
    if getattr(block, "_chunk_size", None) is not None:
        raise TokenMergeError(
            f"chunked feed-forward ({block._chunk_size} tokens at a time) splits the sequence, which merging needs "
            "whole; first call disable_forward_chunking(), or set_chunk_feed_forward(None) on its blocks"
        )

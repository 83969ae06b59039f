"""ToMA: destinations by submodular selection inside regions, merging by an attention-like linear map."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..config import MergeConfig
from ..grid import Partition

REFRESHES = True


def draws(config: MergeConfig) -> bool:
    return config.selection in ("random", "stochastic")


def select(
    tokens: Tensor,
    partition: Partition,
    config: MergeConfig,
    ops: ModuleType,
    generator: torch.Generator,
    *,
    shared: bool,
) -> Tensor:
    """Destinations [S, R, k] that represent the tokens of their region best (section 4.1)."""
    layout = partition.layout
    return ops.select(
        tokens,
        partition.order,
        layout.select_regions,
        layout.select_count,
        selection=config.selection,
        similarity=config.similarity,
        shared=shared,
        generator=generator,
    )


def weigh(
    tokens: Tensor,
    destinations: Tensor,
    partition: Partition,
    config: MergeConfig,
    ops: ModuleType,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Weights between tokens and the destinations of their merging region (section 4.2)."""
    layout = partition.layout
    # Selection regions are listed merging region by merging region, so regrouping is a view.
    grouped = destinations.reshape(destinations.shape[0], layout.merge_regions, layout.merge_count)
    merge, unmerge = ops.weigh(
        tokens, partition.merge_order, grouped, similarity=config.similarity, temperature=config.temperature
    )
    if config.unmerge == "pinv":
        unmerge = ops.pinv_weights(merge, fallback=unmerge)
    return merge, unmerge

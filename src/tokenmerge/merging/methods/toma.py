"""ToMA: destinations by submodular selection inside regions, merging by an attention-like linear map.

The controls `random` and `uniform` differ only in destinations, which do not depend on the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...config import SELECTIONS, Merge
from ..grid import Layout
from .base import Given, LinearMethod, Rates


@dataclass(frozen=True)
class Toma(LinearMethod):
    unread: tuple[str, ...] = ()

    def effective(self, technique: Merge) -> Merge:
        return technique.replace(selection=technique.method) if technique.method in SELECTIONS else technique

    def needs_host(self, technique: Merge) -> bool:
        # The solver behind the pseudo-inverse cannot be captured.
        return technique.selection in ("random", "stochastic") or technique.unmerge == "pinv"

    def splits(self, technique: Merge) -> bool:
        # Random numbers are drawn for all regions together.
        return super().splits(technique) and technique.selection not in ("random", "stochastic")

    def select(self, given: Given) -> Tensor:
        """Destinations [S, R, k] that best represent the tokens of their region (section 4.1)."""
        layout, technique = given.partition.layout, given.technique
        return given.ops.select(
            given.tokens,
            given.partition.order,
            layout.select_regions,
            layout.select_count,
            selection=technique.selection,
            similarity=technique.similarity,
            shared=given.shared,
            generator=given.generator,
        )

    def weigh(self, given: Given, destinations: Tensor) -> tuple[Tensor, Tensor]:
        """Weights between tokens and the destinations of their merging region (section 4.2)."""
        layout, ops, technique = given.partition.layout, given.ops, given.technique
        order = given.partition.merge_order
        # Selection regions are sorted by merging region, so regrouping is a view.
        grouped = destinations.reshape(destinations.shape[0], layout.merge_regions, layout.merge_count)
        merge, unmerge = ops.weigh(
            given.tokens,
            order,
            grouped,
            similarity=technique.similarity,
            temperature=technique.temperature,
        )
        if technique.unmerge == "pinv":
            unmerge = ops.pinv_weights(merge, fallback=unmerge)
        return merge, unmerge

    def making(self, layout: Layout, width: int, technique: Merge, rates: Rates) -> float:
        looks = technique.selection not in ("random", "uniform")
        selection = looks * layout.tokens * layout.select_size * width
        weights = layout.tokens * (layout.merge_count + 1) * width
        return rates.selected * selection + rates.weighed * weights

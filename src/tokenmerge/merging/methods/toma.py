"""ToMA: destinations by submodular selection inside regions, merging by an attention-like linear map.

The controls `random` and `uniform` are the same with destinations that do not look at the tokens.
"""

from __future__ import annotations

from torch import Tensor

from ...config import SELECTIONS, MergeConfig
from ..grid import Layout
from .base import Given, LinearMethod


class Toma(LinearMethod):
    GATHERS = True

    def settle(self, config: MergeConfig) -> MergeConfig:
        return config.replace(selection=config.method) if config.method in SELECTIONS else config

    def needs_host(self, config: MergeConfig) -> bool:
        # No capture holds the solver behind the pseudo-inverse.
        return config.selection in ("random", "stochastic") or config.unmerge == "pinv"

    def select(self, given: Given) -> Tensor:
        """Destinations [S, R, k] that represent the tokens of their region best (section 4.1)."""
        layout, config = given.partition.layout, given.config
        return given.ops.select(
            given.tokens,
            given.partition.order,
            layout.select_regions,
            layout.select_count,
            selection=config.selection,
            similarity=config.similarity,
            shared=given.shared,
            generator=given.generator,
        )

    def weigh(self, given: Given, destinations: Tensor) -> tuple[Tensor, Tensor]:
        """Weights between tokens and the destinations of their merging region (section 4.2)."""
        layout, ops, config = given.partition.layout, given.ops, given.config
        order = given.partition.merge_order
        # Selection regions are listed merging region by merging region, so regrouping is a view.
        grouped = destinations.reshape(destinations.shape[0], layout.merge_regions, layout.merge_count)
        merge, unmerge = ops.weigh(
            given.tokens,
            order,
            grouped,
            similarity=config.similarity,
            temperature=config.temperature,
            rotary=given.rotary,
        )
        if config.merge == "pick":
            merge = ops.pick_weights(given.tokens, order, grouped)
        if config.unmerge == "pinv":
            unmerge = ops.pinv_weights(merge, fallback=unmerge)
        return merge, unmerge

    def making(self, layout: Layout, width: int, config: MergeConfig) -> float:
        looks = config.selection not in ("random", "uniform")
        selection = looks * layout.tokens * layout.select_size * width / config.schedule.destinations_every
        if config.coverage is not None:
            selection += layout.tokens * layout.select_count * width / config.schedule.destinations_every
        weights = layout.tokens * (layout.merge_count + 1) * width / config.schedule.weights_every
        return selection + weights

"""Hold: between anchors blocks do not run, and what they changed at the last ones stands in.

It is merging at its limit, where all tokens are removed: a step cache for every family, which compiled code and CUDA
graphs can follow.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...config import MergeConfig
from ..grid import Layout, Partition, TokenGrid
from .base import Given, LinearMethod


class Hold(LinearMethod):
    """Its map has no destinations. Renewing it, at each anchor alike, says that one has run."""

    SITES = ("block", "stage")

    def settle(self, config: MergeConfig) -> MergeConfig:
        schedule = dataclasses.replace(config.schedule, destinations_every=1)
        return config.replace(regions="whole", merge_regions=None, schedule=schedule)

    def layout(self, token_count: int, config: MergeConfig) -> Layout:
        return Layout(token_count, select_size=token_count, select_count=0, merge_size=token_count)

    def partition(self, grids: tuple[TokenGrid, ...], config: MergeConfig) -> Partition:
        return Partition(self.layout(sum(grid.count for grid in grids), config), None, None, "held", grids)

    def select(self, given: Given) -> Tensor:
        return given.tokens.new_empty(given.samples, 1, 0, dtype=torch.int64)

    def weigh(self, given: Given, destinations: Tensor) -> tuple[Tensor, Tensor]:
        batch, count, _ = given.tokens.shape
        return given.tokens.new_empty(batch, 1, 0, count), given.tokens.new_empty(batch, 1, count, 0)

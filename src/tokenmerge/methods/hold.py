"""Hold: between anchors blocks do not run, and what they changed at the last ones stands in.

It is merging at its limit, where all tokens are removed: a step cache for every family, which compiled code and CUDA
graphs can follow.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..config import MergeConfig
from ..grid import Layout, Partition, TokenGrid
from ..mergemap import MergeMap
from .base import Given, Method


class Hold(Method[MergeMap]):
    """Its map is empty. Renewing it says that an anchor has run."""

    REFRESHES = False
    SITES = ("block",)

    def layout(self, token_count: int, config: MergeConfig) -> Layout:
        return Layout(token_count, select_size=token_count, select_count=0, merge_size=token_count)

    def partition(self, grids: tuple[TokenGrid, ...], config: MergeConfig) -> Partition:
        return Partition(self.layout(sum(grid.count for grid in grids), config), None, None, "held", grids)

    def empty_map(
        self,
        layout: Layout,
        ops: ModuleType,
        config: MergeConfig,
        batch: int,
        *,
        shared: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> MergeMap:
        return MergeMap.empty(layout, ops, batch, ordered=False, shared=shared, dtype=dtype, device=device)

    def map_over(self, layout: Layout, ops: ModuleType, tensors: list[Tensor]) -> MergeMap:
        return MergeMap.over(layout, ops, tensors)

    def renew(self, merge_map: MergeMap, phase: str, given: Given) -> None:
        """There is nothing to fill."""

    def spent(self, layout: Layout, width: int, config: MergeConfig, *, blocks: int, merges: int) -> float:
        return 0.0

"""Downsampling on the grid, independent of the tokens' values: the control `pool`, and ToDo (arXiv 2402.13573).

Both cut the grid into cells and keep one token of each. The ratio gives the cell: 0.75 is 2x2. Where cells do not
divide a grid they are ragged, like any tile.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import Merge
from ...errors import TokenMergeError
from ...runtime.timeline import ONCE
from ..clustermap import ClusterMap
from ..grid import Layout
from .base import REGIONS, WEIGHTS, ClusterMethod, Given, LinearMethod, Rates

# Allows 0.667 for two thirds.
_TOLERANCE = 0.01
# The ratio alone gives the cells, and nothing is random.
_UNREAD = (*REGIONS, "selection", *WEIGHTS, "seed")


def in_cells(technique: Merge) -> Merge:
    """The technique with cells as regions: 1 / (1 - ratio) tokens, as square as that number allows."""
    wished = 1.0 / (1.0 - technique.ratio)
    size = max(2, round(wished)) if technique.ratio else 1
    if abs(wished - size) > _TOLERANCE:
        raise TokenMergeError(
            f"{technique.method} keeps one of the n tokens of every cell, so its ratio is 1 - 1/n: 0.5, 0.667, 0.75, "
            f"...; ratio is {technique.ratio:g}: use {1 - 1 / size:.3g}"
        )
    height = max(side for side in range(1, math.isqrt(size) + 1) if size % side == 0)
    return technique.replace(regions=f"tile:{height}x{size // height}", merge_regions=None)


def _runs(layout: Layout) -> tuple[list[int], list[int]]:
    """The run of every token in a region, and the first token of every run. A run is the tokens of one destination.

    A region is one cell, thus one run, unless no divisor of the token count is near a cell's size.
    """
    size, count = layout.select_size, layout.select_count
    return [token * count // size for token in range(size)], [-(-run * size // count) for run in range(count)]


def _regions(given: Given) -> Tensor:
    """Token indices [R, n] by region."""
    layout, order = given.partition.layout, given.partition.order
    if order is None:
        order = torch.arange(layout.tokens, device=given.tokens.device)
    return order.view(layout.select_regions, layout.select_size)


class Pool(LinearMethod):
    """Average pooling of cells, and nearest upsampling back. A cell has the position of its first token."""

    RENEWS = ONCE
    unread = _UNREAD

    def effective(self, technique: Merge) -> Merge:
        return in_cells(technique)

    def needs_host(self, technique: Merge) -> bool:
        return True

    def select(self, given: Given) -> Tensor:
        """The first token of every cell."""
        _, firsts = _runs(given.partition.layout)
        return _regions(given)[:, firsts].expand(given.samples, -1, -1)

    def weigh(self, given: Given, destinations: Tensor) -> tuple[Tensor, Tensor]:
        """Every token belongs to its own cell only, and all tokens of a cell weigh the same."""
        tokens, layout = given.tokens, given.partition.layout
        runs, _ = _runs(layout)
        members = F.one_hot(torch.tensor(runs, device=tokens.device), layout.select_count)
        unmerge = members.to(tokens.dtype).expand(tokens.shape[0], layout.merge_regions, -1, -1)
        merge = unmerge.transpose(-1, -2)
        return merge / merge.sum(-1, keepdim=True), unmerge


class ToDo(ClusterMethod):
    """Token Downsampling: keys and values of self-attention come from the first token of every cell.

    Queries stay full, so nothing is unmerged. On grids that cells divide, this is nearest-neighbour downsampling.
    """

    RENEWS = ONCE
    KEYS_VALUES = True
    SITES = ("component",)
    rule = "prune"
    unread = _UNREAD

    def effective(self, technique: Merge) -> Merge:
        return in_cells(super().effective(technique))

    def needs_host(self, technique: Merge) -> bool:
        return True

    def renew(self, merge_map: ClusterMap, phase: str, given: Given) -> None:
        layout, device = given.partition.layout, given.tokens.device
        regions = _regions(given)
        runs, firsts = _runs(layout)
        others = sorted(set(range(layout.select_size)) - set(firsts))
        places = torch.empty(layout.tokens, dtype=torch.int64, device=device)
        first_places = torch.arange(layout.select_regions, device=device)[:, None] * layout.select_count
        places[regions] = first_places + torch.tensor(runs, device=device)
        merge_map.fill(regions[:, firsts].reshape(1, -1), regions[:, others].reshape(1, -1), places)

    def spent(self, layout: Layout, width: int, technique: Merge, rates: Rates, *, blocks: int, merges: int) -> float:
        return 0.0

"""Bipartite matching of tokens with one destination per 2x2 cell: ToMeSD, and ToFu on top of it.

ToMeSD (Token Merging for Stable Diffusion) gives the same results as the `tomesd` package. ToFu (Token Fusion, arXiv
2312.01026) has no public code for diffusion models: this follows its description.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import Merge
from ...errors import TokenMergeError
from ...families.calls import TokenGrid
from ...runtime.timeline import ALWAYS
from ..clustermap import ClusterMap
from ..grid import Layout, Partition, drawn_alone
from .base import REGIONS, WEIGHTS, ClusterMethod, Given, Rates

_SIDE = 2
# The largest ratio, because destinations are never removed.
_MOST = 1.0 - 1.0 / _SIDE**2


@dataclass(frozen=True)
class Bipartite(ClusterMethod):
    """The tokens most like a destination join it; all others stay as they are.

    Every block has a new matching, made from the tokens that enter it and shared by its components.
    """

    RENEWS = ALWAYS
    unread = (*REGIONS, *WEIGHTS)

    rule: str = "mean"
    label: str = ""

    def effective(self, technique: Merge) -> Merge:
        if technique.ratio > _MOST:
            raise TokenMergeError(
                f"{technique.method} keeps a destination in every {_SIDE}x{_SIDE} cell, so it removes at most {_MOST}, "
                f"but ratio is {technique.ratio:g}: use {_MOST} or less, or method='toma'"
            )
        if technique.selection not in ("random", "uniform"):
            raise TokenMergeError(
                f"{technique.method} takes a random token of every cell as destination, or the top left one, but "
                f"selection is {technique.selection!r}: use 'random' or 'uniform', or the preset {technique.method!r}"
            )
        return super().effective(technique).replace(regions="whole", merge_regions=None)

    def needs_host(self, technique: Merge) -> bool:
        return technique.selection == "random"

    def partition(self, grids: tuple[TokenGrid, ...], technique: Merge) -> Partition:
        # The drawn image is matched alone: not with reference images, nor with a given first frame.
        grid, before, after = drawn_alone(grids)
        if min(grid.height, grid.width) < _SIDE:
            raise TokenMergeError(
                f"a {grid} token grid has no {_SIDE}x{_SIDE} cell to match in; use a larger image, or method='toma'"
            )
        description = f"{_SIDE}x{_SIDE} cells, top left tokens"
        if technique.selection == "random":
            description = f"{_SIDE}x{_SIDE} cells, random tokens (top left in odd batches)"
        removed = int(grid.count * technique.ratio)
        layout = Layout(grid.count, grid.count, grid.count - removed, grid.count)
        return Partition(layout, None, None, description, (grid,), before, after)

    def renew(self, merge_map: ClusterMap, phase: str, given: Given) -> None:
        # An odd batch cannot hold both sides of guidance, so these come in two calls. Different random patterns in the
        # two would show in the image. Like the package, take the top left tokens.
        tokens, partition = given.tokens, given.partition
        drawn = given.generator if given.technique.selection == "random" and tokens.shape[0] % 2 == 0 else None
        destinations, sources = split_cells(partition.grids[0], tokens.device, drawn)
        merge_map.fill(*match(tokens, destinations, sources, partition.layout.merged, shared=given.shared))

    def spent(self, layout: Layout, width: int, technique: Merge, rates: Rates, *, blocks: int, merges: int) -> float:
        """Similarities of all pairs. Sums and copies cost no multiplications."""
        destinations = layout.tokens / _SIDE**2
        return blocks * (layout.tokens - destinations) * destinations * width


def split_cells(grid: TokenGrid, device: torch.device, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """One token of every whole 2x2 cell, [D], and all others, [N - D], as row-major indices.

    The token of a cell is a random one if there is a generator, else the top left one. Cells that the grid's edge cuts
    have no such token.
    """
    rows, columns = grid.height // _SIDE, grid.width // _SIDE
    index = torch.arange(grid.count, device=device).view(grid.frames, grid.height, grid.width)
    whole = index[:, : rows * _SIDE, : columns * _SIDE].reshape(-1, rows, _SIDE, columns, _SIDE)
    cells = whole.transpose(2, 3).reshape(-1, _SIDE**2)
    edges = torch.cat([index[:, rows * _SIDE :].flatten(), index[:, : rows * _SIDE, columns * _SIDE :].flatten()])
    if generator is None:
        return cells[:, 0], torch.cat([cells[:, 1:].flatten(), edges])
    pick = torch.randint(_SIDE**2, (len(cells), 1), device=generator.device, generator=generator).to(device)
    rest = (pick + torch.arange(1, _SIDE**2, device=device)) % _SIDE**2
    return cells.gather(1, pick).flatten(), torch.cat([cells.gather(1, rest).flatten(), edges])


def match(
    tokens: Tensor, candidates: Tensor, others: Tensor, merged: int, *, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Join the `others` [K] that are most like one of the `candidates` [D] to it, until M = `merged` tokens are left.

    tokens: [B, N, C]. Returns destinations [S, M], the others that stay before the candidates; sources [S, N - M]; and
    the place [B, N] of every token's cluster among the destinations. S is B, or 1 if `shared`: then the same tokens
    join in all samples, those with the largest sum of similarities. Each joins the candidate most like it.
    """
    batch, token_count, _ = tokens.shape
    staying = merged - len(candidates)
    # In the tokens' dtype, as in the package: a baseline must not be slower here than there.
    directions = F.normalize(tokens, dim=-1)
    similarity = directions[:, others] @ directions[:, candidates].transpose(-1, -2)
    best, nearest = similarity.max(-1)
    ranking = (best.sum(0, keepdim=True) if shared else best).argsort(dim=-1, descending=True, stable=True)
    joining, kept = ranking.split([len(others) - staying, staying], dim=-1)
    destinations = torch.cat([others[kept], candidates.expand(len(kept), -1)], dim=1)
    sources = others[joining]
    places = torch.empty(batch, token_count, dtype=torch.int64, device=tokens.device)
    places.scatter_(1, destinations.expand(batch, -1), torch.arange(merged, device=tokens.device).expand(batch, -1))
    places.scatter_(1, sources.expand(batch, -1), staying + nearest.gather(1, joining.expand(batch, -1)))
    return destinations, sources, places

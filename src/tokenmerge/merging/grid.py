"""Grids of tokens and how they are cut into regions of equal size.

Every region of a partition holds the same number of tokens, so that all of them are one batched operation. That number
depends on the token count alone, never on the aspect ratio: compiled code then knows every shape without knowing the
grid. Where no rectangle of that size tiles the grid, regions are equal runs along a curve that sweeps bands of rows
column by column: ragged tiles, without padding or masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..config import Merge, Regions
from ..errors import TokenMergeError
from ..families.calls import TokenGrid

# A tile may be at most this much longer or shorter than wished before a ragged one of the right shape is better.
_MAX_STRETCH = 2.0


@dataclass(frozen=True)
class Layout:
    """The shapes of a merge map: a function of the token count and the merge."""

    tokens: int
    select_size: int  # tokens in a selection region
    select_count: int  # destinations chosen there
    merge_size: int  # tokens in a merging region, a multiple of select_size

    @property
    def select_regions(self) -> int:
        return self.tokens // self.select_size

    @property
    def merge_regions(self) -> int:
        return self.tokens // self.merge_size

    @property
    def merged(self) -> int:
        return self.select_regions * self.select_count

    @property
    def merge_count(self) -> int:
        """Destinations in a merging region."""
        return self.merged // self.merge_regions


@dataclass(frozen=True)
class Partition:
    """One layout laid over actual grids: which tokens form which region, and how to tell a person."""

    layout: Layout
    order: Tensor | None  # [N] row-major token indices, region by region; None where that is 0, 1, 2, ...
    merge_order: Tensor | None  # the same for merging regions
    description: str
    grids: tuple[TokenGrid, ...]

    def to(self, device: torch.device) -> Partition:
        def moved(order: Tensor | None) -> Tensor | None:
            return None if order is None else order.to(device)

        return replace(self, order=moved(self.order), merge_order=moved(self.merge_order))


def region_size(token_count: int, regions: Regions, ratio: float) -> int:
    """Tokens in a region: the divisor of `token_count` nearest in ratio to what is wished.

    Cutting a small grid into many regions would leave too few tokens in each to remove a share `ratio` of them, so a
    wished count gives way to that.
    """
    if regions.kind == "whole":
        return token_count
    # A region of one token has none to remove.
    least = 2 if ratio else 1
    if regions.tile:
        return nearest_divisor(token_count, regions.tile[0] * regions.tile[1], least)
    enough = min(1.0 / min(ratio, 1.0 - ratio), token_count) if ratio else 1.0
    return nearest_divisor(token_count, max(token_count / (regions.count or 1), enough), least)


@lru_cache(maxsize=512)
def nearest_divisor(number: int, wished: float, least: int = 1) -> int:
    """The divisor of `number`, from `least`, with the smallest |log(divisor / wished)|; the smaller one of a tie."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    return min(
        (divisor for divisor in divisors if divisor >= min(least, number)),
        key=lambda divisor: abs(math.log(divisor / max(wished, 1.0))),
    )


def layout_for(token_count: int, technique: Merge) -> Layout:
    """The layout of `token_count` tokens: k = round(n (1 - ratio)) destinations per selection region, at least one, and
    at least one less than tokens, so that a small ratio does not come to nothing in small regions."""
    select_size = region_size(token_count, technique.select_in, technique.ratio)
    if technique.merge_regions is None:
        merge_size = select_size
    elif technique.merge_in.kind == "whole":
        merge_size = token_count
    else:
        # A merging region is made of whole selection regions: each must hold the same number of destinations.
        wished = region_size(token_count, technique.merge_in, technique.ratio) / select_size
        merge_size = select_size * nearest_divisor(token_count // select_size, wished)
    most = select_size - 1 if technique.ratio else select_size
    count = max(1, min(most, round(select_size * (1.0 - technique.ratio))))
    return Layout(token_count, select_size, count, merge_size)


def partition_grids(grids: tuple[TokenGrid, ...], technique: Merge) -> Partition:
    """Lay the layout over the images of one sequence (more than one for models that take reference images)."""
    layout = layout_for(sum(grid.count for grid in grids), technique)
    if len(grids) > 1 and layout.merge_regions == 1:
        raise TokenMergeError(
            f"a sequence of {len(grids)} images ({_named(grids)} tokens) would be merged as one; "
            "use regions and merge_regions that are local, such as 'tile:4x4'"
        )
    select, how = _order(grids, technique.select_in, layout.select_size)
    description = f"{layout.select_regions} {how}"
    if technique.merge_regions is None:
        return Partition(layout, select, select, description, grids)
    merged_in = region_size(layout.tokens, technique.merge_in, technique.ratio)
    if merged_in < layout.select_size:
        raise TokenMergeError(
            f"on the {_named(grids)} token grid, merge_regions {technique.merge_regions!r} have {merged_in} tokens, "
            f"less than the {layout.select_size} of regions {technique.regions!r}: every merging region must be made "
            "of whole selection regions; use larger merge_regions or smaller regions, or leave merge_regions out"
        )
    if layout.merge_size == layout.tokens:
        whole = "" if layout.select_regions == 1 else ", merged in the whole image"
        return Partition(layout, select, None, f"{description}{whole}", grids)
    if layout.merge_size == layout.select_size and technique.select_in.kind == technique.merge_in.kind:
        return Partition(layout, select, select, description, grids)
    merge, merge_how = _order(grids, technique.merge_in, layout.merge_size)
    nested = _nest(select, merge, layout)
    if nested is None and technique.select_in.kind == technique.merge_in.kind:
        # Runs of neighbouring selection regions always nest; sizes without a nesting rectangle get those.
        nested, merge_how = select, f"runs of {layout.merge_size // layout.select_size} of them"
    elif nested is None:
        raise TokenMergeError(
            f"on the {_named(grids)} token grid, regions {technique.regions!r} do not nest in merge_regions "
            f"{technique.merge_regions!r}: every merging region must be made of whole selection regions; use the same "
            "kind for both, merge_regions='whole', or leave merge_regions out"
        )
    return Partition(layout, nested, nested, f"{description}, merged in {layout.merge_regions} {merge_how}", grids)


def _named(grids: tuple[TokenGrid, ...]) -> str:
    return " + ".join(map(str, grids))


def split_regions(tokens: Tensor, order: Tensor | None, regions: int) -> Tensor:
    """[B, N, C] row-major to [B, R, n, C]."""
    if order is not None:
        tokens = tokens.index_select(1, order)
    return tokens.unflatten(1, (regions, -1))


def join_regions(regions: Tensor, inverse: Tensor | None) -> Tensor:
    """[B, R, n, C] to [B, N, C] row-major; `inverse` undoes the order that `split_regions` was given."""
    tokens = regions.flatten(1, 2)
    return tokens if inverse is None else tokens.index_select(1, inverse)


def invert_order(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device, dtype=order.dtype)
    return inverse


def _order(grids: tuple[TokenGrid, ...], regions: Regions, size: int) -> tuple[Tensor | None, str]:
    """Token indices region by region, and what to call the regions after their number."""
    several = "" if sum(grid.count for grid in grids) == size else "s"
    if regions.kind != "tile":
        return None, "region" if regions.kind == "whole" else f"stripe{several} of {size}"
    shapes = {_tile_shape(grid, regions, size) for grid in grids}
    shape = shapes.pop() if len(shapes) == 1 else None
    parts, offset = [], 0
    for grid in grids:
        part = _rectangles(grid, shape) if shape else _sweep(grid, regions, size)
        parts.append(part + offset)
        offset += grid.count
    how = f"tile{several} of {shape[0]}x{shape[1]}" if shape else f"ragged tile{several} of {size}"
    return torch.cat(parts), how


def _wished_height(grid: TokenGrid, regions: Regions, size: int) -> float:
    """The height of tile to come near: of the asked proportions, or square, at `size` tokens."""
    height, width = regions.tile or (1, 1)
    return min(height * math.sqrt(size / (height * width)), grid.height)


def _tile_shape(grid: TokenGrid, regions: Regions, size: int) -> tuple[int, int] | None:
    """The rectangle of `size` tokens that tiles the grid and is nearest to the wished shape, if one is near enough."""
    wished = _wished_height(grid, regions, size)
    best, best_stretch = None, _MAX_STRETCH
    for height in range(1, min(size, grid.height) + 1):
        if size % height or grid.height % height or grid.width % (size // height):
            continue
        stretch = max(height / wished, wished / height)
        if stretch <= best_stretch:
            best, best_stretch = (height, size // height), stretch
    return best


def _rectangles(grid: TokenGrid, shape: tuple[int, int]) -> Tensor:
    rows, columns = grid.height // shape[0], grid.width // shape[1]
    index = torch.arange(grid.count).view(rows, shape[0], columns, shape[1])
    return index.permute(0, 2, 1, 3).reshape(-1)


def _sweep(grid: TokenGrid, regions: Regions, size: int) -> Tensor:
    """Bands of rows of nearly equal height, each swept column by column, every other band backwards.

    Equal runs along this curve are compact, and stay so where a run turns into the next band.
    """
    wished = _wished_height(grid, regions, size)
    bands = max(1, round(grid.height / wished))
    index = torch.arange(grid.count).view(grid.height, grid.width)
    parts = []
    for number, band in enumerate(torch.tensor_split(index, bands)):
        parts.append((band.flip(1) if number % 2 else band).t().reshape(-1))
    return torch.cat(parts)


def _nest(select: Tensor | None, merge: Tensor | None, layout: Layout) -> Tensor | None:
    """Selection regions sorted by the merging region that holds them; None if one straddles two, or if the order is
    natural already."""
    if select is None and merge is None:
        return None
    natural = torch.arange(layout.tokens)
    owner = torch.empty_like(natural)
    owner[natural if merge is None else merge] = natural // layout.merge_size
    regions = (natural if select is None else select).view(layout.select_regions, layout.select_size)
    owners = owner[regions]
    if not bool((owners == owners[:, :1]).all()):
        return None
    return regions[torch.argsort(owners[:, 0], stable=True)].reshape(-1)

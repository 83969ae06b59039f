"""Grids of tokens and how they are cut into regions of equal size.

Every region of a partition holds the same number of tokens, so that all of them are one batched operation. Where no
rectangle of that size tiles the grid, regions are equal runs along a curve that sweeps bands of rows column by column:
ragged tiles, without padding or masks. In a video a tile lies within one frame, or spans as many as are asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..config import Merge, Regions
from ..errors import TokenMergeError
from ..families.calls import Shard, TokenGrid

# A tile may be at most this much longer or shorter than wished before a ragged one of the right shape is better.
_MAX_STRETCH = 2.0


@dataclass(frozen=True)
class Layout:
    """The shapes of a merge map."""

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
    order: Tensor | None  # [N] token indices, region by region; None where that is 0, 1, 2, ...
    merge_order: Tensor | None  # the same for merging regions
    description: str
    grids: tuple[TokenGrid, ...]  # that merge, of all that were given
    whole: int = 0  # tokens of the images that do not merge, which come after those that do

    def to(self, device: torch.device) -> Partition:
        def moved(order: Tensor | None) -> Tensor | None:
            return None if order is None else order.to(device)

        return replace(self, order=moved(self.order), merge_order=moved(self.merge_order))


def region_size(grids: tuple[TokenGrid, ...], regions: Regions, ratio: float) -> int:
    """Tokens in a region: of the numbers that divide every grid (for tiles, every frame) the nearest to the wished one.

    Cutting a small grid into many regions would leave too few tokens in each to remove a share `ratio` of them, so a
    wished count gives way to that.
    """
    if regions.kind == "whole":
        return sum(grid.count for grid in grids)
    # A region of one token has none to remove.
    least = 2 if ratio else 1
    frames = _tile_frames(grids, regions)
    area = math.gcd(*((grid.area if regions.kind == "tile" else grid.count) for grid in grids))
    return frames * nearest_divisor(area, _wished_size(grids, regions, ratio) / frames, least if frames == 1 else 1)


def _wished_size(grids: tuple[TokenGrid, ...], regions: Regions, ratio: float) -> float:
    """Tokens that a region would have if every number divided every grid."""
    if regions.tile:
        return _tile_frames(grids, regions) * regions.tile[0] * regions.tile[1]
    tokens = sum(grid.count for grid in grids)
    enough = min(1.0 / min(ratio, 1.0 - ratio), tokens) if ratio else 1.0
    return max(tokens / (regions.count or 1), enough)


def _tile_frames(grids: tuple[TokenGrid, ...], regions: Regions) -> int:
    """Frames that a tile spans: a number that divides those of every grid."""
    return nearest_divisor(math.gcd(*(grid.frames for grid in grids)), regions.frames)


def _room(grids: tuple[TokenGrid, ...], regions: Regions) -> int:
    """Tokens that a tile must not reach beyond: those of as many frames as it spans."""
    return _tile_frames(grids, regions) * math.gcd(*(grid.area for grid in grids))


@lru_cache(maxsize=512)
def nearest_divisor(number: int, wished: float, least: int = 1) -> int:
    """The divisor of `number`, from `least`, with the smallest |log(divisor / wished)|; the smaller one of a tie."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    return min(
        (divisor for divisor in divisors if divisor >= min(least, number)),
        key=lambda divisor: abs(math.log(divisor / max(wished, 1.0))),
    )


def merging_grids(grids: tuple[TokenGrid, ...], technique: Merge) -> tuple[TokenGrid, ...]:
    """The images of a sequence that merge: all, or where no region of about the wished size fits all of them, the
    first alone, which is the one that is drawn. No region holds tokens of two."""
    if len(grids) == 1:
        return grids
    for regions in (technique.select_in, technique.merge_in):
        wished = _wished_size(grids, regions, technique.ratio)
        size = region_size(grids, regions, technique.ratio)
        if regions.kind == "whole" or max(size / wished, wished / size) > _MAX_STRETCH:
            return grids[:1]
    return grids


def layout_for(grids: tuple[TokenGrid, ...], technique: Merge) -> Layout:
    """The layout of grids that merge: k = round(n (1 - ratio)) destinations per selection region, at least one, and at
    least one less than tokens, so that a small ratio does not come to nothing in small regions."""
    tokens = sum(grid.count for grid in grids)
    select_size = region_size(grids, technique.select_in, technique.ratio)
    if technique.merge_regions is None:
        merge_size = select_size
    elif technique.merge_in.kind == "whole":
        merge_size = tokens
    else:
        # A merging region is made of whole selection regions: each must hold the same number of destinations.
        wished = region_size(grids, technique.merge_in, technique.ratio) / select_size
        regions = math.gcd(*(grid.count // select_size for grid in grids))
        if technique.merge_in.kind == "tile" and not _room(grids, technique.merge_in) % select_size:
            regions = math.gcd(regions, _room(grids, technique.merge_in) // select_size)
        merge_size = select_size * nearest_divisor(regions, wished)
    most = select_size - 1 if technique.ratio else select_size
    count = max(1, min(most, round(select_size * (1.0 - technique.ratio))))
    return Layout(tokens, select_size, count, merge_size)


def partition_grids(given: tuple[TokenGrid, ...], technique: Merge) -> Partition:
    """Lay the layout over the images of one sequence (more than one for models that take reference images)."""
    grids = merging_grids(given, technique)
    layout = layout_for(grids, technique)
    whole = sum(grid.count for grid in given[len(grids) :])
    select, how = _order(grids, technique.select_in, layout.select_size)
    description = f"{layout.select_regions} {how}" + (", of the first image" if whole else "")
    if technique.merge_regions is None:
        return Partition(layout, select, select, description, grids, whole)
    merged_in = region_size(grids, technique.merge_in, technique.ratio)
    if merged_in < layout.select_size:
        raise TokenMergeError(
            f"on the {_named(grids)} token grid, merge_regions {technique.merge_regions!r} have {merged_in} tokens, "
            f"less than the {layout.select_size} of regions {technique.regions!r}: every merging region must be made "
            "of whole selection regions; use larger merge_regions or smaller regions, or leave merge_regions out"
        )
    if technique.merge_in.kind == "tile" and _room(grids, technique.merge_in) % layout.merge_size:
        raise TokenMergeError(
            f"on the {_named(grids)} token grid, regions {technique.regions!r} cross the frames that merge_regions "
            f"{technique.merge_regions!r} lie in; use tiles for both, merge_regions='whole', or leave merge_regions out"
        )
    if layout.merge_size == layout.tokens:
        joined = "" if layout.select_regions == 1 else ", merged in the whole image"
        return Partition(layout, select, None, f"{description}{joined}", grids, whole)
    kinds = {(wish.kind, _tile_frames(grids, wish)) for wish in (technique.select_in, technique.merge_in)}
    if layout.merge_size == layout.select_size and len(kinds) == 1:
        return Partition(layout, select, select, description, grids, whole)
    merge, merge_how = _order(grids, technique.merge_in, layout.merge_size)
    nested = _nest(select, merge, layout)
    if nested is None and len(kinds) == 1:
        # Runs of neighbouring selection regions always nest; sizes without a nesting rectangle get those.
        nested, merge_how = select, f"runs of {layout.merge_size // layout.select_size} of them"
    elif nested is None:
        raise TokenMergeError(
            f"on the {_named(grids)} token grid, regions {technique.regions!r} do not nest in merge_regions "
            f"{technique.merge_regions!r}: every merging region must be made of whole selection regions; use the same "
            "kind for both, merge_regions='whole', or leave merge_regions out"
        )
    description = f"{description}, merged in {layout.merge_regions} {merge_how}"
    return Partition(layout, nested, nested, description, grids, whole)


def shard_partition(partition: Partition, shard: Shard) -> Partition:
    """What one process has of a partition, in the numbers of its own tokens. No region may have tokens of two."""
    layout = partition.layout
    bounds = shard.bounds(layout.tokens + partition.whole)
    begin, end = bounds[shard.rank : shard.rank + 2]
    told = f"{partition.description} on the {_named(partition.grids)} token grid"

    def own(order: Tensor | None, size: int) -> tuple[Tensor | None, int]:
        """The order of its regions, and how many there are."""
        regions = (torch.arange(layout.tokens) if order is None else order).view(-1, size)
        owners = torch.bucketize(regions, torch.tensor(bounds[1:-1]), right=True)
        if not bool((owners == owners[:, :1]).all()):
            raise TokenMergeError(
                f"{told}: some lie in two of the parts that processes have of it, which begin at tokens "
                f"{', '.join(map(str, bounds[:-1]))}; use smaller regions, such as 'stripe', or another size of "
                "picture, or Hold"
            )
        counts = owners[:, 0].bincount(minlength=shard.ranks)
        if not counts.min() or (shard.even and counts.min() != counts.max()):
            raise TokenMergeError(
                f"{told}: processes have {', '.join(map(str, counts.tolist()))} of them, and must have "
                f"{'as many each' if shard.even else 'one or more'}; use Hold"
            )
        mine = regions[owners[:, 0] == shard.rank] - begin
        return None if order is None else mine.flatten(), len(mine)

    select, count = own(partition.order, layout.select_size)
    merge, _ = own(partition.merge_order, layout.merge_size)
    layout = replace(layout, tokens=count * layout.select_size)
    description = f"{partition.description}, {count} in this process"
    return Partition(layout, select, merge, description, partition.grids, end - begin - layout.tokens)


def _named(grids: tuple[TokenGrid, ...]) -> str:
    return " + ".join(map(str, grids))


def split_regions(tokens: Tensor, order: Tensor | None, regions: int) -> Tensor:
    """[B, N, C] to [B, R, n, C]."""
    if order is not None:
        tokens = tokens.index_select(1, order)
    return tokens.unflatten(1, (regions, -1))


def join_regions(regions: Tensor, inverse: Tensor | None) -> Tensor:
    """[B, R, n, C] to [B, N, C]; `inverse` undoes the order that `split_regions` was given."""
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
    frames = _tile_frames(grids, regions)
    size //= frames
    shapes = {_tile_shape(grid, regions, size) for grid in grids}
    shape = shapes.pop() if len(shapes) == 1 else None
    parts, offset = [], 0
    for grid in grids:
        plane = _rectangles(grid, shape) if shape else _sweep(grid, regions, size)
        # [bands, regions of a frame, frames of a band, tokens]
        starts = torch.arange(grid.frames).view(-1, 1, frames, 1) * grid.area + offset
        parts.append((plane.view(1, -1, 1, size) + starts).flatten())
        offset += grid.count
    over = f"{frames}x" if frames > 1 else ""
    how = f"tile{several} of {over}{shape[0]}x{shape[1]}" if shape else f"ragged tile{several} of {over}{size}"
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
    index = torch.arange(grid.area).view(rows, shape[0], columns, shape[1])
    return index.permute(0, 2, 1, 3).reshape(-1)


def _sweep(grid: TokenGrid, regions: Regions, size: int) -> Tensor:
    """Bands of rows of nearly equal height, each swept column by column, every other band backwards.

    Equal runs along this curve are compact, and stay so where a run turns into the next band.
    """
    wished = _wished_height(grid, regions, size)
    bands = max(1, round(grid.height / wished))
    index = torch.arange(grid.area).view(grid.height, grid.width)
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

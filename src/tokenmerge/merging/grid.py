"""How token grids are cut into regions of equal size.

Every region of a partition holds the same number of tokens, so that one batched operation covers them all. Where no
rectangle of that size tiles the grid, regions are equal stretches of a curve that sweeps bands of rows column by
column: ragged tiles, without padding or masks. In a video a tile lies within one frame, or spans the number of frames
asked for. Left-over frames come first, in tiles that span fewer frames but reach further within each.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..config import Merge, Regions
from ..errors import TokenMergeError
from ..families.calls import Shard, TokenGrid

# A tile may be longer or shorter than wished by this factor. Beyond it, a ragged tile of the right shape is better.
_MAX_STRETCH = 2.0


@dataclass(frozen=True)
class Layout:
    """The shapes of a map."""

    tokens: int
    select_size: int  # tokens in a selection region
    select_count: int  # destinations in a selection region
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
    """A layout applied to actual grids: which tokens form which region, and a description for people."""

    layout: Layout
    order: Tensor | None  # [N] token indices by selection region; None where that is 0, 1, 2, ...
    merge_order: Tensor | None  # [N] token indices by merging region, or None likewise
    description: str
    grids: tuple[TokenGrid, ...]  # those that merge
    before: int = 0  # tokens that do not merge, before those that do
    after: int = 0  # tokens that do not merge, after those that do

    def to(self, device: torch.device) -> Partition:
        def moved(order: Tensor | None) -> Tensor | None:
            return None if order is None else order.to(device)

        return replace(self, order=moved(self.order), merge_order=moved(self.merge_order))


def region_size(grids: tuple[TokenGrid, ...], regions: Regions, ratio: float) -> int:
    """Tokens in a region: of the numbers that divide every slab of every grid, the nearest to the wished one.

    A wished number of regions is lowered where regions would be too small to remove a share `ratio` of their tokens.
    """
    if regions.kind == "whole":
        return sum(grid.count for grid in grids)
    # A region of one token has nothing to remove.
    least = 2 if ratio else 1
    return nearest_divisor(_room(grids, regions), _wished_size(grids, regions, ratio), least)


def _wished_size(grids: tuple[TokenGrid, ...], regions: Regions, ratio: float) -> float:
    """Tokens that a region would have if every number divided every grid."""
    if regions.tile:
        return min(regions.frames, max(grid.frames for grid in grids)) * regions.tile[0] * regions.tile[1]
    tokens = sum(grid.count for grid in grids)
    enough = min(1.0 / min(ratio, 1.0 - ratio), tokens) if ratio else 1.0
    return max(tokens / (regions.count or 1), enough)


def _slabs(grid: TokenGrid, regions: Regions) -> tuple[tuple[int, int], ...]:
    """Slabs of frames that no region crosses, as (frames in a slab, consecutive slabs of that depth).

    Left-over frames come first, where video autoencoders put the one latent frame that stands for a single frame.
    """
    depth = min(regions.frames, grid.frames) if regions.kind == "tile" else grid.frames
    whole, rest = divmod(grid.frames, depth)
    return ((rest, 1), (depth, whole)) if rest else ((depth, whole),)


def _room(grids: tuple[TokenGrid, ...], regions: Regions) -> int:
    """The number that a region size must divide, so that regions of one size fill every slab."""
    return math.gcd(*(depth * grid.area for grid in grids for depth, _ in _slabs(grid, regions)))


@lru_cache(maxsize=512)
def nearest_divisor(number: int, wished: float, least: int = 1) -> int:
    """The divisor of `number`, at least `least`, with the smallest |log(divisor / wished)|. Ties go to the smaller."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    return min(
        (divisor for divisor in divisors if divisor >= min(least, number)),
        key=lambda divisor: abs(math.log(divisor / max(wished, 1.0))),
    )


def drawn_alone(grids: tuple[TokenGrid, ...]) -> tuple[TokenGrid, int, int]:
    """The image of a sequence that is being drawn, and the numbers of tokens before and after it.

    Reference images follow it. In a video it is the frames after a first one that may be given.
    """
    number = max(range(len(grids)), key=lambda number: grids[number].frames)
    before, after = (sum(grid.count for grid in others) for others in (grids[:number], grids[number + 1 :]))
    return grids[number], before, after


def merging_grids(grids: tuple[TokenGrid, ...], technique: Merge) -> tuple[TokenGrid, ...]:
    """The images of a sequence that merge: all of them, if regions of about the wished size fit them all; else only the
    one being drawn. No region holds tokens of two images."""
    if len(grids) == 1:
        return grids
    for regions in (technique.select_in, technique.merge_in):
        wished = _wished_size(grids, regions, technique.ratio)
        size = region_size(grids, regions, technique.ratio)
        if regions.kind == "whole" or max(size / wished, wished / size) > _MAX_STRETCH:
            return (drawn_alone(grids)[0],)
    return grids


def layout_for(grids: tuple[TokenGrid, ...], technique: Merge) -> Layout:
    """The layout of grids that merge, with k = round(n (1 - ratio)) destinations in a selection region of n tokens.

    k is at least 1. It is at most n - 1 unless ratio is 0, so that a small ratio removes something in small regions.
    """
    select_size = region_size(grids, technique.select_in, technique.ratio)
    merge_size = _merge_size(grids, technique, select_size)
    most = select_size - 1 if technique.ratio else select_size
    count = max(1, min(most, round(select_size * (1.0 - technique.ratio))))
    return Layout(sum(grid.count for grid in grids), select_size, count, merge_size)


def _merge_size(grids: tuple[TokenGrid, ...], technique: Merge, select_size: int) -> int:
    """Tokens in a merging region. It consists of whole selection regions, so that all have as many destinations."""
    if technique.merge_regions is None:
        return select_size
    wished = region_size(grids, technique.merge_in, technique.ratio)
    if wished < select_size:
        raise TokenMergeError(
            f"on the {_named(grids)} token grid, merge_regions {technique.merge_regions!r} have {wished} tokens, "
            f"fewer than the {select_size} of regions {technique.regions!r}: every merging region must be made "
            "of whole selection regions; use larger merge_regions or smaller regions, or leave merge_regions out"
        )
    room = _room(grids, technique.merge_in)
    if room % select_size:
        raise TokenMergeError(
            f"on the {_named(grids)} token grid, regions {technique.regions!r} cross frame boundaries that "
            f"merge_regions {technique.merge_regions!r} respect; use tiles for both, merge_regions='whole', or leave "
            "merge_regions out"
        )
    return select_size * nearest_divisor(room // select_size, wished / select_size)


def partition_grids(given: tuple[TokenGrid, ...], technique: Merge) -> Partition:
    """The partition of the images of one sequence. There are several with reference images, or a first frame that may
    be given."""
    grids = merging_grids(given, technique)
    layout = layout_for(grids, technique)
    _, before, after = drawn_alone(given) if len(grids) < len(given) else (None, 0, 0)
    select, how = _order(grids, technique.select_in, layout.select_size)
    order, merge_order, merge_how = _merging_order(grids, technique, layout, select)
    of = ", of the frames after the first" if before else ", of the first image" if after else ""
    return Partition(layout, order, merge_order, f"{how}{of}{merge_how}", grids, before, after)


def _merging_order(
    grids: tuple[TokenGrid, ...], technique: Merge, layout: Layout, select: Tensor | None
) -> tuple[Tensor | None, Tensor | None, str]:
    """The orders of selection and merging regions, and words for the latter where they differ. `select` is sorted anew
    where that makes regions nest."""
    if technique.merge_regions is None:
        return select, select, ""
    if layout.merge_size == layout.tokens:
        return select, None, "" if layout.select_regions == 1 else ", merged in the whole image"
    kinds = {(wish.kind, *(_slabs(grid, wish) for grid in grids)) for wish in (technique.select_in, technique.merge_in)}
    if layout.merge_size == layout.select_size and len(kinds) == 1:
        return select, select, ""
    merge, how = _order(grids, technique.merge_in, layout.merge_size)
    nested = _nest(select, merge, layout)
    if nested is None and len(kinds) == 1:
        # Neighbouring selection regions always nest, so sizes without a nesting rectangle use runs of those.
        runs, length = layout.merge_regions, layout.merge_size // layout.select_size
        nested, how = select, f"{runs} runs of {length} of them"
    elif nested is None:
        raise TokenMergeError(
            f"on the {_named(grids)} token grid, regions {technique.regions!r} do not nest in merge_regions "
            f"{technique.merge_regions!r}: every merging region must be made of whole selection regions; use the same "
            "kind for both, merge_regions='whole', or leave merge_regions out"
        )
    return nested, nested, f", merged in {how}"


def shard_partition(partition: Partition, shard: Shard) -> Partition:
    """The partition of one process's shard, with token indices within the shard. No region may straddle two shards."""
    layout = partition.layout
    bounds = shard.bounds(partition.before + layout.tokens + partition.after)
    begin, end = bounds[shard.rank : shard.rank + 2]
    way_out = "smaller regions, such as 'stripe', or another image size"
    if bounds[-1] % shard.ranks:
        # Smaller regions do not fit shards of two sizes either, unless a reference image fills them up.
        way_out = f"an image size with a multiple of {shard.ranks} tokens"
    before = max(0, min(partition.before, end) - begin)
    told = f"{partition.description} on the {_named(partition.grids)} token grid"

    def own(order: Tensor | None, size: int) -> tuple[Tensor | None, int]:
        """The order of this process's regions, and their number."""
        regions = (torch.arange(layout.tokens) if order is None else order).view(-1, size) + partition.before
        owners = torch.bucketize(regions, torch.tensor(bounds[1:-1]), right=True)
        if not bool((owners == owners[:, :1]).all()):
            raise TokenMergeError(
                f"{told}: some straddle the shards of two processes, which begin at tokens "
                f"{', '.join(map(str, bounds[:-1]))}; use {way_out}, or Hold"
            )
        counts = owners[:, 0].bincount(minlength=shard.ranks)
        if not counts.min() or (shard.even and counts.min() != counts.max()):
            raise TokenMergeError(
                f"{told}: processes would have {', '.join(map(str, counts.tolist()))} of them, but each needs "
                f"{'the same number' if shard.even else 'at least one'}; use Hold"
            )
        mine = regions[owners[:, 0] == shard.rank] - begin - before
        return None if order is None else mine.flatten(), len(mine)

    select, count = own(partition.order, layout.select_size)
    merge, _ = own(partition.merge_order, layout.merge_size)
    layout = replace(layout, tokens=count * layout.select_size)
    description = f"{partition.description}, {count} in this process"
    after = end - begin - before - layout.tokens
    return Partition(layout, select, merge, description, partition.grids, before, after)


def _named(grids: tuple[TokenGrid, ...]) -> str:
    return " + ".join(map(str, grids))


def split_regions(tokens: Tensor, order: Tensor | None, regions: int) -> Tensor:
    """[B, N, C] to [B, R, n, C]."""
    if order is not None:
        tokens = tokens.index_select(1, order)
    return tokens.unflatten(1, (regions, -1))


def join_regions(regions: Tensor, inverse: Tensor | None) -> Tensor:
    """[B, R, n, C] to [B, N, C]; `inverse` undoes the order that `split_regions` received."""
    tokens = regions.flatten(1, 2)
    return tokens if inverse is None else tokens.index_select(1, inverse)


def invert_order(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device, dtype=order.dtype)
    return inverse


def _order(grids: tuple[TokenGrid, ...], regions: Regions, size: int) -> tuple[Tensor | None, str]:
    """Token indices by region, and a description of the regions: numbers and shapes."""
    if regions.kind != "tile":
        count = sum(grid.count for grid in grids) // size
        return None, f"{count} region" if regions.kind == "whole" else _counted(count, "stripe", str(size))
    parts, shapes, offset = [], Counter[tuple[str, str]](), 0
    for grid in grids:
        for depth, slabs in _slabs(grid, regions):
            plane, shape = _plane(grid, regions, size, depth)
            starts = torch.arange(slabs) * depth * grid.area + offset
            frames = torch.arange(depth) * grid.area
            # [slabs, places, frames]
            parts.append((starts.view(-1, 1, 1) + plane.view(1, -1, 1) + frames).flatten())
            shapes[shape] += slabs * depth * grid.area // size
            offset += slabs * depth * grid.area
    return torch.cat(parts), ", ".join(_counted(count, *shape) for shape, count in shapes.items())


def _counted(count: int, kind: str, shape: str) -> str:
    return f"{count} {kind}{'' if count == 1 else 's'} of {shape}"


def _plane(grid: TokenGrid, regions: Regions, size: int, depth: int) -> tuple[Tensor, tuple[str, str]]:
    """The places of a frame in the order in which regions of `size` tokens in `depth` frames take them, and the kind
    and shape of those regions."""
    over = f"{depth}x" if depth > 1 else ""
    shape = None if size % depth else _tile_shape(grid, regions, size // depth)
    if shape:
        return _rectangles(grid, shape), ("tile", f"{over}{shape[0]}x{shape[1]}")
    # A ragged tile whose size is no multiple of the frames ends between the frames of a place.
    return _sweep(grid, regions, size / depth), ("ragged tile", f"{over}{size / depth:g}")


def _wished_height(grid: TokenGrid, regions: Regions, size: float) -> float:
    """Height of a tile of `size` tokens with the proportions asked for, else square."""
    height, width = regions.tile or (1, 1)
    return min(height * math.sqrt(size / (height * width)), grid.height)


def _tile_shape(grid: TokenGrid, regions: Regions, size: int) -> tuple[int, int] | None:
    """The rectangle of `size` tokens that tiles the grid and is nearest to the wished shape; None if all are far."""
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


def _sweep(grid: TokenGrid, regions: Regions, size: float) -> Tensor:
    """Bands of rows of nearly equal height, each swept column by column, every other band backwards.

    Equal stretches of this curve are compact, even where one continues into the next band.
    """
    wished = _wished_height(grid, regions, size)
    bands = max(1, round(grid.height / wished))
    index = torch.arange(grid.area).view(grid.height, grid.width)
    parts = []
    for number, band in enumerate(torch.tensor_split(index, bands)):
        parts.append((band.flip(1) if number % 2 else band).t().reshape(-1))
    return torch.cat(parts)


def _nest(select: Tensor | None, merge: Tensor | None, layout: Layout) -> Tensor | None:
    """Token indices by selection region, sorted by the merging region that holds it. None if a selection region
    straddles two, or if the order is natural already."""
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

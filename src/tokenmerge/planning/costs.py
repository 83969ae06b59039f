"""What a group of blocks costs in one denoiser call: multiplications by the paper's cost model. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import Merge
from ..families.base import Block
from ..families.calls import DenoiserCall, TokenGrid, grids_at_level
from ..merging.grid import Layout, shard_partition
from ..merging.methods import Rates, method_for
from ..merging.places import MergePlace
from ..runtime.timeline import MERGED, Step

# The paper counts 7 d^2 N + 2 d N^2 multiplications per block. Each component's share: (of d^2 N, of d N^2).
_SHARES = {"self_attention": (3, 2), "cross_attention": (2, 0), "mlp": (2, 0)}


@dataclass(frozen=True)
class PlannedGroup:
    """The layers that share one map, for one size of image, and their work in one denoiser call."""

    name: str
    blocks: int
    merged_blocks: int
    merges: int  # how often tokens merge and unmerge in one merged call
    width: int
    grids: tuple[TokenGrid, ...]
    layout: Layout | None  # of the tokens that merge; None if no tokens merge
    regions: str
    total: float  # multiplications in a full call
    saved: float  # multiplications that a merged call saves
    spent: float  # multiplications that a merged call spends on merging itself, on average

    @property
    def grid(self) -> str:
        """The grids of all images, as text."""
        return " + ".join(map(str, self.grids))

    @property
    def tokens(self) -> int:
        """The number of tokens that merge; of all tokens if none do."""
        return self.layout.tokens if self.layout is not None else _count(self.grids)

    @property
    def merged(self) -> int:
        """The number of those tokens after merging."""
        return self.layout.merged if self.layout is not None else self.tokens


def planned_groups(
    blocks: Sequence[Block],
    places: Sequence[MergePlace],
    technique: Merge | None,
    call: DenoiserCall,
    timeline: Sequence[Step],
) -> list[PlannedGroup]:
    """The groups of a model, with their work in `call`. The timeline says how often maps are made."""
    groups, rates = [], _rates(timeline)
    for name in dict.fromkeys(block.group for block in blocks):
        members = [block for block in blocks if block.group == name]
        inside = {block.name for block in members}
        merging = [place for place in places if place.block.name in inside and not place.skipped]
        groups.append(_group(name, members, merging, technique, call, rates))
    return groups


def _rates(timeline: Sequence[Step]) -> Rates:
    """How often merged steps make maps. With held steps in between, that is more often than the intervals suggest."""
    maps = [step.maps for step in timeline if step.kind == MERGED]
    merged = len(maps) or 1
    return Rates(maps.count("select") / merged, sum(each != "reuse" for each in maps) / merged)


def _group(
    name: str, members: list[Block], places: list[MergePlace], technique: Merge | None, call: DenoiserCall, rates: Rates
) -> PlannedGroup:
    grids, width = grids_at_level(call, members[0].level), members[0].width
    total = len(members) * _work(tuple(_SHARES), _count(grids), width)
    # Where nothing merges, the grid may be too small to merge: do not partition it.
    if technique is None or not places:
        return PlannedGroup(name, len(members), 0, 0, width, grids, None, "", total, 0.0, 0.0)
    method = method_for(technique)
    effective = method.effective(technique)
    partition = method.partition(grids, effective)
    if call.shard is not None:
        # Called for its error where processes cannot share the partition. Costs are those of the whole picture.
        shard_partition(partition, call.shard)
    layout = partition.layout
    blocks = len({place.block.name for place in places})
    saved = spent = 0.0
    if layout.merged < layout.tokens:
        # Images that do not merge are part of the same sequence.
        after = _count(grids) - layout.tokens + layout.merged
        saved = sum(_saved(place, _count(grids), after, width, keys_values=method.KEYS_VALUES) for place in places)
        spent = method.spent(layout, width, effective, rates, blocks=blocks, merges=len(places))
    regions = partition.description
    return PlannedGroup(name, len(members), blocks, len(places), width, grids, layout, regions, total, saved, spent)


def _work(components: tuple[str, ...], tokens: int, width: int) -> float:
    """Multiplications in these components of a block, on `tokens` tokens."""
    linear = sum(_SHARES[component][0] for component in components)
    square = sum(_SHARES[component][1] for component in components)
    return linear * width**2 * tokens + square * width * tokens**2


def _saved(place: MergePlace, before: int, after: int, width: int, *, keys_values: bool) -> float:
    """Multiplications saved at one place by having fewer tokens there."""
    if keys_values:
        # The place is a projection to keys or to values. It saves there and in one of attention's two products.
        return (width**2 + width * before) * (before - after)
    components = (place.component,) if place.component in _SHARES else tuple(_SHARES)
    return _work(components, before, width) - _work(components, after, width)


def _count(grids: tuple[TokenGrid, ...]) -> int:
    return sum(grid.count for grid in grids)

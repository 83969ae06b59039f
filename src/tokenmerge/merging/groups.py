"""MergeGroup: layers that share a map, and what a call must renew in it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import LARGEST_SEED, Merge
from ..families.calls import DenoiserCall, TokenGrid
from ..runtime.clock import MAX_CALLS, Clock
from ..runtime.timeline import ALWAYS, Timeline
from .grid import Partition, shard_partition
from .mergemap import MapSpace
from .methods import Given, Method
from .ops import backend_for
from .slots import Made, Slot

# Image sizes whose maps stay allocated: from one image to the next, and within one image that is drawn in tiles.
_MAX_SIZES = 4
_MAX_SIZES_AT_ONCE = 32


@dataclass
class _Due:
    """What one denoiser call must renew before its layers read the maps.

    The first layer that runs renews it. No layer is fixed for that, because a cache may skip any of them.
    """

    made: Made
    step: int
    maps: str  # select, reweigh or reuse
    maps_done: int = 0  # refreshes in this call: at most one, or one per block where each block has its own map
    visits: int = 0  # layers that have asked for a refresh
    seed: int | None = None  # in training, the seed of every random map: a block that runs again draws the same map


class Past(NamedTuple):
    """What a call did in a group, kept for its backward pass."""

    slot: Slot | None
    partition: Partition | None
    grids: tuple[TokenGrid, ...]
    due: _Due


class MergeGroup:
    """Layers that share destinations and weights, and everything those need."""

    def __init__(
        self, name: str, number: int, method: Method[Any], technique: Merge, clock: Clock, level: int, shared: bool
    ) -> None:
        self.name = name
        self.level = level
        self.shared = shared  # whether all samples of a batch have the same destinations
        self.slot: Slot | None = None
        self.grids: tuple[TokenGrid, ...] = ()
        self.partition: Partition | None = None
        self.backend = "not run yet"
        # Counts for this image.
        self.selections = 0
        self.weighings = 0
        self.handle = _register(self)
        self._technique = method.effective(technique)
        self._timeline = Timeline(self._technique, None, method.RENEWS)
        self._clock = clock
        self._method = method
        self._seed = technique.seed + number
        self._generator = torch.Generator()
        self._seeded_for = -1
        self._due = _Due(Made(-1), 0, "reuse")  # nothing is due before the first call
        self._slots: dict[tuple[Any, ...], Slot] = {}
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}
        self._partitions: dict[tuple[Any, ...], Partition] = {}

    def enter(self, call: DenoiserCall) -> None:
        """Point `slot` at the tensors for the size of this call, load the maps of its turn, and decide what is due."""
        image, step, number = self._clock.now
        turn: Hashable = call.conditions or min(number, MAX_CALLS)
        if image != self._seeded_for:
            # Per image, so that an image does not depend on those drawn before it.
            self._generator.manual_seed(self._seed)
            self._seeded_for = image
        self.partition = self._partition_for(call)
        made = self._enter_slot(turn, call, self.partition).made_for(turn, image)
        seed = (self._seed + image) % LARGEST_SEED if call.trains else None
        self._due = _Due(made, step, self._timeline.maps(step, made.selected, made.weighed), seed=seed)
        self._gathered.clear()

    def _enter_slot(self, turn: Hashable, call: DenoiserCall, partition: Partition) -> Slot:
        """Point `slot` at the tensors for the size of a call, and load the maps of its turn into them."""
        key = (call.batch, self.grids, call.shard, call.dtype, call.device)
        if key not in self._slots:
            self._make_room()
            self._slots[key] = self._allocate(partition, MapSpace(call.batch, self.shared, call.dtype, call.device))
        self.slot = slot = self._slots[key]
        if slot.lent:
            slot = self._copy_slot()
        slot.image, slot.lent = self._clock.image, torch.is_grad_enabled()
        with torch.no_grad():
            slot.load(turn)
        return slot

    def _copy_slot(self) -> Slot:
        """Leave the slot's tensors to a backward pass that may read them, and continue with copies."""
        old = self.slot
        assert old is not None
        assert self.partition is not None
        ops, _ = backend_for(self._technique.backend, old.before.device)
        with torch.inference_mode(False), torch.no_grad():
            copies = self._method.map_over(self.partition.layout, ops, [tensor.clone() for tensor in old.map.tensors])
        # A new slot, because graphs recorded for the old one read the old tensors.
        self.slot = new = replace(old, map=copies)
        self._slots = {key: new if slot is old else slot for key, slot in self._slots.items()}
        return new

    def past(self) -> Past:
        """What this call does, for `recall` when a backward pass runs its blocks again."""
        return Past(self.slot, self.partition, self.grids, self._due)

    def recall(self, past: Past) -> None:
        """Restore the maps of a past call. Where every block has its own map, blocks make the same maps again."""
        self.slot, self.partition, self.grids, due = past
        # One refresh counts as done. So a shared map is not selected again, and blocks with maps of their own write to
        # copies.
        self._due = replace(due, maps="select" if self._method.RENEWS == ALWAYS else "reuse", maps_done=1)
        self._gathered.clear()

    def _make_room(self) -> None:
        """Drop the sizes that were used longest ago, and those of this image last."""
        for key in sorted(self._slots, key=lambda key: self._slots[key].image):
            most = _MAX_SIZES_AT_ONCE if self._slots[key].image == self._clock.image else _MAX_SIZES
            if len(self._slots) < most:
                break
            del self._slots[key]
        # Recorded graphs read the partitions of sizes that still have a slot.
        kept = {(grids, shard, device) for _, grids, shard, _, device in self._slots}
        self._partitions = {key: partition for key, partition in self._partitions.items() if key in kept}

    def _allocate(self, partition: Partition, space: MapSpace) -> Slot:
        ops, self.backend = backend_for(self._technique.backend, space.device)
        # Inference tensors could not be refreshed outside of inference mode.
        with torch.inference_mode(False):
            merge_map = self._method.empty_map(partition.layout, ops, self._technique, space)
            before, after = (torch.empty(n, 0, device=space.device) for n in (partition.before, partition.after))
            return Slot(merge_map, before, after)

    def _partition_for(self, call: DenoiserCall) -> Partition:
        key = (self.grids, call.shard, call.device)
        if key not in self._partitions:
            partition = self._method.partition(self.grids, self._technique)
            if call.shard is not None:
                partition = shard_partition(partition, call.shard)
            self._partitions[key] = partition.to(call.device)
        return self._partitions[key]

    def note(self) -> None:
        """Record what a call renewed, once it has ended well: a failed call may leave a map half written."""
        due = self._due
        if due.maps_done and due.maps != "reuse":
            due.made.weighed = due.step
            self.weighings += due.maps_done
            if due.maps == "select":
                due.made.selected = due.step
                self.selections += due.maps_done

    def visit(self) -> bool:
        """Count a layer that is about to read the maps; returns whether `refresh` must run first."""
        self._due.visits += 1
        return self._method.RENEWS == ALWAYS or not self._due.maps_done

    def gathered(self, table: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """`gather(table)`, computed once per call and table: all blocks receive the same tables."""
        # A kept result would tie the gradients of one block to another.
        if self._method.RENEWS == ALWAYS or table.requires_grad:
            return gather(table)
        if id(table) not in self._gathered:
            # Keeping the table itself keeps its id from being reused.
            self._gathered[id(table)] = (table, gather(table))
        return self._gathered[id(table)][1]

    @property
    def writable(self) -> list[Tensor]:
        """The map's tensors, for overwriting. They are copies if a layer of this call has read the originals and a
        backward pass will."""
        assert self.slot is not None
        slot = self._copy_slot() if self._due.maps_done and self.slot.lent else self.slot
        return slot.map.tensors

    @torch.no_grad()
    def refresh(self, tokens: Tensor, tensors: list[Tensor]) -> None:
        """Bring the maps up to date for this call, after `visit` has returned True.

        tokens: [B, N, C]; `tensors`, those of the map, are overwritten in place.
        """
        due = self._due
        assert self.partition is not None
        due.maps_done += 1
        if due.maps == "reuse":
            return
        if due.seed is not None:
            self._generator.manual_seed(due.seed)
        ops, _ = backend_for(self._technique.backend, tokens.device)
        merge_map = self._method.map_over(self.partition.layout, ops, tensors)
        # Similarities must not be rounded: at a temperature of 0.001 the weights would follow the rounding.
        with torch.autocast(tokens.device.type, enabled=False):
            given = Given(tokens, self.partition, self._technique, self._generator, self.shared, ops)
            self._method.renew(merge_map, due.maps, given)

    @property
    def has_maps(self) -> bool:
        """Whether the maps of the last call exist: its step may not have merged, or a cache may have skipped every
        layer."""
        return self._due.made.selected is not None

    @property
    def visits(self) -> int:
        """Layers that read the maps in this call."""
        return self._due.visits

    @property
    def renews(self) -> bool:
        """Whether this call changes the maps."""
        return self._due.maps != "reuse" and self.slot is not None and self.slot.merges

    # For CUDA graphs of calls.

    def kind(self) -> tuple[Any, ...] | None:
        assert self.slot is not None
        if not self.slot.merges:
            return ("whole",)
        if self._due.maps != "reuse" and self._method.needs_host(self._technique):
            return None
        return weakref.ref(self.slot), self.grids, self._due.maps

    @property
    def done(self) -> tuple[int, int]:
        """Refreshes and visits in this call."""
        return self._due.maps_done, self._due.visits

    @done.setter
    def done(self, done: tuple[int, int]) -> None:
        self._due.maps_done, self._due.visits = done


# The operator below finds its group by a number in a tensor. A plain number would be compiled in as a constant, so that
# groups could not share a graph.
_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, MergeGroup] = weakref.WeakValueDictionary()


def _register(group: MergeGroup) -> Tensor:
    number = next(_numbers)
    _groups[number] = group
    return torch.tensor(number)


@torch.library.custom_op("tokenmerge::refresh", mutates_args=("tensors",))
def refresh(tokens: Tensor, group: Tensor, tensors: list[Tensor]) -> None:
    found = _groups[int(group)]
    if found.visit():
        found.refresh(tokens, tensors)


@refresh.register_fake
def _(tokens: Tensor, group: Tensor, tensors: list[Tensor]) -> None:
    return None

"""MergeGroup: layers that share a map, and what a call must renew in it."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import Merge
from ..families.calls import DenoiserCall, TokenGrid, token_count
from ..runtime.clock import MAX_CALLS, Clock
from ..runtime.timeline import ALWAYS, Timeline
from .grid import Partition
from .mergemap import MapSpace
from .methods import Given, Method
from .ops import backend_for
from .ops.reference import Rotary
from .slots import Made, Slot

# Sizes whose maps stay allocated: from one image to the next, and within one, as of tiles.
_MAX_SIZES = 4
_MAX_SIZES_AT_ONCE = 32


@dataclass
class _Due:
    """What one denoiser call must renew before its layers read the maps. The first layer to run does it: a cache may
    skip them all."""

    made: Made
    step: int
    maps: str  # select, reweigh or reuse
    maps_done: int = 0  # how often: every block may need a map of its own
    rotary_done: int = 0
    visits: int = 0  # of layers that asked
    noted: bool = False

    @property
    def rotary(self) -> bool:
        """Whether rotary tables must be gathered."""
        return self.maps == "select" or not self.made.rotary


class MergeGroup:
    """Layers that share destinations and weights, and everything those need."""

    def __init__(
        self, name: str, number: int, method: Method[Any], technique: Merge, clock: Clock, level: int, shared: bool
    ) -> None:
        self.name = name
        self.level = level
        self.shared = shared  # whether the samples of a batch have the same destinations
        self.slot: Slot | None = None
        self.grids: tuple[TokenGrid, ...] = ()
        self.partition: Partition | None = None
        self.backend = "not run yet"
        self.selections = 0
        self.weighings = 0
        self.handle = _register(self)
        self._technique = method.settle(technique)
        self._timeline = Timeline(self._technique, None, method.RENEWS)
        self._clock = clock
        self._method = method
        self._seed = technique.seed + number
        self._generator = torch.Generator()
        self._seeded_for = -1
        self._due: _Due | None = None
        self._slots: dict[tuple[Any, ...], Slot] = {}
        self._partitions: dict[tuple[Any, ...], Partition] = {}

    def enter(self, call: DenoiserCall) -> None:
        """Point `slot` at the tensors for the size of this call, holding the maps of its turn, and see what is due."""
        image, step, turn = self._clock.now
        turn = min(turn, MAX_CALLS)
        if image != self._seeded_for:
            # Per image, so that a picture does not depend on those made before it.
            self._generator.manual_seed(self._seed)
            self._seeded_for = image
        made = self._enter_slot(turn, call).history.made_for(turn, image)
        self._due = _Due(made, step, self._timeline.maps(step, made.selected, made.weighed))
        self.partition = self._partition_on(call.device)

    def _enter_slot(self, turn: int, call: DenoiserCall) -> Slot:
        """Point `slot` at the tensors of a size, holding the maps of a turn."""
        key = (call.batch, token_count(call, self.level), call.text_tokens, call.dtype, call.device)
        if key not in self._slots:
            self._make_room()
            self._slots[key] = self._allocate(*key, call.rotary_width)
        self.slot = slot = self._slots[key]
        slot.image = self._clock.image
        with torch.no_grad():
            slot.history.bring_in(turn, slot.tensors)
        return slot

    def _make_room(self) -> None:
        """Give up the sizes that were used longest ago, those of this image last."""
        for key in sorted(self._slots, key=lambda key: self._slots[key].image):
            most = _MAX_SIZES_AT_ONCE if self._slots[key].image == self._clock.image else _MAX_SIZES
            if len(self._slots) < most:
                break
            del self._slots[key]
        # Recorded graphs read the partitions of sizes that still have a slot.
        kept = {(tokens, device) for _, tokens, _, _, device in self._slots}
        for grids, device in list(self._partitions):
            if (sum(grid.count for grid in grids), device) not in kept:
                del self._partitions[grids, device]

    def _allocate(
        self, batch: int, tokens: int, text: int, dtype: torch.dtype, device: torch.device, rotary_width: int
    ) -> Slot:
        ops, self.backend = backend_for(self._technique.backend, device)
        layout = self._method.layout(tokens, self._technique)
        # Inference tensors could not be refreshed outside of inference mode.
        with torch.inference_mode(False):
            space = MapSpace(batch, self.shared, dtype, device)
            merge_map = self._method.empty_map(layout, ops, self._technique, space)
            tables = 2 if rotary_width else 0
            rotary = [torch.zeros(text + layout.merged, rotary_width, device=device) for _ in range(tables)]
        return Slot(merge_map, rotary)

    def _partition_on(self, device: torch.device) -> Partition:
        key = (self.grids, device)
        if key not in self._partitions:
            self._partitions[key] = self._method.partition(self.grids, self._technique).to(device)
        return self._partitions[key]

    def note(self) -> None:
        """Note what a call has renewed, at its end: one that fails may have left half of a map."""
        due = self._due
        if due is None or due.noted:
            return
        due.noted = True
        if due.maps_done and due.maps != "reuse":
            due.made.weighed = due.step
            self.weighings += due.maps_done
            if due.maps == "select":
                due.made.selected, due.made.rotary = due.step, False
                self.selections += due.maps_done
        due.made.rotary |= due.rotary_done > 0

    def visit(self, tables: list[Tensor]) -> bool:
        """A layer is about to read the maps: whether a refresh has work left, given the layer's rotary tables."""
        due = self._due
        assert due is not None, "a site ran before its denoiser was entered"
        due.visits += 1
        return self._has_work(due, tables)

    def _has_work(self, due: _Due, tables: list[Tensor]) -> bool:
        again = self._method.RENEWS == ALWAYS
        return again or not due.maps_done or (bool(tables) and not due.rotary_done)

    @torch.no_grad()
    def refresh(self, tokens: Tensor, tables: list[Tensor], tensors: list[Tensor], rotary: list[Tensor]) -> None:
        """Bring the maps up to date for this call; the first layer of the group to run does the work, or every block
        where a method makes a map for each.

        tokens: [B, N, C]; tables: rotary cosines and sines [T + N, D], or none at a site without positions; `tensors`
        (of the map) and `rotary` (of the merged sequence) are overwritten in place.
        """
        due = self._due
        assert due is not None
        if not self._has_work(due, tables):
            return
        again = self._method.RENEWS == ALWAYS
        renews, gathered = False, None
        if tables and (again or not due.rotary_done):
            due.rotary_done += 1
            gathered = Rotary(tables, rotary) if due.rotary else None
        if again or not due.maps_done:
            due.maps_done += 1
            renews = due.maps != "reuse"
        if renews or gathered is not None:
            self._renew(tokens, tensors, due.maps if renews else "reuse", gathered)

    def _renew(self, tokens: Tensor, tensors: list[Tensor], maps: str, gathered: Rotary | None) -> None:
        """Fill the tensors of a map, and the rotary tables of the merged sequence."""
        assert self.partition is not None
        ops, _ = backend_for(self._technique.backend, tokens.device)
        merge_map = self._method.map_over(self._method.layout(tokens.shape[1], self._technique), ops, tensors)
        if maps != "reuse":
            # Similarities must not be rounded: at a temperature of 0.001 the weights would follow the rounding.
            with torch.autocast(tokens.device.type, enabled=False):
                given = Given(tokens, self.partition, self._technique, self._generator, self.shared, ops, gathered)
                self._method.renew(merge_map, maps, given)
            if self._method.GATHERS:
                return
        if gathered is not None:
            ops.gather_rotary(gathered, merge_map.destinations[0])

    @property
    def has_maps(self) -> bool:
        """Whether the maps of the last call have been made: a step may not merge, and a cache may skip all layers."""
        return self._due is not None and self._due.made.selected is not None

    @property
    def ratio(self) -> float:
        return self._technique.ratio

    @property
    def visits(self) -> int:
        """Layers that read the maps in this call."""
        return self._due.visits if self._due is not None else 0

    @property
    def renewed(self) -> bool:
        """Whether this call has changed the maps."""
        return self._due is not None and self._due.maps != "reuse" and self._due.maps_done > 0

    # What recordings of a call must know.

    def owns(self, slot: Slot | None) -> bool:
        return any(each is slot for each in self._slots.values())

    def kind(self) -> tuple[Any, ...] | None:
        """Equal for calls in which this group does the same work on the same tensors; None where that cannot be
        recorded."""
        due = self._due
        assert due is not None
        assert self.slot is not None
        if not self.slot.merges:
            return ("whole",)
        if due.maps != "reuse" and self._method.needs_host(self._technique):
            return None
        return id(self.slot), self.grids, due.maps, due.rotary

    @property
    def done(self) -> tuple[int, int, int]:
        """What this call has renewed, and how many layers asked."""
        assert self._due is not None
        return self._due.maps_done, self._due.rotary_done, self._due.visits

    @done.setter
    def done(self, done: tuple[int, int, int]) -> None:
        assert self._due is not None
        self._due.maps_done, self._due.rotary_done, self._due.visits = done


# Operators take tensors only, so groups are found by number.
_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, MergeGroup] = weakref.WeakValueDictionary()


def _register(group: MergeGroup) -> Tensor:
    number = next(_numbers)
    _groups[number] = group
    return torch.tensor(number)


@torch.library.custom_op("tokenmerge::refresh", mutates_args=("tensors", "rotary"))
def refresh(tokens: Tensor, tables: list[Tensor], group: Tensor, tensors: list[Tensor], rotary: list[Tensor]) -> None:
    found = _groups[int(group)]
    if found.visit(tables):
        found.refresh(tokens, tables, tensors, rotary)


@refresh.register_fake
def _(tokens: Tensor, tables: list[Tensor], group: Tensor, tensors: list[Tensor], rotary: list[Tensor]) -> None:
    return None

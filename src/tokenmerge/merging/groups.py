"""MergeGroup: layers that share a map, and what a call must renew in it."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..families.calls import DenoiserCall, grid_at_level
from ..runtime.clock import Clock
from ..config import MergeConfig
from .grid import Partition, TokenGrid
from .methods import Given, Method
from .ops import backend_for
from .ops.reference import Rotary
from .slots import MAX_CALLS, Record, Slot

# Sizes whose maps stay allocated: from one image to the next, and within one, as of tiles.
_MAX_SIZES = 4
_MAX_SIZES_AT_ONCE = 32


@dataclass
class _Due:
    """What one denoiser call must renew before its layers read the maps. The first layer to run does it: a cache may
    skip them all."""

    record: Record
    step: int
    phase: str
    maps_done: int = 0  # how often: every block may need a map of its own
    rotary_done: int = 0
    settled: bool = False


class MergeGroup:
    """Layers that share destinations and weights, and everything those need."""

    def __init__(
        self, name: str, index: int, method: Method[Any], config: MergeConfig, clock: Clock, level: int, shared: bool
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
        ratios = config.step_ratios or config.buckets
        self._configs = {each: method.settle(config.replace(ratio=each, step_ratios=None)) for each in ratios}
        self._wish = config
        self._config = self._configs[ratios[0]]
        self._clock = clock
        self._method = method
        self._seed = config.seed + index
        self._generator = torch.Generator()
        self._seeded_for = -1
        self._due: _Due | None = None
        self._chosen: dict[tuple[int, tuple[Any, ...]], float] = {}  # buckets in this image, by turn and size
        self._slots: dict[tuple[Any, ...], Slot] = {}
        self._partitions: dict[tuple[Any, ...], Partition] = {}

    def enter(self, call: DenoiserCall, *, mode: str) -> None:
        """Point `slot` at the tensors for the size of this call, holding the maps of its turn, and see what is due."""
        self.settle()
        image, step, turn = self._clock.now
        turn = min(turn, MAX_CALLS)
        if image != self._seeded_for:
            # Per image, so that a picture does not depend on those made before it.
            self._generator.manual_seed(self._seed)
            self._chosen.clear()
            self._seeded_for = image
        slot = self._enter_slot(self._ratio_now(turn, call), turn, call)
        record = slot.history.record(turn, image)
        phase = self._phase(record, step, anchor=mode == "anchor")
        if phase == "select" and mode != "full" and record.selected is not None and self._wish.coverage is not None:
            record = self._choose_ratio(slot, record, turn, call)
        self._due = _Due(record, step, phase)
        self.partition = self._partition_on(call.device)

    def _ratio_now(self, turn: int, call: DenoiserCall) -> float:
        """Of the maps that a call has, or begins with."""
        if self._wish.coverage is None:
            return self._wish.ratio_at(self._clock.position)
        # Early steps are the most sensitive, and a selection at the smallest ratio measures what all others cover.
        return self._chosen.setdefault((turn, call.size), self._wish.buckets[0])

    def _choose_ratio(self, slot: Slot, record: Record, turn: int, call: DenoiserCall) -> Record:
        """Go over to the ratio that the last selection calls for, in whose slot the next one will be made."""
        assert slot.coverages is not None
        if record.coverages is None:
            # Waits for the device, once for every selection.
            record.coverages = slot.coverages.tolist()
        ratio = self._wish.next_ratio(self._config.ratio, record.coverages)
        if ratio == self._config.ratio:
            return record
        self._chosen[turn, call.size] = ratio
        # Maps that this turn had there before are older than those it leaves.
        return self._enter_slot(ratio, turn, call).history.new_record(turn, record.image)

    def _enter_slot(self, ratio: float, turn: int, call: DenoiserCall) -> Slot:
        """Point `slot` at the tensors of a ratio and size, holding the maps of a turn."""
        self._config = self._configs[ratio]
        size = (call.batch, self.token_count(call), call.text_tokens, call.dtype, call.device)
        key = (ratio, *size)
        if key not in self._slots:
            self._make_room()
            self._slots[key] = self._allocate(*size, call.rotary_width)
        self.slot = slot = self._slots[key]
        slot.image = self._clock.image
        with torch.no_grad():
            slot.history.bring_in(turn, slot.tensors)
        return slot

    def _make_room(self) -> None:
        """Give up the sizes that were used longest ago, those of this image last: its gaps belong to their maps."""
        for key in sorted(self._slots, key=lambda key: self._slots[key].image):
            most = _MAX_SIZES_AT_ONCE if self._slots[key].image == self._clock.image else _MAX_SIZES
            if len(self._slots) < most * len(self._configs):
                break
            del self._slots[key]
        self._forget_partitions()

    def _phase(self, record: Record, step: int, *, anchor: bool) -> str:
        if self._method.PER_BLOCK:
            return "select"
        if record.selected is not None and not self._method.REFRESHES:
            return "reuse"
        return self._config.schedule.phase(step, record.selected, record.weighed, anchor=anchor)

    def token_count(self, call: DenoiserCall) -> int:
        """Image tokens at this group's level."""
        height, width = grid_at_level(call, self.level)
        return height * width if height else call.tokens

    def settle(self) -> None:
        """Note in the record what the last call has renewed."""
        due = self._due
        if due is None or due.settled:
            return
        due.settled = True
        if due.maps_done and due.phase != "reuse":
            due.record.weighed = due.step
            self.weighings += due.maps_done
            if due.phase == "select":
                due.record.selected, due.record.rotary, due.record.coverages = due.step, False, None
                self.selections += due.maps_done
        due.record.rotary |= due.rotary_done > 0

    def _allocate(
        self, batch: int, tokens: int, text: int, dtype: torch.dtype, device: torch.device, rotary_width: int
    ) -> Slot:
        ops, self.backend = backend_for(self._config.backend, device)
        layout = self._method.layout(tokens, self._config)
        # Inference tensors could not be refreshed outside of inference mode.
        with torch.inference_mode(False):
            merge_map = self._method.empty_map(
                layout, ops, self._config, batch, shared=self.shared, dtype=dtype, device=device
            )
            tables = 2 if rotary_width else 0
            rotary = [torch.zeros(text + layout.merged, rotary_width, device=device) for _ in range(tables)]
            coverages = None
            if self._wish.coverage is not None:
                coverages = torch.full((len(self._wish.buckets),), torch.nan, dtype=torch.float32, device=device)
        return Slot(merge_map, rotary, coverages)

    def has_due(self, tables: list[Tensor]) -> bool:
        """Whether a refresh has work left in this call, for a site with these rotary tables."""
        due = self._due
        assert due is not None, "a site ran before its denoiser was entered"
        return self._method.PER_BLOCK or not due.maps_done or (bool(tables) and not due.rotary_done)

    @torch.no_grad()
    def refresh(self, tokens: Tensor, tables: list[Tensor], tensors: list[Tensor], rotary: list[Tensor]) -> None:
        """Bring the maps up to date for this call; the first layer of the group to run does the work, or every block
        where a method makes a map for each.

        tokens: [B, N, C]; tables: rotary cosines and sines [T + N, D], or none at a site without positions; `tensors`
        (of the map) and `rotary` (of the merged sequence) are overwritten in place.
        """
        due = self._due
        assert due is not None
        assert self.partition is not None
        if not self.has_due(tables):
            return
        again = self._method.PER_BLOCK
        ops, _ = backend_for(self._config.backend, tokens.device)
        merge_map = self._method.map_over(self._method.layout(tokens.shape[1], self._config), ops, tensors)
        gathered = None
        if tables and (again or not due.rotary_done):
            due.rotary_done += 1
            if self._rotary_is_due(due):
                gathered = Rotary(tables, rotary)
        if again or not due.maps_done:
            due.maps_done += 1
            if due.phase != "reuse":
                # Similarities must not be rounded: at a temperature of 0.001 the weights would follow the rounding.
                with torch.autocast(tokens.device.type, enabled=False):
                    given = Given(tokens, self.partition, self._config, self._generator, self.shared, ops, gathered)
                    self._method.renew(merge_map, due.phase, given)
                    if due.phase == "select":
                        self._measure_coverages(given, merge_map.destinations)
                if self._method.GATHERS:
                    return
        if gathered is not None:
            ops.gather_rotary(gathered, merge_map.destinations[0])

    def _measure_coverages(self, given: Given, destinations: Tensor) -> None:
        """Keep the coverage that a selection [S, M] has, and those that larger ratios would have."""
        assert self.slot is not None
        if self.slot.coverages is None:
            return
        layout, buckets = given.partition.layout, self._wish.buckets
        place = buckets.index(self._config.ratio)
        counts = [self._method.layout(layout.tokens, self._configs[each]).select_count for each in buckets[place:]]
        selected = destinations.unflatten(1, (layout.select_regions, layout.select_count))
        measured = given.ops.mean_coverages(given.tokens, given.partition.order, selected, counts)
        self.slot.coverages[place:].copy_(measured)

    @property
    def has_maps(self) -> bool:
        """Whether the maps of the last call have been made: a step may not merge, and a cache may skip all layers."""
        self.settle()
        return self._due is not None and self._due.record.selected is not None

    @property
    def coverage(self) -> float | None:
        """Of the maps in use, where a target chooses the ratio and a selection was made. Waits for the device."""
        if self.slot is None or self.slot.coverages is None or not self.has_maps:
            return None
        return self.slot.coverages[self._wish.buckets.index(self._config.ratio)].item()

    @staticmethod
    def _rotary_is_due(due: _Due) -> bool:
        return due.phase == "select" or not due.record.rotary

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
        if due.phase != "reuse" and self._method.needs_host(self._config):
            return None
        return id(self.slot), self.grids, due.phase, self._rotary_is_due(due)

    @property
    def ratio(self) -> float:
        """Of this call."""
        return self._config.ratio

    @property
    def phase(self) -> str:
        """What is due in this call: select, reweigh or reuse."""
        assert self._due is not None
        return self._due.phase

    @property
    def done(self) -> tuple[int, int]:
        """How often this call has renewed maps and rotary tables."""
        assert self._due is not None
        return self._due.maps_done, self._due.rotary_done

    @done.setter
    def done(self, done: tuple[int, int]) -> None:
        assert self._due is not None
        self._due.maps_done, self._due.rotary_done = done

    def _forget_partitions(self) -> None:
        """Give up those of sizes that have no slot left; recorded graphs read the others."""
        kept = {(ratio, tokens, device) for ratio, _, tokens, _, _, device in self._slots}
        for key in list(self._partitions):
            grids, device, ratio = key
            if (ratio, sum(grid.count for grid in grids), device) not in kept:
                del self._partitions[key]

    def _partition_on(self, device: torch.device) -> Partition:
        key = (self.grids, device, self._config.ratio)
        if key not in self._partitions:
            self._partitions[key] = self._method.partition(self.grids, self._config).to(device)
        return self._partitions[key]


# Operators take tensors only, so groups are found by number.
_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, MergeGroup] = weakref.WeakValueDictionary()


def _register(group: MergeGroup) -> Tensor:
    number = next(_numbers)
    _groups[number] = group
    return torch.tensor(number)


@torch.library.custom_op("tokenmerge::refresh", mutates_args=("tensors", "rotary"))
def refresh(tokens: Tensor, tables: list[Tensor], group: Tensor, tensors: list[Tensor], rotary: list[Tensor]) -> None:
    _groups[int(group)].refresh(tokens, tables, tensors, rotary)


@refresh.register_fake
def _(tokens: Tensor, tables: list[Tensor], group: Tensor, tensors: list[Tensor], rotary: list[Tensor]) -> None:
    return None

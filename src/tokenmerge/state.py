"""MergeState: the only thing that remembers: where the denoising loop stands, and each group's maps.

Compiled code must not see any of this, or it would be compiled again at every step. So denoiser calls are observed
outside of it, and inside an opaque operator, `refresh`, brings a group's tensors up to date in place. Traced code only
ever reads those tensors, the gaps that anchors keep, and the mode of the step: merged, full or anchor.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .clustermap import ClusterMap
from .config import MergeConfig, TokenMergeError
from .gaps import GapMemory, GapSize
from .grid import Partition, TokenGrid
from .mergemap import MergeMap
from .methods import Given, Method, method_for
from .ops import backend_for
from .watch import watch

# Where `apply` keeps its record, on the denoiser itself so that both live and die together.
RECORD = "_tokenmerge"
# Denoiser calls within one step that keep maps of their own (guidance makes two or three). Later ones select anew.
_MAX_CALLS = 4
# Sizes of image whose maps stay allocated.
_MAX_SIZES = 4


class DenoiserCall(NamedTuple):
    """What an adapter reads off the arguments of one denoiser call."""

    batch: int
    dtype: torch.dtype
    device: torch.device
    timestep: Tensor
    height: int = 0  # of the grid that level 0 has; 0 where positions come as ids
    width: int = 0
    tokens: int = 0  # image tokens, where positions come as ids
    ids: Tensor | None = None  # [N, 3] image number, row and column of every image token
    text_tokens: int = 0
    rotary_width: int = 0

    @property
    def size(self) -> tuple[Any, ...]:
        """What the tensors of a call depend on."""
        return self.batch, self.dtype, self.device, self.height, self.width, self.tokens, self.text_tokens


def grid_at_level(call: DenoiserCall, level: int) -> tuple[int, int]:
    """Height and width of a level; each halves the one above it, rounding up."""
    height, width = call.height, call.width
    for _ in range(level):
        height, width = (height + 1) // 2, (width + 1) // 2
    return height, width


class Clock:
    """Where the denoising loop stands: image, step and call within the step, each counted from 0."""

    def __init__(self) -> None:
        self.image = -1
        self.step = 0
        self.call = -1
        self.total: int | None = None  # steps of the whole schedule
        self.begin = 0  # where in the schedule this image begins (img2img)
        self.levels: list[float] = []  # of noise, by step of the schedule
        self._timestep: float | None = None

    @property
    def now(self) -> tuple[int, int, int]:
        return self.image, self.step, self.call

    @property
    def position(self) -> float:
        """Share of the schedule that lies behind; 0 where its length is unknown."""
        return (self.begin + self.step) / self.total if self.total else 0.0

    def noise_level(self, step: int) -> float:
        """The noise level of a step, or its number where levels are not known."""
        place = self.begin + step
        return self.levels[place] if place < len(self.levels) else float(step)

    def start_image(self, total: int | None, levels: list[float] | None = None) -> None:
        self.image += 1
        self.step, self.call, self.begin, self.total = 0, -1, 0, total
        self.levels = levels or []

    def next_step(self) -> None:
        self.step += 1
        self.call = -1

    def follow_timestep(self, timestep: float) -> None:
        """Without a scheduler: an equal timestep is the same step, a lower one the next, a higher one a new image."""
        if self._timestep is None or timestep > self._timestep:
            self.start_image(None)
        elif timestep < self._timestep:
            self.next_step()
        self._timestep = timestep


@dataclass
class _Record:
    """When the maps of one call of the step were made."""

    image: int
    selected: int | None = None
    weighed: int | None = None
    rotary: bool = False  # whether the rotary tables follow the selection
    coverages: list[float] | None = None  # of the selection, once they have been read from the device


@dataclass
class _Due:
    """What one denoiser call must renew before its layers read the maps. The first layer to run does it: a cache may
    skip them all."""

    record: _Record
    step: int
    phase: str
    maps_done: int = 0  # how often: every block may need a map of its own
    rotary_done: int = 0
    settled: bool = False


@dataclass
class _History:
    """Whose maps a slot's tensors hold, and the maps of the other calls of a step."""

    resident: int | None = None
    records: dict[int, _Record] = field(default_factory=dict)
    saved: dict[int, list[Tensor]] = field(default_factory=dict)

    def bring_in(self, call: int, tensors: list[Tensor]) -> None:
        """Swap `tensors` so that they hold the maps of `call`, keeping those they held."""
        if self.resident == call:
            return
        if self.resident is not None and self.resident < _MAX_CALLS:
            self.saved[self.resident] = [tensor.clone() for tensor in tensors]
        for tensor, kept in zip(tensors, self.saved.pop(call, ()), strict=False):
            tensor.copy_(kept)
        self.resident = call

    def record(self, call: int, image: int) -> _Record:
        known = self.records.get(call)
        if known is None or known.image != image or call == _MAX_CALLS:
            return self.new_record(call, image)
        return known

    def new_record(self, call: int, image: int) -> _Record:
        """Forget what `call` had."""
        self.records[call] = _Record(image)
        return self.records[call]


@dataclass
class Slot:
    """The tensors that the layers of a group read for one size of image."""

    map: MergeMap | ClusterMap
    rotary: list[Tensor]  # cosines and sines [T + M, D], where the model has them
    # fp32 [buckets], where a target chooses the ratio; written by a selection, from the ratio of this slot on.
    coverages: Tensor | None = None
    history: _History = field(default_factory=_History)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that belongs to one call of a step."""
        measured = [] if self.coverages is None else [self.coverages]
        return [*self.map.tensors, *self.rotary, *measured]

    @property
    def merges(self) -> bool:
        """Whether any token is removed at this size."""
        return self.map.merged_count < self.map.token_count


@dataclass
class _Anchors:
    """The anchors of one turn and size in an image."""

    image: int
    ratio: float
    sizes: list[GapSize]  # of every memory
    steps: list[int] = field(default_factory=list)  # the last two that ran
    removed: list[float] = field(default_factory=list)  # by every group at the last one


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
        turn = min(turn, _MAX_CALLS)
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

    def _choose_ratio(self, slot: Slot, record: _Record, turn: int, call: DenoiserCall) -> _Record:
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
            while len(self._slots) >= _MAX_SIZES * len(self._configs):
                del self._slots[next(iter(self._slots))]
            self._slots[key] = self._allocate(*size, call.rotary_width)
        self.slot = slot = self._slots[key]
        with torch.no_grad():
            slot.history.bring_in(turn, slot.tensors)
        return slot

    def _phase(self, record: _Record, step: int, *, anchor: bool) -> str:
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
        if again or not due.maps_done:
            due.maps_done += 1
            if due.phase != "reuse":
                # Similarities must not be rounded: at a temperature of 0.001 the weights would follow the rounding.
                with torch.autocast(tokens.device.type, enabled=False):
                    given = Given(tokens, self.partition, self._config, self._generator, self.shared, ops)
                    self._method.renew(merge_map, due.phase, given)
                    if due.phase == "select":
                        self._measure_coverages(given, merge_map.destinations)
        if tables and (again or not due.rotary_done):
            due.rotary_done += 1
            if self._rotary_is_due(due):
                ops.gather_rotary(tables, merge_map.destinations[0], rotary)

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
    def coverage(self) -> float | None:
        """Of the maps in use, where a target chooses the ratio and a selection was made. Waits for the device."""
        self.settle()
        if self.slot is None or self.slot.coverages is None or self._due is None or self._due.record.selected is None:
            return None
        return self.slot.coverages[self._wish.buckets.index(self._config.ratio)].item()

    @staticmethod
    def _rotary_is_due(due: _Due) -> bool:
        return due.phase == "select" or not due.record.rotary

    def holds(self, slot: Slot | None) -> bool:
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

    def _partition_on(self, device: torch.device) -> Partition:
        key = (self.grids, device, self._config.ratio)
        if key not in self._partitions:
            self._partitions[key] = self._method.partition(self.grids, self._config).to(device)
        return self._partitions[key]


class MergeState:
    """Everything one `apply` remembers. Sites and hooks refer to it; it refers to none of them."""

    def __init__(self, config: MergeConfig, scheduler: Callable[[], Any]) -> None:
        self.config = config
        self.clock = Clock()
        self.groups: list[MergeGroup] = []
        self.mode = "merged"  # or full, or anchor: merged and full both
        self._memories: list[tuple[MergeGroup, GapMemory]] = []
        self._anchors: dict[tuple[int, tuple[Any, ...]], _Anchors] = {}  # by turn and size
        self._pending: tuple[_Anchors, int] | None = None  # the last call's, and its step, if it was to be an anchor
        self._ahead: dict[int, Tensor] = {}
        self.at_image_start: Callable[[], None] = lambda: None
        self._scheduler = scheduler
        self._stop_watching: Callable[[], None] | None = None
        self._watched: Callable[[], Any] = lambda: None
        self.follow_scheduler()

    def __reduce__(self) -> Any:
        raise TokenMergeError("a model cannot be copied or pickled while merging is applied; call remove first")

    def add_memory(self, group: MergeGroup, width: int, *, has_text: bool) -> GapMemory | None:
        """Where a block of a group remembers gaps, if there are anchors."""
        if not self.config.schedule.anchor_every:
            return None
        memory = GapMemory(width, has_text)
        self._memories.append((group, memory))
        return memory

    def _see_anchor(self, call: DenoiserCall) -> None:
        """Make this call an anchor, if it is time for one in its turn of the step."""
        image, step, turn = self.clock.now
        if turn >= _MAX_CALLS:
            # No gap is kept for so many calls, and anchors at every step would cost more than merging saves.
            self.mode = "full"
            return
        # Another ratio has other maps, so gaps of the last one mean nothing to it.
        ratio = self.config.ratio_at(self.clock.position)
        seen = self._anchors.get((turn, call.size))
        if seen is None or (seen.image, seen.ratio) != (image, ratio):
            seen = self._anchors[turn, call.size] = _Anchors(image, ratio, self._gap_sizes(call))
        if self.config.schedule.anchors(step, seen.steps[-1] if seen.steps else None):
            self.mode = "anchor"

    def _settle_anchor(self) -> None:
        """Note the anchor of the last call. One whose blocks a cache has skipped saw no gap: it does not count, and the
        next call is an anchor in its place."""
        if self._pending is not None and any(maps for maps, _ in self.done()):
            seen, step = self._pending
            removed = [group.ratio for group in self.groups]
            # From a gap at another ratio nothing can be extrapolated.
            seen.steps = [*seen.steps[-1:], step] if removed == seen.removed else [step]
            seen.removed = removed
        self._pending = None

    def _gap_sizes(self, call: DenoiserCall) -> list[GapSize]:
        """Of every memory, in this call."""
        tokens = [group.token_count(call) for group, _ in self._memories]
        return [GapSize(call.batch, count, call.text_tokens, call.dtype, call.device) for count in tokens]

    def _enter_memories(self, call: DenoiserCall) -> None:
        """Point every site's memory at the gap of this call, and tell how far the last anchor is."""
        turn = self.clock.call
        if not self._memories or self.mode == "full":
            return
        seen = self._anchors[turn, call.size]
        self._pending = (seen, self.clock.step) if self.mode == "anchor" else None
        if turn not in self._ahead or self._ahead[turn].device != call.device:
            with torch.inference_mode(False):
                self._ahead[turn] = torch.zeros((), device=call.device)
        ahead, linear = self._ahead[turn], self.config.gap == "linear"
        if linear:
            ahead.fill_(self._steps_ahead(seen.steps))
        for (group, memory), size in zip(self._memories, seen.sizes, strict=True):
            if group.slot is not None and group.slot.merges:
                memory.enter(size, turn, ahead, linear=linear, float8=self.config.gap_dtype == "float8")

    def _forget_gaps(self) -> None:
        """Give up gaps of sizes that the last two images did not have: two sizes may take turns."""
        for (turn, size), seen in list(self._anchors.items()):
            if seen.image < self.clock.image - 2:
                del self._anchors[turn, size]
                for (_, memory), gap_size in zip(self._memories, seen.sizes, strict=True):
                    memory.forget(gap_size, turn)

    def _steps_ahead(self, anchors: list[int]) -> float:
        """Distance of this step from the last anchor over that between the last two, in noise levels; 0 after one."""
        if len(anchors) < 2:
            return 0.0
        before, last, now = (self.clock.noise_level(step) for step in (*anchors[-2:], self.clock.step))
        return (now - last) / (last - before) if last != before else 0.0

    @property
    def gap_bytes(self) -> int:
        """Memory of all gaps."""
        return sum(memory.nbytes for _, memory in self._memories)

    def add_group(
        self,
        name: str,
        level: int = 0,
        method: Method[Any] | None = None,
        *,
        ratio: float | None = None,
        shared: bool = False,
    ) -> MergeGroup:
        config = self.config if ratio is None else self.config.replace(ratio=ratio, block_ratios=None)
        group = MergeGroup(name, len(self.groups), method or method_for(config), config, self.clock, level, shared)
        self.groups.append(group)
        return group

    def enter(self, call: DenoiserCall) -> None:
        """At the start of a denoiser call: learn the step and the grids, and lay out tensors of their size."""
        self._settle_anchor()
        self.follow_scheduler()
        scheduler = self._watched()
        if scheduler is None:
            if self.config.needs_length:
                raise TokenMergeError(
                    "the scheduler that merging follows is gone, and what a step does depends on how many there are; "
                    "apply to the pipeline that runs"
                )
            self.clock.follow_timestep(float(call.timestep.flatten()[0]))
        elif self.clock.now[1:] == (0, -1):
            self.clock.begin = self._begin(scheduler, call.timestep)
        self.clock.call += 1
        self._set_mode()
        if self.mode == "merged" and self.config.schedule.anchor_every:
            self._see_anchor(call)
        if self.clock.now[1:] == (0, 0):
            self.at_image_start()
            self._forget_gaps()
        self._see_grids(call)
        for group in self.groups:
            group.enter(call, mode=self.mode)
        self._enter_memories(call)
        ratios = {group.ratio for group in self.groups}
        if any(ratios) and not any(group.slot and group.slot.merges for group in self.groups):
            raise TokenMergeError(
                f"at this size ratio {max(ratios)} removes no token in regions {self.config.regions!r}; "
                "use larger regions or a larger image, or remove merging"
            )

    def _see_grids(self, call: DenoiserCall) -> None:
        """Tell every group how its image tokens lie."""
        if call.ids is None:
            for group in self.groups:
                group.grids = (TokenGrid(*grid_at_level(call, group.level)),)
            return
        # Reading ids waits for the device, so only once per image.
        known = self.groups[0].grids
        fresh = self.clock.now[1:] == (0, 0) or self.clock.call >= _MAX_CALLS
        if fresh or sum(grid.count for grid in known) != call.tokens:
            known = grids_of_ids(call.ids)
            for group in self.groups:
                group.grids = known

    @property
    def phase(self) -> str:
        """What the last call to enter does: full, reuse, reweigh or select; the last three also at an anchor."""
        merging = [group for group in self.groups if group.slot is not None and group.slot.merges]
        if self.mode == "full" or not merging:
            return "full"
        phase = max((group.phase for group in merging), key=("reuse", "reweigh", "select").index)
        phase = f"anchor, {phase}" if self.mode == "anchor" else phase
        return f"{phase} at {self.groups[0].ratio:g}" if self.config.step_ratios else phase

    def kind(self) -> tuple[Any, ...] | None:
        """Equal for denoiser calls that launch the same work on the same tensors; None if it cannot be recorded."""
        if self.mode == "full":
            return (self.mode,)
        kinds = tuple(group.kind() for group in self.groups)
        gaps = tuple(id(memory.current) for _, memory in self._memories)
        return None if None in kinds else (self.mode, gaps, *kinds)

    def done(self) -> list[tuple[int, int]]:
        """What this call has renewed so far, by group."""
        return [group.done for group in self.groups]

    def set_done(self, done: list[tuple[int, int]]) -> None:
        """Take it that this call has renewed this."""
        for group, each in zip(self.groups, done, strict=True):
            group.done = each

    def owners(self) -> list[Any]:
        """What owns the tensors of this call."""
        return [*(group.slot for group in self.groups), *(memory.current for _, memory in self._memories)]

    def still_owns(self, owners: list[Any]) -> bool:
        """Whether no tensor of an earlier call has been given up since."""
        slots, gaps = owners[: len(self.groups)], owners[len(self.groups) :]
        return all(group.holds(slot) for group, slot in zip(self.groups, slots, strict=True)) and all(
            memory.holds(gap) for (_, memory), gap in zip(self._memories, gaps, strict=True)
        )

    def follow_scheduler(self) -> None:
        """Listen to the scheduler in use, also after the user has put another one into the pipeline."""
        scheduler = self._scheduler()
        # A pipeline may be gone and its denoiser and scheduler live on in another one.
        if scheduler is None or scheduler is self._watched():
            return
        self._forget_scheduler()
        self._watched = weakref.ref(scheduler)
        self._stop_watching = watch(scheduler, self)
        self.timesteps_set(scheduler)

    def close(self) -> None:
        """Merge no more, also where somebody has kept the forward of a site."""
        self._forget_scheduler()
        self.mode = "full"

    def _forget_scheduler(self) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None

    def timesteps_set(self, scheduler: Any) -> None:
        timesteps = getattr(scheduler, "timesteps", None)
        sigmas = getattr(scheduler, "sigmas", None)
        # Schedulers keep them on the CPU; reading them from elsewhere would wait for the device.
        levels = sigmas.tolist() if isinstance(sigmas, Tensor) and sigmas.device.type == "cpu" else None
        self.clock.start_image(None if timesteps is None else len(timesteps), levels)
        self._set_mode()

    def begin_set(self, scheduler: Any) -> None:
        self.clock.begin = scheduler.begin_index or 0
        self._set_mode()

    def stepped(self, scheduler: Any) -> None:
        self.clock.next_step()
        self._set_mode()

    def _begin(self, scheduler: Any, timestep: Tensor) -> int:
        """Where in the schedule an image begins. Old schedulers do not say; then the timestep is looked up."""
        if hasattr(scheduler, "begin_index"):
            return scheduler.begin_index or 0
        if not self.config.needs_length:
            return 0
        places = (scheduler.timesteps.cpu() == timestep.flatten()[0].cpu()).nonzero()
        return int(places[0]) if len(places) else 0

    def _set_mode(self) -> None:
        self.mode = "merged" if self.config.schedule.merges(self.clock.position) else "full"


def grids_of_ids(ids: Tensor) -> tuple[TokenGrid, ...]:
    """The images of a sequence, from the image number, row and column of every token ([N, 3])."""
    places = ids.detach().to("cpu", torch.int64)
    _, lengths = places[:, 0].unique_consecutive(return_counts=True)
    grids = []
    for image in places.split(lengths.tolist()):
        height, width = (int(axis.max() - axis.min()) + 1 for axis in (image[:, 1], image[:, 2]))
        if height * width != len(image):
            raise TokenMergeError(
                f"img_ids place {len(image)} tokens on a {height}x{width} grid; merging needs every place filled once, "
                "as the pipeline's own ids do"
            )
        grids.append(TokenGrid(height, width))
    return tuple(grids)


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

"""Anchors: which denoiser calls are anchors, and the memories of gaps that blocks keep between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..families.calls import DenoiserCall
from ..runtime.clock import Clock
from ..config import MergeConfig
from .residuals import Gap, GapMemory, GapSize
from ..merging.groups import MergeGroup
from ..merging.slots import MAX_CALLS


@dataclass
class _Seen:
    """The anchors of one turn and size in an image."""

    image: int
    ratio: float
    apart: bool
    sizes: list[GapSize]  # of every memory
    steps: list[int] = field(default_factory=list)  # the last two that ran
    removed: list[float] = field(default_factory=list)  # by every group at the last one


class Anchors:
    """Decides which calls are anchors, and points every memory at the gap of a call."""

    def __init__(self, config: MergeConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._memories: list[tuple[MergeGroup, GapMemory]] = []
        self._seen: dict[tuple[int, tuple[Any, ...]], _Seen] = {}  # by turn and size
        self._pending: tuple[_Seen, int] | None = None  # the last call's, and its step, if it was to be an anchor
        self._ahead: dict[tuple[int, torch.device], Tensor] = {}  # by turn

    @property
    def exist(self) -> bool:
        return self._config.schedule.anchor_every > 0

    def add_memory(self, group: MergeGroup, width: int, *, has_text: bool, apart: bool | None = None) -> GapMemory:
        """Where blocks of a group remember gaps."""
        memory = GapMemory(width, has_text, apart)
        self._memories.append((group, memory))
        return memory

    def mode(self, call: DenoiserCall) -> str:
        """Of a call that is to merge: an anchor, if it is time for one in its turn of the step."""
        self._drop_failed()
        image, step, turn = self._clock.now
        if turn >= MAX_CALLS:
            # No gap is kept for so many calls, and anchors at every step would cost more than merging saves.
            return "full"
        # Another ratio has other maps, so gaps of the last one mean nothing to it.
        ratio = self._config.ratio_at(self._clock.position)
        seen = self._seen.get((turn, call.size))
        if seen is None or (seen.image, seen.ratio) != (image, ratio):
            seen = self._seen[turn, call.size] = _Seen(image, ratio, call.apart, self._sizes(call))
        last = seen.steps[-1] if seen.steps else None
        position = None if last is None else self._clock.position_of(last)
        return "anchor" if self._config.schedule.anchors(step, last, position) else "merged"

    def settle(self, groups: list[MergeGroup]) -> None:
        """Note that a call was an anchor. One whose blocks a cache has skipped saw no gap: it does not count, and the
        next call is an anchor in its place."""
        if self._pending is not None and any(group.done[0] for group in groups):
            seen, step = self._pending
            removed = [group.ratio for group in groups]
            # From a gap at another ratio nothing can be extrapolated.
            seen.steps = [*seen.steps[-1:], step] if removed == seen.removed else [step]
            seen.removed = removed
        self._pending = None

    def enter(self, call: DenoiserCall, mode: str) -> None:
        """Point every site's memory at the gap of this call, and tell how far the last anchor is."""
        self._drop_failed()
        for _, memory in self._memories:
            memory.entered = None
        turn = self._clock.call
        if not self._memories or mode == "full":
            return
        seen = self._seen[turn, call.size]
        self._pending = (seen, self._clock.step) if mode == "anchor" else None
        if (turn, call.device) not in self._ahead:
            with torch.inference_mode(False):
                self._ahead[turn, call.device] = torch.zeros((), device=call.device)
        ahead, linear = self._ahead[turn, call.device], self._config.gap != "last"
        if linear:
            ahead.fill_(self._distance(seen.steps))
        for (group, memory), size in zip(self._memories, seen.sizes, strict=True):
            if memory.apart not in (None, call.apart):
                memory.current = None
            elif group.slot is not None and group.slot.merges:
                memory.enter(size, turn, ahead, linear=linear, float8=self._config.gap_dtype == "float8")

    def _drop_failed(self) -> None:
        """An anchor that failed on the way has left gaps among those of the last one that ran: begin anew."""
        if self._pending is not None:
            self._pending[0].steps.clear()
            self._pending = None

    def forget(self) -> None:
        """Give up gaps of sizes that the last two images did not have: two sizes may take turns."""
        for (turn, size), seen in list(self._seen.items()):
            if seen.image < self._clock.image - 2:
                del self._seen[turn, size]
                for (_, memory), gap_size in zip(self._memories, seen.sizes, strict=True):
                    if memory.apart in (None, seen.apart):
                        memory.forget(gap_size, turn)

    @property
    def gaps(self) -> list[Gap | None]:
        """Of this call, by memory."""
        return [memory.current for _, memory in self._memories]

    def owns(self, gaps: list[Gap | None]) -> bool:
        """Whether none of an earlier call's gaps has been given up since."""
        return all(memory.owns(gap) for (_, memory), gap in zip(self._memories, gaps, strict=True))

    @property
    def nbytes(self) -> int:
        """Memory of all gaps."""
        return sum(memory.nbytes for _, memory in self._memories)

    def _sizes(self, call: DenoiserCall) -> list[GapSize]:
        """Of every memory, in this call."""
        tokens = [group.token_count(call) for group, _ in self._memories]
        return [GapSize(call.batch, count, call.text_tokens, call.dtype, call.device) for count in tokens]

    def _distance(self, steps: list[int]) -> float:
        """Of this step from the last anchor over that between the last two, in noise levels or steps; 0 after one."""
        if len(steps) < 2:
            return 0.0
        before, last, now = (self._clock.noise_level(step) for step in (*steps[-2:], self._clock.step))
        return (now - last) / (last - before) if last != before else 0.0

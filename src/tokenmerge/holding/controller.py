"""Holding: the residuals that a denoiser call keeps or adds, how far they are extrapolated, and with what error."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..families.calls import DenoiserCall, Shard
from ..runtime.clock import Clock
from ..runtime.timeline import HELD, Kept, Step
from .errors import Errors
from .residuals import Joined, Residual, Run

# What held blocks do in a call.
RUN, KEEP, HOLD = "run", "keep", "hold"


@dataclass(eq=False)
class _Part:
    """What is kept for one part of a step's calls (see `DenoiserCall.parts`), at one size."""

    samples: int
    shard: Shard | None
    ahead: Tensor  # scalars that all residuals of the part share, see `Residual`
    owed: Tensor
    image: int = -1  # the image that these steps belong to
    steps: list[int] = field(default_factory=list)  # the last two kept steps; only one if no slope may be used
    held: list[int] = field(default_factory=list)  # the steps since then in which this part was held
    residuals: dict[Run, Residual] = field(default_factory=dict)

    def start_from(self, *steps: int) -> None:
        """Set the last kept steps; nothing has been held since."""
        self.steps, self.held = [*steps], []

    def residual(self, run: Run) -> Residual:
        if run not in self.residuals:
            # Tensors made in inference mode cannot be overwritten outside it.
            with torch.inference_mode(False):
                # Runs that make up for nothing still add zeros, so that all runs share compiled code.
                owed = self.owed if run.last or run.adds else torch.zeros_like(self.owed)
                self.residuals[run] = Residual(run.streams, self.samples, self.ahead, owed)
        return self.residuals[run]


class Holding:
    """Points every run of held blocks at its residual for this call. Sites read here what to do."""

    def __init__(self, clock: Clock) -> None:
        self.act = RUN
        self.learning = False  # whether no call has shown yet what can be held
        self._shown: DenoiserCall | None = None  # the call that shows it, if its step is kept
        self.runs: list[Run] = []
        self.missed: Tensor | None = None  # correction of image tokens that earlier runs of this call hand on
        self.errors = Errors()
        self._clock = clock
        self._parts_by_size: dict[tuple[Hashable, tuple[Any, ...]], _Part] = {}
        self._now: list[_Part] = []  # the parts of this call; empty if it just runs
        self._keeping: int | None = None  # the step of this call, if it is kept
        self._restart = False  # whether no slope may be used between the last kept step and this one

    def add_run(self, run: Run) -> Run:
        self.runs.append(run)
        return run

    def begin_image(self) -> None:
        """Drop residuals of sizes that the last two images did not have. Two sizes may thus alternate."""
        self.errors.begin_image()
        parts = self._parts_by_size.items()
        self._parts_by_size = {key: part for key, part in parts if part.image >= self._clock.image - 2}

    def known(self, call: DenoiserCall) -> Kept | None:
        """What this image has shown about calls like this one; None unless all their parts kept the same steps."""
        self._drop_failed()
        parts = self._known_parts(call)
        if len(parts) < len(self._parts(call)) or any(part.steps != parts[0].steps for part in parts):
            return None
        kept = self._kept(parts[0])
        # The error of a full step is still on its way from the device when the next step begins. We do not wait for it.
        before = kept.last.number + (self._clock.step > parts[0].steps[-1] + 1)
        return kept._replace(bend=self.errors.bend(before))

    def _kept(self, part: _Part) -> Kept:
        """The kept and held steps of a part, without any error."""
        *before, last = map(self._clock.place, part.steps)
        return Kept(last, before[0] if before else None, held=tuple(map(self._clock.place, part.held)))

    def _parts(self, call: DenoiserCall) -> list[tuple[Hashable, DenoiserCall]]:
        return call.parts(self._clock.call)

    def _known_parts(self, call: DenoiserCall) -> list[_Part]:
        """The parts of a call that have kept steps in this image."""
        found = (self._parts_by_size.get((name, each.size)) for name, each in self._parts(call))
        return [part for part in found if part is not None and part.image == self._clock.image and part.steps]

    def enter(self, call: DenoiserCall, step: Step, *, restart: bool) -> None:
        """Point every run at its residual for this call, and set how far it is extrapolated.

        restart: the last kept step and this one run differently, so that no slope may be used between them.
        """
        self._drop_failed()
        self.act = HOLD if step.kind == HELD else KEEP if step.keeps else RUN
        if self.learning:
            self._shown = call if self.act == KEEP else None
            self.act = RUN
        for run in self.runs:
            run.current = run.entered = run.passed = None
        self._now, self.missed = [], None
        if self.act == RUN:
            for part in self._known_parts(call):
                # A step that ran without being kept: residuals from before it are too old.
                part.start_from()
            return
        self._point(call)
        self._keeping, self._restart = None, restart
        if self.act == KEEP:
            self._keeping = self._clock.step
            for part in self._now:
                part.owed.fill_(self._owed(part))
            return
        for part in self._now:
            # A failed call may be repeated.
            if self._clock.step not in part.held:
                part.held.append(self._clock.step)

    def _point(self, call: DenoiserCall) -> None:
        """Point every run at its residual for a call."""
        self._now = [self._part(name, each) for name, each in self._parts(call)]
        for part in self._now:
            part.ahead.fill_(self._distance(part.steps))
        for run in self.runs:
            if run.serves(call):
                found = tuple(part.residual(run) for part in self._now)
                run.current = found[0] if len(found) == 1 else Joined(found)

    def _part(self, name: Hashable, call: DenoiserCall) -> _Part:
        """What is kept for a part of a call. Every image starts without kept steps."""
        key = name, call.size
        if key not in self._parts_by_size:
            with torch.inference_mode(False):
                ahead, owed = (torch.zeros((), device=call.device) for _ in range(2))
            self._parts_by_size[key] = _Part(call.batch, call.shard, ahead, owed)
        part = self._parts_by_size[key]
        if part.image != self._clock.image:
            part.image = self._clock.image
            part.start_from()
        return part

    def keep_shown(self, changes: list[tuple[Run, tuple[Tensor | None, ...]]]) -> None:
        """Keep the residuals of the call that showed what can be held, and has just ended, if its step is kept."""
        call, self._shown = self._shown, None
        if call is None or any(not run.serves(call) for run, _ in changes):
            return
        self._point(call)
        for run, change in changes:
            assert run.current is not None
            run.current.keep(change)
            run.current.leave_inference()
        for part in self._now:
            part.start_from(self._clock.step)

    def leave(self) -> None:
        """At the end of a call that did not fail."""
        if self._keeping is not None:
            for run in self.runs:
                run.passed = None
                if run.current is not None:
                    run.current.leave_inference()
            self._note()
        # Blocks must run if somebody calls them outside of the denoiser.
        self.act = RUN

    def _drop_failed(self) -> None:
        """Start again after a failed call, which may have replaced some residuals and not others."""
        if self._keeping is not None:
            for part in self._now:
                part.start_from()
            self._keeping = None

    def _note(self) -> None:
        """At the end of a kept step: note its error, and the steps that a slope may be taken between."""
        step, self._keeping = self._keeping, None
        assert step is not None
        for part in self._now:
            if self._restart:
                part.start_from(step)
                continue
            if part.steps:
                residuals = [part.residuals[run] for run in self.runs if run.current is not None]
                self.errors.note(self._clock.place(step), self._kept(part), residuals, part.shard)
            part.start_from(*part.steps[-1:], step)

    def _owed(self, part: _Part) -> float:
        """`Kept.owed` of this step; 0 if it cannot make up for the held steps before it."""
        # A solver that clips would cut the correction.
        if not part.steps or self._restart or self._clock.clips:
            return 0.0
        return self._kept(part).owed(self._clock.place())

    def _distance(self, steps: list[int]) -> float:
        """(now - last) / (last - before) in `Place.at`: how far ahead of the last two kept steps this step lies; 0 if
        there is only one."""
        if len(steps) < 2:
            return 0.0
        before, last, now = (self._clock.place(step).at for step in (*steps[-2:], self._clock.step))
        return (now - last) / (last - before) if last != before else 0.0

    def close(self) -> None:
        self.act = RUN

    @property
    def drift(self) -> float | None:
        """How far the last image has drifted, by the errors of its kept steps; None if nothing was held or unknown."""
        drift = self.errors.drift
        return None if drift is None else drift * self._clock.length

    @property
    def nbytes(self) -> int:
        """Memory of all residuals."""
        return sum(each.nbytes for part in self._parts_by_size.values() for each in part.residuals.values())

    # For CUDA graphs.

    def kind(self) -> Hashable | None:
        return tuple(map(weakref.ref, self._now))

    def owners(self) -> list[Any]:
        return list(self._now)

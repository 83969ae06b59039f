"""Holding: which residuals a denoiser call keeps or adds, how far they are extrapolated, and how far off that was."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..families.calls import DenoiserCall
from ..runtime.clock import Clock
from ..runtime.timeline import HELD, Kept, Step
from .errors import Errors
from .residuals import Joined, Residual, Run

# What held blocks do in a call.
RUN, KEEP, HOLD = "run", "keep", "hold"


@dataclass
class _Call:
    """The kept steps of one part of a step's calls, at one size, in an image."""

    image: int
    call: DenoiserCall
    steps: list[int] = field(default_factory=list)  # the last two, or one where no slope may be taken


class Holding:
    """Points every run of held blocks at the residual of a call. Sites ask it what they do."""

    def __init__(self, clock: Clock) -> None:
        self.act = RUN
        self.learning = False  # until a call has shown what can be held
        self._shown: DenoiserCall | None = None  # that call, if it is to be kept
        self.runs: list[Run] = []
        self.errors = Errors()
        self._clock = clock
        self._kept: dict[tuple[Hashable, tuple[Any, ...]], _Call] = {}  # by part and size
        self._pending: tuple[list[_Call], int] | None = None  # the last call's parts, and its step, if it is to be kept
        self._ahead: dict[tuple[Hashable, torch.device], Tensor] = {}  # by part

    def add_run(self, run: Run) -> Run:
        self.runs.append(run)
        return run

    def begin_image(self) -> None:
        """Give up residuals of sizes that the last two images did not have: two sizes may take turns."""
        self.errors.begin_image()
        for (part, size), kept in list(self._kept.items()):
            if kept.image < self._clock.image - 2:
                del self._kept[part, size]
                for run in self.runs:
                    if run.serves(kept.call):
                        run.forget(kept.call, part)

    def known(self, call: DenoiserCall) -> Kept | None:
        """What such a call of this image has shown so far, if all of its parts have shown the same steps."""
        self._drop_failed()
        first, *others = (self._steps(part, each) for part, each in self._parts(call))
        if not first or any(each != first for each in others):
            return None
        *before, last = map(self._clock.place, first)
        # The error of a full step is on its way while the next begins, and is not waited for.
        late = last.number if self._clock.step == first[-1] + 1 else last.number + 1
        held = tuple(map(self._clock.place, range(first[-1] + 1, self._clock.step)))
        return Kept(last, before[0] if before else None, self.errors.bend(late), held)

    def _parts(self, call: DenoiserCall) -> list[tuple[Hashable, DenoiserCall]]:
        return call.parts(self._clock.call)

    def _steps(self, part: Hashable, call: DenoiserCall) -> list[int]:
        """The kept steps of a part, in this image."""
        kept = self._kept.get((part, call.size))
        return kept.steps if kept is not None and kept.image == self._clock.image else []

    def enter(self, call: DenoiserCall, step: Step) -> None:
        """Point every run at the residual of this call, and tell how far the last kept step is."""
        self._drop_failed()
        self.act = HOLD if step.kind == HELD else KEEP if step.keeps else RUN
        if self.learning:
            self._shown = call if self.act == KEEP else None
            self.act = RUN
        for run in self.runs:
            run.entered, run.passed = None, None
        parts = self._parts(call)
        if self.act == RUN:
            for part, each in parts:
                # No slope across a step that ran and was not kept.
                self._steps(part, each).clear()
            return
        kept = [self._call(part, each) for part, each in parts]
        self._pending = (kept, self._clock.step) if self.act == KEEP else None
        self._point(call, [self._distance(each.steps) for each in kept])

    def _call(self, part: Hashable, call: DenoiserCall) -> _Call:
        """What is known of a part, begun anew with every image."""
        kept = self._kept.get((part, call.size))
        if kept is None or kept.image != self._clock.image:
            # The tensors of a call would be kept alive by its ids and timestep.
            known = call._replace(ids=None, timestep=torch.zeros(()))
            kept = self._kept[part, call.size] = _Call(self._clock.image, known)
        return kept

    def _point(self, call: DenoiserCall, distances: list[float]) -> None:
        """Every run at its residuals of a call."""
        parts = self._parts(call)
        aheads = []
        for (part, _), distance in zip(parts, distances, strict=True):
            if (part, call.device) not in self._ahead:
                with torch.inference_mode(False):
                    self._ahead[part, call.device] = torch.zeros((), device=call.device)
            aheads.append(self._ahead[part, call.device].fill_(distance))
        for run in self.runs:
            if run.serves(call):
                run.enter(parts, aheads)
            else:
                run.current = None

    def keep_shown(self, changes: list[tuple[Run, tuple[Tensor | None, ...]]]) -> None:
        """Keep what runs changed in the call that has shown them and just ended, if its step is to be kept."""
        call, self._shown = self._shown, None
        if call is None or any(not run.serves(call) for run, _ in changes):
            return
        parts = self._parts(call)
        self._point(call, [0.0] * len(parts))
        for run, change in changes:
            assert run.current is not None
            run.current.keep(change)
            run.current.leave_inference()
        for part, each in parts:
            self._call(part, each).steps = [self._clock.step]

    def leave(self, *, restart: bool) -> None:
        """At the end of a call that did not fail. restart: whether what ran is another than at the last kept step, so
        that no slope may be taken between the two."""
        if self._pending is not None:
            for run in self.runs:
                run.passed = None
                if run.current is not None:
                    run.current.leave_inference()
            self._note(*self._pending, restart=restart)
        self._pending = None
        # Blocks that are called by themselves run.
        self.act = RUN

    def _drop_failed(self) -> None:
        """A call that failed on the way has left residuals among those of the last that ran: begin anew."""
        if self._pending is not None:
            for kept in self._pending[0]:
                kept.steps.clear()
            self._pending = None

    def _note(self, parts: list[_Call], step: int, *, restart: bool) -> None:
        """A step of a call was kept: its error, and that a slope may be taken from it."""
        for number, kept in enumerate(parts):
            if kept.steps and not restart:
                *before, last = map(self._clock.place, kept.steps)
                residuals = [run.current.parts[number] for run in self.runs if run.current is not None]
                known = Kept(last, before[0] if before else None)
                self.errors.note(self._clock.place(step), known, residuals, kept.call.shard)
            kept.steps = [step] if restart else [*kept.steps[-1:], step]

    def _distance(self, steps: list[int]) -> float:
        """Of this step from the last kept one, over that between the last two; 0 after one."""
        if len(steps) < 2:
            return 0.0
        before, last, now = (self._clock.place(step).at for step in (*steps[-2:], self._clock.step))
        return (now - last) / (last - before) if last != before else 0.0

    def close(self) -> None:
        self.act = RUN

    @property
    def drift(self) -> float | None:
        """How far the last image has drifted, or this one so far, by the errors of its kept steps; None where nothing
        was held."""
        drift = self.errors.drift(lambda number: self._clock.place(number - self._clock.begin))
        return None if drift is None else drift * self._clock.length

    @property
    def nbytes(self) -> int:
        """Memory of all residuals."""
        return sum(run.nbytes for run in self.runs)

    # What recordings of a call must know.

    def kind(self) -> Hashable | None:
        return tuple(id(run.current) for run in self.runs)

    def owners(self) -> list[Residual | Joined | None]:
        return [run.current for run in self.runs]

    def still_owns(self, owners: list[Residual | Joined | None]) -> bool:
        return all(run.owns(residual) for run, residual in zip(self.runs, owners, strict=True))

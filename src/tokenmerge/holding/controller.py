"""Holding: which residuals a denoiser call keeps or adds, and how far they are extrapolated."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..families.calls import DenoiserCall
from ..runtime.clock import Clock
from ..runtime.timeline import HELD, Step
from .residuals import Residual, Run

# What held blocks do in a call.
RUN, KEEP, HOLD = "run", "keep", "hold"


@dataclass
class _Kept:
    """The kept steps of one call of the step, at one size, in an image."""

    image: int
    call: DenoiserCall
    steps: list[int] = field(default_factory=list)  # the last two, or one where no slope may be taken


class Holding:
    """Points every run of held blocks at the residual of a call. Sites ask it what they do."""

    def __init__(self, clock: Clock) -> None:
        self.act = RUN
        self.runs: list[Run] = []
        self._clock = clock
        self._kept: dict[tuple[int, tuple[Any, ...]], _Kept] = {}  # by call of the step and size
        self._pending: tuple[_Kept, int] | None = None  # the last call's, and its step, if it is to be kept
        self._ahead: dict[tuple[int, torch.device], Tensor] = {}  # by call of the step

    def add_run(self, run: Run) -> Run:
        self.runs.append(run)
        return run

    def begin_image(self) -> None:
        """Give up residuals of sizes that the last two images did not have: two sizes may take turns."""
        for (turn, size), kept in list(self._kept.items()):
            if kept.image < self._clock.image - 2:
                del self._kept[turn, size]
                for run in self.runs:
                    if run.serves(kept.call):
                        run.forget(kept.call, turn)

    def last_kept(self, call: DenoiserCall) -> int | None:
        """The last step of this image that such a call was kept at."""
        self._drop_failed()
        kept = self._kept.get((self._clock.call, call.size))
        return kept.steps[-1] if kept is not None and kept.image == self._clock.image and kept.steps else None

    def enter(self, call: DenoiserCall, step: Step) -> None:
        """Point every run at the residual of this call, and tell how far the last kept step is."""
        self._drop_failed()
        self.act = HOLD if step.kind == HELD else KEEP if step.keeps else RUN
        for run in self.runs:
            run.entered = None
        turn = self._clock.call
        kept = self._kept.get((turn, call.size))
        if self.act == RUN:
            if kept is not None:
                # No slope across a step that ran and was not kept.
                kept.steps.clear()
            return
        if kept is None or kept.image != self._clock.image:
            # The tensors of a call would be kept alive by its ids and timestep.
            known = call._replace(ids=None, timestep=torch.zeros(()))
            kept = self._kept[turn, call.size] = _Kept(self._clock.image, known)
        self._pending = (kept, self._clock.step) if self.act == KEEP else None
        if (turn, call.device) not in self._ahead:
            with torch.inference_mode(False):
                self._ahead[turn, call.device] = torch.zeros((), device=call.device)
        ahead = self._ahead[turn, call.device]
        ahead.fill_(self._distance(kept.steps))
        for run in self.runs:
            if run.serves(call):
                run.enter(call, turn, ahead)
            else:
                run.current = None

    def leave(self, *, restart: bool) -> None:
        """At the end of a call that did not fail. restart: whether what ran is another than at the last kept step, so
        that no slope may be taken between the two."""
        if self._pending is not None:
            kept, step = self._pending
            kept.steps = [step] if restart else [*kept.steps[-1:], step]
        self._pending = None
        # Blocks that are called by themselves run.
        self.act = RUN

    def _drop_failed(self) -> None:
        """A call that failed on the way has left residuals among those of the last that ran: begin anew."""
        if self._pending is not None:
            self._pending[0].steps.clear()
            self._pending = None

    def _distance(self, steps: list[int]) -> float:
        """Of this step from the last kept one, over that between the last two; 0 after one."""
        if len(steps) < 2:
            return 0.0
        before, last, now = (self._clock.distance(step) for step in (*steps[-2:], self._clock.step))
        return (now - last) / (last - before) if last != before else 0.0

    def close(self) -> None:
        self.act = RUN

    @property
    def nbytes(self) -> int:
        """Memory of all residuals."""
        return sum(run.nbytes for run in self.runs)

    # What recordings of a call must know.

    def kind(self) -> Hashable:
        return tuple(id(run.current) for run in self.runs)

    def owners(self) -> list[Residual | None]:
        return [run.current for run in self.runs]

    def still_owns(self, owners: list[Residual | None]) -> bool:
        return all(run.owns(residual) for run, residual in zip(self.runs, owners, strict=True))

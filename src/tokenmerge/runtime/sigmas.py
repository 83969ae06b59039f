"""Follow a host that tells the noise of every evaluation, in place of a diffusers scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..families.calls import DenoiserCall
from .clock import Clock

# By which levels may differ that are the same: hosts compute them twice, and round.
_SAME = 1e-3


class SigmaFollower:
    """Keeps the clock of one picture. The host calls `evaluate` before the denoiser calls of an evaluation."""

    waits = False
    scheduler = None

    def __init__(self, levels: Sequence[float], gain: float = 1.0) -> None:
        """levels: of noise to signal, of every evaluation to come. gain: by which the solver magnifies errors."""
        self.clock = Clock()
        self._levels = list(levels)
        self._gain = gain
        self._inside = False  # whether a call has begun and not ended: one that fails does not

    def evaluate(self, level: float) -> None:
        """An evaluation begins, at this level of noise to signal."""
        clock = self.clock
        if clock.image < 0:
            clock.start_image(len(self._levels), self._levels, self._gain)
        else:
            clock.next_step()
        told = self._levels[clock.step : clock.step + 1]
        if not told or not math.isclose(told[0], level, rel_tol=_SAME):
            # Solvers that choose their own steps: what is left of the schedule lies below.
            rest = [each for each in self._levels[clock.step :] if each < level]
            self._levels = [*self._levels[: clock.step], level, *rest]
            clock.correct_levels(self._levels)

    def enter(self, call: DenoiserCall) -> None:
        self.clock.call += self.clock.call < 0 or not self._inside
        self._inside = True

    def leave(self) -> None:
        self._inside = False

    def close(self) -> None:
        """It listens to nobody."""

"""Follow a host that passes the noise level of every evaluation itself, and has no diffusers scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..families.calls import DenoiserCall
from .clock import Clock
from .prediction import PICTURES, Predictor

# Relative rounding error of a level: hosts compute levels twice.
_SAME = 1e-3


class SigmaFollower:
    """Keeps the clock of one picture. The host must make every evaluation of its model through `evaluate`."""

    waits = False
    scheduler = None

    def __init__(self, levels: Sequence[float], gain: float = 1.0) -> None:
        """levels: noise to signal of every planned evaluation. gain: how much the solver magnifies errors."""
        self.clock = Clock()
        self._levels = list(levels)
        self._gain = gain
        self._predictor: Predictor | None = None
        self._leaves_out: Callable[[DenoiserCall], bool] = _leaves_nothing_out

    def predict(self, predictor: Predictor, leaves_out: Callable[[DenoiserCall], bool]) -> None:
        """From now on hold whole evaluations. leaves_out: whether to, given a call that stands for all of them."""
        self._predictor, self._leaves_out = predictor, leaves_out

    def evaluate(self, level: float, sample: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """The clean picture of a sample after guidance: predicted by the model, or held. level: noise to signal.

        run: evaluates the model, in one or more denoiser calls. It is not called if the clean prediction is held.
        """
        self._begin(level)
        if self._predictor is None:
            return run()
        size = tuple(sample.shape[1:])
        whole = DenoiserCall(sample.shape[0], sample.dtype, sample.device, torch.tensor(level), shapes=size)
        self._predictor.begin(PICTURES, whole)
        picture = sample if self._leaves_out(whole) else run()
        return self._predictor.step(picture, sample, level)

    def _begin(self, level: float) -> None:
        clock = self.clock
        if clock.image < 0:
            clock.start_image(len(self._levels), self._levels, gain=self._gain)
        else:
            clock.next_step()
        planned = self._levels[clock.step : clock.step + 1]
        if not planned or not math.isclose(planned[0], level, rel_tol=_SAME):
            # The solver chooses its own steps: only lower levels are left of the schedule.
            rest = [each for each in self._levels[clock.step :] if each < level]
            self._levels = [*self._levels[: clock.step], level, *rest]
            clock.correct_levels(self._levels)

    def enter(self, call: DenoiserCall) -> None:
        self.clock.begin_call()

    def close(self) -> None:
        """Drop the predictor and its callback: both refer back to this follower, and to all residuals."""
        self._predictor, self._leaves_out = None, _leaves_nothing_out


def _leaves_nothing_out(call: DenoiserCall) -> bool:
    return False

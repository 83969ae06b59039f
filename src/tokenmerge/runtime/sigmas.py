"""Follow a host that tells the noise of every evaluation, in place of a diffusers scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..families.calls import DenoiserCall
from .clock import Clock
from .prediction import PICTURES, Predictor

# By which levels may differ that are the same: hosts compute them twice, and round.
_SAME = 1e-3


class SigmaFollower:
    """Keeps the clock of one picture. The host makes every evaluation of its model by `evaluate`."""

    waits = False
    scheduler = None

    def __init__(self, levels: Sequence[float], gain: float = 1.0) -> None:
        """levels: of noise to signal, of every evaluation to come. gain: by which the solver magnifies errors."""
        self.clock = Clock()
        self._levels = list(levels)
        self._gain = gain
        self._predictor: Predictor | None = None
        self._leaves_out: Callable[[DenoiserCall], bool] = _nothing
        self._inside = False  # whether a call has begun and not ended: one that fails does not

    def predict(self, predictor: Predictor, leaves_out: Callable[[DenoiserCall], bool]) -> None:
        """From now on hold whole evaluations, where `leaves_out` says so of what stands for their calls."""
        self._predictor, self._leaves_out = predictor, leaves_out

    def evaluate(self, level: float, sample: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """The clean picture that the model sees in a sample at this level of noise to signal, after guidance.

        run: asks the model, by one denoiser call or several. Where the clean prediction is held it is not called.
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
        """It listens to nobody. What it was told to ask leads back to it, and to all that is held."""
        self._predictor, self._leaves_out = None, _nothing


def _nothing(call: DenoiserCall) -> bool:
    return False

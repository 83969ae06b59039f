"""Errors: how far extrapolations were off. Every kept step measures one at no cost; it is read two steps later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from ..families.calls import Shard
from ..runtime.levels import Place
from ..runtime.timeline import Kept, bend_of
from .residuals import Residual


@dataclass
class Measured:
    """The error of extrapolating to one kept step (`now`) from the steps before it (`kept`), for each of its calls."""

    now: Place
    kept: Kept
    calls: list[Reading] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Relative error of the worst sample and call; NaN if any is NaN. It decides what may be held."""
        errors = [call.value for call in self.calls]
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    @property
    def bend(self) -> float | None:
        return bend_of(self.error, self.now, self.kept)

    @property
    def mean(self) -> float:
        """Relative error of the worst sample: the mean of all calls, as guidance adds them up. It estimates drift."""
        return fmean(call.value for call in self.calls)

    def drift(self, bend: float | None) -> float | None:
        """How far the steps held before this one moved the picture from the plain one; None if unknown.

        bend: `Kept.bend` by this error, or by another if this one says nothing about it.
        """
        if self.kept.before is None:
            # Held without a slope. No bend is needed: the error of a held step is that of this one, scaled by distance.
            shown = self.kept.growth_to(self.now)
            missed = sum(self.kept.growth_to(place) * place.weight for place in self.kept.held)
            return self.mean * missed / shown if shown else None
        *before, last = self.kept.held
        return self.kept._replace(bend=bend, held=tuple(before)).drift_to(last)


class Errors:
    """The errors of one image, in the order of its kept steps."""

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.assumed: float | None = None  # replaces measured bends in benchmarks, where weights may be random

    def begin_image(self) -> None:
        self.measured = []

    def note(self, now: Place, kept: Kept, residuals: Sequence[Residual], shard: Shard | None = None) -> None:
        """At the end of a kept call: measure its relative error over all runs, of the worst sample."""
        if not self.measured or self.measured[-1].now.number != now.number:
            self.measured.append(Measured(now, kept))
        squares = torch.stack([residual.squares for residual in residuals]).sum(0)
        if shard is not None:
            # Sum over all tokens, so that all processes decide alike.
            torch.distributed.all_reduce(squares, group=shard.group)
        off, length = squares
        self.measured[-1].calls.append(Reading((off / length).max().sqrt()))

    def bend(self, before: int) -> float | None:
        """`Kept.bend` by the last error that says anything about it, measured before a step; None without one."""
        known = [each for each in self.measured if each.now.number < before]
        if self.assumed is not None and any(each.kept.before is not None for each in known):
            return self.assumed
        return next((bend for each in reversed(known) if (bend := each.bend) is not None), None)

    @property
    def drift(self) -> float | None:
        """How far the picture drifted, relative to the model's output; None if nothing was held, or if it is unknown.

        Errors between two kept steps add up. Those after different kept steps are independent, so their squares do.
        """
        bends = [bend_of(each.mean, each.now, each.kept) for each in self.measured]
        # An error that says nothing about bends takes the bend of the one before, or else of the next that does.
        last = next((bend for bend in bends if bend is not None), None)
        drifts = []
        for each, bend in zip(self.measured, bends, strict=True):
            last = last if bend is None else bend
            if each.kept.held:
                drifts.append(each.drift(last))
        known = [drift for drift in drifts if drift is not None]
        return math.hypot(*known) or None if len(known) == len(drifts) else None

    @property
    def nonsense(self) -> int:
        """The number of errors that were not finite."""
        return sum(not math.isfinite(each.error) for each in self.measured)


class Reading:
    """A number that is copied from the device without waiting; reading `value` waits."""

    def __init__(self, number: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._number = number
        if number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(number.device))

    @property
    def value(self) -> float:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return float(self._number)

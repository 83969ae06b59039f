"""Errors: how far extrapolations were off, which every kept step shows for nothing. They are read late."""

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
    """The error of extrapolating to one kept step, from what was known before it."""

    now: Place
    kept: Kept
    calls: list[Reading] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Relative, of the worst sample and call; NaN if any is."""
        read = [call.value for call in self.calls]
        return math.nan if any(map(math.isnan, read)) else max(read)

    @property
    def bend(self) -> float | None:
        """By which is decided what may be held."""
        return bend_of(self.error, self.now, self.kept)

    @property
    def mean(self) -> float:
        """Of the worst sample, over calls: guidance adds their outputs up, and the worst alone says too much."""
        return fmean(call.value for call in self.calls)

    def drift(self, bend: float | None) -> float | None:
        """How far the picture drifted in the steps that were held since the last kept one, if it can be told. bend:
        how much residuals bend, as this error or another tells."""
        if self.kept.before is None:
            # One residual was held, without a slope: that needs no bend.
            here = self.kept.growth_to(self.now)
            grown = sum(self.kept.growth_to(place) * place.weight for place in self.kept.held)
            return self.mean * grown / here if here else None
        *before, last = self.kept.held
        return self.kept._replace(bend=bend, held=tuple(before)).drift_to(last)


class Errors:
    """The errors of one image, in the order of its steps."""

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.assumed: float | None = None  # how much residuals bend, where weights are random and tell nothing of it

    def begin_image(self) -> None:
        self.measured = []

    def note(self, now: Place, kept: Kept, residuals: Sequence[Residual], shard: Shard | None = None) -> None:
        """At the end of a call that was kept: its error over all runs of blocks, by the worst sample."""
        if not self.measured or self.measured[-1].now.number != now.number:
            self.measured.append(Measured(now, kept))
        squares = torch.stack([residual.squares for residual in residuals]).sum(0)
        if shard is not None:
            # Of all tokens, so that every process decides as one would that had them all.
            torch.distributed.all_reduce(squares, group=shard.group)
        off, length = squares
        self.measured[-1].calls.append(Reading((off / length).max().sqrt()))

    def bend(self, before: int) -> float | None:
        """What the last error before a step told of how much residuals bend; None if there was none."""
        known = [each for each in self.measured if each.now.number < before]
        if self.assumed is not None and any(each.kept.before is not None for each in known):
            return self.assumed
        return next((bend for each in reversed(known) if (bend := each.bend) is not None), None)

    @property
    def drift(self) -> float | None:
        """How far the picture drifted, over what the model gives out; None where nothing was held, or what was held
        cannot be told of. Between kept steps errors add up; those of different ones have nothing in common."""
        bends = [bend_of(each.mean, each.now, each.kept) for each in self.measured]
        # Where an error tells nothing of bends, the one before it does; at first, the next.
        usual = next((bend for bend in bends if bend is not None), None)
        drifts = []
        for each, bend in zip(self.measured, bends, strict=True):
            usual = usual if bend is None else bend
            if each.kept.held:
                drifts.append(each.drift(usual))
        known = [drift for drift in drifts if drift is not None]
        return math.hypot(*known) or None if len(known) == len(drifts) else None

    @property
    def nonsense(self) -> int:
        """How many errors were not finite."""
        return sum(not math.isfinite(each.error) for each in self.measured)


class Reading:
    """A number on its way from the device."""

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

"""Residuals: what a run of blocks changed in its tokens, kept at full steps and extrapolated in held ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..families.calls import DenoiserCall


class _Stream:
    """The residual of one input of a run. Full steps overwrite it in place, and compiled code reads it."""

    value: Tensor | None = None
    change: Tensor | None = None  # since the full step before

    def keep(self, new: Tensor, usable: Tensor | None) -> None:
        """usable: on the device, whether the slope may be used; if not, the next steps hold the value alone."""
        if self.value is None or self.change is None or self.value.shape != new.shape:
            # Only a block knows how many tokens it has: some models append registers or pad.
            self.value, self.change = new, torch.zeros_like(new)
            return
        change = new - self.value
        self.change.copy_(change if usable is None else torch.where(usable, change, 0))
        self.value.copy_(new)

    def at(self, ahead: Tensor) -> Tensor | None:
        if self.value is None or self.change is None:
            return None
        # After the first kept step the change still comes from the last image, and need not be finite.
        return torch.where(ahead == 0, self.value, self.value + self.change * ahead.to(self.value.dtype))

    def leave_inference(self) -> None:
        """Tensors made in inference mode cannot be overwritten outside it."""
        if self.value is not None and self.change is not None and self.value.is_inference():
            with torch.inference_mode(False):
                self.value, self.change = self.value.clone(), self.change.clone()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.value, self.change) if each is not None)


class Residual:
    """The residual of one run: of its image tokens, its text tokens, and whatever else its blocks change."""

    def __init__(self, streams: int, samples: int, ahead: Tensor, owed: Tensor) -> None:
        self.streams = tuple(_Stream() for _ in range(streams))
        # fp32 scalar: distance from the last kept step, over the distance between the last two; 0 after one.
        self.ahead = ahead
        # fp32 scalar: what held steps have missed, over the error of this step.
        self.owed = owed
        # At a kept step, for each sample: squared length of the extrapolation's error, and of the residual.
        self.squares = torch.zeros(2, samples, device=ahead.device)

    @property
    def parts(self) -> tuple[Residual, ...]:
        return (self,)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.streams)

    def keep(self, changes: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Take the residual of a full step: [B, N, C] for each stream, None where the blocks return nothing. Returns
        what held steps have missed."""
        errors = [_error(*each) for each in zip(changes, self.now(), strict=True)]
        usable = self._compare(changes[0], errors[0])
        for stream, new in zip(self.streams, changes, strict=True):
            if new is not None:
                stream.keep(new, usable)
        return tuple(self._missed(*each, usable) for each in zip(changes, errors, strict=True))

    def _compare(self, new: Tensor | None, error: Tensor | None) -> Tensor | None:
        """Measure the error of the extrapolation to this step, on image tokens only. Returns whether it is a number."""
        if new is None or error is None:
            return None
        # In some models the samples lie along another axis.
        samples = self.squares.shape[1] if new.shape[0] == self.squares.shape[1] else 1
        # One after the other: a copy in fp32 may take twice the memory of the tokens.
        squares = [each.reshape(samples, -1).float().square().sum(1) for each in (error, new)]
        self.squares.copy_(torch.stack(squares))
        return self.squares.isfinite().all()

    def _missed(self, new: Tensor | None, error: Tensor | None, usable: Tensor | None) -> Tensor | None:
        """What held steps have missed of a stream, by what this step shows."""
        if new is None or error is None or usable is None:
            return None if new is None else torch.zeros_like(new)
        return torch.where(usable & (self.owed != 0), error * self.owed.to(error.dtype), 0)

    def now(self) -> tuple[Tensor | None, ...]:
        """The residual of every stream, extrapolated to this step."""
        return tuple(stream.at(self.ahead) for stream in self.streams)

    def leave_inference(self) -> None:
        for stream in self.streams:
            stream.leave_inference()


@dataclass(frozen=True)
class Joined:
    """The residuals of conditions that one call joins along the batch."""

    parts: tuple[Residual, ...]

    def keep(self, changes: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        count = len(self.parts)
        split = [(None,) * count if each is None else each.chunk(count) for each in changes]
        return _joined([part.keep(mine) for part, mine in zip(self.parts, zip(*split, strict=True), strict=True)])

    def now(self) -> tuple[Tensor | None, ...]:
        return _joined([part.now() for part in self.parts])

    def leave_inference(self) -> None:
        for part in self.parts:
            part.leave_inference()


def _error(new: Tensor | None, expected: Tensor | None) -> Tensor | None:
    """How far a residual is from the extrapolated one, if there is one of its shape."""
    return None if new is None or expected is None or expected.shape != new.shape else new - expected


def _joined(parts: list[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """The streams of all parts, along the batch."""
    streams = ([each for each in stream if each is not None] for stream in zip(*parts, strict=True))
    return tuple(torch.cat(stream) if stream else None for stream in streams)


@dataclass(eq=False)
class Run:
    """Blocks that are held together."""

    streams: int
    apart: bool | None = None  # True: for calls where something acts between blocks; False: for others; None: for all
    last: bool = True  # of the runs of a call: makes up for what held steps have missed
    adds: bool = False  # whether what it misses lasts up to the last run, to which it is handed on
    current: Residual | Joined | None = None  # in this call
    # At a full step, until the last block has run: what entered the first block, and what the last one returned.
    entered: tuple[Tensor, ...] | None = None
    passed: tuple[Tensor | None, ...] | None = None

    def serves(self, call: DenoiserCall) -> bool:
        return self.apart in (None, call.apart)

"""Residuals: output minus input of a run of blocks, kept at kept steps and extrapolated in held steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..families.calls import DenoiserCall


class _Stream:
    """The residual of one stream of a run: image tokens, text tokens, or what else its blocks change.

    Kept steps overwrite the tensors in place, since compiled code and CUDA graphs read them.
    """

    value: Tensor | None = None  # at the last kept step
    change: Tensor | None = None  # since the kept step before it

    def keep(self, new: Tensor, usable: Tensor | None) -> None:
        """Take the residual of a kept step. usable: bool scalar on the device, whether its error is finite; if not,
        held steps add the value alone."""
        if self.value is None or self.change is None or self.value.shape != new.shape:
            # Only the blocks know their number of tokens: some models append registers or pad.
            self.value, self.change = new, torch.zeros_like(new)
            return
        change = new - self.value
        self.change.copy_(change if usable is None else torch.where(usable, change, 0))
        self.value.copy_(new)

    def at(self, ahead: Tensor) -> Tensor | None:
        """value + change * ahead."""
        if self.value is None or self.change is None:
            return None
        # After the first kept step of an image, `ahead` is 0 and the change is from the last image, perhaps not finite.
        return torch.where(ahead == 0, self.value, self.value + self.change * ahead.to(self.value.dtype))

    def leave_inference(self) -> None:
        """Copy tensors made in inference mode, since they could not be overwritten outside of it."""
        if self.value is not None and self.change is not None and self.value.is_inference():
            with torch.inference_mode(False):
                self.value, self.change = self.value.clone(), self.change.clone()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.value, self.change) if each is not None)


class Residual:
    """The residual of one run, for all of its streams."""

    def __init__(self, streams: int, samples: int, ahead: Tensor, owed: Tensor) -> None:
        self.streams = tuple(_Stream() for _ in range(streams))
        # fp32 scalar: (now - last) / (last - before), the distance from the last kept step over that between the last
        # two; 0 if only one is kept.
        self.ahead = ahead
        # fp32 scalar: how many times a full step adds its own error to make up for held steps, see `Kept.owed`.
        self.owed = owed
        # fp32 [2, samples], at a kept step: squared norms of the extrapolation's error, and of the residual.
        self.squares = torch.zeros(2, samples, device=ahead.device)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.streams)

    def keep(self, changes: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Take the residual of a kept step. Returns the correction for what held steps have missed: owed * error.

        Both are [B, N, C] for each stream, or None if the blocks no longer return it.
        """
        errors = [_error(*each) for each in zip(changes, self.now(), strict=True)]
        usable = self._compare(changes[0], errors[0])
        for stream, new in zip(self.streams, changes, strict=True):
            if new is not None:
                stream.keep(new, usable)
        return tuple(self._missed(*each, usable) for each in zip(changes, errors, strict=True))

    def _compare(self, new: Tensor | None, error: Tensor | None) -> Tensor | None:
        """Measure the error of the extrapolation, on image tokens alone. Returns whether it is finite."""
        if new is None or error is None:
            return None
        # Some models have the batch on another axis; then all samples count as one.
        samples = self.squares.shape[1] if new.shape[0] == self.squares.shape[1] else 1
        # One after the other: an fp32 copy may take twice the memory of the tokens.
        squares = [each.reshape(samples, -1).float().square().sum(1) for each in (error, new)]
        self.squares.copy_(torch.stack(squares))
        return self.squares.isfinite().all()

    def _missed(self, new: Tensor | None, error: Tensor | None, usable: Tensor | None) -> Tensor | None:
        """What held steps have missed of a stream: owed * error, or zeros."""
        if new is None or error is None or usable is None:
            return None if new is None else torch.zeros_like(new)
        return torch.where(usable & (self.owed != 0), error * self.owed.to(error.dtype), 0)

    def now(self) -> tuple[Tensor | None, ...]:
        """The residual of every stream, extrapolated to this step; None for what is not kept."""
        return tuple(stream.at(self.ahead) for stream in self.streams)

    def leave_inference(self) -> None:
        for stream in self.streams:
            stream.leave_inference()


@dataclass(frozen=True)
class Joined:
    """The residuals of several conditions that one call joins along the batch."""

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
    """A residual minus the extrapolated one; None without one of the same shape."""
    return None if new is None or expected is None or expected.shape != new.shape else new - expected


def _joined(parts: list[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """The streams of all parts, concatenated along the batch."""
    streams = ([each for each in stream if each is not None] for stream in zip(*parts, strict=True))
    return tuple(torch.cat(stream) if stream else None for stream in streams)


@dataclass(eq=False)
class Run:
    """Blocks that are held together."""

    streams: int
    apart: bool | None = None  # True: for calls where something acts between blocks; False: for others; None: for all
    last: bool = True  # the last run of a call: it makes up for what held steps have missed
    adds: bool = False  # whether its change stays in the tokens up to the last run, which then makes up for it, too
    current: Residual | Joined | None = None  # its residual for this call
    entered: tuple[Tensor, ...] | None = None  # at a kept step: what entered the first block
    passed: tuple[Tensor | None, ...] | None = None  # at a kept step: what the block before returned

    def serves(self, call: DenoiserCall) -> bool:
        return self.apart in (None, call.apart)

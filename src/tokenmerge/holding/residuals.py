"""Residuals: what a run of blocks changed in its tokens, kept at full steps and extrapolated in held ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..families.calls import DenoiserCall


class _Stream:
    """What blocks changed in one of their inputs: a value that full steps overwrite in place and compiled code reads,
    and its change since the one before."""

    value: Tensor | None = None
    change: Tensor | None = None

    def keep(self, new: Tensor, usable: Tensor | None) -> None:
        """usable: on the device, whether a slope may be taken; where not, the next steps hold the value alone."""
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
        # After the first kept step of an image the change is one from the image before, which need not be finite.
        return torch.where(ahead == 0, self.value, self.value + self.change * ahead.to(self.value.dtype))

    def leave_inference(self) -> None:
        """Tensors of inference mode could not be overwritten outside of it."""
        if self.value is not None and self.change is not None and self.value.is_inference():
            with torch.inference_mode(False):
                self.value, self.change = self.value.clone(), self.change.clone()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.value, self.change) if each is not None)


class Residual:
    """The residual of one run at one size and call of the step: of its image tokens, its text tokens, and whatever else
    its blocks change."""

    def __init__(self, streams: int, samples: int, ahead: Tensor) -> None:
        self.streams = tuple(_Stream() for _ in range(streams))
        # fp32 scalar: how far this step is from the last kept one, in distances between the last two; 0 after one.
        self.ahead = ahead
        # At a kept step: squared length of the extrapolation's error and of the residual itself, of every sample.
        self.squares = torch.zeros(2, samples, device=ahead.device)

    @property
    def parts(self) -> tuple[Residual, ...]:
        return (self,)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.streams)

    def keep(self, changes: tuple[Tensor | None, ...]) -> None:
        """Take the residual of a full step, [B, N, C] for each stream; None where blocks give none out."""
        image = changes[0]
        usable = None if image is None else self._compare(image)
        for stream, new in zip(self.streams, changes, strict=True):
            if new is not None:
                stream.keep(new, usable)

    def _compare(self, new: Tensor) -> Tensor | None:
        """Note how far the extrapolation to this step would have been off; of image tokens, which alone are drawn."""
        expected = self.streams[0].at(self.ahead)
        if expected is None or expected.shape != new.shape:
            return None
        # Blocks of some models have their samples along another axis.
        samples = self.squares.shape[1] if new.shape[0] == self.squares.shape[1] else 1
        off, length = (each.reshape(samples, -1).float() for each in (new - expected, new))
        self.squares.copy_(torch.stack([off.square().sum(1), length.square().sum(1)]))
        return self.squares.isfinite().all()

    def now(self) -> tuple[Tensor | None, ...]:
        """The residual of every stream, extrapolated to this step."""
        return tuple(stream.at(self.ahead) for stream in self.streams)

    def leave_inference(self) -> None:
        for stream in self.streams:
            stream.leave_inference()


@dataclass(frozen=True)
class Joined:
    """The residuals of conditions that one call has joined, one after the other along the batch."""

    parts: tuple[Residual, ...]

    def keep(self, changes: tuple[Tensor | None, ...]) -> None:
        count = len(self.parts)
        split = [(None,) * count if each is None else each.chunk(count) for each in changes]
        for part, mine in zip(self.parts, zip(*split, strict=True), strict=True):
            part.keep(mine)

    def now(self) -> tuple[Tensor | None, ...]:
        streams = zip(*(part.now() for part in self.parts), strict=True)
        return tuple(_joined([each for each in stream if each is not None]) for stream in streams)

    def leave_inference(self) -> None:
        for part in self.parts:
            part.leave_inference()


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if parts else None


@dataclass
class Run:
    """Blocks that are held together: all their residuals, by size and call of the step."""

    streams: int
    apart: bool | None = None  # whether it is for calls where something acts between blocks, or does not; None: for all
    current: Residual | Joined | None = None
    # At a full step, until the last block has run: what entered the first.
    entered: tuple[Tensor, ...] | None = None
    passed: tuple[Tensor | None, ...] | None = None  # at a full step, what the last block gave on
    _residuals: dict[tuple[Any, Hashable], Residual] = field(default_factory=dict)

    def serves(self, call: DenoiserCall) -> bool:
        return self.apart in (None, call.apart)

    def enter(self, parts: Sequence[tuple[Hashable, DenoiserCall]], aheads: Sequence[Tensor]) -> None:
        """Point `current` at the residuals of a call's parts."""
        found = [self._residual(part, call, ahead) for (part, call), ahead in zip(parts, aheads, strict=True)]
        self.current = found[0] if len(found) == 1 else Joined(tuple(found))

    def _residual(self, part: Hashable, call: DenoiserCall, ahead: Tensor) -> Residual:
        key = (call.size, part)
        if key not in self._residuals:
            # Inference tensors could not be overwritten outside of inference mode.
            with torch.inference_mode(False):
                self._residuals[key] = Residual(self.streams, call.batch, ahead)
        return self._residuals[key]

    def forget(self, call: DenoiserCall, part: Hashable) -> None:
        self._residuals.pop((call.size, part), None)

    def owns(self, residual: Residual | Joined | None) -> bool:
        return residual is None or any(each is residual for each in self._residuals.values())

    @property
    def nbytes(self) -> int:
        return sum(residual.nbytes for residual in self._residuals.values())

"""Gaps: what merging left out of a block's change at the last anchor, added to it until the next one.

At an anchor a block runs on all tokens and on merged ones. The gap between the two changes is the error of merging; it
varies slowly from step to step, so most of it can be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

_FLOAT8 = torch.float8_e4m3fn
# Keeps a gap of zeros from a division by zero.
_LEAST_SCALE = 1e-30


class GapSize(NamedTuple):
    """What the tensors of a gap depend on."""

    batch: int
    tokens: int
    text_tokens: int  # 0 where the block gives no text tokens out
    dtype: torch.dtype
    device: torch.device


class Kept:
    """A tensor that anchors overwrite in place and compiled code reads: as it is, or in 8 bits with one scale."""

    def __init__(self, shape: tuple[int, ...], size: GapSize, *, float8: bool) -> None:
        self.dtype = size.dtype
        self.values = torch.zeros(shape, dtype=_FLOAT8 if float8 else size.dtype, device=size.device)
        self.scale = torch.ones((), device=size.device) if float8 else None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def write(self, new: Tensor) -> None:
        if self.scale is None:
            self.values.copy_(new)
        else:
            self.scale.copy_((new.abs().amax().float() / torch.finfo(_FLOAT8).max).clamp_min(_LEAST_SCALE))
            self.values.copy_(new.float() / self.scale)

    def read(self) -> Tensor:
        return self.values if self.scale is None else (self.values.float() * self.scale).to(self.dtype)


class Gap:
    """The gap of one site at one size and call of the step."""

    def __init__(self, size: GapSize, width: int, ahead: Tensor, *, linear: bool, float8: bool) -> None:
        image, text = (size.batch, size.tokens, width), (size.batch, size.text_tokens, width)
        self.image = Kept(image, size, float8=float8)
        self.text = Kept(text, size, float8=float8) if size.text_tokens else None
        # What the last anchor changed, where gaps are extrapolated.
        self.image_change = Kept(image, size, float8=float8) if linear else None
        self.text_change = Kept(text, size, float8=float8) if linear and size.text_tokens else None
        # fp32 scalar: how far this step is from the last anchor, in distances between the last two.
        self.ahead = ahead

    @property
    def nbytes(self) -> int:
        kept = (self.image, self.text, self.image_change, self.text_change)
        return sum(each.nbytes for each in kept if each is not None)

    def keep(self, image: Tensor, text: Tensor | None) -> None:
        """Take the gaps of an anchor, [B, N, C] and [B, T, C]."""
        _keep(image, self.image, self.image_change)
        if text is not None and self.text is not None:
            _keep(text, self.text, self.text_change)

    def image_now(self) -> Tensor:
        """[B, N, C] at this step."""
        return _at(self.image, self.image_change, self.ahead)

    def text_now(self) -> Tensor | None:
        """[B, T, C] at this step."""
        return None if self.text is None else _at(self.text, self.text_change, self.ahead)


@dataclass
class GapMemory:
    """All gaps of one site, or of a run of held blocks."""

    width: int
    has_text: bool
    apart: bool | None = None  # whether it is for calls where something acts between blocks, or does not; None: for all
    current: Gap | None = None
    # Of a run of held blocks, at an anchor until the last of them has run: the image and text tokens that entered it.
    entered: tuple[Tensor, Tensor | None] | None = None
    _gaps: dict[tuple[GapSize, int], Gap] = field(default_factory=dict)

    def enter(self, size: GapSize, turn: int, ahead: Tensor, *, linear: bool, float8: bool) -> None:
        """Point `current` at the gap of a call, the one with number `turn` of its step."""
        key = (size if self.has_text else size._replace(text_tokens=0), turn)
        if key not in self._gaps:
            # Inference tensors could not be overwritten outside of inference mode.
            with torch.inference_mode(False):
                self._gaps[key] = Gap(key[0], self.width, ahead, linear=linear, float8=float8)
        self.current = self._gaps[key]

    def forget(self, size: GapSize, turn: int) -> None:
        """Give up the memory of a gap."""
        self._gaps.pop((size if self.has_text else size._replace(text_tokens=0), turn), None)

    def owns(self, gap: Gap | None) -> bool:
        return gap is None or any(each is gap for each in self._gaps.values())

    @property
    def nbytes(self) -> int:
        return sum(gap.nbytes for gap in self._gaps.values())


def _keep(new: Tensor, held: Kept, change: Kept | None) -> None:
    if change is not None:
        change.write(new - held.read())
    held.write(new)


def _at(held: Kept, change: Kept | None, ahead: Tensor) -> Tensor:
    if change is None:
        return held.read()
    # After the first anchor of an image the change is one from the image before, which need not be finite.
    now = held.read()
    return torch.where(ahead == 0, now, now + change.read() * ahead.to(now.dtype))

"""Gaps: what merging left out of a block's change at the last anchor, added to it until the next one.

At an anchor a block runs on all tokens and on merged ones. The gap between the two changes is the error of merging; it
varies slowly from step to step, so most of it can be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class GapSize(NamedTuple):
    """What the tensors of a gap depend on."""

    batch: int
    tokens: int
    text_tokens: int  # 0 where the block gives no text tokens out
    dtype: torch.dtype
    device: torch.device


@dataclass
class Gap:
    """The gap of one site at one size and call of the step. Anchors overwrite it in place; compiled code reads it."""

    image: Tensor  # [B, N, C]
    text: Tensor | None  # [B, T, C]
    image_change: Tensor | None  # [B, N, C] by the last anchor, where gaps are extrapolated
    text_change: Tensor | None
    ahead: Tensor  # fp32 scalar: how far this step is from the last anchor, in distances between the last two

    @classmethod
    def empty(cls, size: GapSize, width: int, ahead: Tensor, *, linear: bool) -> Gap:
        shapes = [(size.batch, size.tokens, width), (size.batch, size.text_tokens, width)]
        wanted = [True, size.text_tokens > 0, linear, linear and size.text_tokens > 0]
        tensors = [
            torch.zeros(shape, dtype=size.dtype, device=size.device) if each else None
            for shape, each in zip(shapes * 2, wanted, strict=True)
        ]
        assert tensors[0] is not None
        return cls(tensors[0], tensors[1], tensors[2], tensors[3], ahead)

    @property
    def nbytes(self) -> int:
        tensors = (self.image, self.text, self.image_change, self.text_change)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def keep(self, image: Tensor, text: Tensor | None) -> None:
        """Take the gaps of an anchor."""
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
    """All gaps of one site."""

    width: int
    has_text: bool
    current: Gap | None = None
    _gaps: dict[tuple[GapSize, int], Gap] = field(default_factory=dict)

    def enter(self, size: GapSize, turn: int, ahead: Tensor, *, linear: bool) -> None:
        """Point `current` at the gap of a call, the one with number `turn` of its step."""
        key = (size if self.has_text else size._replace(text_tokens=0), turn)
        if key not in self._gaps:
            # Inference tensors could not be overwritten outside of inference mode.
            with torch.inference_mode(False):
                self._gaps[key] = Gap.empty(key[0], self.width, ahead, linear=linear)
        self.current = self._gaps[key]

    def forget(self, size: GapSize, turn: int) -> None:
        """Give up the memory of a gap."""
        self._gaps.pop((size if self.has_text else size._replace(text_tokens=0), turn), None)

    def holds(self, gap: Gap | None) -> bool:
        return gap is None or any(each is gap for each in self._gaps.values())

    @property
    def nbytes(self) -> int:
        return sum(gap.nbytes for gap in self._gaps.values())


def _keep(new: Tensor, held: Tensor, change: Tensor | None) -> None:
    if change is not None:
        change.copy_(new - held)
    held.copy_(new)


def _at(held: Tensor, change: Tensor | None, ahead: Tensor) -> Tensor:
    if change is None:
        return held
    # After the first anchor of an image the change is one from the image before, which need not be finite.
    return torch.where(ahead == 0, held, held + change * ahead.to(held.dtype))

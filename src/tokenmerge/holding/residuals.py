"""Residuals: what a run of blocks changed in its tokens, kept at full steps and extrapolated in held ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..families.calls import DenoiserCall, token_count


class ResidualSize(NamedTuple):
    """What the tensors of a residual depend on."""

    batch: int
    tokens: int
    text_tokens: int  # 0 where the run gives no text tokens out
    dtype: torch.dtype
    device: torch.device


class _Kept:
    """A value that full steps overwrite in place and compiled code reads, and its change since the one before."""

    def __init__(self, batch: int, tokens: int, width: int, size: ResidualSize) -> None:
        self.value = torch.zeros((batch, tokens, width), dtype=size.dtype, device=size.device)
        self.change = torch.zeros_like(self.value)

    def keep(self, new: Tensor) -> None:
        self.change.copy_(new - self.value)
        self.value.copy_(new)

    def at(self, ahead: Tensor) -> Tensor:
        # After the first kept step of an image the change is one from the image before, which need not be finite.
        return torch.where(ahead == 0, self.value, self.value + self.change * ahead.to(self.value.dtype))

    @property
    def nbytes(self) -> int:
        return self.value.nbytes + self.change.nbytes


class Residual:
    """The residual of one run at one size and call of the step."""

    def __init__(self, size: ResidualSize, width: int, ahead: Tensor) -> None:
        self.image = _Kept(size.batch, size.tokens, width, size)
        self.text = _Kept(size.batch, size.text_tokens, width, size) if size.text_tokens else None
        # fp32 scalar: how far this step is from the last kept one, in distances between the last two; 0 after one.
        self.ahead = ahead

    @property
    def nbytes(self) -> int:
        return self.image.nbytes + (self.text.nbytes if self.text is not None else 0)

    def keep(self, image: Tensor, text: Tensor | None) -> None:
        """Take the residual of a full step, [B, N, C] and [B, T, C]."""
        self.image.keep(image)
        if text is not None and self.text is not None:
            self.text.keep(text)

    def image_now(self) -> Tensor:
        """[B, N, C], extrapolated to this step."""
        return self.image.at(self.ahead)

    def text_now(self) -> Tensor | None:
        """[B, T, C], extrapolated to this step."""
        return None if self.text is None else self.text.at(self.ahead)


@dataclass
class Run:
    """Blocks that are held together: all their residuals, by size and call of the step."""

    width: int
    level: int
    has_text: bool
    apart: bool | None = None  # whether it is for calls where something acts between blocks, or does not; None: for all
    current: Residual | None = None
    # At a full step, until the last block has run: the image and text tokens that entered the first.
    entered: tuple[Tensor, Tensor | None] | None = None
    _residuals: dict[tuple[ResidualSize, int], Residual] = field(default_factory=dict)

    def size(self, call: DenoiserCall) -> ResidualSize:
        text = call.text_tokens if self.has_text else 0
        return ResidualSize(call.batch, token_count(call, self.level), text, call.dtype, call.device)

    def serves(self, call: DenoiserCall) -> bool:
        return self.apart in (None, call.apart)

    def enter(self, call: DenoiserCall, turn: int, ahead: Tensor) -> None:
        """Point `current` at the residual of a call, the one with number `turn` of its step."""
        key = (self.size(call), turn)
        if key not in self._residuals:
            # Inference tensors could not be overwritten outside of inference mode.
            with torch.inference_mode(False):
                self._residuals[key] = Residual(key[0], self.width, ahead)
        self.current = self._residuals[key]

    def forget(self, call: DenoiserCall, turn: int) -> None:
        self._residuals.pop((self.size(call), turn), None)

    def owns(self, residual: Residual | None) -> bool:
        return residual is None or any(each is residual for each in self._residuals.values())

    @property
    def nbytes(self) -> int:
        return sum(residual.nbytes for residual in self._residuals.values())

"""The tokens that enter every block of an unmerged model, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ...families import Family, denoiser_of, family_of
from ...families.base import Block
from ..loading import dtype_on, load_pipeline
from ...families.calls import DenoiserCall, grid_at_level, grids_of_ids
from ...runtime.clock import Clock
from ..drawing.generate import Request, best_device, draw, picture_size
from ...merging.grid import TokenGrid
from ...runtime.installing import Installation
from ..typed import check_counts


@dataclass(frozen=True)
class Hidden:
    """Image tokens, fp32 [N, C], that entered a block at a step, for the prompt and not for its negative."""

    step: int
    block: str
    grid: TokenGrid
    tokens: Tensor


@dataclass(frozen=True)
class Subject:
    """An unmerged model, ready to draw."""

    pipe: Any
    request: Request
    device: torch.device

    def watch(self, prompt: str, seed: int, see: Callable[[Hidden], None]) -> Image.Image:
        """Draw one picture, and show `see` the tokens that enter every block at every step."""
        denoiser = denoiser_of(self.pipe)
        family = family_of(denoiser)
        watcher = _Watcher(family, see)
        installations = [Installation() for _ in range(1 + len(family.blocks(denoiser)))]
        try:
            installations[0].observe_calls(denoiser, watcher.enter)
            for installation, block in zip(installations[1:], family.blocks(denoiser), strict=True):
                installation.observe_calls(block.module, partial(watcher.enter_block, block))
            request = replace(self.request, prompt=prompt)
            (picture,), _ = draw(self.pipe, request, (seed,), request.steps, self.device)
        finally:
            for installation in installations:
                installation.uninstall()
        return picture


def load_subject(
    model: str, *, size: str | None, steps: int | None, guidance: float | None, device: str | None, dtype: str | None
) -> Subject:
    check_counts(steps=steps)
    place = best_device(device)
    pipe, defaults = load_pipeline(model, getattr(torch, dtype_on(place, dtype)), place)
    pipe.set_progress_bar_config(disable=True)
    width, height = picture_size(size, defaults, pipe)
    return Subject(pipe, Request("", steps or defaults.steps, width, height, (), guidance, defaults), place)


class _Watcher:
    """Tells steps apart by their timesteps, and looks at the first denoiser call of each: others are for guidance."""

    def __init__(self, family: Family, see: Callable[[Hidden], None]) -> None:
        self._family = family
        self._see = see
        self._call: DenoiserCall | None = None
        self._clock = Clock()

    def enter(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = self._family.read(denoiser, args, kwargs)
        self._clock.follow_timestep(float(self._call.timestep.flatten()[0]))
        self._clock.call += 1

    def enter_block(self, block: Block, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._clock.call or self._call is None:
            return
        # The prompt comes last in a batch that also holds its negative.
        tokens = block.kind.ports.tokens.read(args, kwargs)[-1].detach().float()
        self._see(Hidden(self._clock.step, block.name, _grid(self._call, block), tokens))


def _grid(call: DenoiserCall, block: Block) -> TokenGrid:
    if call.ids is None:
        return TokenGrid(*grid_at_level(call, block.level))
    (grid,) = grids_of_ids(call.ids)
    return grid

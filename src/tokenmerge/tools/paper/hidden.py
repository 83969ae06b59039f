"""Watches the tokens that enter the blocks of a plain model at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor, nn

from ...families import Block, Family, denoiser_of, family_of
from ...families.calls import DenoiserCall, TokenGrid, grids_at_level, grids_of_ids
from ...runtime.clock import Clock
from ...runtime.installing import observe_calls
from ..drawing.studio import Studio


@dataclass(frozen=True)
class Hidden:
    """Image tokens, fp32 [N, C], that entered a block at a step: those of the prompt, not of the negative prompt."""

    step: int
    block: str
    grid: TokenGrid
    tokens: Tensor


def watch(studio: Studio, prompt: str, seed: int, see: Callable[[Hidden], None]) -> Image.Image:
    """Draw one picture, and call `see` with the tokens that enter every block at every step."""
    denoiser = denoiser_of(studio.pipe)
    family = family_of(denoiser)
    watcher = _Watcher(family, see)
    undo = [observe_calls(denoiser, watcher.enter)]
    undo += [observe_calls(block.module, partial(watcher.enter_block, block)) for block in family.blocks(denoiser)]
    try:
        (picture,), _ = studio.draw(prompt, (seed,))
    finally:
        for each in undo:
            each()
    return picture


class _Watcher:
    """Tells steps apart by their timesteps. Looks at the first denoiser call of each step: others are for guidance."""

    def __init__(self, family: Family, see: Callable[[Hidden], None]) -> None:
        self._family = family
        self._see = see
        self._call: DenoiserCall | None = None
        self._clock = Clock()

    def enter(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = self._family.calls.read(denoiser, args, kwargs)
        self._clock.follow_timestep(float(self._call.timestep.flatten()[0]))
        self._clock.call += 1

    def enter_block(self, block: Block, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._clock.call or self._call is None:
            return
        # In a batch that also holds the negative prompt, the prompt comes last.
        tokens = block.kind.ports.tokens.read(args, kwargs)[-1].detach().float()
        self._see(Hidden(self._clock.step, block.name, _grid(self._call, block), tokens))


def _grid(call: DenoiserCall, block: Block) -> TokenGrid:
    (grid,) = grids_at_level(call, block.level) if call.ids is None else grids_of_ids(call.ids)
    return grid

"""Sites that hold: a block of a run, or a stage of a UNet. Which there are, and how they are put on a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TokenMergeError
from ..families.base import Block, Family, Ports
from ..runtime.foreign import cache_hooks, is_group_offloaded
from ..runtime.installing import Installation, Site
from .controller import KEEP, RUN, Holding
from .residuals import Residual, Run

_FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class HeldRun:
    """Blocks, or stages, that are held together, in the order they run."""

    blocks: tuple[Block, ...]
    stages: bool = False


def held_runs(denoiser: nn.Module, family: Family, what: str) -> tuple[HeldRun, ...]:
    """What is held in a denoiser: all stages as one run, or runs of blocks with nothing between them."""
    name = type(denoiser).__name__
    if what == "stages":
        if family.stages is None:
            raise TokenMergeError(f"what='stages' holds the stages of a UNet, and {name} has none; use what='blocks'")
        return (HeldRun(tuple(family.stages(denoiser)), stages=True),)
    blocks = family.blocks(denoiser)
    if not blocks:
        raise TokenMergeError(
            f"{name} has no transformer blocks to hold; use what='stages', under a scheduler that adds no noise, such "
            "as DDIMScheduler"
        )
    runs: list[list[Block]] = []
    for block in blocks:
        if not runs or runs[-1][-1].line != block.line:
            runs.append([])
        runs[-1].append(block)
    return tuple(HeldRun(tuple(run)) for run in runs)


def install_holding(runs: Sequence[HeldRun], holding: Holding, installation: Installation) -> None:
    """Put sites on all blocks or stages."""
    for held in runs:
        first, last = held.blocks[0], held.blocks[-1]
        has_text = first.kind.ports.outputs is not None
        together = holding.add_run(Run(first.width, first.level, has_text, None if held.stages else False))
        for block in held.blocks:
            ends = {"first": block is first, "last": block is last}
            site: Site
            if held.stages:
                site = StageSite(block.name, holding, block.kind.ports, together, **ends)
            else:
                alone = holding.add_run(Run(block.width, block.level, has_text, apart=True))
                site = HeldSite(block.name, holding, block.kind.ports, together, alone, level=block.level, **ends)
            installation.add(site, block.module)


def check_holdable(denoiser: nn.Module, runs: Sequence[HeldRun]) -> None:
    """Refuse caches, and weights that come and go with blocks that do not always run."""
    for name in cache_hooks(denoiser):
        raise TokenMergeError(
            f"a cache ({name}) skips steps, and so does Hold; use one of both: call disable_cache(), or apply a Merge"
        )
    if any(is_group_offloaded(block.module) for run in runs for block in run.blocks):
        raise TokenMergeError(
            "group offload moves weights when blocks run, and held blocks do not; use enable_model_cpu_offload() or "
            "enable_sequential_cpu_offload(), or apply a Merge"
        )


class HeldSite(Site):
    """A block that does not run in held steps. There the first of its run gives out what entered plus the run's
    residual, and the others pass it on. Where something acts between blocks, each is a run `alone`."""

    holds = True

    def __init__(
        self,
        name: str,
        holding: Holding,
        ports: Ports,
        together: Run,
        alone: Run,
        *,
        first: bool,
        last: bool,
        level: int = 0,
    ) -> None:
        self.name = name
        self.holding = holding
        self.ports = ports
        self.together = together
        self.alone = alone
        self.first = first
        self.last = last
        self.level = level

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        act = self.holding.act
        if self.retired or act == RUN:
            return self.original(*args, **kwargs)
        alone = self.alone.current is not None
        run = self.alone if alone else self.together
        residual, first, last = run.current, alone or self.first, alone or self.last
        assert residual is not None, "a held block ran before its denoiser was entered"
        tokens = self.ports.tokens.read(args, kwargs)
        text = self.ports.text_tokens.read(args, kwargs) if self.ports.text_tokens else None
        if act == KEEP:
            if first:
                self.check(tokens, residual)
                run.entered = tokens.detach(), None if text is None else text.detach()
            output = self.original(*args, **kwargs)
            if last:
                self.keep(run, residual, output)
            return output
        if first:
            tokens, change = _clipped(tokens + residual.image_now()), residual.text_now()
            text = text if text is None or change is None else _clipped(text + change)
        return self.ports.output(tokens, text)

    def check(self, tokens: Tensor, residual: Residual) -> None:
        """Refuse tokens that the residual was not made for."""
        expected = residual.image.value
        if tokens.shape[1] != expected.shape[1] or tokens.device != expected.device:
            raise TokenMergeError(
                f"{self.name!r} was given {tokens.shape[1]} tokens on {tokens.device}, not the {expected.shape[1]} of "
                f"its call on {expected.device}; put the denoiser on one device, or remove first"
            )

    def keep(self, run: Run, residual: Residual, output: Any) -> None:
        """Keep what a run has changed, of which this is the last block."""
        if run.entered is None:
            raise TokenMergeError(
                f"{self.name!r} ran without the first of the blocks that are held with it; do not skip layers in some "
                "steps only, nor checkpoint gradients, or remove first"
            )
        (tokens, text), run.entered = run.entered, None
        (image,), text_out = self.ports.outgoing(output), self.ports.text(output)
        change = None if text is None or text_out is None else _clipped(text_out.detach() - text)
        residual.keep(_clipped(image.detach() - tokens), change)


class StageSite(Site):
    """A stage of a UNet, with all its layers, that does not run in held steps. There the last stage gives out what
    entered the first plus the residual of all; what the others give out is not read."""

    holds = True

    def __init__(self, name: str, holding: Holding, ports: Ports, together: Run, *, first: bool, last: bool) -> None:
        self.name = name
        self.holding = holding
        self.ports = ports
        self.together = together
        self.first = first
        self.last = last
        self.skips: int | None = None  # of a stage that also gives out what skip connections take: how many

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        act, residual = self.holding.act, self.together.current
        if self.retired or act == RUN:
            return self.original(*args, **kwargs)
        assert residual is not None, "a held stage ran before its denoiser was entered"
        features = self.ports.tokens.read(args, kwargs)
        if self.first:
            self.together.entered = features.detach(), None
        if act == KEEP:
            output = self.original(*args, **kwargs)
            self.skips = len(output[1]) if isinstance(output, tuple) else None
            if self.last:
                change = _clipped(output.detach() - self.take_entered())
                residual.keep(change.reshape(residual.image.value.shape), None)
            return output
        if self.last:
            entered = self.take_entered()
            return _clipped(entered + residual.image_now().view(entered.shape))
        # As many as always, of a shape that whatever a ControlNet adds goes with.
        nothing = features.new_empty(())
        return nothing if self.skips is None else (nothing, (nothing,) * self.skips)

    def take_entered(self) -> Tensor:
        """What entered the first stage in this call, which is kept no longer."""
        if self.together.entered is None:
            raise TokenMergeError(
                f"{self.name!r} ran without the first of the stages that are held; use what='blocks', or remove first"
            )
        (features, _), self.together.entered = self.together.entered, None
        return features


def _clipped(tokens: Tensor) -> Tensor:
    """Within what fp16 can hold, as diffusers' blocks keep what they give out."""
    return tokens.clip(-_FP16_MAX, _FP16_MAX) if tokens.dtype == torch.float16 else tokens

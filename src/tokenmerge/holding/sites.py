"""Sites that hold: a block of a run, or a stage of a UNet. Which of them a model has, and how they are installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TokenMergeError
from ..families.base import Block, BlockKind, Family, Ports
from ..runtime.foreign import cache_hooks, offloaded_with
from ..runtime.installing import Installation, Site
from .controller import KEEP, RUN, Holding
from .learning import LearnedPorts, LearnedRun
from .residuals import Joined, Residual, Run

_FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class HeldRun:
    """Blocks or stages that are held together, in the order they run."""

    blocks: tuple[Block, ...]
    stages: bool = False  # whether `blocks` are the stages of a UNet
    whole: bool = False  # whether `blocks` is the denoiser itself
    generic: bool = False  # whether `blocks` are candidates: the first call shows which of them follow each other
    adds: bool = False  # see `Run.adds`


def held_runs(denoiser: nn.Module, family: Family, what: str) -> tuple[HeldRun, ...]:
    """What is held in a denoiser: itself, all of its stages as one run, or runs of blocks with nothing between them."""
    name = type(denoiser).__name__
    if what == "prediction":
        return (HeldRun((Block("clean prediction", denoiser, BlockKind(Ports()), "denoiser"),), whole=True),)
    if what == "stages":
        if family.stages is None:
            raise TokenMergeError(f"what='stages' holds the stages of a UNet, but {name} has none; use what='blocks'")
        return (HeldRun(tuple(family.stages(denoiser)), stages=True),)
    blocks = family.blocks(denoiser)
    if not blocks:
        raise TokenMergeError(f"{name} has no transformer blocks to hold; use what='stages', or what='prediction'")
    if family.learned:
        return (HeldRun(tuple(blocks), generic=True),)
    runs: list[list[Block]] = []
    for block in blocks:
        if not runs or runs[-1][-1].line != block.line:
            runs.append([])
        runs[-1].append(block)
    # Between the blocks of a UNet, sizes and channels change.
    return tuple(HeldRun(tuple(run), adds=family.stages is None) for run in runs)


def install_holding(runs: Sequence[HeldRun], holding: Holding, installation: Installation) -> None:
    """Put sites on all blocks or stages of these runs."""
    for held in runs:
        first, last = held.blocks[0], held.blocks[-1]
        streams = first.kind.ports.streams
        ends_all = held is runs[-1]
        together = holding.add_run(Run(streams, None if held.stages else False, last=ends_all, adds=held.adds))
        for block in held.blocks:
            ends = {"first": block is first, "last": block is last}
            site: Site
            if held.stages:
                site = StageSite(block.name, holding, block.kind.ports, together, **ends)
            else:
                alone = holding.add_run(Run(streams, apart=True, last=ends_all and block is last, adds=held.adds))
                site = HeldSite(block.name, holding, block.kind.ports, together, alone, level=block.level, **ends)
            installation.add(site, block.module)


def install_learned(runs: Sequence[LearnedRun], holding: Holding, installation: Installation) -> None:
    """Put sites on the blocks of learned runs, and keep the residuals of the call that showed them."""
    changes: list[tuple[Run, tuple[Tensor | None, ...]]] = []
    for learned in runs:
        ends_all, last = learned is runs[-1], len(learned.blocks) - 1
        together = holding.add_run(Run(learned.ports[0].streams, apart=False, last=ends_all))
        for number, (block, ports) in enumerate(zip(learned.blocks, learned.ports, strict=True)):
            alone = holding.add_run(Run(ports.streams, apart=True, last=ends_all and number == last))
            ends = {"first": number == 0, "last": number == last}
            site = LearnedSite(block.name, holding, ports, together, alone, **ends)
            installation.add(site, block.module)
        if learned.entered and learned.left:
            changes.append((together, _changes(learned.entered, learned.left)))
    installation.place()
    # All residuals of a call or none: runs are held together.
    if len(changes) == len(runs):
        holding.keep_shown(changes)


def check_holdable(denoiser: nn.Module, runs: Sequence[HeldRun]) -> None:
    """Refuse caches, and group offload that moves held blocks together with others."""
    for name in cache_hooks(denoiser) if runs else ():
        raise TokenMergeError(
            f"a cache ({name}) skips steps, and so does Hold; use only one of them: call disable_cache(), or apply "
            "Merge instead"
        )
    # It is not known yet which of the candidates will be held.
    held = {block.module for run in runs if not run.generic for block in run.blocks}
    # If the whole denoiser is held, no weights move.
    for block in (block for run in runs if not run.whole for block in run.blocks):
        if any(other is not block.module and other not in held for other in offloaded_with(block.module)):
            raise TokenMergeError(
                f"group offload moves the weights of {block.name!r} with those of other blocks, which may not be held "
                "with it; use enable_group_offload(..., num_blocks_per_group=1), enable_model_cpu_offload(), or Merge"
            )


class HeldSite(Site):
    """A block that does not run in held steps. Then the first block of a run returns its input plus the run's residual,
    and the others pass it on. In calls where something acts between blocks, each is held `alone`."""

    holds = True

    def __init__(
        self,
        name: str,
        holding: Holding,
        ports: Ports | LearnedPorts,
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
        streams = self.ports.entering(args, kwargs)
        if act == KEEP:
            self.check_entering(streams, run, first=first)
            if first:
                run.entered = tuple(_entered(each, self.ports) for each in streams)
            output = self.original(*args, **kwargs)
            self.note_leaving(output, run)
            return self.kept(run, residual, output) if last else output
        if first:
            streams = self.moved(streams, residual)
        return self.ports.output(streams)

    def check_entering(self, streams: tuple[Tensor, ...], run: Run, *, first: bool) -> None:
        """Nothing to check: the family's table knows what enters."""

    def note_leaving(self, output: Any, run: Run) -> None:
        """Nothing to note: the family's table knows what leaves."""

    def moved(self, streams: tuple[Tensor, ...], residual: Residual | Joined) -> tuple[Tensor, ...]:
        """What leaves a held run: what entered it plus its residual."""
        changes = residual.now()
        for entered, change in zip(streams, changes, strict=True):
            if change is not None and (entered.shape[1:] != change.shape[1:] or entered.device != change.device):
                raise TokenMergeError(
                    f"{self.name!r} received {entered.shape[1]} tokens on {entered.device}, but the last full step had "
                    f"{change.shape[1]} on {change.device}; put the denoiser on one device, or call remove first"
                )
        pairs = zip(streams, changes, strict=True)
        return tuple(entered if change is None else _clipped(entered + change) for entered, change in pairs)

    def kept(self, run: Run, residual: Residual | Joined, output: Any) -> Any:
        """At the last block of a run, keep the run's residual. Returns what leaves the run; the last run of a call adds
        the correction for what held steps have missed."""
        if run.entered is None:
            raise TokenMergeError(
                f"{self.name!r} ran without the first block that is held with it; do not skip layers in some steps "
                "only, do not checkpoint gradients, or call remove first"
            )
        entered, run.entered = run.entered, None
        left = self.ports.leaving(output)
        missed, *others = residual.keep(_changes(entered, left))
        if run.adds:
            missed, self.holding.missed = _added(missed, self.holding.missed, self.ports.text), None
            if not run.last:
                # Corrected tokens would be unlike any that the next run has seen.
                self.holding.missed = missed
                return output
        return self.ports.output(tuple(map(_made_up, left, (missed, *others))))


class LearnedSite(HeldSite):
    """A block of a learned run. Every kept step checks that it still follows the block before it."""

    ports: LearnedPorts

    def check_entering(self, streams: tuple[Tensor, ...], run: Run, *, first: bool) -> None:
        if first or torch.compiler.is_compiling():
            return
        if run.passed is None or any(now is not before for now, before in zip(streams, run.passed, strict=True)):
            raise TokenMergeError(
                f"{self.name!r} received other tokens than the block before it returned, unlike in the first call; "
                "blocks cannot be held if something acts between them in some steps; call remove first"
            )

    def note_leaving(self, output: Any, run: Run) -> None:
        if torch.compiler.is_compiling():
            return
        entered = run.entered or ()
        left = self.ports.leaving(output) if self.ports.fits(output) else ()
        if entered and [each.shape for each in left] != [each.shape for each in entered]:
            raise TokenMergeError(
                f"{self.name!r} returned other tensors or shapes than its run received, unlike in the first call; such "
                "blocks cannot be held; call remove first"
            )
        run.passed = left


class StageSite(Site):
    """A stage of a UNet, with all its layers, that does not run in held steps. Then the last stage returns the input of
    the first plus the residual of all. Nothing reads what the others return."""

    holds = True

    def __init__(self, name: str, holding: Holding, ports: Ports, together: Run, *, first: bool, last: bool) -> None:
        self.name = name
        self.holding = holding
        self.ports = ports
        self.together = together
        self.first = first
        self.last = last
        self.skips: int | None = None  # number of its skip connections, if the stage returns any

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        act, residual = self.holding.act, self.together.current
        if self.retired or act == RUN:
            return self.original(*args, **kwargs)
        assert residual is not None, "a held stage ran before its denoiser was entered"
        features = self.ports.tokens.read(args, kwargs)
        if self.first:
            self.together.entered = (_entered(features, self.ports),)
        if act == KEEP:
            output = self.original(*args, **kwargs)
            self.skips = len(output[1]) if isinstance(output, tuple) else None
            if not self.last:
                return output
            (missed,) = residual.keep((_clipped(output.detach() - self.take_entered()),))
            return _made_up(output, missed)
        if self.last:
            (change,) = residual.now()
            assert change is not None, "a stage was held before it was kept"
            return _clipped(self.take_entered() + change)
        # The usual number of tensors, in a shape that a ControlNet's residuals can be added to.
        nothing = features.new_empty(self.ports.nothing)
        return nothing if self.skips is None else (nothing, (nothing,) * self.skips)

    def take_entered(self) -> Tensor:
        """What entered the first stage in this call. It is taken out of the run, to free the memory."""
        if self.together.entered is None:
            raise TokenMergeError(
                f"{self.name!r} ran without the first held stage; use what='blocks', or call remove first"
            )
        (features,), self.together.entered = self.together.entered, None
        return features


def _entered(tokens: Tensor, ports: Ports | LearnedPorts) -> Tensor:
    """The input of a run, to be compared with its output. It is copied if blocks overwrite it."""
    return tokens.detach().clone() if ports.in_place else tokens.detach()


def _changes(entered: tuple[Tensor, ...], left: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The residual of a run, output minus input, by stream; None for streams that it no longer returns."""
    pairs = zip(entered, left, strict=True)
    return tuple(None if after is None else _clipped(after.detach() - before) for before, after in pairs)


def _added(missed: Tensor | None, before: Tensor | None, text: str) -> Tensor | None:
    """The correction of a run, plus `before`: that of the image tokens in the runs before it, padded to this run's
    sequence. text: where text tokens lie in the sequence."""
    if missed is None or before is None:
        return missed
    if missed.shape == before.shape:
        return missed + before
    more = missed.shape[1] - before.shape[1]
    if not text or more < 0:
        return missed
    return missed + nn.functional.pad(before, (0, 0, more, 0) if text == "first" else (0, 0, 0, more))


def _made_up(left: Tensor | None, missed: Tensor | None) -> Tensor | None:
    """What leaves a run plus the correction for held steps, by stream; None if the run no longer returns it."""
    return left if left is None or missed is None else _clipped(left + missed)


def _clipped(tokens: Tensor) -> Tensor:
    """Clip fp16 tokens to finite values, as diffusers' blocks do with their outputs."""
    return tokens.clip(-_FP16_MAX, _FP16_MAX) if tokens.dtype == torch.float16 else tokens

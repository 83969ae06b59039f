"""Comparisons of all candidates: one for every size, batch and mode that was asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from ... import api
from ...families import family_of
from ..loading import check_size, load_denoiser
from ...errors import TokenMergeError
from ..files import append_line
from ..typed import check_counts
from .candidates import Candidate, candidates_for, visits
from .timing import Loop, Setting, measure_candidate

MODES = ("eager", "graph", "compiled", "compiled+graph")


@dataclass(frozen=True)
class Task:
    """What was asked for: every size, batch and mode is a comparison of all presets and ratios."""

    model: str
    device: torch.device
    sizes: Sequence[tuple[int, int]]  # width, height
    batches: Sequence[int]
    modes: Sequence[str]
    presets: Sequence[str]
    ratios: Sequence[float]  # or none: of each preset its own
    changes: Mapping[str, Any]  # to every preset
    steps: int = 50
    warmups: int = 5
    settle: float | None = None
    repeats: int = 20
    loops: int = 0
    rounds: int = 1
    dtype: str | None = None
    out: Path | None = None
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("sizes", "batches", "modes", "presets"):
            if not getattr(self, name):
                raise TokenMergeError(f"--{name} is empty; give one or more, separated by commas")
        check_counts(steps=self.steps, repeats=self.repeats, rounds=self.rounds)
        check_counts(0, warmups=self.warmups, loops=self.loops)
        if min(self.batches) < 1:
            raise TokenMergeError(f"--batches are {list(self.batches)}; give numbers from 1, as in 1,4")
        # NaN fails the comparison too.
        if self.settle is not None and not 0 <= self.settle < math.inf:
            raise TokenMergeError(f"--settle is {self.settle}; it must be a number of seconds from 0")
        for mode in self.modes:
            if mode not in MODES:
                raise TokenMergeError(f"mode {mode!r} is unknown; modes are {', '.join(MODES)}")
            if "graph" in mode and self.device.type != "cuda":
                raise TokenMergeError(
                    f"mode {mode!r} needs a CUDA device, this is {self.device}; use eager or compiled"
                )

    def settings(self) -> list[Setting]:
        """Of every comparison. A GPU under full load lowers its clocks within a second or two to stay within its power,
        so by default each candidate keeps it busy for two seconds before it is timed."""
        settle = (2.0 if self.device.type == "cuda" else 0.0) if self.settle is None else self.settle
        counts = (self.steps, self.warmups, settle, self.repeats, self.loops)
        return [
            Setting(self.model, width, height, batch, mode, *counts, self.command)
            for width, height in self.sizes
            for batch in self.batches
            for mode in self.modes
        ]


def run(task: Task) -> list[dict[str, Any]]:
    """Measure every size, batch and mode; records are appended to the file `out` as they are made.

    Each round measures all candidates again, every second one in reverse order: a device that warms up and slows down
    then does so for all of them.
    """
    denoiser, scale = load_denoiser(task.model, task.dtype, task.device)
    candidates = candidates_for(denoiser, task.presets, task.ratios, task.changes)
    turns = [each for turn in range(task.rounds) for each in (candidates if turn % 2 == 0 else candidates[::-1])]
    settings = task.settings()
    with tqdm(total=len(settings) * len(turns), unit="row", leave=False) as progress:
        progress.set_description("trial")
        for width, height in task.sizes:
            _check(denoiser, candidates, task, width, height, scale)
        if task.out is not None:
            append_line(task.out)
        records = []
        for setting in settings:
            arguments = _arguments(denoiser, setting.batch, setting.width, setting.height, scale)
            for candidate in turns:
                progress.set_description(f"{setting.width}x{setting.height} b{setting.batch} {candidate.label}")
                try:
                    record = measure_candidate(denoiser, arguments, candidate, setting)
                except torch.OutOfMemoryError as error:
                    raise _too_large(task, setting.width, setting.height, setting.batch) from error
                records.append(record)
                if task.out is not None:
                    append_line(task.out, json.dumps(record))
                progress.update()
    return records


def _arguments(denoiser: nn.Module, batch: int, width: int, height: int, scale: int) -> dict[str, Any]:
    """Of a call for pictures of this size in pixels."""
    return family_of(denoiser).example(denoiser, batch, height // scale, width // scale)


def _check(
    denoiser: nn.Module, candidates: Sequence[Candidate], task: Task, width: int, height: int, scale: int
) -> None:
    """Refuse what the model cannot do at a size before anything is timed: every phase of every candidate runs once."""
    check_size(denoiser, scale, width, height)
    batch = min(task.batches)
    arguments = _arguments(denoiser, batch, width, height, scale)
    for candidate in candidates:
        loop = Loop(task.steps)
        visited = visits(candidate.phases(task.steps))
        try:
            if candidate.config is not None:
                api.apply(denoiser, candidate.config, scheduler=loop)
            loop.set_timesteps()
            for step in range(max(visited) + 1):
                if step in visited:
                    with torch.inference_mode():
                        denoiser(**arguments, return_dict=False)
                loop.step()
        except torch.OutOfMemoryError as error:
            raise _too_large(task, width, height, batch) from error
        # Also the denoiser's own checks: a size it has no positions for, say.
        except ValueError as error:
            raise TokenMergeError(f"{candidate.label} is refused at {width}x{height}: {error}") from error
        finally:
            api.remove(denoiser)


def _too_large(task: Task, width: int, height: int, batch: int) -> TokenMergeError:
    return TokenMergeError(
        f"{task.device} has too little memory for {task.model} at {width}x{height}, batch {batch}; use a smaller size "
        "or batch" + (f" (what was measured is in {task.out})" if task.out and task.out.is_file() else "")
    )

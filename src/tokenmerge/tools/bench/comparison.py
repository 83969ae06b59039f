"""Comparisons of all candidates: one for every size, batch and mode that was asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from ... import api
from ...errors import TokenMergeError, did_you_mean
from ..files import append_line, check_writable
from ..loading import Outline, best_device, load_denoiser, outline
from ..measure import environment
from ..typed import default_techniques, read_configurations
from .candidates import Candidate, candidates_for, trial_step
from .records import Measured
from .timing import Loop, Setting, measure_candidate, reach

MODES = ("eager", "graph", "compiled", "compiled+graph")


@dataclass(frozen=True)
class Counts:
    """How often things are run. A CPU is slow and steady; a GPU under full load lowers its clocks within a second or
    two to stay within its power, so there each candidate keeps it busy for two seconds before it is timed."""

    warmups: int
    repeats: int
    settle: float


ON_GPU, ON_CPU = Counts(warmups=5, repeats=20, settle=2.0), Counts(warmups=1, repeats=5, settle=0.0)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What was asked for: every size, batch and mode is a comparison of all techniques. None stands for the model's
    own size and frames, and for the counts of the device."""

    model: str
    techniques: Sequence[str] | None = None  # as typed; without, those of the model's family
    ratios: Sequence[float] | None = None
    sizes: Sequence[tuple[int, int]] | None = None  # width, height
    frames: int | None = None
    batches: Sequence[int] = (1,)
    modes: Sequence[str] = ("eager",)
    steps: int = 50
    warmups: int | None = None
    settle: float | None = None
    repeats: int | None = None
    loops: int = 0
    rounds: int = 1
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    out: Path | None = None
    resume: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        if self.resume and self.out is None:
            raise TokenMergeError("--resume goes on with a file; give --out")
        for mode in self.modes:
            if mode not in MODES:
                raise TokenMergeError(f"mode {mode!r} is unknown{did_you_mean(mode, MODES)}; use {', '.join(MODES)}")

    def settings(self, model: Outline, device: torch.device) -> list[Setting]:
        """Of every comparison."""
        usual = ON_GPU if device.type == "cuda" else ON_CPU
        warmups = usual.warmups if self.warmups is None else self.warmups
        settle = usual.settle if self.settle is None else self.settle
        counts = (self.steps, warmups, settle, self.repeats or usual.repeats, self.loops)
        frames = self.frames or model.family.frames
        return [
            Setting(self.model, width, height, batch, mode, *counts, self.command, frames)
            for width, height in self.sizes or (model.own_size,)
            for batch in self.batches
            for mode in self.modes
        ]


def run(task: Task) -> list[dict[str, Any]]:
    """Measure every size, batch and mode; records are appended to the file `out` as they are made. With `resume`, rows
    that it holds of the same machine and versions are taken from there.

    Each round measures all candidates again, every second one in reverse order: a device that warms up and slows down
    then does so for all of them.
    """
    typed = None if task.techniques is None else read_configurations(task.techniques, task.ratios)
    device = best_device(task.device)
    for mode in task.modes:
        if "graph" in mode and device.type != "cuda":
            raise TokenMergeError(f"mode {mode!r} needs a CUDA device, this is {device}; use eager or compiled")
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    model = outline(task.model)
    candidates = candidates_for(typed or read_configurations(default_techniques(model.family), task.ratios))
    settings = task.settings(model, device)
    for setting in _of_sizes(settings):
        _check(model, candidates, setting)
    if task.out is not None:
        check_writable(task.out)
    measured = Measured(task.out if task.resume else None, environment(device))
    rows = [
        (setting, candidate, measured.take({**candidate.to_dict(), **vars(setting)}))
        for setting in settings
        for turn in range(task.rounds)
        for candidate in (candidates if turn % 2 == 0 else candidates[::-1])
    ]
    if all(known for *_, known in rows):
        return [known for *_, known in rows if known]
    return _measure(task, load_denoiser(task.model, task.dtype, device), model, rows)


def _measure(
    task: Task, denoiser: nn.Module, model: Outline, rows: Sequence[tuple[Setting, Candidate, dict[str, Any] | None]]
) -> list[dict[str, Any]]:
    device = next(denoiser.parameters()).device
    left = [(setting, candidate) for setting, candidate, known in rows if known is None]
    records = []
    with tqdm(total=len(left), unit="row", leave=False) as progress:
        progress.set_description("trial")
        for setting in _of_sizes([setting for setting, _ in left]):
            size = setting.width, setting.height
            new = {each.label: each for other, each in left if (other.width, other.height) == size}
            _try(denoiser, list(new.values()), task, model, setting)
        for setting, candidates in groupby(rows, key=lambda row: row[0]):
            arguments = model.example(denoiser, setting.batch, setting.width, setting.height, setting.frames)
            for _, candidate, record in candidates:
                if record is None:
                    progress.set_description(f"{setting.width}x{setting.height} b{setting.batch} {candidate.label}")
                    try:
                        record = measure_candidate(denoiser, arguments, candidate, setting)
                    except torch.OutOfMemoryError as error:
                        raise _too_large(task, device, setting) from error
                    if task.out is not None:
                        append_line(task.out, json.dumps(record))
                    progress.update()
                records.append(record)
    return records


def _of_sizes(settings: Sequence[Setting]) -> list[Setting]:
    """One of every size, with the smallest batch."""
    smallest_last = sorted(settings, key=lambda setting: -setting.batch)
    return list({(setting.width, setting.height): setting for setting in smallest_last}.values())


def _check(model: Outline, candidates: Sequence[Candidate], setting: Setting) -> None:
    """Refuse what the model cannot do at a size, as far as its config files tell."""
    width, height = setting.width, setting.height
    model.check_size(width, height)
    for candidate in candidates:
        try:
            model.plan(candidate.techniques, width, height, steps=setting.steps, frames=setting.frames)
        except TokenMergeError as error:
            raise _refused(candidate, setting, error) from error


def _try(denoiser: nn.Module, candidates: Sequence[Candidate], task: Task, model: Outline, setting: Setting) -> None:
    """Refuse what only a run tells before anything is timed: every candidate runs until it merges."""
    arguments = model.example(denoiser, setting.batch, setting.width, setting.height, setting.frames)

    def call() -> None:
        with torch.inference_mode():
            denoiser(**arguments, return_dict=False)

    for candidate in candidates:
        loop, phases = Loop(task.steps), candidate.phases(task.steps)
        try:
            api.apply(denoiser, candidate.techniques, scheduler=loop)
            reach(loop, call, phases, trial_step(phases))
            call()
        except torch.OutOfMemoryError as error:
            raise _too_large(task, next(denoiser.parameters()).device, setting) from error
        # Also the denoiser's own checks: a size it has no positions for, say.
        except ValueError as error:
            raise _refused(candidate, setting, error) from error
        finally:
            api.remove(denoiser)


def _refused(candidate: Candidate, setting: Setting, error: Exception) -> TokenMergeError:
    return TokenMergeError(f"{candidate.label} is refused at {setting.width}x{setting.height}: {error}")


def _too_large(task: Task, device: torch.device, setting: Setting) -> TokenMergeError:
    kept = f" (what was measured is in {task.out})" if task.out and task.out.is_file() else ""
    return TokenMergeError(
        f"{device} has too little memory for {task.model} at {setting.width}x{setting.height}, batch {setting.batch}; "
        f"use a smaller size or batch{kept}"
    )

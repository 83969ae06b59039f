"""Compares all candidates at every requested size, batch and mode."""

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
from .timing import Loop, Setting, caller, measure_candidate, reach

MODES = ("eager", "graph", "compiled", "compiled+graph")


@dataclass(frozen=True)
class Counts:
    """Default numbers of runs. A CPU is slow and steady. A GPU under full load lowers its clocks within two seconds to
    stay within its power limit, so each candidate keeps it busy that long before it is timed."""

    warmups: int
    repeats: int
    settle: float


ON_GPU, ON_CPU = Counts(warmups=5, repeats=20, settle=2.0), Counts(warmups=1, repeats=5, settle=0.0)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to measure. Each combination of size, batch and mode is one comparison of all techniques.

    None stands for the model's own techniques, size and frames, and for the usual counts of the device.
    """

    model: str
    techniques: Sequence[str] | None = None  # as typed
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
            raise TokenMergeError("--resume continues a file; give --out")
        for mode in self.modes:
            if mode not in MODES:
                raise TokenMergeError(f"mode {mode!r} is unknown{did_you_mean(mode, MODES)}; use {', '.join(MODES)}")

    def settings(self, model: Outline, device: torch.device) -> list[Setting]:
        """One setting per comparison."""
        usual = ON_GPU if device.type == "cuda" else ON_CPU
        return [
            Setting(
                model=self.model,
                width=width,
                height=height,
                batch=batch,
                mode=mode,
                steps=self.steps,
                warmups=usual.warmups if self.warmups is None else self.warmups,
                settle=usual.settle if self.settle is None else self.settle,
                repeats=self.repeats or usual.repeats,
                loops=self.loops,
                command=self.command,
                frames=self.frames or model.family.frames,
            )
            for width, height in self.sizes or (model.own_size,)
            for batch in self.batches
            for mode in self.modes
        ]


def run(task: Task) -> list[dict[str, Any]]:
    """Measure every size, batch and mode, and append each record to the file `out` as soon as it is measured. With
    `resume`, reuse the records in that file that come from the same machine and versions.

    Every second round runs in reverse order, so that a device that slows down as it warms up slows all candidates.
    """
    typed = None if task.techniques is None else read_configurations(task.techniques, task.ratios)
    device = best_device(task.device)
    for mode in task.modes:
        if "graph" in mode and device.type != "cuda":
            raise TokenMergeError(f"mode {mode!r} needs a CUDA device, but this is {device}; use eager or compiled")
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    model = outline(task.model)
    candidates = candidates_for(typed or read_configurations(default_techniques(model.family), task.ratios))
    settings = task.settings(model, device)
    for setting in _smallest_batches(settings):
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
        for setting in _smallest_batches([setting for setting, _ in left]):
            size = setting.width, setting.height
            waiting = {each.label: each for other, each in left if (other.width, other.height) == size}
            _try(denoiser, list(waiting.values()), task, model, setting)
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


def _smallest_batches(settings: Sequence[Setting]) -> list[Setting]:
    """One setting per size, with its smallest batch."""
    smallest_last = sorted(settings, key=lambda setting: -setting.batch)
    return list({(setting.width, setting.height): setting for setting in smallest_last}.values())


def _check(model: Outline, candidates: Sequence[Candidate], setting: Setting) -> None:
    """Refuse what the config files of the model already rule out at a size."""
    width, height = setting.width, setting.height
    model.check_size(width, height)
    for candidate in candidates:
        try:
            model.plan(candidate.techniques, width, height, steps=setting.steps, frames=setting.frames)
        except TokenMergeError as error:
            raise _refused(candidate, setting, error) from error


def _try(denoiser: nn.Module, candidates: Sequence[Candidate], task: Task, model: Outline, setting: Setting) -> None:
    """Run every candidate until it merges: some refusals show only then, and should come before anything is timed."""
    call = caller(denoiser, model.example(denoiser, setting.batch, setting.width, setting.height, setting.frames))
    for candidate in candidates:
        loop, phases = Loop(task.steps), candidate.phases(task.steps)
        try:
            api.apply(denoiser, candidate.techniques, scheduler=loop)
            reach(loop, call, phases, trial_step(phases))
            call()
        except torch.OutOfMemoryError as error:
            raise _too_large(task, next(denoiser.parameters()).device, setting) from error
        # TokenMergeError, or a check of the denoiser: it may have no positions for a size.
        except ValueError as error:
            raise _refused(candidate, setting, error) from error
        finally:
            api.remove(denoiser)


def _refused(candidate: Candidate, setting: Setting, error: Exception) -> TokenMergeError:
    return TokenMergeError(f"{candidate.label} is refused at {setting.width}x{setting.height}: {error}")


def _too_large(task: Task, device: torch.device, setting: Setting) -> TokenMergeError:
    kept = f" (results so far are in {task.out})" if task.out and task.out.is_file() else ""
    return TokenMergeError(
        f"{device} has too little memory for {task.model} at {setting.width}x{setting.height}, batch {setting.batch}; "
        f"use a smaller size or batch{kept}"
    )

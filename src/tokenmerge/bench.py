"""Latency, launches and memory of a denoiser, by phase and over a whole schedule, with and without merging.

A denoising loop makes few kinds of call: those that select, that only weigh, that reuse maps, and unmerged ones. Each
kind is timed many times, and the medians are summed as often as a schedule has them: the time of all steps, selection
and weights included, without running every step again and again.
"""

from __future__ import annotations

import gc
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from . import api
from .adapters import family_of
from .adapters.loading import check_size, load_denoiser
from .compiling import compile, uncompile, unrecorded
from .config import SELECTIONS, MergeConfig, TokenMergeError
from .files import append_line
from .measure import Stopwatch, environment, timed
from .methods import method_for
from .tables import markdown

MODES = ("eager", "graph", "compiled", "compiled+graph")
# What the bound of linear merging has in place of a config's own; the rest they share.
_BOUND = {"method": "lower-bound", "selection": "facility-location", "unmerge": "transpose", "anchor_every": 0}


@dataclass(frozen=True)
class Candidate:
    """One row of a comparison; without a config the denoiser as it is."""

    label: str
    config: MergeConfig | None = None

    def phases(self, steps: int) -> list[str]:
        """The phase of every step. The first is one of its own, since there an image begins: how its tokens lie is read
        from the device. Fixed maps are made once; those of the bound cost nothing by definition."""
        if self.config is None:
            return ["full"] * steps
        phases = phases_of(self.config, steps)
        method = method_for(self.config)
        if self.config.method == "lower-bound":
            return [_renamed(phase, "reuse") for phase in phases]
        if method.PER_BLOCK:
            phases = [_renamed(phase, "select") for phase in phases]
        elif not method.REFRESHES:
            made = {phases.index(each) for each in dict.fromkeys(phases) if "select" in each}
            phases = [phase if step in made else _renamed(phase, "reuse") for step, phase in enumerate(phases)]
        return [f"first {phases[0]}", *phases[1:]]


def _renamed(phase: str, name: str) -> str:
    """A phase as if `name` were what it renews."""
    return re.sub("select|reweigh|reuse", name, phase)


class _Loop:
    """Stands for the scheduler that drives a denoiser: merging hears its steps, and it may skip some."""

    def __init__(self, steps: int) -> None:
        self.timesteps = list(range(steps, 0, -1))
        self.begin_index = 0

    def set_timesteps(self) -> None:
        """Begin an image."""

    def step(self) -> None:
        """End a step."""


@dataclass(frozen=True)
class Setting:
    """What all candidates of one comparison share."""

    model: str
    width: int
    height: int
    batch: int
    mode: str
    steps: int
    warmups: int
    settle: float  # seconds of warming up at least, for the clocks of the device to settle
    repeats: int
    loops: int  # whole schedules to run from end to end as well
    command: str  # that asked for it


def phases_of(config: MergeConfig, steps: int) -> list[str]:
    """The phase of every step of an image."""
    schedule = config.schedule
    phases = []
    # Each ratio has maps of its own; a gap is that of the last one.
    selected: dict[float, int] = {}
    weighed: dict[float, int] = {}
    anchored: tuple[float, int] | None = None
    for step in range(steps):
        ratio = config.ratio_at(step / steps)
        if not schedule.merges(step / steps) or ratio == 0:
            phases.append("full")
            continue
        anchor = schedule.anchors(step, anchored[1] if anchored and anchored[0] == ratio else None)
        phase = schedule.phase(step, selected.get(ratio), weighed.get(ratio), anchor=anchor)
        anchored = (ratio, step) if anchor else anchored
        if phase == "select":
            selected[ratio] = step
        if phase != "reuse":
            weighed[ratio] = step
        label = f"anchor, {phase}" if anchor else phase
        phases.append(f"{label} at {ratio:g}" if config.step_ratios else label)
    return phases


def measure_candidate(
    denoiser: nn.Module, arguments: dict[str, Any], candidate: Candidate, setting: Setting
) -> dict[str, Any]:
    """One record: milliseconds by phase and over the schedule, launches of a call, peak memory."""
    device = next(denoiser.parameters()).device
    loop = _Loop(setting.steps)
    api.remove(denoiser)
    uncompile(denoiser)
    torch.compiler.reset()
    _free(device)

    def call() -> None:
        with torch.inference_mode():
            denoiser(**arguments, return_dict=False)

    phases = candidate.phases(setting.steps)
    try:
        if candidate.config is not None:
            api.apply(denoiser, candidate.config, scheduler=loop)
        launches = None
        if setting.mode != "eager":
            compile(denoiser, blocks="compiled" in setting.mode, graphs="graph" in setting.mode)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _, first = timed(call, device)
        times = _time_phases(loop, call, phases, device, setting)
        if reasons := unrecorded(denoiser):
            raise TokenMergeError(
                f"{candidate.label} cannot be timed in mode {setting.mode!r}: calls cannot be recorded as CUDA graphs "
                f"({reasons[0]}); use mode 'eager' or 'compiled'"
            )
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        whole = [_time_loop(loop, call, device, setting.steps) for _ in range(setting.loops)]
        backends = [group["backend"] for group in api.summary(denoiser).groups]
        compiled = api.summary(denoiser).compiled
        if device.type == "cuda" and "graph" not in setting.mode:
            launches = _launches(loop, call, typical_step(phases))
    finally:
        uncompile(denoiser)
        api.remove(denoiser)
    return {
        "label": candidate.label,
        **vars(setting),
        "config": candidate.config.to_dict() if candidate.config is not None else None,
        "steps_by_phase": dict(Counter(phases)),
        "laps_ms": {phase: [round(lap, 4) for lap in laps] for phase, laps in times.items()},
        "loop_ms": [round(seconds * 1e3, 3) for seconds in whole],
        "first_call_s": round(first, 3),
        "launches": launches,
        "peak_bytes": peak,
        "backend": backends[0] if backends else None,
        "compiled": compiled,
        "environment": environment(device),
    }


def _time_phases(
    loop: _Loop, call: Callable[[], None], phases: list[str], device: torch.device, setting: Setting
) -> dict[str, list[float]]:
    """Milliseconds of every phase. Each image visits a step of each phase and skips the rest."""
    # Where nothing is refreshed one image goes on: making maps anew would let the device run dry before a lap.
    anew = len(set(phases)) > 1
    visited = visits(phases) if anew else {0: phases[0]}
    _begin_image(loop, call, 1)

    def turn(watches: dict[str, Stopwatch]) -> None:
        if anew:
            loop.set_timesteps()
        for step in range(max(visited) + 1):
            if step in visited:
                phase = visited[step]
                call() if phase is None else watches[phase].lap(call)
            loop.step()

    began, turns = time.perf_counter(), 0
    while turns < setting.warmups or time.perf_counter() - began < setting.settle:
        timed(lambda: turn(_watches(phases, device)), device)
        turns += 1
    watches = _watches(phases, device)
    for _ in range(setting.repeats):
        turn(watches)
    return {phase: watch.milliseconds() for phase, watch in watches.items()}


def visits(phases: Sequence[str]) -> dict[int, str | None]:
    """The steps of an image that are run to time every phase, each with the phase it is a lap of: the first that has
    it. Where that one would have to make the maps it is said to reuse, as a bound does, it is no lap, and the second
    is one."""
    found: dict[int, str | None] = {}
    for phase in dict.fromkeys(phases):
        first, *later = (step for step, each in enumerate(phases) if each == phase)
        made = any(before.endswith(_renamed(phase, "select")) for before in phases[:first])
        if "reuse" in phase and not made and later:
            found[first] = None
            first = later[0]
        found[first] = phase
    return found


def _watches(phases: Iterable[str], device: torch.device) -> dict[str, Stopwatch]:
    return {phase: Stopwatch(device) for phase in dict.fromkeys(phases)}


def _time_loop(loop: _Loop, call: Callable[[], None], device: torch.device, steps: int) -> float:
    return timed(lambda: _begin_image(loop, call, steps), device)[1]


def _begin_image(loop: _Loop, call: Callable[[], None], steps: int) -> None:
    """An image up to, and without, the step of this number."""
    loop.set_timesteps()
    for _ in range(steps):
        call()
        loop.step()


def typical_step(phases: Sequence[str]) -> int:
    """The second step, or else the only one, of the most frequent phase: of those that reuse maps, or where none does
    of those that merge, or where nothing is merged of all. The first may also begin an image, or make a bound's maps.
    """
    reused = [phase for phase in phases if phase.startswith("reuse")]
    merged = [phase for phase in phases if "full" not in phase]
    (phase, _), *_ = Counter(reused or merged or phases).most_common(1)
    return [step for step, each in enumerate(phases) if each == phase][:2][-1]


def _launches(loop: _Loop, call: Callable[[], None], step: int) -> int:
    """Kernels, copies and fills of one step of an image."""
    from torch.profiler import ProfilerActivity, profile

    _begin_image(loop, call, step)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiled.events())


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def candidates_for(
    denoiser: nn.Module, presets: Sequence[str], ratios: Sequence[float], changes: Mapping[str, Any]
) -> list[Candidate]:
    """The denoiser as it is; then for every ratio each preset, and where merging is linear its bound at those sites."""
    found = [Candidate("unpatched")]
    for ratio in ratios:
        for preset in presets:
            config = api.config_for(denoiser, preset=None if preset == "default" else preset, ratio=ratio, **changes)
            if config.coverage is not None:
                raise TokenMergeError(
                    f"with coverage={config.coverage:g} a picture decides how much is removed at which step, so phases "
                    "cannot be timed one by one; use eval, which times whole pictures, or leave coverage out"
                )
            if config.method in ("toma", *SELECTIONS):
                found.append(Candidate(f"lower-bound of {preset} {ratio:g}", config.replace(**_BOUND)))
            found.append(Candidate(f"{preset} {ratio:g}", config))
    return found


@dataclass(frozen=True)
class Task:
    """What was asked for: every size, batch and mode is a comparison of all presets and ratios."""

    model: str
    device: torch.device
    sizes: Sequence[tuple[int, int]]  # width, height
    batches: Sequence[int]
    modes: Sequence[str]
    presets: Sequence[str]
    ratios: Sequence[float]
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
        for name in ("sizes", "batches", "modes", "presets", "ratios"):
            if not getattr(self, name):
                raise TokenMergeError(f"--{name} is empty; give one or more, separated by commas")
        numbers = [("steps", 1), ("warmups", 0), ("repeats", 1), ("loops", 0), ("rounds", 1)]
        for name, least in numbers:
            if getattr(self, name) < least:
                raise TokenMergeError(f"--{name} is {getattr(self, name)}; it must be {least} or more")
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
    check_size(width, height, scale * _patch(denoiser))
    batch = min(task.batches)
    arguments = _arguments(denoiser, batch, width, height, scale)
    for candidate in candidates:
        loop = _Loop(task.steps)
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


def _patch(denoiser: nn.Module) -> int:
    """Latents to a side of the smallest token."""
    latents = 64
    return latents // family_of(denoiser).plan_call(denoiser, latents, latents).height


def _too_large(task: Task, width: int, height: int, batch: int) -> TokenMergeError:
    return TokenMergeError(
        f"{task.device} has too little memory for {task.model} at {width}x{height}, batch {batch}; use a smaller size "
        "or batch" + (f" (what was measured is in {task.out})" if task.out and task.out.is_file() else "")
    )


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file that `run` has written."""
    way_out = "give a file that bench --out has written"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TokenMergeError(f"{path} cannot be read ({error.strerror or error}); {way_out}") from error
    except UnicodeDecodeError as error:
        raise TokenMergeError(f"{path} is no text; {way_out}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TokenMergeError(f"line {number} of {path} is no JSON ({error}); {way_out}") from error
        if not isinstance(record, dict) or "laps_ms" not in record:
            raise TokenMergeError(f"line {number} of {path} is no record of times; {way_out}")
        records.append(record)
    if not records:
        raise TokenMergeError(f"{path} holds no record; {way_out}")
    return records


def report(records: Iterable[dict[str, Any]]) -> str:
    """A Markdown table of each comparison, with advice where merging did not pay."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        key = tuple(record[name] for name in ("model", "width", "height", "batch", "mode", "steps"))
        groups.setdefault((*key, json.dumps(record["environment"])), []).append(record)
    parts = []
    for (model, width, height, batch, mode, steps, _), found in groups.items():
        rows = pool(found)
        where = rows[0].record["environment"]
        parts.append(
            f"**{model}, {width}x{height}, batch {batch}, {mode}**: {steps} steps on {where['device']}, "
            f"torch {where['torch']}\n\n{_table(rows)}"
        )
        if any(speed_up(row, rows) < 1 for row in rows):
            parts.append(_advice(mode))
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Row:
    """A candidate of a comparison, with the laps of all rounds."""

    record: dict[str, Any]  # of the first round
    laps: dict[str, list[float]]
    loops: list[float]  # milliseconds of whole schedules, run from end to end

    @property
    def config(self) -> dict[str, Any] | None:
        config: dict[str, Any] | None = self.record["config"]
        return config

    @property
    def schedule_ms(self) -> float:
        """Of all steps: the median of each phase, as often as a schedule has it."""
        steps: dict[str, int] = self.record["steps_by_phase"]
        return sum(statistics.median(self.laps[phase]) * count for phase, count in steps.items())


def pool(records: Sequence[dict[str, Any]]) -> list[Row]:
    """One row for each candidate."""
    rows: dict[str, Row] = {}
    for record in records:
        key = json.dumps([record["label"], record["config"]])
        row = rows.setdefault(key, Row(record, {phase: [] for phase in record["laps_ms"]}, []))
        row.loops.extend(record["loop_ms"])
        for phase, laps in record["laps_ms"].items():
            row.laps[phase] += laps
    return list(rows.values())


def speed_up(row: Row, rows: Sequence[Row]) -> float:
    """Of a row over the unpatched one of the same comparison."""
    plain = next((each for each in rows if each.config is None), None)
    if plain is None:
        raise TokenMergeError(
            f"{row.record['label']!r} has no unpatched row to be compared with; keep all rows of a run in one file"
        )
    return plain.schedule_ms / row.schedule_ms


def _advice(mode: str) -> str:
    lead = "Below 1.00x merging costs more than it saves here: "
    if "graph" in mode:
        return lead + "there are too few tokens. Use a larger batch or a larger image, or leave merging off."
    return lead + (
        "the device waits for launches, or there are too few tokens. Use `tokenmerge.compile(pipe)`, which replays "
        "CUDA graphs, or a larger batch or image."
    )


def _table(rows: Sequence[Row]) -> str:
    header = ["", "schedule ms", "speed-up", "over its bound", "ms by phase (10-90 %)", "launches", "peak GiB"]
    header += ["end to end ms", "first call s"]
    lines = list(_lines(rows))
    # What was not measured has no column.
    shown = [place for place in range(len(header)) if any(line[place] for line in lines)]
    return markdown([header[place] for place in shown], [[line[place] for place in shown] for line in lines])


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    bounds = {_bound_of(row.config): row for row in rows if row.config and row.config["method"] == "lower-bound"}
    for row in rows:
        bound = bounds.get(_bound_of(row.config)) if row.config else None
        peak = row.record["peak_bytes"]
        yield [
            row.record["label"],
            f"{row.schedule_ms:.0f}",
            f"{speed_up(row, rows):.2f}x",
            "" if bound in (None, row) else f"{100 * (row.schedule_ms / bound.schedule_ms - 1):+.1f} %",
            ", ".join(f"{phase} {_spread(laps)}" for phase, laps in row.laps.items()),
            str(row.record["launches"] or ""),
            f"{peak / 2**30:.2f}" if peak else "",
            f"{statistics.median(row.loops):.0f}" if row.loops else "",
            f"{row.record['first_call_s']:.1f}" if "compiled" in row.record["mode"] else "",
        ]


def _spread(laps: list[float]) -> str:
    ordered = sorted(laps)
    tail = len(ordered) // 10
    return f"{statistics.median(ordered):.2f} ({ordered[tail]:.2f}-{ordered[-1 - tail]:.2f})"


def _bound_of(config: dict[str, Any]) -> str:
    """The config of its bound, as it is recorded; a bound has itself."""
    schedule = {name: _BOUND.get(name, value) for name, value in config["schedule"].items()}
    bound = {name: _BOUND.get(name, value) for name, value in config.items()}
    return json.dumps({**bound, "schedule": schedule}, sort_keys=True)

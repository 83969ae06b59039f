"""Measures the time, launches and memory of one candidate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import api
from ...compiling import compile, uncompile, unrecorded
from ...errors import TokenMergeError
from ...runtime.state import APPLIED
from ...runtime.timeline import USUAL_BEND
from ..measure import Stopwatch, environment, forget_peak_memory, free_memory, peak_memory, timed
from .candidates import Candidate, is_needed, typical_step, visits


@dataclass(frozen=True)
class Setting:
    """What all candidates in one comparison share."""

    model: str
    width: int
    height: int
    batch: int
    mode: str
    steps: int
    warmups: int
    settle: float  # least seconds of warm-up, for the clocks of the device to settle
    repeats: int
    loops: int  # whole schedules to time as well
    command: str  # as typed
    frames: int


class Loop:
    """A stand-in for the scheduler: techniques follow its steps, and it may skip some."""

    def __init__(self, steps: int) -> None:
        self.timesteps = list(range(steps, 0, -1))
        self.begin_index = 0

    @property
    def sigmas(self) -> Tensor:
        """Noise levels, in which residuals may be extrapolated. Their values do not affect time."""
        return torch.linspace(1.0, 0.0, len(self.timesteps) + 1)

    def set_timesteps(self) -> None:
        """Begin an image."""

    def step(self) -> None:
        """End a step."""


def measure_candidate(
    denoiser: nn.Module, arguments: dict[str, Any], candidate: Candidate, setting: Setting
) -> dict[str, Any]:
    """A record: milliseconds by phase and of whole schedules, launches per call, peak memory."""
    device = next(denoiser.parameters()).device
    loop = Loop(setting.steps)
    api.remove(denoiser)
    uncompile(denoiser)
    torch.compiler.reset()
    if device.type != "cpu":
        # The peak would include what ran before.
        free_memory(device)
    call, phases = caller(denoiser, arguments), candidate.phases(setting.steps)
    try:
        api.apply(denoiser, candidate.techniques, scheduler=loop)
        expect_usual_errors(denoiser)
        launches = None
        if setting.mode != "eager":
            compile(denoiser, blocks="compiled" in setting.mode, graphs="graph" in setting.mode)
        forget_peak_memory(device)
        _, first = timed(call, device)
        times = _time_phases(loop, call, phases, device, setting)
        if reasons := unrecorded(denoiser):
            raise TokenMergeError(
                f"{candidate.label} cannot be timed in mode {setting.mode!r}: CUDA graphs cannot record its calls "
                f"({reasons[0]}); use mode 'eager' or 'compiled'"
            )
        peak = peak_memory(device)
        whole = [timed(lambda: begin_image(loop, call, setting.steps), device)[1] for _ in range(setting.loops)]
        summary = api.summary(denoiser)
        if device.type == "cuda" and "graph" not in setting.mode:
            launches = _launches(loop, call, phases)
    finally:
        uncompile(denoiser)
        api.remove(denoiser)
    return {
        **candidate.to_dict(),
        **vars(setting),
        "steps_by_phase": dict(Counter(phases)),
        "laps_ms": {phase: [round(lap, 4) for lap in laps] for phase, laps in times.items()},
        "loop_ms": [round(seconds * 1e3, 3) for seconds in whole],
        "first_call_s": round(first, 3),
        "launches": launches,
        "peak_bytes": peak,
        "backend": summary.groups[0]["backend"] if summary.groups else None,
        "compiled": summary.compiled,
        "environment": environment(device),
    }


def caller(denoiser: nn.Module, arguments: dict[str, Any]) -> Callable[[], None]:
    """A function that calls a denoiser with these arguments."""

    def call() -> None:
        with torch.inference_mode():
            denoiser(**arguments, return_dict=False)

    return call


def expect_usual_errors(denoiser: nn.Module) -> None:
    """Make Hold follow the expected timeline. Weights and inputs may be random, with unusual errors."""
    known = vars(denoiser).get(APPLIED)
    if known is not None and known.holding is not None:
        known.holding.errors.assumed = USUAL_BEND


def _time_phases(
    loop: Loop, call: Callable[[], None], phases: list[str], device: torch.device, setting: Setting
) -> dict[str, list[float]]:
    """Milliseconds of every lap, by phase. Each image visits one step per phase and skips the rest."""
    # With a single phase, one image goes on: new maps would let the device run dry before each lap.
    anew = len(set(phases)) > 1
    visited = visits(phases) if anew else {0: phases[0]}
    if not anew:
        begin_image(loop, call, 1)

    def turn(watches: dict[str, Stopwatch]) -> None:
        if anew:
            loop.set_timesteps()
        for step in range(max(visited) + 1):
            if step in visited:
                phase = visited[step]
                call() if phase is None else watches[phase].lap(call)
            loop.step()

    began, turns = time.perf_counter(), 0
    # CUDA graphs record the second call of a kind.
    least = max(setting.warmups, 2) if "graph" in setting.mode else setting.warmups
    while turns < least or time.perf_counter() - began < setting.settle:
        timed(lambda: turn(_watches(phases, device)), device)
        turns += 1
    watches = _watches(phases, device)
    for _ in range(setting.repeats):
        turn(watches)
    return {phase: watch.milliseconds() for phase, watch in watches.items()}


def _watches(phases: Iterable[str], device: torch.device) -> dict[str, Stopwatch]:
    return {phase: Stopwatch(device) for phase in dict.fromkeys(phases)}


def begin_image(loop: Loop, call: Callable[[], None], steps: int) -> None:
    """Begin an image and run its first `steps` steps."""
    loop.set_timesteps()
    for _ in range(steps):
        call()
        loop.step()


def reach(loop: Loop, call: Callable[[], None], phases: Sequence[str], step: int) -> None:
    """Begin an image and advance to `step`. Of the steps before it, run only those that later ones need."""
    loop.set_timesteps()
    for each in range(step):
        if is_needed(each, phases):
            call()
        loop.step()


def _launches(loop: Loop, call: Callable[[], None], phases: list[str]) -> int:
    """The number of kernels, copies and fills that a typical step launches."""
    from torch.profiler import ProfilerActivity, profile

    reach(loop, call, phases, typical_step(phases))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiled.events())

"""Time, launches and memory of one candidate."""

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
    frames: int


class Loop:
    """Stands for the scheduler that drives a denoiser: techniques hear its steps, and it may skip some."""

    def __init__(self, steps: int) -> None:
        self.timesteps = list(range(steps, 0, -1))
        self.begin_index = 0

    @property
    def sigmas(self) -> Tensor:
        """Noise levels, which residuals may be extrapolated in; what they are costs nothing."""
        return torch.linspace(1.0, 0.0, len(self.timesteps) + 1)

    def set_timesteps(self) -> None:
        """Begin an image."""

    def step(self) -> None:
        """End a step."""


def measure_candidate(
    denoiser: nn.Module, arguments: dict[str, Any], candidate: Candidate, setting: Setting
) -> dict[str, Any]:
    """One record: milliseconds by phase and over the schedule, launches of a call, peak memory."""
    device = next(denoiser.parameters()).device
    loop = Loop(setting.steps)
    api.remove(denoiser)
    uncompile(denoiser)
    torch.compiler.reset()
    if device.type != "cpu":
        # Of what ran before, which the peak would count.
        free_memory(device)

    def call() -> None:
        with torch.inference_mode():
            denoiser(**arguments, return_dict=False)

    phases = candidate.phases(setting.steps)
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
                f"{candidate.label} cannot be timed in mode {setting.mode!r}: calls cannot be recorded as CUDA graphs "
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


def expect_usual_errors(denoiser: nn.Module) -> None:
    """Let Hold take the steps that a timeline expects: weights and inputs may be random, and show other errors."""
    known = vars(denoiser).get(APPLIED)
    if known is not None and known.holding is not None:
        known.holding.errors.assumed = USUAL_BEND


def _time_phases(
    loop: Loop, call: Callable[[], None], phases: list[str], device: torch.device, setting: Setting
) -> dict[str, list[float]]:
    """Milliseconds of every phase. Each image visits a step of each phase and skips the rest."""
    # Where nothing is renewed one image goes on: making maps anew would let the device run dry before a lap.
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
    # The first call of a kind runs as it is, and the second is recorded.
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
    """An image up to, and without, the step of this number."""
    loop.set_timesteps()
    for _ in range(steps):
        call()
        loop.step()


def reach(loop: Loop, call: Callable[[], None], phases: Sequence[str], step: int) -> None:
    """Begin an image and go on to a step. Of those before it, only what later ones depend on runs."""
    loop.set_timesteps()
    for each in range(step):
        if is_needed(each, phases):
            call()
        loop.step()


def _launches(loop: Loop, call: Callable[[], None], phases: list[str]) -> int:
    """Kernels, copies and fills of a typical step."""
    from torch.profiler import ProfilerActivity, profile

    reach(loop, call, phases, typical_step(phases))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiled.events())

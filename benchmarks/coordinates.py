"""Measures over which coordinate residuals run straightest: steps, timesteps, or one of several measures of noise.

    python benchmarks/coordinates.py --out benchmarks/results/coordinates.jsonl

Both bundled models draw plain pictures at 128 px under many schedules, and the residual of their blocks (on UNets, of
their stages) is recorded at every step. Then every second, third or fifth step of the last four fifths counts as kept,
and the steps between are extrapolated from the last two. The result is the root mean square of the relative error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import diffusers
import torch
from bundled import STEPS, Schedules, parser_for, under_schedules, write_records
from torch import Tensor

from tokenmerge.families import denoiser_of, family_of
from tokenmerge.runtime.levels import noise_levels

START = 0.2
EVERY = (2, 3, 5)
PROMPTS = ("a photo of a sunflower", "a photo of a rose")
# Each from a step's number, its timestep, its ratio of noise to signal, and the scheduler's own sigma.
COORDINATES: dict[str, Callable[[int, float, float, float], float]] = {
    "step": lambda number, time, ratio, sigma: number,
    "timestep": lambda number, time, ratio, sigma: time,
    "noise level": lambda number, time, ratio, sigma: sigma,
    "its logarithm": lambda number, time, ratio, sigma: math.log(sigma),
    "log signal to noise": lambda number, time, ratio, sigma: math.log(ratio),
    "root of noise to signal": lambda number, time, ratio, sigma: math.sqrt(ratio),
}
_PLAIN = {"rescale_betas_zero_snr": False}
_FIXED = {"use_dynamic_shifting": False}
SCHEDULES: dict[str, Schedules] = {
    "tiny-sdxl": {
        "Euler, trailing, zero SNR": (diffusers.EulerDiscreteScheduler, {}),
        "Euler, leading": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "timestep_spacing": "leading"}),
        "Euler, linspace": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "timestep_spacing": "linspace"}),
        "Euler, Karras": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "use_karras_sigmas": True}),
        "Euler, exponential": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "use_exponential_sigmas": True}),
        "Euler, beta": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "use_beta_sigmas": True}),
        "DDIM, zero SNR": (diffusers.DDIMScheduler, {}),
        "DPM++ 2M": (diffusers.DPMSolverMultistepScheduler, _PLAIN),
        "DPM++ 2M, Karras": (diffusers.DPMSolverMultistepScheduler, {**_PLAIN, "use_karras_sigmas": True}),
    },
    "tiny-flux": {
        "flow, its own shift": (diffusers.FlowMatchEulerDiscreteScheduler, {}),
        **{
            f"flow, shift {shift:g}": (diffusers.FlowMatchEulerDiscreteScheduler, {**_FIXED, "shift": shift})
            for shift in (1.0, 3.0, 7.0)
        },
        **{
            f"flow, {kind}": (
                diffusers.FlowMatchEulerDiscreteScheduler,
                {**_FIXED, "shift": 2.0, f"use_{kind.lower()}_sigmas": True},
            )
            for kind in ("Karras", "exponential", "beta")
        },
    },
}


def measured() -> Iterator[dict[str, Any]]:
    for model, name, pipe, call in under_schedules(SCHEDULES):
        pictures = [residuals_of(pipe, call, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
        for every in EVERY:
            errors = {each: error(pipe.scheduler, pictures, every, each) for each in COORDINATES}
            yield {"model": model, "schedule": name, "steps": STEPS, "every": every, "errors": errors}


def residuals_of(pipe: Any, call: dict[str, Any], prompt: str, seed: int) -> list[Tensor]:
    """The residual of all blocks at every step. If a step takes several calls, their residuals are concatenated."""
    denoiser = denoiser_of(pipe)
    family = family_of(denoiser)
    parts = family.stages(denoiser) if family.stages else family.blocks(denoiser)
    entered: list[Tensor] = []
    residuals: list[Tensor] = []

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        entered[:] = [parts[0].kind.ports.tokens.read(args, kwargs)]

    def leave(_: Any, __: Any, output: Any) -> None:
        (left,) = parts[-1].kind.ports.outgoing(output)
        residuals.append(left - entered[0])

    handles = [parts[0].module.register_forward_pre_hook(enter, with_kwargs=True)]
    handles.append(parts[-1].module.register_forward_hook(leave))
    generator = torch.Generator().manual_seed(seed)
    pipe(prompt, generator=generator, output_type="latent", num_inference_steps=STEPS, **call)
    for handle in handles:
        handle.remove()
    calls = len(residuals) // STEPS
    return [torch.cat(residuals[step * calls : (step + 1) * calls]) for step in range(STEPS)]


def error(scheduler: Any, pictures: list[list[Tensor]], every: int, coordinate: str) -> float:
    """Root mean square of the relative error, over all steps that are not kept."""
    levels = noise_levels(scheduler)
    assert levels is not None
    sigmas = getattr(scheduler, "sigmas", None)
    known = levels if sigmas is None else [max(sigma, 1e-4) for sigma in sigmas.tolist()]
    given = zip(range(STEPS), scheduler.timesteps.tolist(), levels, known[:STEPS], strict=True)
    places = [COORDINATES[coordinate](*each) for each in given]
    kept = range(math.ceil(START * STEPS), STEPS, every)
    found = []
    for picture in pictures:
        for before, last in pairwise(kept):
            slope = (picture[last] - picture[before]) / (places[last] - places[before])
            for step in range(last + 1, min(last + every, STEPS)):
                expected = picture[last] + slope * (places[step] - places[last])
                off, length = (each.flatten(1).norm(dim=1) for each in (picture[step] - expected, picture[step]))
                found.append(float((off / length).max()))
    return round(math.sqrt(sum(each**2 for each in found) / len(found)), 5)


if __name__ == "__main__":
    write_records(parser_for(__doc__).parse_args().out, measured())

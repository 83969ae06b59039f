"""Measures what residuals run straightest over: steps, timesteps, the noise level, its logarithm, or its square root.

    python benchmarks/coordinates.py --out benchmarks/results/coordinates.jsonl

Both bundled models draw plain pictures at 128 px under many schedules. What their blocks (of UNets, their stages)
change is noted at every step. Then every second, third or fifth step of the last four fifths is taken as kept, and the
steps between are extrapolated from the last two. Told is the root mean square of the relative error.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

import tokenmerge_models
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.runtime.levels import noise_levels
from tokenmerge.tools.measure import environment

SIDE, STEPS, START = 128, 28, 0.2
EVERY = (2, 3, 5)
PROMPTS = ("a photo of a sunflower", "a photo of a rose")
# From the number of a step, its timestep, and its noise to signal, alone and as the scheduler has it.
COORDINATES: dict[str, Callable[[int, float, float, float], float]] = {
    "step": lambda number, time, ratio, sigma: number,
    "timestep": lambda number, time, ratio, sigma: time,
    "noise level": lambda number, time, ratio, sigma: sigma,
    "its logarithm": lambda number, time, ratio, sigma: math.log(sigma),
    "log signal to noise": lambda number, time, ratio, sigma: math.log(ratio),
    "root of noise to signal": lambda number, time, ratio, sigma: math.sqrt(ratio),
}
_PLAIN = {"rescale_betas_zero_snr": False}
SDXL: dict[str, tuple[Any, dict[str, Any]]] = {
    "Euler, trailing, zero SNR": (diffusers.EulerDiscreteScheduler, {}),
    "Euler, leading": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "timestep_spacing": "leading"}),
    "Euler, linspace": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "timestep_spacing": "linspace"}),
    "Euler, Karras": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "use_karras_sigmas": True}),
    "Euler, exponential": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "use_exponential_sigmas": True}),
    "Euler, beta": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "use_beta_sigmas": True}),
    "DDIM, zero SNR": (diffusers.DDIMScheduler, {}),
    "DPM++ 2M": (diffusers.DPMSolverMultistepScheduler, _PLAIN),
    "DPM++ 2M, Karras": (diffusers.DPMSolverMultistepScheduler, {**_PLAIN, "use_karras_sigmas": True}),
}
_FIXED = {"use_dynamic_shifting": False}
FLUX: dict[str, tuple[Any, dict[str, Any]]] = {
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
}
MODELS = {"tiny-sdxl": SDXL, "tiny-flux": FLUX}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = environment(torch.device("cpu"))
    with options.out.open("w") as file:
        for model, schedules in MODELS.items():
            folder = tokenmerge_models.models()[model]
            pipe = DiffusionPipeline.from_pretrained(folder)
            pipe.set_progress_bar_config(disable=True)
            call = json.loads((folder / "tokenmerge.json").read_text())["call"]
            own = pipe.scheduler.config
            for name, (scheduler, changes) in schedules.items():
                pipe.scheduler = scheduler.from_config(own, **changes)
                pictures = [noted(pipe, prompt, seed, call) for seed, prompt in enumerate(PROMPTS)]
                for every in EVERY:
                    errors = {each: error(pipe.scheduler, pictures, every, each) for each in COORDINATES}
                    record = {"model": model, "schedule": name, "steps": STEPS, "every": every, "errors": errors}
                    file.write(json.dumps({**record, "environment": known}) + "\n")
                print(model, name, flush=True)


def noted(pipe: Any, prompt: str, seed: int, call: dict[str, Any]) -> list[Tensor]:
    """What the blocks change in every step, all its calls together."""
    denoiser = denoiser_of(pipe)
    family = family_of(denoiser)
    parts = family.stages(denoiser) if family.stages else family.blocks(denoiser)
    entered: list[Tensor] = []
    changes: list[Tensor] = []

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        entered[:] = [parts[0].kind.ports.tokens.read(args, kwargs)]

    def leave(_: Any, __: Any, output: Any) -> None:
        (left,) = parts[-1].kind.ports.outgoing(output)
        changes.append(left - entered[0])

    handles = [parts[0].module.register_forward_pre_hook(enter, with_kwargs=True)]
    handles.append(parts[-1].module.register_forward_hook(leave))
    size = {"num_inference_steps": STEPS, "height": SIDE, "width": SIDE}
    pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent", **size, **call)
    for handle in handles:
        handle.remove()
    calls = len(changes) // STEPS
    return [torch.cat(changes[step * calls : (step + 1) * calls]) for step in range(STEPS)]


def error(scheduler: Any, pictures: list[list[Tensor]], every: int, coordinate: str) -> float:
    """Root mean square of the relative error of all steps that are not kept."""
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
    main()

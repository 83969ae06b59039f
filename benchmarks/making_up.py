"""Measures what a full step gains by making up for the held steps before it.

    python benchmarks/making_up.py --out benchmarks/results/making-up.jsonl

Both bundled models draw at 128 px under several schedules and settings of Hold, with making up and without it. Each
line has the squared errors to the plain pictures. `left` is what making up leaves of what held steps miss, as a share:
in plain pictures every third step is taken as full, and the steps between are extrapolated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from coordinates import noted
from diffusers import DiffusionPipeline

import tokenmerge
import tokenmerge_models
from tokenmerge import Hold
from tokenmerge.runtime.levels import noise_levels, place_at
from tokenmerge.runtime.timeline import Kept
from tokenmerge.tools.measure import environment

SIDE, STEPS, APART = 128, 28, 3
PROMPTS = ("a photo of a sunflower", "a photo of a rose", "a photo of a tulip", "a photo of a passion flower")
# The last is for schedulers that add noise, where errors are large.
HOLDS = (Hold(), Hold(every=3), Hold(every=5), Hold(tolerance=0.6))
_PLAIN = {"rescale_betas_zero_snr": False}
_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 2.0}
SCHEDULES: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "tiny-flux": {
        "its own": (diffusers.FlowMatchEulerDiscreteScheduler, {}),
        "UniPC": (diffusers.UniPCMultistepScheduler, _FLOW),
    },
    "tiny-sdxl": {
        "its own": (diffusers.EulerDiscreteScheduler, {}),
        "Euler, Karras": (diffusers.EulerDiscreteScheduler, {**_PLAIN, "use_karras_sigmas": True}),
        "DPM++ 2M": (diffusers.DPMSolverMultistepScheduler, _PLAIN),
        "Heun": (diffusers.HeunDiscreteScheduler, {}),
        "Euler ancestral": (diffusers.EulerAncestralDiscreteScheduler, {}),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = environment(torch.device("cpu"))
    with options.out.open("w") as file:
        for model, schedules in SCHEDULES.items():
            folder = tokenmerge_models.models()[model]
            pipe = DiffusionPipeline.from_pretrained(folder)
            pipe.set_progress_bar_config(disable=True)
            call = json.loads((folder / "tokenmerge.json").read_text())["call"]
            own = pipe.scheduler.config
            for name, (scheduler, changes) in schedules.items():
                pipe.scheduler = scheduler.from_config(own, **changes)
                for record in measured(pipe, call):
                    record = {"model": model, "schedule": name, "steps": STEPS, **record, "environment": known}
                    file.write(json.dumps(record) + "\n")
                print(model, name, flush=True)


def measured(pipe: Any, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The errors of every setting, and how many steps were full."""
    plain = draw(pipe, call)
    shares = [share for seed, prompt in enumerate(PROMPTS) for share in left(pipe, prompt, seed, call)]
    for hold in HOLDS:
        errors, full = {}, {}
        for name, context in {"made_up": nullcontext, "not_made_up": not_made_up}.items():
            with tokenmerge.applied(pipe, hold), context():
                pictures = draw(pipe, call)
                full[name] = tokenmerge.summary(pipe).steps["full"]
            errors[name] = [round(float(each), 2) for each in ((pictures - plain) ** 2).mean((1, 2, 3))]
        yield {
            "hold": hold.to_dict(),
            "mse": errors,
            "full": full,
            "left": round(sum(shares) / len(shares), 3) if shares else None,
        }


def draw(pipe: Any, call: dict[str, Any]) -> np.ndarray:
    size = {"num_inference_steps": STEPS, "height": SIDE, "width": SIDE, "output_type": "np"}
    generators = (torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS)))
    pairs = zip(PROMPTS, generators, strict=True)
    return 255 * np.stack([pipe(prompt, generator=each, **size, **call).images[0] for prompt, each in pairs])


@contextmanager
def not_made_up() -> Iterator[None]:
    owed = Kept.owed
    Kept.owed = lambda *_: 0.0
    try:
        yield
    finally:
        Kept.owed = owed


def left(pipe: Any, prompt: str, seed: int, call: dict[str, Any]) -> list[float]:
    """What making up leaves of what held steps miss, from every third step to the next."""
    residuals = noted(pipe, prompt, seed, call)
    levels = noise_levels(pipe.scheduler)
    assert levels is not None
    # Solvers of second order have other steps, and those that add noise have residuals that jump.
    if len(levels) != STEPS:
        return []
    place = [place_at(number, STEPS, levels) for number in range(STEPS)]
    found = []
    for now in range(2 * APART, STEPS, APART):
        last = now - APART
        kept = Kept(place[last], place[last - APART], held=tuple(place[last + 1 : now]))
        slope = (residuals[last] - residuals[last - APART]) / (place[last].at - place[last - APART].at)
        off = [
            residuals[step] - residuals[last] - slope * (each.at - place[last].at) for step, each in enumerate(place)
        ]
        missed = sum((off[step] * place[step].weight for step in range(last + 1, now)), torch.zeros(()))
        made_up = off[now] * kept.owed(place[now]) * place[now].weight
        found.append(float((missed - made_up).norm() / missed.norm()))
    return found


if __name__ == "__main__":
    main()

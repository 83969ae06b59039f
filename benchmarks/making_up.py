"""Measures what a full step gains by making up for the held steps before it.

    python benchmarks/making_up.py --out benchmarks/results/making-up.jsonl

Both bundled models draw at 128 px under several schedules and settings of Hold, with making up and without it. Each
line has the squared errors to the plain pictures. `left` is the share of the held steps' error that is left after
making up: in plain pictures every third step counts as full, and the steps between are extrapolated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import diffusers
import torch
from bundled import STEPS, Schedules, draw, parser_for, under_schedules, write_records
from coordinates import residuals_of

import tokenmerge
from tokenmerge import Hold
from tokenmerge.runtime.levels import noise_levels, place_at
from tokenmerge.runtime.timeline import Kept

APART = 3
PROMPTS = ("a photo of a sunflower", "a photo of a rose", "a photo of a tulip", "a photo of a passion flower")
# The last is for schedulers that add noise, where errors are large.
HOLDS = (Hold(), Hold(every=3), Hold(every=5), Hold(tolerance=0.6))
_PLAIN = {"rescale_betas_zero_snr": False}
_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 2.0}
SCHEDULES: dict[str, Schedules] = {
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


def measured() -> Iterator[dict[str, Any]]:
    """The errors of every setting, and the number of full steps."""
    for model, name, pipe, call in under_schedules(SCHEDULES):
        plain = draw(pipe, call, PROMPTS)
        shares = [share for seed, prompt in enumerate(PROMPTS) for share in left(pipe, call, prompt, seed)]
        for hold in HOLDS:
            errors, full = {}, {}
            for way, context in {"made_up": nullcontext, "not_made_up": not_made_up}.items():
                with tokenmerge.applied(pipe, hold), context():
                    pictures = draw(pipe, call, PROMPTS)
                    full[way] = tokenmerge.summary(pipe).steps["full"]
                errors[way] = [round(float(each), 2) for each in ((pictures - plain) ** 2).mean((1, 2, 3))]
            yield {
                "model": model,
                "schedule": name,
                "steps": STEPS,
                "hold": hold.to_dict(),
                "mse": errors,
                "full": full,
                "left": round(sum(shares) / len(shares), 3) if shares else None,
            }


@contextmanager
def not_made_up() -> Iterator[None]:
    owed = Kept.owed
    Kept.owed = lambda *_: 0.0
    try:
        yield
    finally:
        Kept.owed = owed


def left(pipe: Any, call: dict[str, Any], prompt: str, seed: int) -> list[float]:
    """The share of the held steps' error that is left after making up, from every third step to the next."""
    residuals = residuals_of(pipe, call, prompt, seed)
    levels = noise_levels(pipe.scheduler)
    assert levels is not None
    # Solvers of second order have more steps, and under schedulers that add noise residuals jump.
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
    write_records(parser_for(__doc__).parse_args().out, measured())

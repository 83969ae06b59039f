"""Measures what Hold drifts under schedulers that add noise.

    python benchmarks/noise.py --out benchmarks/results/noise.jsonl

Each prompt is drawn plain and held, from the same seeds: both have the same noise at every step. Beside it stands the
same scheduler with as many steps as the held picture ran in full. `mse` is to the plain picture; `grain` is the energy
of the finest detail over that of the plain picture, which noise that stays in a picture would raise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
)

import tokenmerge
import tokenmerge_models
from tokenmerge import Hold
from tokenmerge.tools.evaluation.prompts import read_prompts
from tokenmerge.tools.measure import environment

SIDE, STEPS, PICTURES = 128, 28, 2
SDE = {"algorithm_type": "sde-dpmsolver++"}
TECHNIQUES = {
    "tiny-flux": [Hold(every=2, what="prediction"), Hold(every=3, what="prediction"), Hold(what="prediction")],
    "tiny-sdxl": [Hold(every=3, what="prediction"), Hold(every=3, what="blocks"), Hold(what="prediction")],
}


def schedulers(model: str, own: Any) -> dict[str, Any]:
    if model == "tiny-flux":
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
        # The pipeline gives a shift to schedulers that take one.
        flow |= {"use_dynamic_shifting": True, "time_shift_type": "exponential"}
        return {
            "its own, no noise": own,
            "flow, stochastic": FlowMatchEulerDiscreteScheduler.from_config(own.config, stochastic_sampling=True),
            "SDE-DPM-Solver++": DPMSolverMultistepScheduler(**flow, **SDE),
        }
    config = own.config
    return {
        "its own, no noise": own,
        "Euler ancestral": EulerAncestralDiscreteScheduler.from_config(config),
        "DDPM": DDPMScheduler.from_config(config),
        "SDE-DPM-Solver++": DPMSolverMultistepScheduler.from_config(config, **SDE, rescale_betas_zero_snr=False),
        "LCM": LCMScheduler.from_config(config),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = environment(torch.device("cpu"))
    with options.out.open("w") as file:
        for model in TECHNIQUES:
            for record in measure(model):
                file.write(json.dumps({**record, "environment": known}) + "\n")
                file.flush()


def measure(model: str) -> Iterator[dict[str, Any]]:
    folder = tokenmerge_models.models()[model]
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    call = json.loads((folder / "tokenmerge.json").read_text())["call"]
    every = read_prompts()
    prompts = every[:: len(every) // PICTURES][:PICTURES]

    def draw(steps: int) -> list[np.ndarray]:
        size = {"num_inference_steps": steps, "height": SIDE, "width": SIDE, "output_type": "np"}
        generators = [torch.Generator().manual_seed(seed) for seed in range(PICTURES)]
        pairs = zip(prompts, generators, strict=True)
        # Some schedulers draw from the global generator.
        torch.manual_seed(0)
        return [255 * pipe(prompt, generator=generator, **size, **call).images[0] for prompt, generator in pairs]

    for name, scheduler in schedulers(model, pipe.scheduler).items():
        pipe.scheduler = scheduler
        plain = draw(STEPS)
        fewer: dict[int, dict[str, Any]] = {}
        for hold in TECHNIQUES[model]:
            tokenmerge.apply(pipe, hold)
            held = compared(plain, draw(STEPS))
            kinds = tokenmerge.summary(pipe).steps
            tokenmerge.remove(pipe)
            if kinds["full"] not in fewer:
                fewer[kinds["full"]] = compared(plain, draw(kinds["full"]))
            told = {"model": model, "scheduler": name, "hold": hold.to_dict(), "steps": STEPS, "kinds": kinds}
            yield {**told, "prompts": prompts, "held": held, "fewer_steps": fewer[kinds["full"]]}


def compared(plain: list[np.ndarray], others: list[np.ndarray]) -> dict[str, list[float]]:
    pairs = list(zip(plain, others, strict=True))
    return {
        "mse": [round(float(((other - one) ** 2).mean()), 2) for one, other in pairs],
        "grain": [round(_detail(other) / _detail(one), 3) for one, other in pairs],
    }


def _detail(picture: np.ndarray) -> float:
    """Mean square of what a pixel differs by from those around it."""
    inner = picture[1:-1, 1:-1]
    around = picture[:-2, 1:-1] + picture[2:, 1:-1] + picture[1:-1, :-2] + picture[1:-1, 2:]
    return float(((inner - around / 4) ** 2).mean())


if __name__ == "__main__":
    main()

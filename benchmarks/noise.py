"""Measures how far Hold drifts under schedulers that add noise.

    python benchmarks/noise.py --out benchmarks/results/noise.jsonl

Each prompt is drawn plain and held from the same seed, so both have the same noise at every step. For comparison, the
same scheduler draws with as many steps as the held picture ran in full. `mse` is to the plain picture. `grain` is the
energy of the finest detail, relative to the plain picture: noise that stays in a picture would raise it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import diffusers
import numpy as np
from bundled import STEPS, Schedules, draw, parser_for, some_prompts, under_schedules, write_records

import tokenmerge
from tokenmerge import Hold

PICTURES = 2
SDE = {"algorithm_type": "sde-dpmsolver++"}


class FlowSde:
    """Makes SDE-DPM-Solver++ for flows anew: with the shift of FluxPipeline's defaults, not the model's own."""

    @staticmethod
    def from_config(_: Any) -> Any:
        # The pipeline gives a shift to schedulers that take one.
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
        flow |= {"use_dynamic_shifting": True, "time_shift_type": "exponential"}
        return diffusers.DPMSolverMultistepScheduler(**flow, **SDE)


TECHNIQUES = {
    "tiny-flux": [Hold(every=2, what="prediction"), Hold(every=3, what="prediction"), Hold(what="prediction")],
    "tiny-sdxl": [Hold(every=3, what="prediction"), Hold(every=3, what="blocks"), Hold(what="prediction")],
}
SCHEDULES: dict[str, Schedules] = {
    "tiny-flux": {
        "its own, no noise": (diffusers.FlowMatchEulerDiscreteScheduler, {}),
        "flow, stochastic": (diffusers.FlowMatchEulerDiscreteScheduler, {"stochastic_sampling": True}),
        "SDE-DPM-Solver++": (FlowSde, {}),
    },
    "tiny-sdxl": {
        "its own, no noise": (diffusers.EulerDiscreteScheduler, {}),
        "Euler ancestral": (diffusers.EulerAncestralDiscreteScheduler, {}),
        "DDPM": (diffusers.DDPMScheduler, {}),
        "SDE-DPM-Solver++": (diffusers.DPMSolverMultistepScheduler, {**SDE, "rescale_betas_zero_snr": False}),
        "LCM": (diffusers.LCMScheduler, {}),
    },
}


def measured() -> Iterator[dict[str, Any]]:
    prompts = some_prompts(PICTURES)
    for model, name, pipe, call in under_schedules(SCHEDULES):
        plain = draw(pipe, call, prompts)
        fewer: dict[int, dict[str, Any]] = {}
        for hold in TECHNIQUES[model]:
            with tokenmerge.applied(pipe, hold):
                held = compared(plain, draw(pipe, call, prompts))
                kinds = tokenmerge.summary(pipe).steps
            if kinds["full"] not in fewer:
                fewer[kinds["full"]] = compared(plain, draw(pipe, call, prompts, kinds["full"]))
            record = {"model": model, "scheduler": name, "hold": hold.to_dict(), "steps": STEPS, "kinds": kinds}
            yield {**record, "prompts": prompts, "held": held, "fewer_steps": fewer[kinds["full"]]}


def compared(plain: np.ndarray, others: np.ndarray) -> dict[str, list[float]]:
    pairs = list(zip(plain, others, strict=True))
    return {
        "mse": [round(float(((other - one) ** 2).mean()), 2) for one, other in pairs],
        "grain": [round(_detail(other) / _detail(one), 3) for one, other in pairs],
    }


def _detail(picture: np.ndarray) -> float:
    """Mean square of the difference between a pixel and the mean of its four neighbours."""
    inner = picture[1:-1, 1:-1]
    around = picture[:-2, 1:-1] + picture[2:, 1:-1] + picture[1:-1, :-2] + picture[1:-1, 2:]
    return float(((inner - around / 4) ** 2).mean())


if __name__ == "__main__":
    write_records(parser_for(__doc__).parse_args().out, measured())

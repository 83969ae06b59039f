"""Measures how well Hold's own errors tell how far a picture is from the plain one.

    python benchmarks/drift.py --out benchmarks/results/drift.jsonl   # goes on where it was broken off
    python benchmarks/drift.py --fit benchmarks/results/drift.jsonl   # the line, and how good it is

Every prompt is drawn plain and under ten settings of Hold, at 128 px, by both bundled models. Each line has what full
steps showed and the true PSNR. `--fit` adds the errors up as the library does. The level of one model is then tried on
the other: `rank` is Spearman's correlation over all pictures, `within` its values within settings, `off_50` the median
error in dB.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler, UniPCMultistepScheduler
from scipy.stats import spearmanr

import tokenmerge
import tokenmerge_models
from tokenmerge import Hold
from tokenmerge.families import denoiser_of
from tokenmerge.holding.errors import Errors, Measured, Reading
from tokenmerge.planning import Drift
from tokenmerge.runtime.levels import error_gain, noise_levels, output_length, place_at
from tokenmerge.runtime.state import APPLIED
from tokenmerge.runtime.timeline import Kept
from tokenmerge.tools.evaluation.prompts import read_prompts
from tokenmerge.tools.measure import environment

SIDE = 128
# Steps, whether another solver than the model's own draws, and the technique.
SETTINGS: list[tuple[int, bool, Hold]] = [
    *((28, False, Hold(tolerance=tolerance)) for tolerance in (0.05, 0.2, 0.4)),
    *((28, False, Hold(every=every)) for every in (2, 5)),
    *((50, False, Hold(tolerance=tolerance)) for tolerance in (0.1, 0.3)),
    (16, False, Hold(tolerance=0.2)),
    *((28, True, Hold(tolerance=tolerance)) for tolerance in (0.1, 0.3)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-flux", "tiny-sdxl"])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fit", type=Path, help="judge this file")
    options = parser.parse_args()
    if options.fit:
        print(json.dumps(judged([json.loads(line) for line in options.fit.read_text().splitlines()]), indent=2))
        return
    if not options.out:
        parser.error("give --out or --fit")
    torch.set_num_threads(1)
    known = environment(torch.device("cpu"))
    text = options.out.read_text() if options.out.exists() else ""
    done = {(each["model"], each["prompt"]) for each in map(json.loads, text.splitlines())}
    draws = {model: drawer(model) for model in options.models}
    every = read_prompts()
    with options.out.open("a") as file:
        for seed, prompt in enumerate(every[:: max(1, len(every) // options.prompts)][: options.prompts]):
            for model, (pipe, draw) in draws.items():
                if (model, prompt) in done:
                    continue
                records = measure(model, pipe, partial(draw, prompt, seed))
                lines = [json.dumps({**record, "prompt": prompt, "environment": known}) for record in records]
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()


def drawer(model: str) -> tuple[Any, Callable[[str, int, int], np.ndarray]]:
    """A bundled model, and what draws with it."""
    folder = tokenmerge_models.models()[model]
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    call = json.loads((folder / "tokenmerge.json").read_text())["call"]

    def draw(prompt: str, seed: int, steps: int) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        size = {"num_inference_steps": steps, "height": SIDE, "width": SIDE}
        return 255 * pipe(prompt, generator=generator, output_type="np", **size, **call).images[0]

    return pipe, draw


def measure(model: str, pipe: Any, draw: Callable[[int], np.ndarray]) -> list[dict[str, Any]]:
    """One prompt under every setting."""
    own, plain, records = pipe.scheduler, {}, []
    for number, (steps, other, hold) in enumerate(SETTINGS):
        pipe.scheduler = other_solver(model, own) if other else own
        if (steps, other) not in plain:
            plain[steps, other] = draw(steps)
        with tokenmerge.applied(pipe, hold):
            error = float(((draw(steps) - plain[steps, other]) ** 2).mean())
            holding, kinds = vars(denoiser_of(pipe))[APPLIED].holding, tokenmerge.summary(pipe).steps
        record = {"model": model, "setting": number, "steps": steps, "other_solver": other, "hold": hold.to_dict()}
        levels = [float(f"{level:.5g}") for level in noise_levels(pipe.scheduler) or ()]
        record |= {"levels": levels, "gain": error_gain(pipe.scheduler), "length": output_length(pipe.scheduler)}
        psnr = round(10 * math.log10(255**2 / max(error, 1e-3)), 3)
        records.append({**record, "kinds": kinds, "seen": seen(holding.errors.measured), "psnr": psnr})
    pipe.scheduler = own
    return records


def seen(measured: Sequence[Measured]) -> list[list[float]]:
    """Full steps, each with the two before it, and the error of each call."""
    return [
        [each.now.number, last.number, before.number, *(float(f"{call.value:.5g}") for call in each.calls)]
        for each in measured
        for last, before in [each.kept[:2]]
        if before is not None
    ]


def other_solver(model: str, own: Any) -> Any:
    if model == "tiny-flux":
        return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0)
    return DPMSolverMultistepScheduler.from_config(own.config, use_karras_sigmas=True, rescale_betas_zero_snr=False)


def judged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """A level for each model, and how well that of the other one does."""
    told, all_off = {}, []
    by_model: dict[str, list[tuple[int, float, float]]] = {}
    for record in records:
        if drift := estimate(record):
            guess = Drift.of(drift, calibrated=True).psnr
            by_model.setdefault(record["model"], []).append((record["setting"], guess, record["psnr"]))
    levels = {model: float(np.median([psnr - guess for _, guess, psnr in rows])) for model, rows in by_model.items()}
    for model, rows in by_model.items():
        other = next((level for name, level in levels.items() if name != model), levels[model])
        off = [abs(psnr - guess - other) for _, guess, psnr in rows]
        all_off += off
        within = [[row for row in rows if row[0] == setting] for setting in sorted({row[0] for row in rows})]
        ranks = [round(_rank(each), 2) for each in within]
        told[model] = {"level": round(levels[model], 2), "within": ranks, **_told(rows, off)}
    ranks = [rank for each in told.values() for rank in each["within"]]
    return {**told, "all": {"within": ranks, **_told([row for rows in by_model.values() for row in rows], all_off)}}


def _told(rows: list[tuple[int, float, float]], off: list[float]) -> dict[str, Any]:
    quantiles = {f"off_{share}": round(float(np.quantile(off, share / 100)), 2) for share in (50, 68, 90)}
    return {"pictures": len(rows), "rank": round(_rank(rows), 3), **quantiles}


def estimate(record: dict[str, Any]) -> float | None:
    """What the errors of a picture add up to."""
    place = partial(place_at, total=record["steps"], levels=record["levels"], gain=record["gain"])
    errors = Errors()
    for now, last, before, *calls in record["seen"]:
        kept = Kept(place(last), place(before), held=tuple(map(place, range(last + 1, now))))
        errors.measured.append(Measured(place(now), kept, [Reading(torch.tensor(error)) for error in calls]))
    drift = errors.drift
    return None if drift is None else drift * record["length"]


def _rank(rows: list[tuple[int, float, float]]) -> float:
    return float(spearmanr([guess for _, guess, _ in rows], [psnr for _, _, psnr in rows]).statistic)


if __name__ == "__main__":
    main()

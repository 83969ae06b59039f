"""Measures how well Hold's own errors estimate how far a picture is from the plain one.

    python benchmarks/drift.py --out benchmarks/results/drift.jsonl   # resumes an interrupted run
    python benchmarks/drift.py --fit benchmarks/results/drift.jsonl   # judges the estimates

Both bundled models draw every prompt at 128 px, plain and under ten settings of Hold. Each line has the errors that
full steps showed, and the true PSNR. `--fit` adds the errors up as the library does, then tries the level of one model
on the other. `rank` is Spearman's correlation over all pictures, `within` lists it within each setting, and `off_50` is
the median error in dB.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bundled import CPU, draw, load, some_prompts
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler
from scipy.stats import spearmanr

import tokenmerge
from tokenmerge import Hold
from tokenmerge.families import denoiser_of
from tokenmerge.holding.errors import Errors, Measured, Reading
from tokenmerge.planning import Drift
from tokenmerge.runtime.levels import error_gain, noise_levels, output_length, place_at
from tokenmerge.runtime.state import APPLIED
from tokenmerge.runtime.timeline import Kept
from tokenmerge.tools.measure import environment

# Steps, whether another solver replaces the model's own, and the technique.
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
    parser.add_argument("--fit", type=Path, help="judge the estimates in this file")
    options = parser.parse_args()
    if options.fit:
        print(json.dumps(judged([json.loads(line) for line in options.fit.read_text().splitlines()]), indent=2))
        return
    if not options.out:
        parser.error("give --out or --fit")
    torch.set_num_threads(1)
    known = environment(CPU)
    text = options.out.read_text() if options.out.exists() else ""
    done = {(each["model"], each["prompt"]) for each in map(json.loads, text.splitlines())}
    loaded = {model: load(model) for model in options.models}
    with options.out.open("a") as file:
        for seed, prompt in enumerate(some_prompts(options.prompts)):
            for model, (pipe, call) in loaded.items():
                if (model, prompt) in done:
                    continue
                records = measure(model, pipe, call, prompt, seed)
                lines = [json.dumps({**record, "prompt": prompt, "environment": known}) for record in records]
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()


def measure(model: str, pipe: Any, call: dict[str, Any], prompt: str, seed: int) -> list[dict[str, Any]]:
    """One prompt under every setting."""
    own, plain, records = pipe.scheduler, {}, []
    for number, (steps, other, hold) in enumerate(SETTINGS):
        pipe.scheduler = other_solver(model, own) if other else own
        if (steps, other) not in plain:
            plain[steps, other] = draw(pipe, call, [prompt], steps, seed)
        with tokenmerge.applied(pipe, hold):
            error = float(((draw(pipe, call, [prompt], steps, seed) - plain[steps, other]) ** 2).mean())
            holding, kinds = vars(denoiser_of(pipe))[APPLIED].holding, tokenmerge.summary(pipe).steps
        record = {"model": model, "setting": number, "steps": steps, "other_solver": other, "hold": hold.to_dict()}
        levels = [float(f"{level:.5g}") for level in noise_levels(pipe.scheduler) or ()]
        record |= {"levels": levels, "gain": error_gain(pipe.scheduler), "length": output_length(pipe.scheduler)}
        psnr = round(10 * math.log10(255**2 / max(error, 1e-3)), 3)
        records.append({**record, "kinds": kinds, "seen": seen(holding.errors.measured), "psnr": psnr})
    pipe.scheduler = own
    return records


def seen(measured: Sequence[Measured]) -> list[list[float]]:
    """Full steps, each with the two kept steps before it and the error of each call."""
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
    """A level for each model, and how well the other model's level does."""
    result, all_off = {}, []
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
        result[model] = {"level": round(levels[model], 2), "within": ranks, **_agreement(rows, off)}
    ranks = [rank for each in result.values() for rank in each["within"]]
    every_row = [row for rows in by_model.values() for row in rows]
    return {**result, "all": {"within": ranks, **_agreement(every_row, all_off)}}


def _agreement(rows: list[tuple[int, float, float]], off: list[float]) -> dict[str, Any]:
    quantiles = {f"off_{share}": round(float(np.quantile(off, share / 100)), 2) for share in (50, 68, 90)}
    return {"pictures": len(rows), "rank": round(_rank(rows), 3), **quantiles}


def estimate(record: dict[str, Any]) -> float | None:
    """The sum of a picture's errors, as the library estimates drift."""
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

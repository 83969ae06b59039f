"""Measures what held steps should do with merging's maps: renew them as due, or keep them once Hold begins.

    python benchmarks/heldmaps.py --out benchmarks/results/heldmaps.jsonl

Where a map was renewed holding restarts from one residual; kept maps let it extrapolate from two. Both draw the same
pictures of the bundled models, and drift is told against the plain picture and against the one that merges in the same
steps and holds nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

import tokenmerge
import tokenmerge_models
from tokenmerge import Hold, Merge

# Longer than any picture.
_NEVER = 1000
RULES = {"renewed": {}, "kept": {"destinations_every": _NEVER, "weights_every": _NEVER}}
PROMPTS = ("a photo of a sunflower", "a photo of an oxeye daisy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-flux", "tiny-sdxl"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.75])
    parser.add_argument("--every", nargs="+", type=int, default=[2, 3, 5])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = []
    for model in options.models:
        folder = tokenmerge_models.models()[model]
        pipe = DiffusionPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        known = json.loads((folder / "tokenmerge.json").read_text())
        plain = draw(pipe, known, options.size)
        for ratio in options.ratios:
            skip = 0.25 if model == "tiny-flux" else 0
            merges = {rule: Merge(ratio=ratio, skip_first=skip, start=0.2, **more) for rule, more in RULES.items()}
            merged = draw(tokenmerge.apply(pipe, merges["renewed"]), known, options.size)
            for every, rule in itertools.product(options.every, RULES):
                held = draw(tokenmerge.apply(pipe, [merges[rule], Hold(every=every)]), known, options.size)
                record = {"model": model, "size": options.size, "steps": known["steps"], "pictures": len(held)}
                record |= {"ratio": ratio, "every": every, "maps": rule, "mse_to_plain": mse(held, plain)}
                record |= {"mse_to_merged": mse(held, merged), "kinds": tokenmerge.summary(pipe).steps}
                lines.append(json.dumps(record))
                print(lines[-1], flush=True)
            tokenmerge.remove(pipe)
    options.out.write_text("\n".join(lines) + "\n")


def draw(pipe: Any, known: dict[str, Any], side: int) -> np.ndarray:
    """A picture of every prompt, by a seed of its own."""
    pictures = []
    for seed, prompt in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(seed)
        call = {"num_inference_steps": known["steps"], "height": side, "width": side, **known["call"]}
        pictures.append(pipe(prompt, generator=generator, output_type="np", **call).images[0])
    return 255 * np.stack(pictures)


def mse(one: np.ndarray, other: np.ndarray) -> float:
    return round(float(((one - other) ** 2).mean()), 1)


if __name__ == "__main__":
    main()

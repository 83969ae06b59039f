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

# With the share of blocks that runs whole at the start.
MODELS = {"tiny-flux": 0.25, "tiny-sdxl": 0}
RATIOS, EVERY, SIDE = (0.5, 0.75), (2, 3, 5), 256
# Longer than any picture.
_NEVER = 1000
RULES = {"renewed": {}, "kept": {"destinations_every": _NEVER, "weights_every": _NEVER}}
PROMPTS = ("a photo of a sunflower", "a photo of an oxeye daisy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = []
    for model, skip in MODELS.items():
        folder = tokenmerge_models.models()[model]
        pipe = DiffusionPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        known = json.loads((folder / "tokenmerge.json").read_text())
        plain = draw(pipe, known)
        for ratio in RATIOS:
            merges = {rule: Merge(ratio=ratio, skip_first=skip, start=0.2, **more) for rule, more in RULES.items()}
            merged = draw(tokenmerge.apply(pipe, merges["renewed"]), known)
            for every, rule in itertools.product(EVERY, RULES):
                held = draw(tokenmerge.apply(pipe, [merges[rule], Hold(every=every)]), known)
                record = {"model": model, "size": SIDE, "steps": known["steps"], "pictures": len(held)}
                record |= {"ratio": ratio, "every": every, "maps": rule, "mse_to_plain": mse(held, plain)}
                record |= {"mse_to_merged": mse(held, merged), "kinds": tokenmerge.summary(pipe).steps}
                lines.append(json.dumps(record))
                print(lines[-1], flush=True)
            tokenmerge.remove(pipe)
    options.out.write_text("\n".join(lines) + "\n")


def draw(pipe: Any, known: dict[str, Any]) -> np.ndarray:
    """A picture of every prompt, by a seed of its own."""
    pictures = []
    for seed, prompt in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(seed)
        call = {"num_inference_steps": known["steps"], "height": SIDE, "width": SIDE, **known["call"]}
        pictures.append(pipe(prompt, generator=generator, output_type="np", **call).images[0])
    return 255 * np.stack(pictures)


def mse(one: np.ndarray, other: np.ndarray) -> float:
    return round(float(((one - other) ** 2).mean()), 1)


if __name__ == "__main__":
    main()

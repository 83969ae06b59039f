"""Find settings within a budget of drift, and use them.

    python examples/tune.py --budget mse=50

This runs `tokenmerge tune` with few candidates and small pictures. For your own model keep the command's defaults, and
tune at the size, steps and batch that you will use.
"""

import argparse
import sys
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

import tokenmerge
from tokenmerge.tools.cli.main import main
from tokenmerge_models import models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--budget", default="mse=200", help="the largest drift, as in mse=200 or lpips=0.05")
parser.add_argument("--model", default=str(models()["tiny-sdxl"]), help="folder or hub id")
parser.add_argument("--size", type=int, default=128)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--candidates", type=int, default=6)
parser.add_argument("--out", type=Path, default=Path("tuned"))
options = parser.parse_args()

arguments = ["tune", "--model", options.model, "--budget", options.budget, "--size", f"{options.size}x{options.size}"]
arguments += ["--steps", str(options.steps), "--candidates", str(options.candidates), "--rungs", "1"]
arguments += ["--number", "1", "--repeats", "1", "--out", str(options.out)]
main(arguments)
# If nothing meets the budget, the settings that came nearest are in nearest.yaml.
found = [path for path in (options.out / "preset.yaml", options.out / "nearest.yaml") if path.exists()]
if not found:
    sys.exit(1)

pipe = DiffusionPipeline.from_pretrained(options.model).to("cuda" if torch.cuda.is_available() else "cpu")
tokenmerge.apply(pipe, found[0])
pipe("a photo of a sunflower", height=options.size, width=options.size, num_inference_steps=options.steps)
print(tokenmerge.summary(pipe))

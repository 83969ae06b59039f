"""Draw one picture plain, merged, held and with both, and compare times and drift.

    python examples/compare.py "a photo of an oxeye daisy" --size 512

`tokenmerge generate` draws the same side by side; `tokenmerge eval` compares over many prompts, with nine metrics.
"""

import argparse
import time
from pathlib import Path

import numpy
import torch
from diffusers import DiffusionPipeline
from PIL import Image

import tokenmerge
from tokenmerge import Hold, Merge
from tokenmerge_models import models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt", nargs="?", default="a photo of a sunflower")
parser.add_argument("--model", default=models()["tiny-sdxl"], help="folder or hub id")
parser.add_argument("--size", type=int, default=256)
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--out", type=Path, default=Path("compare"), help="folder for the pictures")
options = parser.parse_args()

pipe = DiffusionPipeline.from_pretrained(options.model).to("cuda" if torch.cuda.is_available() else "cpu")
pipe.set_progress_bar_config(disable=True)
options.out.mkdir(exist_ok=True)


def draw() -> tuple[Image.Image, float]:
    begin = time.perf_counter()
    image = pipe(
        options.prompt,
        height=options.size,
        width=options.size,
        num_inference_steps=options.steps,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    return image, time.perf_counter() - begin


draw()  # warm-up
plain, seconds = draw()
plain.save(options.out / "plain.png")
print(f"{'plain':7} {seconds:6.2f} s")
for name, technique in {
    "merged": Merge(ratio=0.5),
    "held": Hold(every=3),
    "both": [Merge(ratio=0.5), Hold(every=3)],
}.items():
    with tokenmerge.applied(pipe, technique):
        image, seconds = draw()
        steps = tokenmerge.summary(pipe).steps
    image.save(options.out / f"{name}.png")
    mse = numpy.square(numpy.asarray(image, float) - numpy.asarray(plain, float)).mean()
    print(f"{name:7} {seconds:6.2f} s   MSE {mse:8.1f}   steps {steps}")

"""Text to image with Merge, Hold or both.

python examples/text_to_image.py "a photo of a sunflower" --technique hold
"""

import argparse

import torch
from diffusers import DiffusionPipeline

import tokenmerge
from tokenmerge import Hold, Merge
from tokenmerge_models import models

TECHNIQUES = {"merge": Merge(ratio=0.5), "hold": Hold(every=3), "both": [Merge(ratio=0.5), Hold(every=3)]}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt", nargs="?", default="a photo of a sunflower")
parser.add_argument("--technique", choices=TECHNIQUES, default="hold")
parser.add_argument("--model", default=models()["tiny-flux"], help="folder or hub id")
parser.add_argument("--size", type=int, default=256)
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--out", default="text_to_image.png")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
pipe = DiffusionPipeline.from_pretrained(options.model).to(device)

tokenmerge.apply(pipe, TECHNIQUES[options.technique])
image = pipe(
    options.prompt,
    height=options.size,
    width=options.size,
    num_inference_steps=options.steps,
    generator=torch.Generator().manual_seed(0),
).images[0]
print(tokenmerge.summary(pipe))
tokenmerge.remove(pipe)

image.save(options.out)

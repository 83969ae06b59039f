"""Compile the blocks, and on CUDA replay whole denoiser calls as CUDA graphs.

    python examples/compile.py

The first picture compiles, and on CUDA records the graphs; the second shows the speed.
"""

import argparse
import time

import torch
from diffusers import DiffusionPipeline

import tokenmerge
from tokenmerge import Hold
from tokenmerge_models import models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--prompt", default="a photo of a sunflower")
parser.add_argument("--model", default=models()["tiny-sdxl"], help="folder or hub id")
parser.add_argument("--size", type=int, default=256)
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--out", default="compile.png")
options = parser.parse_args()

cuda = torch.cuda.is_available()
pipe = DiffusionPipeline.from_pretrained(options.model)
pipe.to("cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32)

tokenmerge.apply(pipe, Hold(every=3))
tokenmerge.compile(pipe)  # with CPU offload, pass graphs=False
for number in range(2):
    begin = time.perf_counter()
    image = pipe(
        options.prompt,
        height=options.size,
        width=options.size,
        num_inference_steps=options.steps,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    print(f"picture {number + 1}: {time.perf_counter() - begin:.2f} s")
print(tokenmerge.summary(pipe))
tokenmerge.uncompile(pipe)
tokenmerge.remove(pipe)

image.save(options.out)

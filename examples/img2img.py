"""Image to image: both pipelines share the denoiser, so apply to the one that runs.

python examples/img2img.py --image photograph.jpg --prompt "a photo of a sunflower"
"""

import argparse

import torch
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline
from PIL import Image

import tokenmerge
from tokenmerge import Hold
from tokenmerge_models import models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--image", help="picture to start from (default: one that the model draws first)")
parser.add_argument("--prompt", default="a photo of a sunflower")
parser.add_argument("--strength", type=float, default=0.7)
parser.add_argument("--model", default=models()["tiny-sdxl"], help="folder or hub id")
parser.add_argument("--size", type=int, default=256)
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--out", default="img2img.png")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
text_to_image = DiffusionPipeline.from_pretrained(options.model).to(device)
settings = {"height": options.size, "width": options.size, "num_inference_steps": options.steps}
if options.image:
    start = Image.open(options.image).convert("RGB").resize((options.size, options.size))
else:
    start = text_to_image("a photo of an oxeye daisy", **settings).images[0]

pipe = AutoPipelineForImage2Image.from_pipe(text_to_image)
# With a strength of 0.7 the loop begins at 30 % of the schedule, after the steps that Hold always runs in full.
tokenmerge.apply(pipe, Hold(every=3))
image = pipe(options.prompt, image=start, strength=options.strength, **settings).images[0]
print(tokenmerge.summary(pipe))
tokenmerge.remove(pipe)

image.save(options.out)

"""Use a ControlNet together with Merge and Hold.

    python examples/controlnet.py --controlnet FOLDER_OR_HUB_ID --model FOLDER_OR_HUB_ID --hint edges.png

The bundled models have no trained ControlNet. Without --controlnet this makes a new one, which has no effect yet.
"""

import argparse

import torch
from diffusers import ControlNetModel, DiffusionPipeline, StableDiffusionXLControlNetPipeline
from PIL import Image

import tokenmerge
from tokenmerge import Hold, Merge
from tokenmerge_models import models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--controlnet", help="folder or hub id of a ControlNet for SDXL")
parser.add_argument("--hint", help="picture for the ControlNet (default: grey)")
parser.add_argument("--prompt", default="a photo of a sunflower")
parser.add_argument("--model", default=models()["tiny-sdxl"], help="folder or hub id")
parser.add_argument("--size", type=int, default=256)
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--out", default="controlnet.png")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
base = DiffusionPipeline.from_pretrained(options.model)
if options.controlnet:
    controlnet = ControlNetModel.from_pretrained(options.controlnet)
else:
    # Every channel count after the first halves the hint, down to the size of the latent.
    channels = (16, 32, 96, 256)[: base.vae_scale_factor.bit_length()]
    controlnet = ControlNetModel.from_unet(base.unet, conditioning_embedding_out_channels=channels)
pipe = StableDiffusionXLControlNetPipeline.from_pipe(base, controlnet=controlnet).to(device)
square = (options.size, options.size)
hint = Image.open(options.hint).convert("RGB").resize(square) if options.hint else Image.new("RGB", square, "grey")

tokenmerge.apply(pipe, [Merge(ratio=0.5), Hold(every=3)])
image = pipe(options.prompt, image=hint, num_inference_steps=options.steps).images[0]
print(tokenmerge.summary(pipe))
tokenmerge.remove(pipe)

image.save(options.out)

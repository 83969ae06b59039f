"""Load a LoRA while a technique is applied. Both can be added and removed in any order.

    python examples/lora.py --lora FOLDER_OR_HUB_ID --model FOLDER_OR_HUB_ID

The bundled models have no LoRA. Without --lora this makes a random one.
"""

import argparse

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig

import tokenmerge
from tokenmerge import Hold
from tokenmerge_models import models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--lora", help="folder or hub id of a LoRA")
parser.add_argument("--prompt", default="a photo of a sunflower")
parser.add_argument("--model", default=models()["tiny-sdxl"], help="folder or hub id")
parser.add_argument("--size", type=int, default=256)
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--out", default="lora.png")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
pipe = DiffusionPipeline.from_pretrained(options.model).to(device)

tokenmerge.apply(pipe, Hold(every=3))
if options.lora:
    pipe.load_lora_weights(options.lora)
else:
    torch.manual_seed(0)
    projections = ["to_q", "to_k", "to_v", "to_out.0"]
    pipe.unet.add_adapter(LoraConfig(r=4, init_lora_weights="gaussian", target_modules=projections))
image = pipe(options.prompt, height=options.size, width=options.size, num_inference_steps=options.steps).images[0]
print(tokenmerge.summary(pipe))
pipe.unload_lora_weights()
tokenmerge.remove(pipe)

image.save(options.out)

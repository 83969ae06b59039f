"""Photographs: read the shards, decode them once, cut views of them on the device.

A shard `flowers512_K.npz` holds `data` (uint8, all image files one after the other), `offsets` [n + 1] and
`labels` [n] (1..102); every photograph is 512 x 512. Scripts use the shards that are in the folder.
"""

from __future__ import annotations

import io
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

FULL_SIZE = 512
HELD_BACK_EVERY = 20


@dataclass(frozen=True)
class Photographs:
    """Decoded photographs. images: uint8 [n, 3, 512, 512]; labels: int64 [n], 0..101; held_back: bool [n]."""

    images: Tensor
    labels: Tensor
    held_back: Tensor

    def part(self, held_back: bool) -> Photographs:
        """The photographs that training may see (False) or the ones kept for tests (True)."""
        chosen = self.held_back == held_back
        return Photographs(self.images[chosen], self.labels[chosen], self.held_back[chosen])


def read_names(folder: Path) -> list[str]:
    """The 102 flower names; names[i] belongs to label i (the file counts from 1)."""
    by_label = json.loads((folder / "flower_names.json").read_text())
    return [by_label[str(label)] for label in range(1, len(by_label) + 1)]


def _decode(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def load_photographs(folder: Path, workers: int = 8, limit: int | None = None) -> Photographs:
    """Decode every shard in `folder` (the first `limit` photographs of each).

    Each 20th photograph of a shard is held back, so the split is the same whichever shards are at hand.
    Call it before anything is put on a GPU: the workers are forks of this process.
    """
    shards = sorted(folder.glob("flowers512_*.npz"))
    if not shards:
        raise FileNotFoundError(f"no flowers512_*.npz in {folder}; give the folder of the shards with --data")
    files: list[bytes] = []
    labels: list[np.ndarray] = []
    held_back: list[np.ndarray] = []
    for path in shards:
        with np.load(path) as shard:
            data, offsets, shard_labels = shard["data"], shard["offsets"], shard["labels"][:limit]
        count = len(shard_labels)
        files += [data[offsets[i] : offsets[i + 1]].tobytes() for i in range(count)]
        labels.append(shard_labels.astype(np.int64) - 1)
        held_back.append(np.arange(count) % HELD_BACK_EVERY == HELD_BACK_EVERY - 1)
    images = np.empty((len(files), FULL_SIZE, FULL_SIZE, 3), dtype=np.uint8)
    with ProcessPoolExecutor(workers) as pool:
        for i, image in enumerate(pool.map(_decode, files, chunksize=32)):
            images[i] = image
    return Photographs(
        torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(),
        torch.from_numpy(np.concatenate(labels)),
        torch.from_numpy(np.concatenate(held_back)),
    )


@dataclass(frozen=True)
class Crop:
    """A square cut out of a photograph (side and corner in pixels of 512), perhaps mirrored."""

    side: int = FULL_SIZE
    top: int = 0
    left: int = 0
    mirror: bool = False

    def time_ids(self, size: int) -> list[int]:
        """SDXL's size conditioning of this crop at `size` pixels: original height and width, crop top and
        left (both in pixels after resizing), target height and width. The whole photograph gives what the
        stock pipeline passes."""
        scale = size / self.side
        original = round(FULL_SIZE * scale)
        return [original, original, round(self.top * scale), round(self.left * scale), size, size]


def random_crop(generator: torch.Generator, smallest: float) -> Crop:
    """A crop with a side of `smallest` to 1 of the photograph, anywhere in it, mirrored half the time."""
    uniform = torch.rand(4, generator=generator).tolist()
    side = round(FULL_SIZE * (smallest + (1 - smallest) * uniform[0]))
    room = FULL_SIZE - side
    return Crop(side, round(room * uniform[1]), round(room * uniform[2]), uniform[3] < 0.5)


def cut(images: Tensor, crop: Crop, size: int) -> Tensor:
    """Cut `crop` out of uint8 images [b, 3, 512, 512] and resize: float [b, 3, size, size] in -1..1."""
    region = images[:, :, crop.top : crop.top + crop.side, crop.left : crop.left + crop.side]
    values = region.float() / 127.5 - 1
    if size != crop.side:
        values = F.interpolate(values, (size, size), mode="bicubic", antialias=True).clamp(-1, 1)
    return values.flip(-1) if crop.mirror else values

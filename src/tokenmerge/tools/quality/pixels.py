"""Metrics of two pictures, uint8 [H, W, 3], by their pixels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import TokenMergeError

_PEAK = 255.0
# SSIM (Wang et al. 2004): the side and standard deviation of its Gaussian window, and its constants.
_WINDOW, _DEVIATION, _K1, _K2 = 11, 1.5, 0.01, 0.03


def compare(reference: Tensor, test: Tensor) -> dict[str, float]:
    """MSE on the 0-255 scale, PSNR in dB and SSIM of `test` against `reference`."""
    check_sizes(reference, test)
    return {name: measure(reference, test) for name, measure in MEASURES.items()}


def check_sizes(reference: Tensor, test: Tensor) -> None:
    if reference.shape != test.shape:
        raise TokenMergeError(
            f"pictures of {_size(reference)} and {_size(test)} pixels cannot be compared; make them the same size"
        )


def mse(reference: Tensor, test: Tensor) -> float:
    return F.mse_loss(test.double(), reference.double()).item()


def psnr(reference: Tensor, test: Tensor) -> float:
    """PSNR in dB; infinite for equal pictures."""
    error = mse(reference, test)
    return 10 * math.log10(_PEAK**2 / error) if error else math.inf


def ssim(reference: Tensor, test: Tensor) -> float:
    """SSIM, averaged over all places where the window fits, and over channels."""
    first, second = (picture.double().permute(2, 0, 1) for picture in (reference, test))
    if min(first.shape[-2:]) < _WINDOW:
        raise TokenMergeError(f"SSIM needs pictures of at least {_WINDOW}x{_WINDOW} pixels, not {_size(reference)}")
    maps = _blurred(torch.stack([first, second, first**2, second**2, first * second]))
    mean_1, mean_2, square_1, square_2, product = maps
    variance_1, variance_2 = square_1 - mean_1**2, square_2 - mean_2**2
    covariance = product - mean_1 * mean_2
    small_1, small_2 = (_K1 * _PEAK) ** 2, (_K2 * _PEAK) ** 2
    likeness = (2 * mean_1 * mean_2 + small_1) * (2 * covariance + small_2)
    likeness /= (mean_1**2 + mean_2**2 + small_1) * (variance_1 + variance_2 + small_2)
    return likeness.mean().item()


MEASURES = {"mse": mse, "psnr": psnr, "ssim": ssim}


def _size(picture: Tensor) -> str:
    return f"{picture.shape[1]}x{picture.shape[0]}"


def _blurred(maps: Tensor) -> Tensor:
    """Means under the window, [..., H, W] -> [..., H - 10, W - 10]. One axis at a time is far less work."""
    place = torch.arange(_WINDOW, dtype=maps.dtype) - _WINDOW // 2
    line = torch.exp(-(place**2) / (2 * _DEVIATION**2))
    for axis in (-2, -1):
        length = maps.shape[axis] - _WINDOW + 1
        total = torch.zeros_like(maps.narrow(axis, 0, length))
        for shift, weight in enumerate((line / line.sum()).tolist()):
            total.add_(maps.narrow(axis, shift, length), alpha=weight)
        maps = total
    return maps

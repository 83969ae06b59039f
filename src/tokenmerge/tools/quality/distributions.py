"""Distances between two sets of pictures, from their features in an Inception network."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import TokenMergeError


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """FID: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) of two sets of features [n, d] (Heusel et al. 2017).

    With C = R^T R from the QR decomposition of the centred features, the trace of the root is the sum of the singular
    values of R1 R2^T. So no matrix root is taken, and fewer pictures than features will do.
    """
    _check_count("FID", first, second)
    one, two = first.double(), second.double()
    factors = []
    for values in (one, two):
        centred = (values - values.mean(0)) / (len(values) - 1) ** 0.5
        factors.append(torch.linalg.qr(centred, mode="r").R)
    shift = (one.mean(0) - two.mean(0)).square().sum()
    spread = sum(factor.square().sum() for factor in factors)
    distance = shift + spread - 2 * torch.linalg.svdvals(factors[0] @ factors[1].T).sum()
    # Rounding may put the distance of a set to itself slightly below zero.
    return distance.clamp_min(0).item()


def kernel_distance(first: Tensor, second: Tensor) -> float:
    """KID: the unbiased squared maximum mean discrepancy of two sets of features [n, d] under the kernel
    (x.y / d + 1)^3 (Binkowski et al. 2018). It averages over all pairs instead of random subsets.
    """
    _check_count("KID", first, second)
    one, two = first.double(), second.double()

    def kernel(left: Tensor, right: Tensor) -> Tensor:
        return (left @ right.T / left.shape[1] + 1) ** 3

    def within(values: Tensor) -> Tensor:
        similarity = kernel(values, values)
        count = len(values)
        return (similarity.sum() - similarity.trace()) / (count * (count - 1))

    return (within(one) + within(two) - 2 * kernel(one, two).mean()).item()


def _check_count(name: str, first: Tensor, second: Tensor) -> None:
    if min(len(first), len(second)) < 2:
        raise TokenMergeError(f"{name} needs two pictures or more in each set, not {len(first)} and {len(second)}")

# Kernels have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""What kernels share: how tokens are read, and how programs are cut."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def token_indices(order, places, present):
    """Row-major indices of the tokens at `places` of the region order."""
    if order is None:
        return places.to(tl.int64)
    else:
        return tl.load(order + places, mask=present, other=0)


@triton.jit
def load_tokens(tokens, indices, present, columns, token_n, token_c, CHANNELS: tl.constexpr):
    """Values [rows, columns], 0 beyond the region and the channels."""
    places = tokens + indices[:, None] * token_n + columns[None, :] * token_c
    return tl.load(places, mask=present[:, None] & (columns < CHANNELS)[None, :], other=0.0)


@triton.jit
def squared_norms(tokens, indices, present, token_n, token_c, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    squares = tl.zeros(indices.shape, tl.float32)
    for start in tl.range(0, CHANNELS, BLOCK_C, num_stages=3):
        columns = start + tl.arange(0, BLOCK_C)
        values = load_tokens(tokens, indices, present, columns, token_n, token_c, CHANNELS).to(tl.float32)
        squares += tl.sum(values * values, 1)
    return squares


@triton.jit
def add_products(total, one, two):
    """total + one two, in fp32."""
    if one.dtype == tl.float32:
        # The compiler would chain the sums of an addition. Subtracted, every chunk is summed by itself, which rounds
        # less; at a temperature of 0.001 that shows, and beside a large residual.
        return total - tl.dot(-one, two, input_precision="ieee")
    else:
        return tl.dot(one, two, total, input_precision="ieee")


@triton.jit
def inverse_norm(squares):
    return 1.0 / tl.maximum(tl.sqrt(squares), 1e-12)


@triton.jit
def finite(pairs):
    """NaN counts as no similarity; sums of infinities would be NaN."""
    return tl.minimum(tl.maximum(tl.where(pairs == pairs, pairs, 0.0), -1e30), 1e30)


# Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), which takes tensors on the CPU.
INTERPRETED = not isinstance(token_indices, triton.JITFunction)


def block_size(size: int, most: int | None = None) -> int:
    """A power of two that holds `size`, if `most` allows; 16 at least, which a matrix product needs."""
    least = max(16, int(triton.next_power_of_2(size)))
    return least if most is None else min(most, least)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if elsewhere else contextlib.nullcontext()

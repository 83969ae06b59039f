# Triton kernels have no types that mypy understands.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Helpers that all kernels share: reading tokens, products, and block sizes."""

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
    """Row-major indices of the tokens at `places` in the region order."""
    if order is None:
        return places.to(tl.int64)
    else:
        return tl.load(order + places, mask=present, other=0)


@triton.jit
def load_tokens(tokens, indices, present, columns, token_n, token_c, CHANNELS: tl.constexpr):
    """Values [rows, columns]; 0 outside the region and the channels."""
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
    """total + one @ two, in fp32."""
    if one.dtype == tl.float32:
        # With an addition the compiler would chain the sums of all chunks. A subtraction sums every chunk alone, which
        # rounds less. That matters at a temperature of 0.001 and next to a large residual.
        return total - tl.dot(-one, two, input_precision="ieee")
    else:
        return tl.dot(one, two, total, input_precision="ieee")


@triton.jit
def inverse_norm(squares):
    return 1.0 / tl.maximum(tl.sqrt(squares), 1e-12)


@triton.jit
def finite(pairs):
    """Replace NaN by 0, which is no similarity, and clamp infinities, whose sums could be NaN."""
    return tl.minimum(tl.maximum(tl.where(pairs == pairs, pairs, 0.0), -1e30), 1e30)


# Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), which accepts CPU tensors.
INTERPRETED = not isinstance(token_indices, triton.JITFunction)


def block_size(size: int, most: int | None = None) -> int:
    """The smallest power of two that holds `size`: at least 16, for matrix products, and at most `most`."""
    least = max(16, int(triton.next_power_of_2(size)))
    return least if most is None else min(most, least)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, on which Triton launches."""
    elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if elsewhere else contextlib.nullcontext()

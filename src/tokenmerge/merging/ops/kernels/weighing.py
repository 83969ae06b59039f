# Triton kernels have no types that mypy understands.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Weights for merging and unmerging."""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from .. import reference
from .common import (
    DTYPES,
    add_products,
    block_size,
    finite,
    inverse_norm,
    load_tokens,
    on_device_of,
    squared_norms,
    token_indices,
)

# Largest regions for the kernel.
_WEIGH_SIZE = 256


@triton.jit
def _weigh_kernel(
    tokens,
    order,
    destinations,
    scratch,
    merge,
    unmerge,
    regions,
    shrink,
    temperature,
    token_b,
    token_n,
    token_c,
    destination_b,
    COSINE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program computes the weights of one region of one sample, BLOCK_N sources at a time.

    Rows of merge weights are scaled by sums over all sources. If the sources come in several chunks, unscaled weights
    are stored in the scratch buffer, fp32 [B, R, n, k].
    """
    pair = tl.program_id(0)
    region = pair % regions
    sample = (pair // regions).to(tl.int64)
    tokens += sample * token_b
    merge += pair.to(tl.int64) * COUNT * SIZE
    unmerge += pair.to(tl.int64) * COUNT * SIZE
    spots = tl.arange(0, BLOCK_K)
    wanted = spots < COUNT
    targets = tl.load(destinations + sample * destination_b + region * COUNT + spots, mask=wanted, other=0)

    if COSINE:
        target_factors = inverse_norm(squared_norms(tokens, targets, wanted, token_n, token_c, CHANNELS, BLOCK_C))
    totals = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.range(0, SIZE, BLOCK_N, num_stages=1):
        places = first + tl.arange(0, BLOCK_N)
        present = places < SIZE
        inside = present[:, None] & wanted[None, :]
        indices = token_indices(order, region * SIZE + places, present)
        pairs = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in tl.range(0, CHANNELS, BLOCK_C, num_stages=3):
            columns = start + tl.arange(0, BLOCK_C)
            ours = load_tokens(tokens, indices, present, columns, token_n, token_c, CHANNELS)
            theirs = load_tokens(tokens, targets, wanted, columns, token_n, token_c, CHANNELS)
            pairs = add_products(pairs, ours, tl.trans(theirs))
        if COSINE:
            # Load the tokens again, and do not share the products' loads: Triton 3.6 gives shared loads one buffer too
            # few, and the asynchronous products of four warps would read what the next load overwrites.
            squares = squared_norms(tokens, indices, present, token_n, token_c, CHANNELS, BLOCK_C)
            pairs *= inverse_norm(squares)[:, None] * target_factors[None, :]
        else:
            pairs *= shrink
        logits = tl.where(wanted[None, :], finite(pairs) / temperature, -float("inf"))
        spread = tl.exp(logits - tl.max(logits, 1)[:, None])
        spread = spread / tl.sum(spread, 1)[:, None]
        spread = tl.where(inside, spread, 0.0)
        totals += tl.sum(spread, 0)
        cells = places[:, None] * COUNT + spots[None, :]
        tl.store(unmerge + cells, spread.to(unmerge.dtype.element_ty), mask=inside)
        if SIZE > BLOCK_N:
            tl.store(scratch + pair.to(tl.int64) * COUNT * SIZE + cells, spread, mask=inside)
        else:
            _store_merge(merge, spread, totals, targets, indices, spots, places, inside, SIZE)
    if SIZE > BLOCK_N:
        tl.debug_barrier()
        for first in tl.range(0, SIZE, BLOCK_N, num_stages=1):
            places = first + tl.arange(0, BLOCK_N)
            present = places < SIZE
            inside = present[:, None] & wanted[None, :]
            indices = token_indices(order, region * SIZE + places, present)
            cells = places[:, None] * COUNT + spots[None, :]
            spread = tl.load(scratch + pair.to(tl.int64) * COUNT * SIZE + cells, mask=inside, other=0.0)
            _store_merge(merge, spread, totals, targets, indices, spots, places, inside, SIZE)


@triton.jit
def _store_merge(merge, spread, totals, targets, indices, spots, places, inside, SIZE: tl.constexpr):
    """Scale by the totals. A destination that attracts no source, not even itself, stands for itself."""
    least = 1.1754943508222875e-38
    alone = (indices[:, None] == targets[None, :]).to(tl.float32)
    scaled = tl.where((totals > least)[None, :], spread / tl.maximum(totals, least)[None, :], alone)
    tl.store(merge + spots[None, :] * SIZE + places[:, None], scaled.to(merge.dtype.element_ty), mask=inside)


def weigh(
    tokens: Tensor,
    order: Tensor | None,
    destinations: Tensor,
    *,
    similarity: str = "cosine",
    temperature: float = 0.001,
) -> tuple[Tensor, Tensor]:
    """`reference.weigh`, in one launch for merging regions of up to 256 tokens."""
    batch, token_count, channels = tokens.shape
    samples, regions, count = destinations.shape
    size = token_count // regions
    if size > _WEIGH_SIZE or tokens.dtype not in DTYPES:
        return reference.weigh(tokens, order, destinations, similarity=similarity, temperature=temperature)
    tokens = tokens.detach()
    half = tokens.dtype != torch.float32
    merge = tokens.new_empty(batch, regions, count, size)
    unmerge = tokens.new_empty(batch, regions, size, count)
    block_n, block_k = block_size(size, 64), block_size(count)
    warps = min(8, max(1, block_n * block_k // 512))
    scratch = None
    if size > block_n:
        scratch = torch.empty(batch, regions, size, count, dtype=torch.float32, device=tokens.device)
    with on_device_of(tokens):
        _weigh_kernel[(batch * regions,)](
            tokens,
            order,
            destinations.contiguous(),
            scratch,
            merge,
            unmerge,
            regions,
            1.0 / math.sqrt(channels),
            temperature,
            *tokens.stride(),
            regions * count if samples > 1 else 0,
            COSINE=similarity == "cosine",
            CHANNELS=channels,
            SIZE=size,
            COUNT=count,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            BLOCK_C=block_size(channels, 32 if not half else 128 if block_k <= 64 else 64),
            num_warps=warps,
        )
    return merge, unmerge

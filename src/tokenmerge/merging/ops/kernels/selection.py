# Triton kernels have no types that mypy understands.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Greedy selection by facility location."""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from ...grid import split_regions
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

# Largest regions whose similarity is kept in registers, in a scratch buffer of the same launch, or computed by the
# library before the launch.
_REGISTER_SIZE = 128
_SCRATCH_SIZE = 256
_GREEDY_SIZE = 16384


@triton.jit
def _select_kernel(
    tokens,
    order,
    chosen,
    regions,
    shrink,
    token_b,
    token_n,
    token_c,
    COSINE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program selects for one region of one sample, with its similarity in registers, candidates by sources.

    Gains are sums along rows, each of which few threads share. A masked sum extracts the row of the picked candidate.
    """
    pair = tl.program_id(0)
    region = pair % regions
    tokens += (pair // regions).to(tl.int64) * token_b
    places = tl.arange(0, BLOCK_N)
    present = places < SIZE
    indices = token_indices(order, region * SIZE + places, present)

    pairs = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    for start in range(0, CHANNELS, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        values = load_tokens(tokens, indices, present, columns, token_n, token_c, CHANNELS)
        pairs = add_products(pairs, values, tl.trans(values))
    if COSINE:
        # The diagonal holds the squared norms.
        own = tl.where(places[:, None] == places[None, :], pairs, 0.0)
        pairs *= inverse_norm(tl.sum(own, 1))[:, None] * inverse_norm(tl.sum(own, 0))[None, :]
    else:
        pairs *= shrink
    pairs = finite(pairs)
    if COSINE:
        # Exact sums: ties stay ties in every order of summation.
        pairs = tl.floor(pairs * SCALE + 0.5) / SCALE

    gains = tl.sum(pairs, 1)
    # Places beyond the region gain nothing as sources, and are never free as candidates.
    covered = tl.where(present, -float("inf"), float("inf"))
    turns = tl.where(present, COUNT, -1)
    for turn in range(COUNT):
        best = tl.argmax(tl.where(turns == COUNT, gains, -float("inf")), 0)
        turns = tl.where(places == best, turn, turns)
        row = tl.sum(tl.where(places[:, None] == best, pairs, 0.0), 0)
        covered = tl.maximum(covered, row)
        gains = tl.sum(tl.maximum(pairs - covered[None, :], 0.0), 1)
    tl.store(chosen + pair.to(tl.int64) * COUNT + turns, indices, mask=(turns >= 0) & (turns < COUNT))


@triton.jit
def _select_scratch_kernel(
    tokens,
    order,
    chosen,
    factors,
    pairs,
    log,
    regions,
    pair_b,
    token_b,
    token_n,
    token_c,
    COSINE: tl.constexpr,
    SAMPLES: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program selects for one region of SAMPLES samples, with the similarity in a buffer that stays in the L2 cache.

    factors: fp32 [B, R, n]; pairs: int32 [B, R, n, n]; log: int32 [programs, 3, BLOCK_S + ROWS].
    """
    program = tl.program_id(0)
    region = program % regions
    first = (program // regions).to(tl.int64) * SAMPLES
    factors += (first * regions + region) * SIZE
    factor_b = regions * SIZE
    pairs += (first * regions + region) * SIZE * SIZE

    for sample in tl.range(0, SAMPLES, num_stages=1):
        for top in tl.range(0, SIZE, BLOCK_M, num_stages=1):
            places = top + tl.arange(0, BLOCK_M)
            present = places < SIZE
            indices = token_indices(order, region * SIZE + places, present)
            base = tokens + (first + sample) * token_b
            squares = squared_norms(base, indices, present, token_n, token_c, CHANNELS, BLOCK_C)
            tl.store(factors + sample * factor_b + places, squares, mask=present)
    tl.debug_barrier()

    # Fixed point needs a bound: 1 for cosines, the largest squared norm for dot products.
    largest = 1.0
    if not COSINE:
        sources = tl.arange(0, BLOCK_S)
        squares = tl.load(
            factors + sources // SIZE * factor_b + sources % SIZE, mask=sources < SAMPLES * SIZE, other=0.0
        )
        largest = tl.max(tl.where(squares < float("inf"), squares, 0.0), 0)

    for sample in tl.range(0, SAMPLES, num_stages=1):
        base = tokens + (first + sample) * token_b
        for top in tl.range(0, SIZE, BLOCK_M, num_stages=1):
            rows = top + tl.arange(0, BLOCK_M)
            row_indices = token_indices(order, region * SIZE + rows, rows < SIZE)
            row_squares = tl.load(factors + sample * factor_b + rows, mask=rows < SIZE, other=0.0)
            for left in tl.range(top, SIZE, BLOCK_M, num_stages=1):
                columns = left + tl.arange(0, BLOCK_M)
                column_indices = token_indices(order, region * SIZE + columns, columns < SIZE)
                column_squares = tl.load(factors + sample * factor_b + columns, mask=columns < SIZE, other=0.0)
                block = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
                for start in range(0, CHANNELS, BLOCK_C):
                    depths = start + tl.arange(0, BLOCK_C)
                    one = load_tokens(base, row_indices, rows < SIZE, depths, token_n, token_c, CHANNELS)
                    two = load_tokens(base, column_indices, columns < SIZE, depths, token_n, token_c, CHANNELS)
                    block = add_products(block, one, tl.trans(two))
                if COSINE:
                    block *= inverse_norm(row_squares)[:, None] * inverse_norm(column_squares)[None, :]
                else:
                    block /= tl.maximum(largest, 1e-30)
                block = tl.minimum(tl.maximum(tl.where(block == block, block, 0.0), -1.0), 1.0)
                fixed = tl.floor(block * SCALE + 0.5).to(tl.int32)
                # The upper half is copied to the lower, so that rounding cannot make the two differ.
                inside = (rows < SIZE)[:, None] & (columns < SIZE)[None, :]
                target = pairs + tl.cast(sample, tl.int64) * pair_b
                upper = rows[:, None] <= columns[None, :]
                tl.store(target + rows[:, None] * SIZE + columns[None, :], fixed, mask=inside & upper)
                lower = rows[:, None] < columns[None, :]
                tl.store(target + columns[None, :] * SIZE + rows[:, None], fixed, mask=inside & lower)
    tl.debug_barrier()
    _greedy(
        pairs,
        order,
        chosen,
        log,
        program,
        region,
        pair_b,
        SAMPLES,
        SIZE,
        COUNT,
        SCALE,
        BLOCK_N,
        BLOCK_S,
        ROWS,
    )


@triton.jit
def _greedy_kernel(
    pairs,
    order,
    chosen,
    log,
    regions,
    pair_b,
    SAMPLES: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program selects for one region of SAMPLES samples from given similarities, int32 [B, R, n, n]."""
    program = tl.program_id(0)
    region = program % regions
    first = (program // regions).to(tl.int64) * SAMPLES
    pairs += (first * regions + region) * SIZE * SIZE
    _greedy(pairs, order, chosen, log, program, region, pair_b, SAMPLES, SIZE, COUNT, SCALE, BLOCK_N, BLOCK_S, ROWS)


@triton.jit
def _greedy(
    pairs,
    order,
    chosen,
    log,
    program,
    region,
    pair_b,
    SAMPLES: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Greedy facility location that updates only what a turn changes.

    A pick improves the cover of few sources, about n / turn of them, and gains change only by the rows of those
    sources. All turns together read n ln k rows instead of n k. Similarities are fixed point, in [-SCALE, SCALE]. Sums
    of integers are exact, so updated gains equal gains computed afresh, and ties stay ties. -SCALE means no cover.
    """
    sources = tl.arange(0, BLOCK_S)
    real = sources < SAMPLES * SIZE
    # Similarity is symmetric, so a candidate's column is a row in every sample.
    corner = (sources // SIZE).to(tl.int64) * pair_b + sources % SIZE
    candidates = tl.arange(0, BLOCK_N)
    present = candidates < SIZE
    log += program.to(tl.int64) * 3 * (BLOCK_S + ROWS)
    lows = log + BLOCK_S + ROWS
    highs = lows + BLOCK_S + ROWS

    gains = tl.zeros((BLOCK_N,), tl.int32)
    for start in tl.range(0, SAMPLES * SIZE, ROWS, num_stages=1):
        listed = start + tl.arange(0, ROWS)
        filled = listed < SAMPLES * SIZE
        block = _load_rows(pairs, tl.where(filled, listed, 0), candidates, pair_b, SAMPLES, SIZE, BLOCK_N)
        gains += tl.sum(tl.where(filled[:, None], block + SCALE, 0), 0)
    covered = tl.where(real, -SCALE, SCALE)
    turns = tl.where(present, COUNT, -1)
    for turn in tl.range(0, COUNT, num_stages=1):
        best = tl.argmax(tl.where(turns == COUNT, gains, -1), 0)
        turns = tl.where(candidates == best, turn, turns)
        reached = tl.load(pairs + corner + best * SIZE, mask=real, other=0)
        closer = reached > covered
        slots = tl.cumsum(closer.to(tl.int32), 0) - 1
        total = tl.sum(closer.to(tl.int32), 0)
        tl.store(log + slots, sources, mask=closer)
        tl.store(lows + slots, covered, mask=closer)
        tl.store(highs + slots, reached, mask=closer)
        covered = tl.maximum(covered, reached)
        tl.debug_barrier()
        start = 0
        while start < total:
            places = start + tl.arange(0, ROWS)
            filled = places < total
            listed = tl.where(filled, tl.load(log + places), 0)
            low = tl.load(lows + places)
            high = tl.load(highs + places)
            block = _load_rows(pairs, listed, candidates, pair_b, SAMPLES, SIZE, BLOCK_N)
            # Equals max(s - low, 0) - max(s - high, 0).
            change = tl.minimum(tl.maximum(block, low[:, None]), high[:, None]) - low[:, None]
            gains -= tl.sum(tl.where(filled[:, None], change, 0), 0)
            start += ROWS
        # The next turn overwrites the log.
        tl.debug_barrier()
    indices = token_indices(order, region * SIZE + candidates, present)
    tl.store(chosen + program.to(tl.int64) * COUNT + turns, indices, mask=(turns >= 0) & (turns < COUNT))


@triton.jit
def _load_rows(pairs, sources, candidates, pair_b, SAMPLES: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Similarities [sources, candidates]. Sources are numbered through all samples."""
    rows = sources * SIZE
    if SAMPLES > 1:
        rows = (sources // SIZE).to(tl.int64) * pair_b + (sources % SIZE) * SIZE
    places = pairs + rows[:, None] + candidates[None, :]
    # Masked loads wait for each other.
    if SIZE == BLOCK_N:
        return tl.load(places)
    else:
        return tl.load(places, mask=(candidates < SIZE)[None, :], other=0)


def select(
    tokens: Tensor,
    order: Tensor | None,
    regions: int,
    count: int,
    *,
    selection: str = "facility-location",
    similarity: str = "cosine",
    shared: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`reference.select`. Facility location is one launch in regions of up to 256 tokens. In larger regions it is one
    launch after the similarity."""
    batch, token_count, _ = tokens.shape
    size = token_count // regions
    samples = batch if shared else 1
    supported = tokens.dtype in DTYPES and samples * size <= _GREEDY_SIZE
    if selection != "facility-location" or not supported:
        return reference.select(
            tokens,
            order,
            regions,
            count,
            selection=selection,
            similarity=similarity,
            shared=shared,
            generator=generator,
        )
    tokens = tokens.detach()
    chosen = torch.empty(batch // samples, regions, count, dtype=torch.int64, device=tokens.device)
    with on_device_of(tokens):
        if samples == 1 and size <= _REGISTER_SIZE:
            _select_in_registers(tokens, order, chosen, similarity)
        else:
            _select_in_memory(tokens, order, chosen, similarity)
    return chosen


def _select_in_registers(tokens: Tensor, order: Tensor | None, chosen: Tensor, similarity: str) -> None:
    """Fill chosen [B, R, k], for every sample separately."""
    batch, token_count, channels = tokens.shape
    _, regions, count = chosen.shape
    size = token_count // regions
    block = block_size(size)
    half = tokens.dtype != torch.float32
    _select_kernel[(batch * regions,)](
        tokens,
        order,
        chosen,
        regions,
        1.0 / math.sqrt(channels),
        *tokens.stride(),
        COSINE=similarity == "cosine",
        CHANNELS=channels,
        SIZE=size,
        COUNT=count,
        SCALE=2.0 ** reference.sum_bits(size),
        BLOCK_N=block,
        BLOCK_C=block_size(channels, 128 if half and block <= 64 else 64 if half else 32),
        # 32 similarities per thread, or 64 in the largest regions: they stay in registers.
        num_warps=min(8, max(1, block * block // 1024)),
    )


def _select_in_memory(tokens: Tensor, order: Tensor | None, chosen: Tensor, similarity: str) -> None:
    """Fill chosen [S, R, k], for every sample separately or for all together."""
    batch, token_count, channels = tokens.shape
    programs, regions, count = len(chosen) * chosen.shape[1], *chosen.shape[1:]
    samples, size = batch // len(chosen), token_count // regions
    half = tokens.dtype != torch.float32
    scale = _scale(samples * size)
    block_n, block_s = block_size(size), block_size(samples * size)
    warps = min(16, max(1, max(block_n, block_s) // 32))
    # At most 16 similarities per thread in a chunk of rows: with more, the compiler makes loads wait for each other.
    rows = max(1, min(16, warps * 512 // block_n))
    log = torch.empty(programs, 3, block_s + rows, dtype=torch.int32, device=tokens.device)
    blocks = {
        "SAMPLES": samples,
        "SIZE": size,
        "COUNT": count,
        "SCALE": scale,
        "BLOCK_N": block_n,
        "BLOCK_S": block_s,
        "ROWS": rows,
    }
    if size > _SCRATCH_SIZE:
        pairs = _fixed_pairs(tokens, order, regions, similarity, samples > 1, scale)
        _greedy_kernel[(programs,)](pairs, order, chosen, log, regions, pairs.stride(0), **blocks, num_warps=warps)
        return
    factors = torch.empty(batch, regions, size, dtype=torch.float32, device=tokens.device)
    pairs = torch.empty(batch, regions, size, size, dtype=torch.int32, device=tokens.device)
    _select_scratch_kernel[(programs,)](
        tokens,
        order,
        chosen,
        factors,
        pairs,
        log,
        regions,
        pairs.stride(0),
        *tokens.stride(),
        COSINE=similarity == "cosine",
        CHANNELS=channels,
        BLOCK_M=block_size(size, 128 if half else 64),
        BLOCK_C=block_size(channels, 64 if half else 32),
        **blocks,
        num_warps=warps,
    )


def _fixed_pairs(
    tokens: Tensor, order: Tensor | None, regions: int, similarity: str, shared: bool, scale: int
) -> Tensor:
    """Fixed-point similarities, int32 [B, R, n, n] in [-scale, scale], symmetric."""
    pairs = reference.pairwise_similarity(split_regions(tokens, order, regions), similarity)
    if similarity != "cosine":
        pairs /= pairs.abs().amax(dim=(0, 2, 3) if shared else (2, 3), keepdim=True).clamp_min(1e-30)
    fixed = pairs.mul_(scale).round_().clamp_(-scale, scale).to(torch.int32)
    return torch.maximum(fixed, fixed.transpose(-1, -2))


def _scale(sources: int) -> int:
    """A similarity of 1 in fixed point. A gain, up to twice that per source, must fit into int32. The resolution is at
    most the reference's."""
    return min(2**reference.MOST_BITS, (2**30 - 1) // sources)

# Kernels have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""The operations of `reference.py` in Triton, with the same signatures.

Tokens are read and written row-major, through the table of a partition's order and with whatever strides they come, so
that a tile costs what a stripe costs: nothing is permuted or copied. Products accumulate in fp32. What a kernel does
not cover goes to the reference: other selections, regions too large to be local, dtypes other than fp32, fp16 and bf16,
and tokens that need a gradient.

Programs are small and many, since all of these are bound by memory or latency. Launch shapes come from the sizes alone:
trying several at the first call would take seconds and would break the capture of CUDA graphs.
"""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from ..grid import split_regions
from . import reference
from .reference import mean_coverages as mean_coverages
from .reference import pick_weights as pick_weights
from .reference import pinv_weights as pinv_weights

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Largest regions of the kernels. A larger merge is bound by matrix units and better left to the library's product.
_MERGE_SIZE = 512
_WEIGH_SIZE = 256
# Selection: similarity in registers, in a scratch buffer of the same launch, or by the library before the launch.
_REGISTER_SIZE = 128
_SCRATCH_SIZE = 256
_GREEDY_SIZE = 16384
# Four programs for each of an H200's 132 multiprocessors: enough loads in flight to fill the memory system.
_ENOUGH_PROGRAMS = 512


@triton.jit
def _token_indices(order, places, held):
    """Row-major indices of the tokens at `places` of the region order."""
    if order is None:
        return places.to(tl.int64)
    else:
        return tl.load(order + places, mask=held, other=0)


@triton.jit
def _load_tokens(tokens, indices, held, columns, token_n, token_c, CHANNELS: tl.constexpr):
    """Values [rows, columns], 0 beyond the region and the channels."""
    places = tokens + indices[:, None] * token_n + columns[None, :] * token_c
    return tl.load(places, mask=held[:, None] & (columns < CHANNELS)[None, :], other=0.0)


@triton.jit
def _add_products(total, one, two):
    """total + one two^T, in fp32."""
    if one.dtype == tl.float32:
        # The compiler would chain the sums of an addition. Subtracted, every chunk is summed by itself, which rounds
        # less; at a temperature of 0.001 that shows.
        return total - tl.dot(-one, tl.trans(two), input_precision="ieee")
    else:
        return tl.dot(one, tl.trans(two), total, input_precision="ieee")


@triton.jit
def _merge_kernel(
    tokens,
    order,
    weights,
    merged,
    regions,
    token_b,
    token_n,
    token_c,
    weight_b,
    weight_r,
    weight_k,
    weight_n,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program makes BLOCK_K merged tokens of one region in BLOCK_C channels."""
    blocks = tl.cdiv(CHANNELS, BLOCK_C)
    chunks: tl.constexpr = (COUNT + BLOCK_K - 1) // BLOCK_K
    # Neighbouring programs share a region's weights and index table.
    program = tl.program_id(0)
    pair = program // (blocks * chunks)
    region = pair % regions
    sample = (pair // regions).to(tl.int64)
    columns = program % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    spots = program // blocks % chunks * BLOCK_K + tl.arange(0, BLOCK_K)
    wanted = spots < COUNT
    tokens += sample * token_b
    weights += sample * weight_b + region.to(tl.int64) * weight_r

    total = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    for start in range(0, SIZE, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        held = places < SIZE
        indices = _token_indices(order, region * SIZE + places, held)
        values = _load_tokens(tokens, indices, held, columns, token_n, token_c, CHANNELS)
        shares = tl.load(
            weights + spots[:, None] * weight_k + places[None, :] * weight_n,
            mask=wanted[:, None] & held[None, :],
            other=0.0,
        )
        total = tl.dot(shares.to(values.dtype), values, total, input_precision="ieee")
    rows = pair.to(tl.int64) * COUNT + spots
    tl.store(
        merged + rows[:, None] * CHANNELS + columns[None, :],
        total.to(merged.dtype.element_ty),
        mask=wanted[:, None] & (columns < CHANNELS)[None, :],
    )


@triton.jit
def _unmerge_kernel(
    merged,
    order,
    weights,
    residual,
    entered,
    gap,
    out,
    regions,
    merged_b,
    merged_m,
    merged_c,
    weight_b,
    weight_r,
    weight_n,
    weight_k,
    residual_b,
    residual_n,
    residual_c,
    entered_b,
    entered_m,
    entered_c,
    gap_b,
    gap_n,
    gap_c,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program restores BLOCK_N tokens of one region in BLOCK_C channels."""
    blocks = tl.cdiv(CHANNELS, BLOCK_C)
    chunks: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    pair = program // (blocks * chunks)
    region = pair % regions
    sample = (pair // regions).to(tl.int64)
    columns = program % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    places = program // blocks % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    held = places < SIZE
    merged += sample * merged_b
    weights += sample * weight_b + region.to(tl.int64) * weight_r
    indices = _token_indices(order, region * SIZE + places, held)

    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    if residual is not None:
        # Before the product, so that these loads are in flight during it.
        base = _load_tokens(residual + sample * residual_b, indices, held, columns, residual_n, residual_c, CHANNELS)
    if gap is not None:
        missing = _load_tokens(gap + sample * gap_b, indices, held, columns, gap_n, gap_c, CHANNELS)
    for start in range(0, COUNT, BLOCK_K):
        spots = start + tl.arange(0, BLOCK_K)
        wanted = spots < COUNT
        rows = (region * COUNT + spots).to(tl.int64)
        values = _load_tokens(merged, rows, wanted, columns, merged_m, merged_c, CHANNELS)
        if entered is not None:
            before = _load_tokens(entered + sample * entered_b, rows, wanted, columns, entered_m, entered_c, CHANNELS)
            values = (values.to(tl.float32) - before.to(tl.float32)).to(values.dtype)
        shares = tl.load(
            weights + places[:, None] * weight_n + spots[None, :] * weight_k,
            mask=held[:, None] & wanted[None, :],
            other=0.0,
        )
        total = tl.dot(shares.to(values.dtype), values, total, input_precision="ieee")
    if gap is not None:
        total += missing.to(tl.float32)
    if residual is not None:
        total += base.to(tl.float32)
    rows = sample * (regions * SIZE) + indices
    tl.store(
        out + rows[:, None] * CHANNELS + columns[None, :],
        total.to(out.dtype.element_ty),
        mask=held[:, None] & (columns < CHANNELS)[None, :],
    )


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

    Gains are sums along a row, which few threads share; a picked candidate's row is taken out by a masked sum.
    """
    pair = tl.program_id(0)
    region = pair % regions
    tokens += (pair // regions).to(tl.int64) * token_b
    places = tl.arange(0, BLOCK_N)
    held = places < SIZE
    indices = _token_indices(order, region * SIZE + places, held)

    pairs = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    for start in range(0, CHANNELS, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        values = _load_tokens(tokens, indices, held, columns, token_n, token_c, CHANNELS)
        pairs = _add_products(pairs, values, values)
    if COSINE:
        # The diagonal holds the squared norms.
        own = tl.where(places[:, None] == places[None, :], pairs, 0.0)
        pairs *= _inverse_norm(tl.sum(own, 1))[:, None] * _inverse_norm(tl.sum(own, 0))[None, :]
    else:
        pairs *= shrink
    pairs = _finite(pairs)
    if COSINE:
        # Exact sums: what ties, ties in every order of summation.
        pairs = tl.floor(pairs * SCALE + 0.5) / SCALE

    gains = tl.sum(pairs, 1)
    # Places beyond the region gain nothing as sources and are never free as candidates.
    covered = tl.where(held, -float("inf"), float("inf"))
    turns = tl.where(held, COUNT, -1)
    for turn in range(COUNT):
        best = tl.argmax(tl.where(turns == COUNT, gains, -float("inf")), 0)
        turns = tl.where(places == best, turn, turns)
        row = tl.sum(tl.where(places[:, None] == best, pairs, 0.0), 0)
        covered = tl.maximum(covered, row)
        gains = tl.sum(tl.maximum(pairs - covered[None, :], 0.0), 1)
    tl.store(chosen + pair.to(tl.int64) * COUNT + turns, indices, mask=(turns >= 0) & (turns < COUNT))


@triton.jit
def _inverse_norm(squares):
    return 1.0 / tl.maximum(tl.sqrt(squares), 1e-12)


@triton.jit
def _finite(pairs):
    """NaN counts as no similarity; sums of infinities would be NaN."""
    return tl.minimum(tl.maximum(tl.where(pairs == pairs, pairs, 0.0), -1e30), 1e30)


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
            held = places < SIZE
            indices = _token_indices(order, region * SIZE + places, held)
            squares = tl.zeros((BLOCK_M,), tl.float32)
            for start in tl.range(0, CHANNELS, BLOCK_C, num_stages=1):
                columns = start + tl.arange(0, BLOCK_C)
                values = _load_tokens(
                    tokens + (first + sample) * token_b, indices, held, columns, token_n, token_c, CHANNELS
                ).to(tl.float32)
                squares += tl.sum(values * values, 1)
            tl.store(factors + sample * factor_b + places, squares, mask=held)
    tl.debug_barrier()

    # Fixed point needs a bound: 1 for cosines; for dot products the largest squared norm.
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
            row_indices = _token_indices(order, region * SIZE + rows, rows < SIZE)
            row_squares = tl.load(factors + sample * factor_b + rows, mask=rows < SIZE, other=0.0)
            for left in tl.range(top, SIZE, BLOCK_M, num_stages=1):
                columns = left + tl.arange(0, BLOCK_M)
                column_indices = _token_indices(order, region * SIZE + columns, columns < SIZE)
                column_squares = tl.load(factors + sample * factor_b + columns, mask=columns < SIZE, other=0.0)
                block = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
                for start in range(0, CHANNELS, BLOCK_C):
                    depths = start + tl.arange(0, BLOCK_C)
                    one = _load_tokens(base, row_indices, rows < SIZE, depths, token_n, token_c, CHANNELS)
                    two = _load_tokens(base, column_indices, columns < SIZE, depths, token_n, token_c, CHANNELS)
                    block = _add_products(block, one, two)
                if COSINE:
                    block *= _inverse_norm(row_squares)[:, None] * _inverse_norm(column_squares)[None, :]
                else:
                    block /= tl.maximum(largest, 1e-30)
                block = tl.minimum(tl.maximum(tl.where(block == block, block, 0.0), -1.0), 1.0)
                fixed = tl.floor(block * SCALE + 0.5).to(tl.int32)
                # One half decides for both, so that rounding cannot make the two differ.
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
    """Greedy facility location that touches only what a turn changes.

    A pick improves the cover of few sources, about n / turn of them, and gains change by those sources' rows alone:
    over all turns n ln k rows are read instead of n k. Similarities are fixed point, in [-SCALE, SCALE]: sums of
    integers are exact, so gains kept up to date equal gains computed afresh, and ties stay ties. No cover is -SCALE.
    """
    sources = tl.arange(0, BLOCK_S)
    real = sources < SAMPLES * SIZE
    # Similarity is symmetric: a candidate's column is a row of every sample.
    corner = (sources // SIZE).to(tl.int64) * pair_b + sources % SIZE
    candidates = tl.arange(0, BLOCK_N)
    held = candidates < SIZE
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
    turns = tl.where(held, COUNT, -1)
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
            # max(s - low, 0) - max(s - high, 0)
            change = tl.minimum(tl.maximum(block, low[:, None]), high[:, None]) - low[:, None]
            gains -= tl.sum(tl.where(filled[:, None], change, 0), 0)
            start += ROWS
        # The next turn overwrites the log.
        tl.debug_barrier()
    indices = _token_indices(order, region * SIZE + candidates, held)
    tl.store(chosen + program.to(tl.int64) * COUNT + turns, indices, mask=(turns >= 0) & (turns < COUNT))


@triton.jit
def _load_rows(pairs, sources, candidates, pair_b, SAMPLES: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Similarities [sources, candidates]; a source's number counts through the samples."""
    rows = sources * SIZE
    if SAMPLES > 1:
        rows = (sources // SIZE).to(tl.int64) * pair_b + (sources % SIZE) * SIZE
    places = pairs + rows[:, None] + candidates[None, :]
    # Loads with a mask wait for each other.
    if SIZE == BLOCK_N:
        return tl.load(places)
    else:
        return tl.load(places, mask=(candidates < SIZE)[None, :], other=0)


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
    """A program makes the weights of one region of one sample, BLOCK_N sources at a time.

    Rows of merge weights are scaled by sums over all sources; where these come in several chunks, unscaled weights wait
    in the scratch buffer, fp32 [B, R, n, k].
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

    totals = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.range(0, SIZE, BLOCK_N, num_stages=1):
        places = first + tl.arange(0, BLOCK_N)
        held = places < SIZE
        inside = held[:, None] & wanted[None, :]
        indices = _token_indices(order, region * SIZE + places, held)
        pairs = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        source_squares = tl.zeros((BLOCK_N,), tl.float32)
        target_squares = tl.zeros((BLOCK_K,), tl.float32)
        for start in range(0, CHANNELS, BLOCK_C):
            columns = start + tl.arange(0, BLOCK_C)
            ours = _load_tokens(tokens, indices, held, columns, token_n, token_c, CHANNELS)
            theirs = _load_tokens(tokens, targets, wanted, columns, token_n, token_c, CHANNELS)
            pairs = _add_products(pairs, ours, theirs)
            if COSINE:
                source_squares += tl.sum(ours.to(tl.float32) * ours.to(tl.float32), 1)
                target_squares += tl.sum(theirs.to(tl.float32) * theirs.to(tl.float32), 1)
        if COSINE:
            pairs *= _inverse_norm(source_squares)[:, None] * _inverse_norm(target_squares)[None, :]
        else:
            pairs *= shrink
        logits = tl.where(wanted[None, :], _finite(pairs) / temperature, -float("inf"))
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
            held = places < SIZE
            inside = held[:, None] & wanted[None, :]
            indices = _token_indices(order, region * SIZE + places, held)
            cells = places[:, None] * COUNT + spots[None, :]
            spread = tl.load(scratch + pair.to(tl.int64) * COUNT * SIZE + cells, mask=inside, other=0.0)
            _store_merge(merge, spread, totals, targets, indices, spots, places, inside, SIZE)


@triton.jit
def _store_merge(merge, spread, totals, targets, indices, spots, places, inside, SIZE: tl.constexpr):
    """Scale by the totals; a destination that attracts nobody, itself included, stands for itself."""
    least = 1.1754943508222875e-38
    alone = (indices[:, None] == targets[None, :]).to(tl.float32)
    scaled = tl.where((totals > least)[None, :], spread / tl.maximum(totals, least)[None, :], alone)
    tl.store(merge + spots[None, :] * SIZE + places[:, None], scaled.to(merge.dtype.element_ty), mask=inside)


@triton.jit
def _gather_rotary_kernel(
    cosines,
    sines,
    destinations,
    merged_cosines,
    merged_sines,
    text,
    rows,
    width,
    cosine_n,
    sine_n,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program fills BLOCK_M rows of both tables."""
    places = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    held = places < rows
    image = places >= text
    picked = text + tl.load(destinations + places - text, mask=held & image, other=0)
    sources = tl.where(image, picked, places)
    inside = held[:, None] & (columns < width)[None, :]
    targets = places[:, None] * width + columns[None, :]
    cosine = tl.load(cosines + sources[:, None] * cosine_n + columns[None, :], mask=inside)
    sine = tl.load(sines + sources[:, None] * sine_n + columns[None, :], mask=inside)
    tl.store(merged_cosines + targets, cosine.to(merged_cosines.dtype.element_ty), mask=inside)
    tl.store(merged_sines + targets, sine.to(merged_sines.dtype.element_ty), mask=inside)


# Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), which takes tensors on the CPU.
INTERPRETED = not isinstance(_merge_kernel, triton.JITFunction)


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
    """`reference.select`. Facility location takes one launch in regions of up to 256 tokens; in larger ones one launch
    after the similarity."""
    batch, token_count, channels = tokens.shape
    size = token_count // regions
    samples = batch if shared else 1
    supported = tokens.dtype in _DTYPES and samples * size <= _GREEDY_SIZE
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
    cosine = similarity == "cosine"
    chosen = torch.empty(batch // samples, regions, count, dtype=torch.int64, device=tokens.device)
    grid = (batch // samples * regions,)
    half = tokens.dtype != torch.float32
    if samples == 1 and size <= _REGISTER_SIZE:
        block = _block(size)
        with _on(tokens):
            _select_kernel[grid](
                tokens,
                order,
                chosen,
                regions,
                1.0 / math.sqrt(channels),
                *tokens.stride(),
                COSINE=cosine,
                CHANNELS=channels,
                SIZE=size,
                COUNT=count,
                SCALE=2.0 ** reference.sum_bits(size),
                BLOCK_N=block,
                BLOCK_C=_block(channels, 128 if half and block <= 64 else 64 if half else 32),
                # 32 similarities to a thread, or 64 in the largest: they stay in registers.
                num_warps=min(8, max(1, block * block // 1024)),
            )
        return chosen

    scale = _scale(samples * size)
    block_n, block_s = _block(size), _block(samples * size)
    warps = min(16, max(1, max(block_n, block_s) // 32))
    # Up to 16 similarities to a thread in a chunk of rows: the compiler lets more loads wait for each other.
    rows = max(1, min(16, warps * 512 // block_n))
    log = torch.empty(grid[0], 3, block_s + rows, dtype=torch.int32, device=tokens.device)
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
        pairs = _fixed_pairs(tokens, order, regions, similarity, shared, scale)
        with _on(tokens):
            _greedy_kernel[grid](pairs, order, chosen, log, regions, pairs.stride(0), **blocks, num_warps=warps)
        return chosen
    factors = torch.empty(batch, regions, size, dtype=torch.float32, device=tokens.device)
    pairs = torch.empty(batch, regions, size, size, dtype=torch.int32, device=tokens.device)
    with _on(tokens):
        _select_scratch_kernel[grid](
            tokens,
            order,
            chosen,
            factors,
            pairs,
            log,
            regions,
            pairs.stride(0),
            *tokens.stride(),
            COSINE=cosine,
            CHANNELS=channels,
            BLOCK_M=_block(size, 128 if half else 64),
            BLOCK_C=_block(channels, 64 if half else 32),
            **blocks,
            num_warps=warps,
        )
    return chosen


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
    if size > _WEIGH_SIZE or tokens.dtype not in _DTYPES:
        return reference.weigh(tokens, order, destinations, similarity=similarity, temperature=temperature)
    tokens = tokens.detach()
    half = tokens.dtype != torch.float32
    merge = tokens.new_empty(batch, regions, count, size)
    unmerge = tokens.new_empty(batch, regions, size, count)
    block_n, block_k = _block(size, 64), _block(count)
    scratch = None
    if size > block_n:
        scratch = torch.empty(batch, regions, size, count, dtype=torch.float32, device=tokens.device)
    with _on(tokens):
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
            BLOCK_C=_block(channels, 32 if not half else 128 if block_k <= 64 else 64),
            num_warps=min(8, max(1, block_n * block_k // 512)),
        )
    return merge, unmerge


def merge(tokens: Tensor, order: Tensor | None, weights: Tensor) -> Tensor:
    """`reference.merge`, in one launch for regions of up to 512 tokens; the reference where a gradient is needed."""
    if _needs_gradient(tokens, weights):
        return reference.merge(tokens, order, weights)
    if torch.compiler.is_compiling():
        return _merge_operator(tokens, order, weights)
    return _merge(tokens, order, weights)


def unmerge(
    merged: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    weights: Tensor,
    residual: Tensor | None = None,
    entered: Tensor | None = None,
    gap: Tensor | None = None,
) -> Tensor:
    """`reference.unmerge`, in one launch for regions of up to 512 tokens; the reference where a gradient is needed."""
    if _needs_gradient(merged, weights, residual, entered, gap):
        return reference.unmerge(merged, order, inverse, weights, residual, entered, gap)
    if torch.compiler.is_compiling():
        return _unmerge_operator(merged, order, inverse, weights, residual, entered, gap)
    return _unmerge(merged, order, inverse, weights, residual, entered, gap)


def gather_rotary(tables: list[Tensor], destinations: Tensor, out: list[Tensor]) -> None:
    """`reference.gather_rotary`, both tables in one launch."""
    contiguous = all(table.stride(1) == 1 for table in tables) and all(table.is_contiguous() for table in out)
    if len(tables) != 2 or not contiguous or not {table.dtype for table in tables}.issubset(_DTYPES):
        return reference.gather_rotary(tables, destinations, out)
    (cosines, sines), (rows, width) = tables, out[0].shape
    block = 32
    with _on(cosines):
        _gather_rotary_kernel[(triton.cdiv(rows, block),)](
            cosines,
            sines,
            destinations.contiguous(),
            *out,
            rows - destinations.shape[0],
            rows,
            width,
            cosines.stride(0),
            sines.stride(0),
            BLOCK_M=block,
            BLOCK_D=triton.next_power_of_2(width),
        )


def _merge(tokens: Tensor, order: Tensor | None, weights: Tensor) -> Tensor:
    batch, _, channels = tokens.shape
    _, regions, count, size = weights.shape
    if size > _MERGE_SIZE or tokens.dtype not in _DTYPES:
        return reference.merge(tokens, order, weights)
    merged = tokens.new_empty(batch, regions * count, channels)
    block_n, block_k = _merge_blocks(size, count, tokens.dtype)
    programs = batch * regions * triton.cdiv(count, block_k)
    block_c = _channel_block(programs, channels, tokens.dtype)
    with _on(tokens):
        _merge_kernel[(programs * triton.cdiv(channels, block_c),)](
            tokens,
            order,
            weights,
            merged,
            regions,
            *tokens.stride(),
            *weights.stride(),
            CHANNELS=channels,
            SIZE=size,
            COUNT=count,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            BLOCK_C=block_c,
            num_warps=_merge_warps(block_n * block_c),
        )
    return merged


def _unmerge(
    merged: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    weights: Tensor,
    residual: Tensor | None,
    entered: Tensor | None,
    gap: Tensor | None,
) -> Tensor:
    batch, _, channels = merged.shape
    _, regions, size, count = weights.shape
    dtypes = {merged.dtype, *(tensor.dtype for tensor in (residual, gap) if tensor is not None)}
    mixed = entered is not None and entered.dtype != merged.dtype
    if size > _MERGE_SIZE or mixed or not dtypes.issubset(_DTYPES):
        return reference.unmerge(merged, order, inverse, weights, residual, entered, gap)
    out = merged.new_empty(batch, regions * size, channels, dtype=_unmerged_dtype(merged, residual, gap))
    block_n, block_k = _merge_blocks(size, count, merged.dtype)
    programs = batch * regions * triton.cdiv(size, block_n)
    block_c = _channel_block(programs, channels, merged.dtype)
    with _on(merged):
        _unmerge_kernel[(programs * triton.cdiv(channels, block_c),)](
            merged,
            order,
            weights,
            residual,
            entered,
            gap,
            out,
            regions,
            *merged.stride(),
            *weights.stride(),
            *((0, 0, 0) if residual is None else residual.stride()),
            *((0, 0, 0) if entered is None else entered.stride()),
            *((0, 0, 0) if gap is None else gap.stride()),
            CHANNELS=channels,
            SIZE=size,
            COUNT=count,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            BLOCK_C=block_c,
            num_warps=_merge_warps(block_n * block_c),
        )
    return out


# Compiled code sees one opaque operator, whatever the sizes. Outside of it a call need not pass the dispatcher.
@torch.library.custom_op("tokenmerge::merge", mutates_args=())
def _merge_operator(tokens: Tensor, order: Tensor | None, weights: Tensor) -> Tensor:
    return _merge(tokens, order, weights)


@_merge_operator.register_fake
def _(tokens: Tensor, order: Tensor | None, weights: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], weights.shape[1] * weights.shape[2], tokens.shape[2])


@torch.library.custom_op("tokenmerge::unmerge", mutates_args=())
def _unmerge_operator(
    merged: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    weights: Tensor,
    residual: Tensor | None,
    entered: Tensor | None,
    gap: Tensor | None,
) -> Tensor:
    # The reference's sum has the strides of the residual.
    return _unmerge(merged, order, inverse, weights, residual, entered, gap).contiguous()


@_unmerge_operator.register_fake
def _(
    merged: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    weights: Tensor,
    residual: Tensor | None,
    entered: Tensor | None,
    gap: Tensor | None,
) -> Tensor:
    shape = merged.shape[0], weights.shape[1] * weights.shape[2], merged.shape[2]
    return merged.new_empty(shape, dtype=_unmerged_dtype(merged, residual, entered, gap))


def _fixed_pairs(
    tokens: Tensor, order: Tensor | None, regions: int, similarity: str, shared: bool, scale: int
) -> Tensor:
    """int32 [B, R, n, n] in [-scale, scale], symmetric."""
    pairs = reference.pairwise_similarity(split_regions(tokens, order, regions), similarity)
    if similarity != "cosine":
        pairs /= pairs.abs().amax(dim=(0, 2, 3) if shared else (2, 3), keepdim=True).clamp_min(1e-30)
    fixed = pairs.mul_(scale).round_().clamp_(-scale, scale).to(torch.int32)
    return torch.maximum(fixed, fixed.transpose(-1, -2))


def _scale(sources: int) -> int:
    """What a similarity of 1 is in fixed point: a gain, up to twice that for each source, must fit into int32."""
    return min(2**23, (2**30 - 1) // sources)


def _block(size: int, most: int = _GREEDY_SIZE) -> int:
    """A power of two that holds `size`, if `most` allows; 16 at least, which a matrix product needs."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _channel_block(programs: int, channels: int, dtype: torch.dtype) -> int:
    """Channels of a program: whole 256-byte rows, or fewer where there would not be enough programs."""
    # Half as many of fp32, whose products keep operands in registers.
    widest = 64 if dtype == torch.float32 else 128
    for block in (widest, widest // 2):
        if programs * triton.cdiv(channels, block) >= _ENOUGH_PROGRAMS:
            return _block(channels, block)
    return _block(channels, widest // 4)


def _merge_blocks(size: int, count: int, dtype: torch.dtype) -> tuple[int, int]:
    """Sources and destinations of a program, or of a step of its product."""
    # Products of fp32 keep their operands in registers.
    most = 32 if dtype == torch.float32 else 64
    return _block(size, most), _block(count, most)


def _merge_warps(elements: int) -> int:
    """Warps for a tile of tokens: four loads of 16 bytes to a thread."""
    return min(8, max(1, elements // 1024))


def _unmerged_dtype(merged: Tensor, *added: Tensor | None) -> torch.dtype:
    dtype = merged.dtype
    for tensor in added:
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    return dtype


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if elsewhere else contextlib.nullcontext()

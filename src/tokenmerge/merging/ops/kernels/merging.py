# Triton kernels have no types that mypy understands.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Merging and unmerging, as kernel launches and as the operators that compiled code sees."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from ...grid import invert_order
from .. import reference
from .common import DTYPES, add_products, block_size, load_tokens, on_device_of, token_indices

# Largest regions for the kernels. A larger merge is compute-bound, and the library's product is better at it.
_MERGE_SIZE = 512
# Four programs for each of an H200's 132 multiprocessors: enough loads in flight to fill the memory system.
_ENOUGH_PROGRAMS = 512


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
    """A program computes BLOCK_K merged tokens of one region in BLOCK_C channels."""
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
        present = places < SIZE
        indices = token_indices(order, region * SIZE + places, present)
        values = load_tokens(tokens, indices, present, columns, token_n, token_c, CHANNELS)
        shares = tl.load(
            weights + spots[:, None] * weight_k + places[None, :] * weight_n,
            mask=wanted[:, None] & present[None, :],
            other=0.0,
        )
        total = add_products(total, shares.to(values.dtype), values)
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
    present = places < SIZE
    merged += sample * merged_b
    weights += sample * weight_b + region.to(tl.int64) * weight_r
    indices = token_indices(order, region * SIZE + places, present)

    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    if residual is not None:
        # Loaded before the product, so that these loads are in flight during it.
        base = load_tokens(residual + sample * residual_b, indices, present, columns, residual_n, residual_c, CHANNELS)
    for start in range(0, COUNT, BLOCK_K):
        spots = start + tl.arange(0, BLOCK_K)
        wanted = spots < COUNT
        rows = (region * COUNT + spots).to(tl.int64)
        values = load_tokens(merged, rows, wanted, columns, merged_m, merged_c, CHANNELS)
        if entered is not None:
            before = load_tokens(entered + sample * entered_b, rows, wanted, columns, entered_m, entered_c, CHANNELS)
            values = (values.to(tl.float32) - before.to(tl.float32)).to(values.dtype)
        shares = tl.load(
            weights + places[:, None] * weight_n + spots[None, :] * weight_k,
            mask=present[:, None] & wanted[None, :],
            other=0.0,
        )
        total = add_products(total, shares.to(values.dtype), values)
    if residual is not None:
        total += base.to(tl.float32)
    rows = sample * (regions * SIZE) + indices
    tl.store(
        out + rows[:, None] * CHANNELS + columns[None, :],
        total.to(out.dtype.element_ty),
        mask=present[:, None] & (columns < CHANNELS)[None, :],
    )


def merge(tokens: Tensor, order: Tensor | None, weights: Tensor) -> Tensor:
    """`reference.merge`, in one launch for regions of up to 512 tokens. Weights are constants, without gradients."""
    if torch.compiler.is_compiling() or _needs_gradient(tokens):
        return _merge_operator(tokens, order, weights)
    return _merge(tokens, order, weights)


def unmerge(
    merged: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    weights: Tensor,
    residual: Tensor | None = None,
    entered: Tensor | None = None,
) -> Tensor:
    """`reference.unmerge`, in one launch for regions of up to 512 tokens. Weights are constants, without gradients."""
    if torch.compiler.is_compiling() or _needs_gradient(merged, residual, entered):
        return _unmerge_operator(merged, order, inverse, weights, residual, entered)
    return _unmerge(merged, order, inverse, weights, residual, entered)


def _merge(tokens: Tensor, order: Tensor | None, weights: Tensor) -> Tensor:
    batch, _, channels = tokens.shape
    _, regions, count, size = weights.shape
    if size > _MERGE_SIZE or tokens.dtype not in DTYPES:
        return reference.merge(tokens, order, weights)
    merged = tokens.new_empty(batch, regions * count, channels)
    block_n, block_k = _merge_blocks(size, count, tokens.dtype)
    programs = batch * regions * triton.cdiv(count, block_k)
    block_c = _channel_block(programs, channels, tokens.dtype)
    with on_device_of(tokens):
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
) -> Tensor:
    batch, _, channels = merged.shape
    _, regions, size, count = weights.shape
    dtypes = {merged.dtype, merged.dtype if residual is None else residual.dtype}
    mixed = entered is not None and entered.dtype != merged.dtype
    if size > _MERGE_SIZE or mixed or not dtypes.issubset(DTYPES):
        return reference.unmerge(merged, order, inverse, weights, residual, entered)
    out = merged.new_empty(batch, regions * size, channels, dtype=_unmerged_dtype(merged, residual))
    block_n, block_k = _merge_blocks(size, count, merged.dtype)
    programs = batch * regions * triton.cdiv(size, block_n)
    block_c = _channel_block(programs, channels, merged.dtype)
    with on_device_of(merged):
        _unmerge_kernel[(programs * triton.cdiv(channels, block_c),)](
            merged,
            order,
            weights,
            residual,
            entered,
            out,
            regions,
            *merged.stride(),
            *weights.stride(),
            *((0, 0, 0) if residual is None else residual.stride()),
            *((0, 0, 0) if entered is None else entered.stride()),
            CHANNELS=channels,
            SIZE=size,
            COUNT=count,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            BLOCK_C=block_c,
            num_warps=_merge_warps(block_n * block_c),
        )
    return out


# Compiled code sees one opaque operator, whatever the sizes, and gradients need an operator too. Other calls skip the
# dispatcher.
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
) -> Tensor:
    # The reference's sum would have the strides of the residual.
    return _unmerge(merged, order, inverse, weights, residual, entered).contiguous()


@_unmerge_operator.register_fake
def _(
    merged: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    weights: Tensor,
    residual: Tensor | None,
    entered: Tensor | None,
) -> Tensor:
    shape = merged.shape[0], weights.shape[1] * weights.shape[2], merged.shape[2]
    return merged.new_empty(shape, dtype=_unmerged_dtype(merged, residual, entered))


# The gradient of a product with weights is the product with their transpose, so each operator is the other's gradient.
def _keep_for_merge(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, weights = inputs
    ctx.save_for_backward(order, weights)


def _merge_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    order, weights = ctx.saved_tensors
    inverse = None if order is None else invert_order(order)
    return _unmerge_operator(gradient, order, inverse, weights.transpose(-1, -2), None, None), None, None


def _keep_for_unmerge(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    merged, order, _, weights, residual, entered = inputs
    ctx.save_for_backward(order, weights)
    ctx.dtypes = [None if each is None else each.dtype for each in (merged, residual, entered)]


def _unmerge_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    order, weights = ctx.saved_tensors
    merged_dtype, residual_dtype, entered_dtype = ctx.dtypes
    merged = _merge_operator(gradient, order, weights.transpose(-1, -2))
    residual = None if residual_dtype is None else gradient.to(residual_dtype)
    entered = None if entered_dtype is None else -merged.to(entered_dtype)
    return merged.to(merged_dtype), None, None, None, residual, entered


_merge_operator.register_autograd(_merge_backward, setup_context=_keep_for_merge)
_unmerge_operator.register_autograd(_unmerge_backward, setup_context=_keep_for_unmerge)


def _channel_block(programs: int, channels: int, dtype: torch.dtype) -> int:
    """Channels per program: 256 bytes of a row, or less where there would be too few programs."""
    # Products of fp32 keep their operands in registers, so blocks have half as many channels.
    widest = 64 if dtype == torch.float32 else 128
    for block in (widest, widest // 2):
        if programs * triton.cdiv(channels, block) >= _ENOUGH_PROGRAMS:
            return block_size(channels, block)
    return block_size(channels, widest // 4)


def _merge_blocks(size: int, count: int, dtype: torch.dtype) -> tuple[int, int]:
    """Sources and destinations per program, or per step of its product."""
    # Products of fp32 keep their operands in registers.
    most = 32 if dtype == torch.float32 else 64
    return block_size(size, most), block_size(count, most)


def _merge_warps(elements: int) -> int:
    """Warps for a block of tokens: four loads of 16 bytes per thread."""
    return min(8, max(1, elements // 1024))


def _unmerged_dtype(merged: Tensor, *added: Tensor | None) -> torch.dtype:
    dtype = merged.dtype
    for tensor in added:
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    return dtype


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)

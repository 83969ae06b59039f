# Kernels have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rotary tables of a merged sequence."""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from .. import reference
from .common import DTYPES, on_device_of


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


def gather_rotary(tables: list[Tensor], destinations: Tensor, out: list[Tensor]) -> None:
    """`reference.gather_rotary`, both tables in one launch."""
    contiguous = all(table.stride(1) == 1 for table in tables) and all(table.is_contiguous() for table in out)
    if len(tables) != 2 or not contiguous or not {table.dtype for table in tables}.issubset(DTYPES):
        return reference.gather_rotary(tables, destinations, out)
    (cosines, sines), (rows, width) = tables, out[0].shape
    block = 32
    with on_device_of(cosines):
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

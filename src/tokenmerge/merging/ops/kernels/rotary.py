# Kernels have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rotary tables of a merged sequence."""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

from .. import reference
from ..reference import Rotary
from .common import DTYPES, on_device_of

# Rows that a program fills at a time: both tables of a wide head stay in the registers of one warp.
BLOCK_M = tl.constexpr(16)


@triton.jit
def gather_rotary_kernel(
    destinations,
    cosines,
    sines,
    merged_cosines,
    merged_sines,
    text,
    rows,
    width,
    cosine_n,
    sine_n,
    BLOCK_D: tl.constexpr,
):
    """All programs, however many, fill both tables of a merged sequence. Other kernels may do so beside their work."""
    columns = tl.arange(0, BLOCK_D)
    first = tl.program_id(0) * BLOCK_M
    while first < rows:
        places = first + tl.arange(0, BLOCK_M)
        present = places < rows
        image = places >= text
        picked = text + tl.load(destinations + places - text, mask=present & image, other=0)
        sources = tl.where(image, picked, places)
        inside = present[:, None] & (columns < width)[None, :]
        targets = places[:, None] * width + columns[None, :]
        cosine = tl.load(cosines + sources[:, None] * cosine_n + columns[None, :], mask=inside)
        sine = tl.load(sines + sources[:, None] * sine_n + columns[None, :], mask=inside)
        tl.store(merged_cosines + targets, cosine.to(merged_cosines.dtype.element_ty), mask=inside)
        tl.store(merged_sines + targets, sine.to(merged_sines.dtype.element_ty), mask=inside)
        first += tl.num_programs(0) * BLOCK_M


def is_gathered(rotary: Rotary) -> bool:
    """Whether the kernels can fill these tables."""
    tables = [*rotary.tables, *rotary.merged]
    contiguous = all(each.stride(1) == 1 for each in tables) and all(each.is_contiguous() for each in rotary.merged)
    return len(rotary.tables) == 2 and contiguous and {each.dtype for each in tables}.issubset(DTYPES)


def table_arguments(rotary: Rotary | None, merged: int) -> dict[str, object]:
    """What the kernel is told of tables, or of none, for a number of merged tokens."""
    if rotary is None:
        names = ("cosines", "sines", "merged_cosines", "merged_sines")
        return {**dict.fromkeys(names), "text": 0, "rows": 0, "width": 0, "cosine_n": 0, "sine_n": 0, "BLOCK_D": 1}
    (cosines, sines), (merged_cosines, merged_sines) = rotary
    rows, width = merged_cosines.shape
    return {
        "cosines": cosines,
        "sines": sines,
        "merged_cosines": merged_cosines,
        "merged_sines": merged_sines,
        "text": rows - merged,
        "rows": rows,
        "width": width,
        "cosine_n": cosines.stride(0),
        "sine_n": sines.stride(0),
        "BLOCK_D": triton.next_power_of_2(width),
    }


def gather_rotary(rotary: Rotary, destinations: Tensor) -> None:
    """`reference.gather_rotary`, both tables in one launch."""
    if not is_gathered(rotary):
        return reference.gather_rotary(rotary, destinations)
    programs = triton.cdiv(rotary.merged[0].shape[0], BLOCK_M.value)
    with on_device_of(destinations):
        gather_rotary_kernel[(programs,)](destinations.contiguous(), **table_arguments(rotary, destinations.shape[0]))

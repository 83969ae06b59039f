"""DenoiserCall: what a technique must know of one call of a denoiser, and how its image tokens lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import TokenMergeError


@dataclass(frozen=True)
class TokenGrid:
    """Tokens of one image, row-major."""

    height: int
    width: int

    @property
    def count(self) -> int:
        return self.height * self.width

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


class DenoiserCall(NamedTuple):
    """What a family reads off the arguments of one denoiser call."""

    batch: int
    dtype: torch.dtype
    device: torch.device
    timestep: Tensor
    height: int = 0  # of the grid that level 0 has; 0 where positions come as ids
    width: int = 0
    tokens: int = 0  # image tokens, where positions come as ids
    ids: Tensor | None = None  # [N, 3] image number, row and column of every image token
    text_tokens: int = 0
    rotary_width: int = 0
    apart: bool = False  # whether something acts between blocks

    @property
    def size(self) -> tuple[Any, ...]:
        """What the tensors of a call depend on."""
        grid = (self.height, self.width, self.tokens, self.text_tokens)
        return self.batch, self.dtype, self.device, *grid, self.apart


def token_count(call: DenoiserCall, level: int) -> int:
    """Image tokens at a level."""
    height, width = grid_at_level(call, level)
    return height * width if height else call.tokens


def grid_at_level(call: DenoiserCall, level: int) -> tuple[int, int]:
    """Height and width of a level; each halves the one above it, rounding up."""
    height, width = call.height, call.width
    for _ in range(level):
        height, width = (height + 1) // 2, (width + 1) // 2
    return height, width


def grids_of_ids(ids: Tensor) -> tuple[TokenGrid, ...]:
    """The images of a sequence, from the image number, row and column of every token ([N, 3])."""
    places = ids.detach().to("cpu", torch.int64)
    _, lengths = places[:, 0].unique_consecutive(return_counts=True)
    grids = []
    for image in places.split(lengths.tolist()):
        height, width = (int(axis.max() - axis.min()) + 1 for axis in (image[:, 1], image[:, 2]))
        if height * width != len(image):
            height, width = _grid_of_rows(image[:, 2]) or (height, width)
        if height * width != len(image):
            raise TokenMergeError(
                f"img_ids place {len(image)} tokens on a {height}x{width} grid; merging needs every place filled once, "
                "as the pipeline's own ids do"
            )
        grids.append(TokenGrid(height, width))
    return tuple(grids)


def _grid_of_rows(columns: Tensor) -> tuple[int, int] | None:
    """Height and width, if columns ([N]) rise in rows that are all alike: bfloat16 has no odd numbers above 256, so
    that the pipeline's own ids of a large picture do not tell how many there are."""
    falls = (columns[1:] < columns[:-1]).nonzero()
    width = int(falls[0]) + 1 if len(falls) else 0
    if not width or len(columns) % width or not bool((columns.view(-1, width) == columns[:width]).all()):
        return None
    return len(columns) // width, width

"""DenoiserCall: what a technique must know of one call of a denoiser, and how its image tokens lie."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import TokenMergeError


@dataclass(frozen=True)
class TokenGrid:
    """Tokens of one image or video: frame by frame, each row-major."""

    height: int
    width: int
    frames: int = 1

    @property
    def area(self) -> int:
        """Tokens of one frame."""
        return self.height * self.width

    @property
    def count(self) -> int:
        return self.frames * self.area

    def __str__(self) -> str:
        frame = f"{self.height}x{self.width}"
        return frame if self.frames == 1 else f"{self.frames}x{frame}"


@dataclass(frozen=True)
class Shard:
    """The part of a sequence of tokens that this process has, where several draw one picture."""

    rank: int
    ranks: int
    even: bool  # whether all parts must have the same number of tokens
    group: Any = field(compare=False)  # the processes, as torch.distributed knows them

    def bounds(self, tokens: int) -> list[int]:
        """Where the parts begin, and where the last ends."""
        size, more = divmod(tokens, self.ranks)
        return [rank * size + min(rank, more) for rank in range(self.ranks + 1)]


class DenoiserCall(NamedTuple):
    """What a family reads off the arguments of one denoiser call."""

    batch: int  # token sequences; a UNet for video has one for every frame
    dtype: torch.dtype
    device: torch.device
    timestep: Tensor  # falls along a picture
    grids: tuple[TokenGrid, ...] = ()  # at level 0, image by image; none where positions come as ids
    ids: Tensor | None = None  # [N, 3] image number, row and column of every image token
    text_tokens: int = 0
    shapes: Hashable = ()  # of all arguments, where no table tells what counts
    apart: bool = False  # whether something acts between blocks
    # Of a host that joins conditions in one batch and splits them as it likes: what each equal part of it is.
    conditions: tuple[Hashable, ...] = ()
    shard: Shard | None = None  # what blocks see of the tokens, if not all
    trains: bool = False  # whether it is one of training, which is a picture by itself

    @property
    def tokens(self) -> int:
        """Image tokens at level 0."""
        return sum(grid.count for grid in self.grids) if self.ids is None else self.ids.shape[0]

    @property
    def size(self) -> tuple[Any, ...]:
        """What the tensors of a call depend on."""
        grids = self.grids or self.tokens
        return self.batch, self.dtype, self.device, grids, self.text_tokens, self.shapes, self.apart, self.shard

    def parts(self, turn: int) -> list[tuple[Hashable, DenoiserCall]]:
        """What residuals are kept for, by a name that is the same in every step: each condition, or where a host tells
        none the whole call, the one with number `turn` of its step."""
        if not self.conditions:
            return [(turn, self)]
        one = self._replace(batch=self.batch // len(self.conditions), conditions=())
        return [(condition, one) for condition in self.conditions]


def grids_at_level(call: DenoiserCall, level: int) -> tuple[TokenGrid, ...]:
    """The grids of a level; each halves the one above it, rounding up."""
    grids = call.grids
    for _ in range(level):
        grids = tuple(TokenGrid((grid.height + 1) // 2, (grid.width + 1) // 2, grid.frames) for grid in grids)
    return grids


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

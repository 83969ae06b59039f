"""DenoiserCall: what techniques must know of one denoiser call, and how its image tokens lie on grids."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import TokenMergeError


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of one image or video: frame by frame, each frame row-major."""

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
    """This process's part of a token sequence, where several processes draw one picture."""

    rank: int
    ranks: int
    even: bool  # whether all parts must have the same number of tokens
    group: Any = field(compare=False)  # the process group of torch.distributed

    def bounds(self, tokens: int) -> list[int]:
        """Where each part begins, and where the last one ends."""
        size, more = divmod(tokens, self.ranks)
        return [rank * size + min(rank, more) for rank in range(self.ranks + 1)]


class DenoiserCall(NamedTuple):
    """What a family reads from the arguments of one denoiser call."""

    batch: int  # number of token sequences; a video UNet has one per frame
    dtype: torch.dtype
    device: torch.device
    timestep: Tensor  # falls from step to step
    grids: tuple[TokenGrid, ...] = ()  # at level 0, image by image; empty where positions come as ids
    ids: Tensor | None = None  # [N, 3] image number, row and column of each image token
    text_tokens: int = 0
    shapes: Hashable = ()  # shapes of all arguments, where no table says which of them count
    apart: bool = False  # whether something acts between blocks
    # The condition of each equal part of the batch, where the host joins and splits conditions as it likes.
    conditions: tuple[Hashable, ...] = ()
    shard: Shard | None = None  # the part of the tokens that blocks see, if not all
    trains: bool = False  # whether this is a call of training, which counts as a picture of its own

    @property
    def tokens(self) -> int:
        """The number of image tokens at level 0."""
        return sum(grid.count for grid in self.grids) if self.ids is None else self.ids.shape[0]

    @property
    def size(self) -> tuple[Any, ...]:
        """Everything that determines the shapes of a call's tensors."""
        grids = self.grids or self.tokens
        return self.batch, self.dtype, self.device, grids, self.text_tokens, self.shapes, self.apart, self.shard

    def parts(self, turn: int) -> list[tuple[Hashable, DenoiserCall]]:
        """The parts of a call that keep their own residuals. Each has a key that is the same in every step: its
        condition or, without conditions, `turn`, the number of the call within its step."""
        if not self.conditions:
            return [(turn, self)]
        one = self._replace(batch=self.batch // len(self.conditions), conditions=())
        return [(condition, one) for condition in self.conditions]


def planned(*grids: TokenGrid) -> DenoiserCall:
    """A call without tensors, for plans."""
    return DenoiserCall(1, torch.float32, torch.device("cpu"), torch.zeros(()), grids)


def grids_at_level(call: DenoiserCall, level: int) -> tuple[TokenGrid, ...]:
    """The grids at a UNet level. Each level halves the one before, rounding up."""
    grids = call.grids
    for _ in range(level):
        grids = tuple(TokenGrid((grid.height + 1) // 2, (grid.width + 1) // 2, grid.frames) for grid in grids)
    return grids


def grids_of_ids(ids: Tensor) -> tuple[TokenGrid, ...]:
    """The grids of a sequence of images. ids: [N, 3] image number, row and column of each token."""
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
    """Height and width, if columns [N] rise alike in every row; else None.

    bfloat16 has no odd numbers above 256, so the largest id of a large picture does not give its size.
    """
    falls = (columns[1:] < columns[:-1]).nonzero()
    width = int(falls[0]) + 1 if len(falls) else 0
    if not width or len(columns) % width or not bool((columns.view(-1, width) == columns[:width]).all()):
        return None
    return len(columns) // width, width

"""MergeMap: the map that a refresh fills and every layer of a group uses: merge(tokens) and unmerge(merged)."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .grid import Layout, Partition, invert_order


class MapSpace(NamedTuple):
    """What the tensors of a map depend on, besides the layout."""

    batch: int
    shared: bool  # whether all samples of a batch have the same destinations
    dtype: torch.dtype
    device: torch.device

    @property
    def samples(self) -> int:
        """Sets of destinations: one per sample, or one for the whole batch."""
        return 1 if self.shared else self.batch


@dataclass(frozen=True)
class MergeMap:
    """A linear map per region. A refresh fills its tensors in place, and compiled code reads them as inputs."""

    layout: Layout
    ops: ModuleType
    order: Tensor | None  # [N] token indices by merging region; None where those are row-major
    inverse: Tensor | None  # [N] undoes `order`
    destinations: Tensor  # [S, M] row-major token indices; S is 1 if the batch shares them
    merge_weights: Tensor  # [B, R, k, n], rows sum to 1
    unmerge_weights: Tensor  # [B, R, n, k], rows sum to 1

    @classmethod
    def empty(cls, layout: Layout, ops: ModuleType, space: MapSpace, *, ordered: bool) -> MergeMap:
        """A map of the right shapes, for `fill`."""
        regions, count, size, batch = layout.merge_regions, layout.merge_count, layout.merge_size, space.batch
        index_shapes = [(layout.tokens,)] * (2 if ordered else 0) + [(space.samples, layout.merged)]
        weight_shapes = [(batch, regions, count, size), (batch, regions, size, count)]
        indices = [torch.zeros(shape, dtype=torch.int64, device=space.device) for shape in index_shapes]
        weights = [torch.zeros(shape, dtype=space.dtype, device=space.device) for shape in weight_shapes]
        return cls.over(layout, ops, indices + weights)

    # Sizes are read off tensors: the compiler would take a plain number in a site for a constant.
    @property
    def token_count(self) -> int:
        return self.unmerge_weights.shape[1] * self.unmerge_weights.shape[2]

    @property
    def merged_count(self) -> int:
        return self.destinations.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that a refresh writes."""
        ordering = [] if self.order is None or self.inverse is None else [self.order, self.inverse]
        return [*ordering, self.destinations, self.merge_weights, self.unmerge_weights]

    @classmethod
    def over(cls, layout: Layout, ops: ModuleType, tensors: list[Tensor]) -> MergeMap:
        """A map over the `tensors` of another map."""
        order, inverse = tensors[:2] if len(tensors) == 5 else (None, None)
        return cls(layout, ops, order, inverse, *tensors[-3:])

    def fill(self, partition: Partition, destinations: Tensor, merge: Tensor, unmerge: Tensor) -> None:
        """Overwrite the tensors in place: destinations [S, R, k] by selection region, weights by merging region."""
        if self.order is not None and self.inverse is not None:
            if partition.merge_order is None:
                torch.arange(self.layout.tokens, out=self.order)
            else:
                self.order.copy_(partition.merge_order)
            self.inverse.copy_(invert_order(self.order))
        self.destinations.copy_(destinations.flatten(1))
        self.merge_weights.copy_(merge)
        self.unmerge_weights.copy_(unmerge)

    def merge(self, tokens: Tensor) -> Tensor:
        """[B, N, C] to [B, M, C]: every merged token is a weighted mean of the tokens of its region."""
        return self.ops.merge(tokens, self.order, self.merge_weights)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None, entered: Tensor | None = None) -> Tensor:
        """[B, M, C] to [B, N, C], plus `residual` [B, N, C]. With `entered` [B, M, C], only the change from that."""
        return self.ops.unmerge(merged, self.order, self.inverse, self.unmerge_weights, residual, entered)

    def owners(self) -> Tensor:
        """[N] the destination, by row-major index, that gives each token of the first sample most of its result."""
        strongest = self.unmerge_weights[0].argmax(-1)
        regions, count = self.layout.merge_regions, self.layout.merge_count
        owners = self.destinations[0].view(regions, count).gather(1, strongest).flatten()
        return owners if self.inverse is None else owners[self.inverse]

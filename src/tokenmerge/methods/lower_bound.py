"""The speed bound of linear merging: fixed random maps that cost no selection and no weights. Pictures mean nothing."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..config import MergeConfig
from ..grid import Partition
from .base import LinearMethod


class LowerBound(LinearMethod):
    REFRESHES = False

    def needs_host(self, config: MergeConfig) -> bool:
        return True

    def select(
        self,
        tokens: Tensor,
        partition: Partition,
        config: MergeConfig,
        ops: ModuleType,
        generator: torch.Generator,
        *,
        shared: bool,
    ) -> Tensor:
        """Evenly spaced destinations, so that rotary tables have something to follow."""
        layout = partition.layout
        return ops.select(
            tokens, partition.order, layout.select_regions, layout.select_count, selection="uniform", shared=shared
        )

    def weigh(
        self,
        tokens: Tensor,
        destinations: Tensor,
        partition: Partition,
        config: MergeConfig,
        ops: ModuleType,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """The same random map for every sample, with rows of sum 1 in both directions."""
        layout = partition.layout
        shape = (layout.merge_regions, layout.merge_count, layout.merge_size)
        raw = torch.rand(shape, generator=generator, device=generator.device).to(tokens.device)
        merge = raw / raw.sum(-1, keepdim=True)
        unmerge = (raw / raw.sum(-2, keepdim=True)).transpose(-1, -2)
        batch = tokens.shape[0]
        return tuple(each.to(tokens.dtype).expand(batch, -1, -1, -1) for each in (merge, unmerge))  # type: ignore[return-value]

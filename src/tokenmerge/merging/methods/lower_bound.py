"""The speed limit of linear merging: fixed random maps that cost no selection and no weights. Images are nonsense."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import Merge
from ...runtime.timeline import ONCE
from .base import WEIGHTS, Given, LinearMethod


class LowerBound(LinearMethod):
    RENEWS = ONCE
    unread = ("selection", *WEIGHTS)

    def needs_host(self, technique: Merge) -> bool:
        return True

    def splits(self, technique: Merge) -> bool:
        return False

    def select(self, given: Given) -> Tensor:
        """Evenly spaced destinations, so that rotary tables have rows to gather."""
        layout = given.partition.layout
        counts = (layout.select_regions, layout.select_count)
        return given.ops.select(given.tokens, given.partition.order, *counts, selection="uniform", shared=given.shared)

    def weigh(self, given: Given, destinations: Tensor) -> tuple[Tensor, Tensor]:
        """The same random map for every sample. Rows sum to 1 in both directions."""
        tokens, layout, generator = given.tokens, given.partition.layout, given.generator
        shape = (layout.merge_regions, layout.merge_count, layout.merge_size)
        raw = torch.rand(shape, generator=generator, device=generator.device).to(tokens.device)
        merge = raw / raw.sum(-1, keepdim=True)
        unmerge = (raw / raw.sum(-2, keepdim=True)).transpose(-1, -2)
        batch = tokens.shape[0]
        return tuple(each.to(tokens.dtype).expand(batch, -1, -1, -1) for each in (merge, unmerge))  # type: ignore[return-value]

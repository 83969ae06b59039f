"""Methods: how destinations are chosen and weights made. One interface; a comparison changes one word of the config."""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from ..config import MergeConfig
from ..grid import Partition
from . import lower_bound, toma


class Method(Protocol):
    """What a method module offers. Both functions are pure; randomness comes from the generator alone."""

    REFRESHES: bool  # whether maps follow the tokens, or are made once and stay

    def draws(self, config: MergeConfig) -> bool:
        """Whether it draws random numbers, which a recorded CUDA graph cannot."""

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
        """Destinations [S, R, k] of tokens [B, N, C], as row-major indices by selection region; S is 1 if `shared`."""

    def weigh(
        self,
        tokens: Tensor,
        destinations: Tensor,
        partition: Partition,
        config: MergeConfig,
        ops: ModuleType,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Merge weights [B, R, k, n] and unmerge weights [B, R, n, k] by merging region; both have rows of sum 1."""


def method_for(config: MergeConfig) -> Method:
    return {"toma": toma, "lower-bound": lower_bound}[config.method]

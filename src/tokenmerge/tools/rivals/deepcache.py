"""DeepCache, by its own package: between full steps a UNet runs its outer layers only and reuses deeper features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from diffusers import UNet2DConditionModel

from ...errors import TokenMergeError
from ...families import denoiser_of
from ..loading import Outline
from .base import Field, Kind, Run
from .restoring import unchanged

# Branches per down block, as the package counts them.
_BRANCHES = 3


class DeepCache(Kind):
    name = "deepcache"
    noun = "step cache"
    example = "deepcache:interval=3"
    module = "DeepCache"
    one_call = True

    def fields(self) -> Mapping[str, Field]:
        return {"interval": Field(int, 3, least=1), "branch": Field(int, 0)}

    def check(self, model: Outline, values: Mapping[str, Any], steps: int) -> None:
        denoiser = model.denoiser
        if not isinstance(denoiser, UNet2DConditionModel):
            raise TokenMergeError(
                f"DeepCache is for UNets (UNet2DConditionModel), but this is a {type(denoiser).__name__}; use "
                "cache-dit, or a step cache of diffusers"
            )
        super().check(model, values, steps)
        most = _BRANCHES * len(denoiser.down_blocks) - 1
        if values["branch"] > most:
            raise TokenMergeError(
                f"branch is {values['branch']}, but {type(denoiser).__name__} has branches from 0 to {most}; the "
                "larger it is, the more layers run in every step"
            )

    @contextmanager
    def enabled(self, pipe: Any, values: Mapping[str, Any], run: Run) -> Iterator[None]:
        from DeepCache import DeepCacheSDHelper

        helper = DeepCacheSDHelper(pipe=pipe)
        helper.set_params(cache_interval=values["interval"], cache_branch_id=values["branch"])
        with unchanged(pipe, denoiser_of(pipe)):
            helper.enable()
            try:
                yield
            finally:
                helper.disable()

"""DBCache from the package cache-dit: the first blocks of a transformer decide whether the others run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...errors import TokenMergeError
from ...families import denoiser_of
from ..loading import Outline
from .base import Field, Kind, Run
from .restoring import unchanged

# Our names for the fields of its config. `fn` is 1, not the package's 8: small models have fewer blocks.
_CONFIG = {
    "threshold": "residual_diff_threshold",
    "fn": "Fn_compute_blocks",
    "bn": "Bn_compute_blocks",
    "warmup": "max_warmup_steps",
    "cached": "max_cached_steps",
    "continuous": "max_continuous_cached_steps",
}
_LOGGERS = ("cache_dit", "CACHE_DIT")


class CacheDit(Kind):
    name = "cache-dit"
    noun = "step cache"
    example = "cache-dit:threshold=0.12,taylorseer=1"
    module = "cache_dit"

    def fields(self) -> Mapping[str, Field]:
        return {
            "threshold": Field(float, 0.08),
            "taylorseer": Field(int, 0),
            "fn": Field(int, 1, least=1),
            "bn": Field(int, 0),
            "warmup": Field(int, 8),
            "cached": Field(int, -1, least=-1),
            "continuous": Field(int, -1, least=-1),
        }

    def check(self, model: Outline, values: Mapping[str, Any], steps: int) -> None:
        denoiser = type(model.denoiser).__name__
        if model.family.stages is not None:
            raise TokenMergeError(f"cache-dit is for transformers, but {denoiser} is a UNet; use deepcache")
        super().check(model, values, steps)
        _, prefixes = _package().supported_pipelines()
        if not (model.pipeline or "").startswith(tuple(prefixes)):
            raise TokenMergeError(f"cache-dit does not support {model.pipeline}; leave it out")
        blocks, wanted = len(model.family.blocks(model.denoiser)), values["fn"] + values["bn"]
        if wanted >= blocks:
            raise TokenMergeError(
                f"cache-dit would run {wanted} of the {blocks} blocks of {denoiser} in every step (fn + bn) and save "
                f"nothing; use {blocks - 1} or fewer"
            )

    @contextmanager
    def enabled(self, pipe: Any, values: Mapping[str, Any], run: Run) -> Iterator[None]:
        if run.calls not in (1, 2):
            raise TokenMergeError(
                f"cache-dit supports one or two denoiser calls per step, but {type(pipe).__name__} makes {run.calls}; "
                "leave it out"
            )
        package, order = _package(), values["taylorseer"]
        settings = {theirs: values[ours] for ours, theirs in _CONFIG.items()}
        # Otherwise it would take the two calls of guidance for two steps.
        settings["enable_separate_cfg"] = run.calls == 2
        seer = package.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        with unchanged(pipe, denoiser_of(pipe)):
            try:
                package.enable_cache(pipe, package.DBCacheConfig(**settings), seer)
                yield
            finally:
                package.disable_cache(pipe)


def _package() -> Any:
    """The package, with its log silenced: it would mix with printed results."""
    import cache_dit

    for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]:
        logging.getLogger(name).setLevel(logging.ERROR)
    return cache_dit

"""Step caches of diffusers, as in `first-block:threshold=0.1`. They skip work that hardly changes between steps.

Pipelines clear a cache at the end of every call.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from typing import Any, get_type_hints

import diffusers.hooks

from ...errors import TokenMergeError
from ...families import denoiser_of
from ...runtime.foreign import cache_hooks
from ..loading import Outline
from ..measure import timed_calls
from .base import Field, Kind, Run

Bounds = tuple[float, float]
_SOME: Bounds = (1, math.inf)
_ANY: Bounds = (0, math.inf)
# The form in which diffusers prints calibrated ratios: a list of numbers.
_PRINTED = re.compile(r"^\[[-+.\de]+(?:, [-+.\de]+)*\]$", re.MULTILINE)


class DiffusersCache(Kind):
    """A cache by the name of its config class in diffusers, and the bounds of the fields that may be typed.

    Other fields follow from the pipeline, or have no meaning for pictures.
    """

    noun = "step cache"

    def __init__(self, name: str, config: str, bounds: Mapping[str, Bounds]) -> None:
        self.name = name
        self.example = name
        self._config, self._bounds = config, bounds

    def fields(self) -> Mapping[str, Field]:
        made = self.config_class()
        hints = get_type_hints(made)
        return {
            item.name: Field(hints[item.name], item.default, *self._bounds[item.name])
            for item in fields(made)
            if item.name in self._bounds
        }

    def config_class(self) -> Any:
        # Older versions lack some caches.
        found = getattr(diffusers.hooks, self._config, None)
        if found is None:
            raise TokenMergeError(f"diffusers {diffusers.__version__} has no {self._config}; install a newer one")
        return found

    def check(self, model: Outline, values: Mapping[str, Any], steps: int) -> None:
        super().check(model, values, steps)
        _cacheable(model.denoiser)

    def settings(self, pipe: Any, run: Run) -> dict[str, Any]:
        """The fields of its config that follow from the pipeline and its calls."""
        return {}

    @contextmanager
    def enabled(self, pipe: Any, values: Mapping[str, Any], run: Run) -> Iterator[None]:
        denoiser = _cacheable(pipe)
        try:
            denoiser.enable_cache(self.config_class()(**values, **self.settings(pipe, run)))
        except ValueError as error:
            # diffusers counts a cache as enabled only once all its hooks are there, and would leave some behind.
            for name in cache_hooks(denoiser) if not denoiser.is_cache_enabled else ():
                diffusers.hooks.HookRegistry.check_if_exists_or_initialize(denoiser).remove_hook(name, recurse=True)
            raise TokenMergeError(
                f"the {self.name} cache does not work with {type(denoiser).__name__}: {error}; leave it out"
            ) from error
        try:
            yield
        finally:
            denoiser.disable_cache()


class MagCache(DiffusersCache):
    """Decides by how residuals grow from step to step, as `calibrate` measures."""

    def settings(self, pipe: Any, run: Run) -> dict[str, Any]:
        if run.mag_ratios is None:
            raise RuntimeError(f"the {self.name} cache needs ratios from calibrate")
        return {"num_inference_steps": run.steps, "mag_ratios": list(run.mag_ratios)}


class FasterCache(DiffusersCache):
    one_call = True

    def settings(self, pipe: Any, run: Run) -> dict[str, Any]:
        # The other mode splits calls that hold both halves of guidance, which no pipeline here makes.
        settings: dict[str, Any] = {"is_guidance_distilled": True}
        if "current_timestep_callback" in {item.name for item in fields(self.config_class())}:
            settings["current_timestep_callback"] = lambda: pipe.current_timestep
        return settings


MAG = MagCache("mag", "MagCacheConfig", {"threshold": _ANY, "max_skip_steps": _ANY, "retention_ratio": (0, 1)})
DIFFUSERS_CACHES = (
    DiffusersCache("first-block", "FirstBlockCacheConfig", {"threshold": _ANY}),
    MAG,
    DiffusersCache(
        "taylorseer",
        "TaylorSeerCacheConfig",
        {
            "cache_interval": _SOME,
            # It predicts from earlier steps, so the first one must run.
            "disable_cache_before_step": _SOME,
            "disable_cache_after_step": _ANY,
            "max_order": _ANY,
            "taylor_factors_dtype": _ANY,
            "use_lite_mode": _ANY,
        },
    ),
    FasterCache(
        "faster",
        "FasterCacheConfig",
        # Bounds are timesteps. At the first one, 1000, there is nothing to reuse.
        {"spatial_attention_block_skip_range": _SOME, "spatial_attention_timestep_skip_range": (-1, 1000)},
    ),
)


def calibrate(pipe: Any, draw: Callable[[], object], steps: int) -> list[float]:
    """Ratios by which the plain denoiser's residual grows from step to step, measured in one pipeline call.

    The mag cache decides by them. If guidance makes two calls per step, the first, conditional one counts.
    """
    denoiser, printed = _cacheable(pipe), io.StringIO()
    denoiser.enable_cache(MAG.config_class()(calibrate=True, num_inference_steps=steps))
    try:
        # diffusers only prints them.
        with redirect_stdout(printed), timed_calls(denoiser, denoiser.device) as watch:
            draw()
    finally:
        denoiser.disable_cache()
    found: list[list[float]] = [json.loads(line) for line in _PRINTED.findall(printed.getvalue())]
    if not found or watch.laps != steps * len(found):
        raise TokenMergeError(
            f"the mag cache counts one call per step, but {type(pipe).__name__} made {watch.laps} in {steps} steps, "
            f"of which {len(found) * steps} could be calibrated; use another scheduler or another cache"
        )
    return found[0]


def _cacheable(model: Any) -> Any:
    """The denoiser of a pipeline, or the denoiser itself; an error if diffusers gives it no caches."""
    denoiser: Any = denoiser_of(model)
    if not hasattr(denoiser, "enable_cache"):
        raise TokenMergeError(
            f"{type(denoiser).__name__} has no enable_cache in diffusers {diffusers.__version__}; leave out the cache"
        )
    return denoiser

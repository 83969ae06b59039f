"""Step caches of diffusers, as typed: `first-block:threshold=0.1`. They skip work that hardly changes between steps.

Enable a cache after `apply`, and disable it before the next `apply`. Pipelines forget what a cache holds at the end of
every call.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

import diffusers.hooks
import torch

from ..errors import TokenMergeError, did_you_mean
from ..families import denoiser_of
from ..runtime.foreign import cache_hooks
from .fields import parse_as, read_fields
from .measure import timed_calls


@dataclass(frozen=True)
class _Kind:
    """A cache: its config's class in diffusers, and the fields that may be set with the least and most they may be.
    Other fields follow from the pipeline, or have no meaning for pictures."""

    config: str
    bounds: dict[str, tuple[float, float]]


_SOME = (1, math.inf)
_ANY = (0, math.inf)
_KINDS = {
    "first-block": _Kind("FirstBlockCacheConfig", {"threshold": _ANY}),
    "mag": _Kind("MagCacheConfig", {"threshold": _ANY, "max_skip_steps": _ANY, "retention_ratio": (0, 1)}),
    "taylorseer": _Kind(
        "TaylorSeerCacheConfig",
        {
            "cache_interval": _SOME,
            # It predicts from the steps before.
            "disable_cache_before_step": _SOME,
            "disable_cache_after_step": _ANY,
            "max_order": _ANY,
            "taylor_factors_dtype": _ANY,
            "use_lite_mode": _ANY,
        },
    ),
    "faster": _Kind(
        "FasterCacheConfig",
        # Timesteps; at the first one, 1000, there is nothing to reuse.
        {"spatial_attention_block_skip_range": _SOME, "spatial_attention_timestep_skip_range": (-1, 1000)},
    ),
}
CACHES = tuple(_KINDS)
# Of a picture that shows whether a cache works at all.
TRIAL_STEPS = 2
# A list of numbers, as diffusers prints what it has calibrated.
_PRINTED = re.compile(r"^\[[-+.\de]+(?:, [-+.\de]+)*\]$", re.MULTILINE)


@dataclass(frozen=True)
class StepCache:
    """A cache by name, with a value for every field that may be set."""

    name: str
    values: tuple[tuple[str, Any], ...]

    @property
    def calibrated(self) -> bool:
        """Whether it needs ratios that `calibrate` measures."""
        return self.name == "mag"

    def to_dict(self) -> dict[str, Any]:
        told = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in self.values}
        return {"name": self.name, **told}


def read_cache(text: str) -> StepCache:
    """A cache as typed: its name, and fields after a colon, as in `mag:threshold=0.06,max_skip_steps=3`."""
    name, given = read_fields(text, "cache", "first-block:threshold=0.1")
    if name not in _KINDS:
        near = did_you_mean(name, CACHES)
        raise TokenMergeError(f"cache {name!r} is unknown{near}; choose from {', '.join(CACHES)}")
    kind, made = _KINDS[name], _config_class(name)
    hints = get_type_hints(made)
    values = {item.name: item.default for item in fields(made) if item.name in kind.bounds}
    for field, typed in given.items():
        if field not in values:
            near = did_you_mean(field, values)
            raise TokenMergeError(f"cache {name!r} has no field {field!r}{near}; its fields are {', '.join(values)}")
        try:
            values[field] = _parser(hints[field])(typed)
        except ValueError as error:
            raise TokenMergeError(f"cache {text.strip()!r}: {field}: {error}") from error
        _check_bounds(name, field, values[field], kind.bounds[field])
    return StepCache(name, tuple(values.items()))


def enable_cache(pipe: Any, cache: StepCache, steps: int, mag_ratios: Sequence[float] | None = None) -> None:
    """Switch a cache on, for calls of so many steps. mag_ratios: from `calibrate`, where the cache needs it."""
    settings = dict(cache.values)
    if cache.calibrated:
        if mag_ratios is None:
            raise RuntimeError(f"the {cache.name} cache needs what calibrate measures")
        settings |= {"num_inference_steps": steps, "mag_ratios": list(mag_ratios)}
    if cache.name == "faster":
        # No pipeline here has both halves of guidance in one call, which the other mode splits.
        settings["is_guidance_distilled"] = True
        if "current_timestep_callback" in {item.name for item in fields(_config_class(cache.name))}:
            settings["current_timestep_callback"] = lambda: pipe.current_timestep
    denoiser = _cacheable(pipe)
    try:
        denoiser.enable_cache(_config_class(cache.name)(**settings))
    except ValueError as error:
        # diffusers takes a cache for enabled only when all of it is there, and would leave the rest.
        for name in cache_hooks(denoiser) if not denoiser.is_cache_enabled else ():
            diffusers.hooks.HookRegistry.check_if_exists_or_initialize(denoiser).remove_hook(name, recurse=True)
        raise TokenMergeError(
            f"the {cache.name} cache does not go with {type(denoiser).__name__}: {error}; leave it out"
        ) from error


def disable_cache(pipe: Any) -> None:
    """Switch off whatever cache is on."""
    denoiser: Any = denoiser_of(pipe)
    if getattr(denoiser, "is_cache_enabled", False):
        denoiser.disable_cache()


def calibrate(pipe: Any, draw: Callable[[], object], steps: int) -> list[float]:
    """How the residual of the plain denoiser grows from step to step, measured in one call of the pipeline: the mag
    cache decides by it. Where guidance has calls of its own, the first, conditional one counts."""
    denoiser, printed = _cacheable(pipe), io.StringIO()
    denoiser.enable_cache(_config_class("mag")(calibrate=True, num_inference_steps=steps))
    try:
        # Printing is how diffusers hands them out.
        with redirect_stdout(printed), timed_calls(denoiser, denoiser.device) as watch:
            draw()
    finally:
        denoiser.disable_cache()
    found: list[list[float]] = [json.loads(line) for line in _PRINTED.findall(printed.getvalue())]
    if not found or watch.laps != steps * len(found):
        raise TokenMergeError(
            f"the mag cache counts one call a step, and {type(pipe).__name__} made {watch.laps} in {steps} steps, of "
            f"which {len(found) * steps} could be calibrated; use another scheduler or another cache"
        )
    return found[0]


def try_cache(pipe: Any, cache: StepCache, draw: Callable[[], object], steps: int) -> None:
    """Refuse a cache that the model, as it is, does not go with, by a call of the pipeline in few steps."""
    denoiser = _cacheable(pipe)
    enable_cache(pipe, cache, steps, [1.0] * steps)
    try:
        with timed_calls(denoiser, denoiser.device) as watch:
            draw()
    finally:
        disable_cache(pipe)
    if cache.name == "faster" and watch.laps != steps:
        raise TokenMergeError(
            f"the faster cache takes every call for the next step, and {type(pipe).__name__} makes {watch.laps} in "
            f"{steps} steps; use another cache, or no guidance (--guidance 1)"
        )


def check_cacheable(model: Any) -> None:
    """Refuse models that have no caches. model: a pipeline or a denoiser, on the meta device too."""
    _cacheable(model)


def _cacheable(model: Any) -> Any:
    denoiser: Any = denoiser_of(model)
    if not hasattr(denoiser, "enable_cache"):
        raise TokenMergeError(
            f"{type(denoiser).__name__} has no enable_cache in diffusers {diffusers.__version__}; leave out the cache"
        )
    return denoiser


def _config_class(name: str) -> Any:
    wanted = _KINDS[name].config
    # Not every version has them all.
    found = getattr(diffusers.hooks, wanted, None)
    if found is None:
        raise TokenMergeError(f"diffusers {diffusers.__version__} has no {wanted}; install a newer one")
    return found


def _parser(hint: Any) -> Callable[[str], Any]:
    return _dtype if torch.dtype in (hint, *get_args(hint)) else parse_as(hint)


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{text!r} is no dtype of numbers; write float32, float16 or bfloat16")
    return found


def _check_bounds(name: str, field: str, value: Any, bounds: tuple[float, float]) -> None:
    least, most = bounds
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        # NaN is not within bounds either.
        if isinstance(number, int | float) and not least <= number <= most:
            told = f"from {least} to {most}" if math.isfinite(most) else f"{least} or more"
            raise TokenMergeError(f"cache {name!r}: {field} is {number:g}; it must be {told}")

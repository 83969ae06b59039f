"""Rivals as people type them: `cache-dit:threshold=0.12`, `unipc:steps=14`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, get_args

import torch

from ...errors import TokenMergeError, did_you_mean
from ..fields import parse_as, read_fields
from ..loading import Outline
from .base import REQUIRED, Kind, Run
from .dbcache import CacheDit
from .deepcache import DeepCache
from .diffusers_caches import DIFFUSERS_CACHES, MAG
from .schedules import SCHEDULES as _SCHEDULES
from .schedules import Schedule

_KINDS: dict[str, Kind] = {kind.name: kind for kind in (*DIFFUSERS_CACHES, CacheDit(), DeepCache(), *_SCHEDULES)}
SCHEDULES = tuple(kind.name for kind in _SCHEDULES)
CACHES = tuple(name for name in _KINDS if name not in SCHEDULES)
RIVALS = tuple(_KINDS)


@dataclass(frozen=True)
class Rival:
    """A rival by name, with a value for each of its fields."""

    name: str
    values: tuple[tuple[str, Any], ...]

    @property
    def steps(self) -> int | None:
        """Steps of a picture, if the rival is a schedule; else None."""
        kind = _KINDS[self.name]
        return dict(self.values)[kind.counted_by] if isinstance(kind, Schedule) else None

    @property
    def calibrated(self) -> bool:
        """Whether it needs the ratios that `calibrate` measures."""
        return self.name == MAG.name

    def check(self, model: Outline, steps: int) -> None:
        """Refuse a missing package, and a model by its config files alone. steps: those of the plain schedule."""
        _KINDS[self.name].check(model, dict(self.values), steps)

    def check_calls(self, pipe: Any, calls: int, steps: int) -> None:
        """Refuse a pipeline that made this many denoiser calls in this many steps, with the rival on."""
        _KINDS[self.name].check_calls(pipe, calls, steps)

    def enabled(self, pipe: Any, run: Run) -> AbstractContextManager[None]:
        """Switch it on inside a `with` block. Afterwards the pipeline is exactly as it was before."""
        return _KINDS[self.name].enabled(pipe, dict(self.values), run)

    def to_dict(self) -> dict[str, Any]:
        values = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in self.values}
        return {"name": self.name, **values}


def read_rival(text: str) -> Rival:
    """A rival as typed: its name, and fields after a colon, as in `mag:threshold=0.06,max_skip_steps=3`."""
    name, given = read_fields(text, "rival", "first-block:threshold=0.1")
    if name not in _KINDS:
        raise TokenMergeError(f"rival {name!r} is unknown{did_you_mean(name, RIVALS)}; choose from {', '.join(RIVALS)}")
    kind = _KINDS[name]
    owner, known = f"{kind.noun} {name!r}", kind.fields()
    values = {field: item.default for field, item in known.items()}
    for field, typed in given.items():
        if field not in known:
            near = did_you_mean(field, known)
            raise TokenMergeError(f"{owner} has no field {field!r}{near}; its fields are {', '.join(known)}")
        try:
            values[field] = _parser(known[field].hint)(typed)
        except ValueError as error:
            raise TokenMergeError(f"{kind.noun} {text.strip()!r}: {field}: {error}") from error
        known[field].check(owner, field, values[field])
    for field, value in values.items():
        if value is REQUIRED:
            raise TokenMergeError(f"{owner} needs {field}; write it as in {kind.example}")
    return Rival(name, tuple(values.items()))


def _parser(hint: Any) -> Callable[[str], Any]:
    return _dtype if torch.dtype in (hint, *get_args(hint)) else parse_as(hint)


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{text!r} is not a floating-point dtype; write float32, float16 or bfloat16")
    return found

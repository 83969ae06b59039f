"""What a rival is: typed fields, requirements, and how to switch it on and exactly off again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ...errors import TokenMergeError
from ..loading import Outline

# The default of a field that must be typed.
REQUIRED = object()


@dataclass(frozen=True)
class Field:
    """A field that can be typed: its type, default, least and greatest value."""

    hint: Any
    default: Any = REQUIRED
    least: float = 0
    most: float = math.inf

    def check(self, owner: str, name: str, value: Any) -> None:
        """Refuse numbers out of bounds."""
        for number in value if isinstance(value, tuple) else (value,):
            # NaN fails this comparison too.
            if isinstance(number, int | float) and not self.least <= number <= self.most:
                bounds = f"from {self.least} to {self.most}" if math.isfinite(self.most) else f"{self.least} or more"
                raise TokenMergeError(f"{owner}: {name} is {number:g}; it must be {bounds}")


@dataclass(frozen=True)
class Run:
    """The pipeline calls that a rival is switched on for."""

    steps: int
    calls: int = 1  # denoiser calls per step; guidance may take two
    mag_ratios: Sequence[float] | None = None  # how residuals grow from step to step, if this was calibrated


class Kind(ABC):
    """A rival by name."""

    name: str
    noun: str  # what error messages call it
    example: str  # as typed, for error messages
    module: str | None = None  # the module that it needs beside diffusers
    one_call = False  # whether it takes each denoiser call for a new step

    @abstractmethod
    def fields(self) -> Mapping[str, Field]:
        """The fields that can be typed after its name."""

    @abstractmethod
    def enabled(self, pipe: Any, values: Mapping[str, Any], run: Run) -> AbstractContextManager[None]:
        """Switch it on inside a `with` block. Afterwards the pipeline is exactly as it was before."""

    def check(self, model: Outline, values: Mapping[str, Any], steps: int) -> None:
        """Refuse a missing package, and a model by its config files alone. steps: those of the plain schedule."""
        if self.module is not None and find_spec(self.module) is None:
            raise TokenMergeError(f'{self.name} needs a package that is missing: pip install "tokenmerge[rivals]"')

    def check_calls(self, pipe: Any, calls: int, steps: int) -> None:
        """Refuse a pipeline that made this many denoiser calls in this many steps, with the rival on."""
        if self.one_call and calls != steps:
            raise TokenMergeError(
                f"the {self.name} cache takes each denoiser call for a new step, but {type(pipe).__name__} makes "
                f"{calls} in {steps} steps; use another cache, or no guidance (--guidance 1)"
            )

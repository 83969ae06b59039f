"""What a rival is: fields that can be typed, what it needs, and how it is switched on and exactly off again."""

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

# The default of a field that has to be typed.
REQUIRED = object()


@dataclass(frozen=True)
class Field:
    """A field that can be typed: its type, its default, and the least and most it may be."""

    hint: Any
    default: Any = REQUIRED
    least: float = 0
    most: float = math.inf

    def check(self, owner: str, name: str, value: Any) -> None:
        """Refuse numbers out of bounds."""
        for number in value if isinstance(value, tuple) else (value,):
            # NaN is not within bounds either.
            if isinstance(number, int | float) and not self.least <= number <= self.most:
                told = f"from {self.least} to {self.most}" if math.isfinite(self.most) else f"{self.least} or more"
                raise TokenMergeError(f"{owner}: {name} is {number:g}; it must be {told}")


@dataclass(frozen=True)
class Run:
    """The pipeline calls that a rival is switched on for."""

    steps: int
    calls: int = 1  # of the denoiser in a step: guidance may call it twice
    mag_ratios: Sequence[float] | None = None  # how residuals grow, where a cache was calibrated


class Kind(ABC):
    """A rival by name."""

    name: str
    noun: str  # what it is, for people
    example: str
    module: str | None = None  # that it needs beside diffusers
    one_call = False  # whether it takes every call of the denoiser for the next step

    @abstractmethod
    def fields(self) -> Mapping[str, Field]:
        """What can be typed after its name."""

    @abstractmethod
    def enabled(self, pipe: Any, values: Mapping[str, Any], run: Run) -> AbstractContextManager[None]:
        """Switched on inside of a `with` block. Afterwards the pipeline is exactly as it was before."""

    def check(self, model: Outline, values: Mapping[str, Any], steps: int) -> None:
        """Refuse where its package is missing, or a model by its config files alone. steps: of the plain schedule."""
        if self.module is not None and find_spec(self.module) is None:
            raise TokenMergeError(f'{self.name} needs a package that is missing: pip install "tokenmerge[rivals]"')

    def check_calls(self, pipe: Any, calls: int, steps: int) -> None:
        """Refuse a pipeline by how often it called the denoiser in so many steps with the rival on."""
        if self.one_call and calls != steps:
            raise TokenMergeError(
                f"the {self.name} cache takes every call for the next step, and {type(pipe).__name__} makes {calls} in "
                f"{steps} steps; use another cache, or no guidance (--guidance 1)"
            )

"""TokenMergeError, and functions that error messages share."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral
from typing import Any


class TokenMergeError(ValueError):
    """A request that cannot be met. The message gives the fact, the bound and the way out."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its type: short enough to quote in a message of ours."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """A hint at the known name closest to `name`, to put into an error; empty if none is close."""
    names = {each.lower(): each for each in known}
    near = get_close_matches(str(name).lower(), names, n=1)
    return f" (did you mean {names[near[0]]!r}?)" if near else ""


def check_whole(**values: Any) -> None:
    """Refuse values that are not whole numbers from 1."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise TokenMergeError(f"{name} is {value!r}; it must be a whole number from 1")

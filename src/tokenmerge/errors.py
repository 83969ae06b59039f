"""TokenMergeError, and words that errors share."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral
from typing import Any


class TokenMergeError(ValueError):
    """A request that cannot be met. The message gives the fact, the bound and the way out."""


def first_line(error: BaseException) -> str:
    """What others' errors say, short enough for one of ours."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The known name nearest to another one, as part of an error; nothing where none is near."""
    names = {each.lower(): each for each in known}
    near = get_close_matches(str(name).lower(), names, n=1)
    return f" (did you mean {names[near[0]]!r}?)" if near else ""


def check_whole(**values: Any) -> None:
    """Refuse what is no whole number from 1."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise TokenMergeError(f"{name} is {value!r}; it must be a whole number from 1")

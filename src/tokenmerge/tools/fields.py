"""Typed values: numbers, lists, sizes, and fields after a colon."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from ..config import LARGEST_SEED
from ..errors import TokenMergeError

# How error messages name each type: one value, and a list.
_NUMBERS = {
    int: ("a whole number, as in 3", "a list of whole numbers, as in 0,1,2"),
    float: ("a number, as in 0.5", "a list of numbers, as in 0.25,0.5"),
}


class Unreadable(ArgumentTypeError, ValueError):
    """A text that is no value of its type. argparse prints this message; other errors would print a function's name."""


def parse_as(hint: Any) -> Callable[[str], Any]:
    """A parser for values of a type: `int`, `float`, `str`, `bool`, unions, and tuples separated by commas."""
    choices = list(get_args(hint)) if get_origin(hint) in (UnionType, Union) else [hint]
    if NoneType in choices:
        choices.remove(NoneType)
        parse = parse_as(Union[tuple(choices)])  # noqa: UP007
        return lambda text: None if text == "none" else parse(text)
    if get_origin(choices[0]) is tuple:
        return _tuple_parser(*get_args(choices[0]))
    if choices == [int, float]:
        return lambda text: _number(text, int if re.fullmatch(r"[-+]?\d+", text.strip()) else float)
    if choices[0] is bool:
        return _truth
    return (lambda text: _number(text, choices[0])) if choices[0] in _NUMBERS else choices[0]


def read_fields(text: str, kind: str, example: str) -> tuple[str, dict[str, str]]:
    """The head of a text, and the fields after its colon as typed. A part without = continues the field before it.

    kind, example: what error messages call the text, and how to write one.
    """
    match = re.fullmatch(r"(.+?)\s*(?::\s*(\w+=.*))?", text.strip())
    if not match:
        raise TokenMergeError(f"a {kind} is empty; write it as in {example}")
    head, rest = match.groups()
    found: dict[str, str] = {}
    name = ""
    for part in rest.split(",") if rest else ():
        if "=" not in part:
            found[name] += f",{part.strip()}"
            continue
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name in found:
            raise TokenMergeError(f"{kind} {text!r} gives {name} twice; give it once")
        found[name] = value
    return head, found


def write_value(value: Any) -> str:
    """A value in the form that `parse_as` reads."""
    if isinstance(value, tuple):
        return ",".join(map(write_value, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def changes(value: Any, base: Any) -> dict[str, Any]:
    """The fields in which a dataclass instance differs from `base`, an instance of the same class."""
    values = {item.name: getattr(value, item.name) for item in fields(value)}
    return {name: each for name, each in values.items() if each != getattr(base, name)}


def differing(value: Any, base: Any) -> dict[str, str]:
    """The fields in which `value` differs from `base`, in the form that people type."""
    return {name: write_value(each) for name, each in changes(value, base).items()}


def parse_size(text: str) -> tuple[int, int]:
    """Width and height from a text such as 512x384."""
    match = re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", text.strip())
    if not match:
        raise Unreadable(f"{text!r} is not a size; write width x height in pixels, as in 512x384")
    return int(match[1]), int(match[2])


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(map(parse_size, text.split(",")))


def whole(least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """A parser for whole numbers within bounds."""
    bounds = f"{least} or more" if most == math.inf else f"from {least} to {most}"
    return lambda text: _bounded(_number(text, int), lambda value: least <= value <= most, bounds)


def real(*, least: float = -math.inf, above: float = -math.inf) -> Callable[[str], float]:
    """A parser for finite numbers: at least `least`, and greater than `above`."""
    if above > -math.inf:
        bounds = f"above {above:g}"
    else:
        bounds = f"{least:g} or more" if least > -math.inf else "a finite number"

    def is_within(value: float) -> bool:
        # False for NaN.
        return least <= value < math.inf and value > above

    return lambda text: _bounded(_number(text, float), is_within, bounds)


def parse_counts(text: str) -> tuple[int, ...]:
    return tuple(map(whole(), text.split(",")))


def parse_budget(text: str) -> tuple[str | None, float]:
    """A metric and a drift from a text such as `lpips=0.1`, or `0.1` if the metric is named elsewhere."""
    metric, _, value = text.rpartition("=")
    return metric or None, real(above=0)(value)


parse_seed = whole(0, LARGEST_SEED)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Distinct seeds, separated by commas."""
    seeds = tuple(map(parse_seed, text.split(",")))
    if len(set(seeds)) < len(seeds):
        raise Unreadable(f"{text!r} repeats a seed; give distinct ones, as in 0,1,2")
    return seeds


def check_seeds(*seeds: int) -> None:
    """Refuse seeds that torch generators do not accept."""
    for seed in seeds:
        if not 0 <= seed <= LARGEST_SEED:
            raise TokenMergeError(f"seed {seed} is out of range; seeds are from 0 to {LARGEST_SEED}")


def _tuple_parser(item: Any, *others: Any) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            parts = tuple(item(part.strip()) for part in text.split(","))
        except ValueError as error:
            raise Unreadable(f"{text!r} is not {_NUMBERS[item][1]}") from error
        if others != (...,) and len(parts) != 1 + len(others):
            raise Unreadable(f"{1 + len(others)} values are needed, but {text!r} has {len(parts)}")
        return parts

    return parse


def _bounded(value: Any, is_within: Callable[[Any], bool], bounds: str) -> Any:
    if not is_within(value):
        raise Unreadable(f"{value} is out of range; it must be {bounds}")
    return value


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise Unreadable(f"{text!r} is not {_NUMBERS[kind][0]}") from error


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise Unreadable(f"{text!r} is not a truth value; write true or false")
    return text == "true"

"""Fields of `MergeConfig` as people type them."""

from __future__ import annotations

from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from .config import MergeConfig, Schedule


def config_fields() -> dict[str, Any]:
    """Every field of MergeConfig and Schedule with its type hint: the command line has them all."""
    hints = {**get_type_hints(MergeConfig), **get_type_hints(Schedule)}
    return {
        item.name: hints[item.name] for item in (*fields(MergeConfig), *fields(Schedule)) if item.name != "schedule"
    }


def parse_as(hint: Any) -> Any:
    """A parser of command-line text for a field's type: numbers as numbers, tuples by commas."""
    choices = [
        choice for choice in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if choice is not type(None)
    ]
    if get_origin(choices[0]) is tuple:
        item = get_args(choices[0])[0]

        def parse(text: str) -> tuple[Any, ...]:
            return tuple(item(part) for part in text.split(","))

        return parse
    if choices == [int, float]:
        return _number
    return choices[0]


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)

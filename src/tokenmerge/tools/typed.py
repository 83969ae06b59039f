"""Configs as people type them: `toma:ratio=0.5,regions=stripe:64`."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..config import BACKENDS, COMPONENTS, GAP_DTYPES, GAPS, MERGES, METHODS, SELECTIONS, SIMILARITIES, SITES, UNMERGES, MergeConfig, Schedule
from ..errors import TokenMergeError

# What --compile makes fast; the first, as far as the device can, where it names nothing.
COMPILE_WAYS = ("both", "blocks", "graphs")
# What lists are of, by the type of their items, and an example.
_ITEMS = {int: ("whole numbers", "0,1,2"), float: ("numbers", "0.25,0.5")}


# What --help says of the fields of a config.
FIELDS = {
    "ratio": "share of tokens removed, as 0.5",
    "coverage": "least mean similarity of tokens to their destinations; the ratio is then the most that is removed",
    "step_ratios": "ratios for equal parts of the merging steps, first to last",
    "block_ratios": "ratios for equal parts of each group's blocks, first to last",
    "method": f"one of {', '.join(METHODS)}",
    "regions": "where destinations are chosen: whole, tile, stripe, a count (tile:64) or a tile's shape (tile:4x4)",
    "merge_regions": "where tokens merge: regions of the same kind, or whole",
    "selection": f"one of {', '.join(SELECTIONS)}",
    "similarity": f"one of {', '.join(SIMILARITIES)}",
    "temperature": "of the softmax over destinations",
    "merge": f"what a merged token is: {' or '.join(MERGES)}",
    "unmerge": " or ".join(UNMERGES),
    "gap": f"what is added between anchors: {', '.join(GAPS)}",
    "trust": "share of what a merged block changes that counts between anchors",
    "gap_dtype": f"what anchors keep: {' or '.join(GAP_DTYPES)}",
    "sites": f"merge once per {', '.join(SITES[:3])}; hold blocks, or with them all layers: {SITES[3]}",
    "span": "most blocks in a span, or that are held with one gap; 0 is no limit",
    "components": f"of {', '.join(COMPONENTS)}, for --sites component",
    "levels": "of a UNet, by downsampling, as 2,4",
    "skip_first": "first blocks of each group that are left alone: a number, or a share as 0.25",
    "skip_last": "last ones",
    "seed": "of random selections",
    "backend": f"of the operations: {', '.join(BACKENDS)}",
    "destinations_every": "steps between selections of destinations",
    "weights_every": "steps between weighings",
    "start": "share of the steps that run whole at first",
    "stop": "share of the steps after which all run whole",
    "anchor_every": "steps between anchors, on average; 0 is none",
}


class Unreadable(ArgumentTypeError, ValueError):
    """A text that is not of its type. argparse shows its message, and of other errors only the name of a function."""


def config_fields() -> dict[str, Any]:
    """Every field of MergeConfig and Schedule with its type hint: the command line has them all."""
    hints = {**get_type_hints(MergeConfig), **get_type_hints(Schedule)}
    return {
        item.name: hints[item.name] for item in (*fields(MergeConfig), *fields(Schedule)) if item.name != "schedule"
    }


def parse_as(hint: Any) -> Any:
    """A parser of command-line text for a field's type: numbers as numbers, tuples by commas."""
    several = get_origin(hint) in (UnionType, Union)
    choices = [choice for choice in (get_args(hint) if several else (hint,)) if choice is not type(None)]
    if get_origin(choices[0]) is tuple:
        item, *others = get_args(choices[0])

        def parse(text: str) -> tuple[Any, ...]:
            try:
                parts = tuple(item(part) for part in text.split(","))
            except ValueError as error:
                words, example = _ITEMS[item]
                raise Unreadable(f"{text!r} is no list of {words}, as in {example}") from error
            if others != [...] and len(parts) != 1 + len(others):
                raise Unreadable(f"{text!r} has {len(parts)}, and {1 + len(others)} values are needed")
            return parts

        return parse
    if choices == [int, float]:
        return _number
    return _truth if choices[0] is bool else choices[0]


def read_fields(text: str, kind: str, example: str) -> tuple[str, dict[str, str]]:
    """What a text begins with, and the fields after its colon as they were typed. kind, example: for errors."""
    match = re.fullmatch(r"(.+?)(?::(\w+=.*))?", text.strip())
    if not match:
        raise TokenMergeError(f"a {kind} is empty; write it as in {example}")
    head, rest = match.groups()
    found: dict[str, str] = {}
    name = ""
    for part in rest.split(",") if rest else ():
        if "=" not in part:
            found[name] += f",{part}"
            continue
        name, _, value = part.partition("=")
        if name in found:
            raise TokenMergeError(f"{kind} {text!r} gives {name} twice; give it once")
        found[name] = value
    return head, found


def check_counts(least: int = 1, **counts: int | None) -> None:
    """Refuse options that are numbers and too small; None was not given."""
    for name, count in counts.items():
        if count is not None and count < least:
            raise TokenMergeError(f"--{name} is {count}; it must be {least} or more")


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise Unreadable(f"{text!r} is not understood; write true or false")
    return text == "true"


def _number(text: str) -> int | float:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError as error:
        raise Unreadable(f"{text!r} is no number") from error

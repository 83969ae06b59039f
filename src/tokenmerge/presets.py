"""Presets: techniques by name, or from a file.

A file holds one technique or a list of them, as `to_dict` gives them: JSON, or with PyYAML YAML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import GONE, TECHNIQUES, Hold, Merge, Techniques, no_field
from .errors import TokenMergeError, did_you_mean

# What `apply` takes of its own accord: it changes pictures least at any speed it reaches (docs/fidelity.md).
RECOMMENDED = "hold"

# The paper's variants. Its text gives ToMA's selection stripes as 256 regions, merged over the whole image.
_PAPER = Merge(regions="stripe:256", merge_regions="whole", sites="component")
# In its package's form: matched on self-attention's tokens at every call. The package merges level 1 only by default,
# where SDXL has no attention; here all levels merge.
_TOMESD = Merge(method="tomesd", regions="whole", selection="random", sites="component", components=("self_attention",))
# Makes cells of 2x2, as ToDo has them.
_CELLS = 0.75
_PRESETS: dict[str, Merge | Hold] = {
    "hold": Hold(),
    # Small tiles, which keep pictures better than large ones, and one merge per block; in joint-attention models the
    # first blocks, where text and image blend, stay whole.
    "unet": Merge(),
    "dit": Merge(skip_first=0.25),
    # Tiles over two frames lose less of what moves, and frames change no more than plain ones (docs/merging.md).
    "video": Merge(skip_first=0.25, regions="tile:2x4x4"),
    "toma": _PAPER,
    "toma-once": _PAPER.replace(sites="block"),
    "toma-stripe": _PAPER.replace(regions="stripe:64", merge_regions=None),
    "toma-tile": _PAPER.replace(regions="tile:64", merge_regions=None),
    "lower-bound": _PAPER.replace(method="lower-bound", regions="tile:64", merge_regions=None),
    "tomesd": _TOMESD,
    "tofu": _TOMESD.replace(method="tofu"),
    "todo": Merge(ratio=_CELLS, method="todo", sites="component", components=("self_attention",)),
    "pool": Merge(ratio=_CELLS, method="pool"),
    "random": Merge(method="random"),
    "uniform": Merge(method="uniform"),
    "none": Merge(ratio=0.0),
}
_FILES = (".json", ".yaml", ".yml")
# Fields of version 0.1 that have a new form.
_TRANSLATED = ("schedule", "anchor_every")
# Presets of version 0.1, and what comes near.
_GONE = {
    "default": "'hold', or 'unet' or 'dit' with a ratio",
    "unet-hold": "'hold', which holds stages on UNets",
    "unet-anchored": "'hold', or [Merge(), Hold(every=5)]",
    "dit-anchored": "'hold', or [Merge(skip_first=0.25), Hold(every=5)]",
}


def presets() -> dict[str, Merge | Hold]:
    """Every preset, by name."""
    return dict(_PRESETS)


def resolve(technique: Any, fields: Mapping[str, Any]) -> Techniques:
    """What `apply` was asked for, as techniques. Fields go with the name of a preset only."""
    if isinstance(technique, str | Path) and not _is_file(technique):
        return Techniques.of(preset(str(technique)).replace(**fields))
    if fields:
        raise _misplaced(technique, fields)
    if technique is None:
        return Techniques.of(_PRESETS[RECOMMENDED])
    if isinstance(technique, str | Path):
        return read_file(Path(technique))
    if isinstance(technique, Techniques):
        return technique
    listed = technique if isinstance(technique, list | tuple) else [technique]
    for each in listed:
        if not isinstance(each, Merge | Hold):
            kind = f"the class {each.__name__}" if isinstance(each, type) else f"of type {type(each).__name__}"
            raise TypeError(
                f"a technique is {kind}; give a Merge, a Hold, a list of one of each, the name of a preset "
                f"({', '.join(_PRESETS)}), or the path of a .json or .yaml file"
            )
    if not listed:
        raise TokenMergeError("the list of techniques is empty; give a Merge, a Hold or one of each, or call remove")
    return Techniques.of(*listed)


def preset(name: str) -> Merge | Hold:
    """A preset by its name."""
    if name in _GONE:
        raise TokenMergeError(f"preset {name!r} is of tokenmerge 0.1; use {_GONE[name]}")
    if ":" in name or "+" in name:
        raise TokenMergeError(
            f"{name!r} is how commands take techniques; in Python give fields by name, as in apply(pipe, 'toma', "
            "ratio=0.5), and both techniques as a list, as in [Merge(ratio=0.5), Hold()]"
        )
    if name not in _PRESETS:
        raise TokenMergeError(
            f"preset {name!r} is unknown{did_you_mean(name, _PRESETS)}; use one of {', '.join(_PRESETS)}, or the path "
            "of a .json or .yaml file"
        )
    return _PRESETS[name]


def read_file(path: Path) -> Techniques:
    """The techniques that a JSON or YAML file holds."""
    if not path.is_file():
        raise TokenMergeError(f"technique file {str(path)!r} is not there; give an existing .json or .yaml file")
    try:
        text = path.read_text(encoding="utf-8")
        return from_data(_parse_json(text) if path.suffix.lower() == ".json" else _parse_yaml(text))
    except UnicodeDecodeError as error:
        raise TokenMergeError(f"technique file {str(path)!r} is not UTF-8 text ({error}); save it as such") from error
    except OSError as error:
        raise TokenMergeError(f"technique file {str(path)!r} cannot be read ({error.strerror})") from error
    except TokenMergeError as error:
        raise TokenMergeError(f"technique file {str(path)!r}: {error}") from error


def from_data(data: Any) -> Techniques:
    """Techniques from plain data: a mapping of fields that says which technique it is, or a list of such."""
    listed = data if isinstance(data, list) else [data]
    if not listed:
        raise TokenMergeError(f"it holds no technique; {_EXAMPLE}")
    return Techniques.of(*map(_one, listed))


_EXAMPLE = 'a technique is a mapping, as in {"technique": "merge", "ratio": 0.5} or {"technique": "hold", "every": 3}'


def _one(data: Any) -> Merge | Hold:
    if not isinstance(data, Mapping):
        held = "nothing" if data is None else f"a value of type {type(data).__name__}"
        raise TokenMergeError(f"it holds {held}; {_EXAMPLE}")
    # Names need not be texts in YAML.
    values = {str(name): value for name, value in data.items()}
    kind = values.pop("technique", None)
    if kind is None and values and values.keys() <= {*Merge.field_docs(), *GONE}:
        new = json.dumps(new_form(values), default=str)
        lost = "".join(f"; {name} is gone: {GONE[name]}" for name in GONE if name in values and name not in _TRANSLATED)
        raise TokenMergeError(f"it is a config of tokenmerge 0.1; its new form is {new}{lost}")
    if not isinstance(kind, str) or kind not in TECHNIQUES:
        raise TokenMergeError(f"technique is {kind!r}; it must be one of {', '.join(TECHNIQUES)}. {_EXAMPLE}")
    try:
        TECHNIQUES[kind].check_names(values)
    except TypeError as error:
        raise TokenMergeError(str(error)) from error
    return TECHNIQUES[kind](**values)


def new_form(old: Mapping[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
    """What a config of version 0.1 would be written as now. What is gone is left out; anchors become `Hold`."""
    schedule = old.get("schedule")
    values = {**old, **(schedule if isinstance(schedule, Mapping) else {})}
    if values.get("method") == "none":
        return {"technique": "merge", "ratio": 0.0}
    every = values.get("anchor_every")
    # Version 0.1 had no window where none was given.
    window = {"start": values.get("start", 0.0), **({"stop": values["stop"]} if "stop" in values else {})}
    hold: dict[str, Any] = {"technique": "hold", **({"every": every} if every else {}), **window}
    if values.get("method") == "hold":
        return {**hold, "what": "stages" if values.get("sites") == "stage" else "blocks"}
    default = Merge().to_dict()
    merge = {name: value for name, value in values.items() if name in default and value != default[name]}
    if merge.get("sites") != "component":
        # Spans are gone, and components of blocks never counted.
        merge = {name: value for name, value in merge.items() if name not in ("sites", "components")}
    merge = {"technique": "merge", **merge}
    return [merge, hold] if every else merge


def _is_file(technique: str | Path) -> bool:
    return isinstance(technique, Path) or technique.lower().endswith(_FILES)


def _misplaced(technique: Any, fields: Mapping[str, Any]) -> TypeError:
    """Fields without the name of a preset, with what to write instead."""
    unknown = [name for name in fields if all(name not in cls.field_docs() for cls in TECHNIQUES.values())]
    if unknown:
        known = dict.fromkeys([*Merge.field_docs(), *Hold.field_docs()])
        return no_field("neither Merge nor Hold", unknown[0], list(known))
    if technique is None:
        fact = "fields need a technique"
    elif isinstance(technique, str | Path):
        fact = "fields do not go with a file: write them into it"
    else:
        fact = "fields do not go with a technique that is made already: give them to its class"
    asked = {cls: _told(fields, cls) for cls in ((Hold, Merge) if isinstance(technique, Hold) else (Merge, Hold))}
    for cls, told in asked.items():
        if fields.keys() <= cls.field_docs().keys():
            name = {Merge: "toma", Hold: "hold"}[cls]
            return TypeError(f"{fact}; write apply(pipe, {cls.__name__}({told})) or apply(pipe, {name!r}, {told})")
    both = ", ".join(f"{cls.__name__}({told})" for cls, told in asked.items())
    return TypeError(f"{fact}; write apply(pipe, [{both}])")


def _told(fields: Mapping[str, Any], cls: type[Merge] | type[Hold]) -> str:
    """The fields of one technique, as they are written."""
    return ", ".join(f"{name}={value!r}" for name, value in fields.items() if name in cls.field_docs())


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenMergeError(f"no JSON at line {error.lineno}, column {error.colno} ({error.msg})") from error
    except ValueError as error:
        # Python reads no number of thousands of digits.
        raise TokenMergeError(f"no JSON ({error.args[0].partition(';')[0]}); write shorter numbers") from error


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise TokenMergeError("YAML needs PyYAML: pip install tokenmerge[yaml], or use JSON") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        # A value that is not what it looks like, such as a thirteenth month, comes without a place.
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise TokenMergeError(f"no YAML{where} ({reason})") from error

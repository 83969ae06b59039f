"""Presets: techniques by name, or from a file.

A file holds what `to_dict` returns, or a list of that: as JSON, or with PyYAML installed as YAML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import OLD_FIELDS, TECHNIQUES, Hold, Merge, Techniques, unknown_field
from .errors import TokenMergeError, did_you_mean

# What `apply` uses by default: the preset that changes pictures least at every speed it reaches (docs/fidelity.md).
RECOMMENDED = "hold"

# The paper's variants. According to its text, ToMA selects in 256 stripes and merges over the whole image.
_PAPER = Merge(regions="stripe:256", merge_regions="whole", sites="component")
# As in its package: tokens are matched before self-attention in every call. The package merges only level 1 by default,
# where SDXL has no attention; here all levels merge.
_TOMESD = Merge(method="tomesd", regions="whole", selection="random", sites="component", components=("self_attention",))
# The ratio that makes cells of 2x2 tokens, as in ToDo.
_CELLS = 0.75
_PRESETS: dict[str, Merge | Hold] = {
    "hold": Hold(),
    # Small tiles change pictures less than large ones. In joint-attention models the first blocks do not merge, because
    # text and image blend there.
    "unet": Merge(),
    "dit": Merge(skip_first=0.25),
    # Tiles over two frames lose less, and do not flicker as tiles within a frame may (docs/merging.md).
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
# Fields of version 0.1 that `new_form` translates.
_TRANSLATED = ("schedule", "anchor_every")
# Presets of version 0.1, and what comes close to each.
_OLD_PRESETS = {
    "default": "'hold', or 'unet' or 'dit' with a ratio",
    "unet-hold": "'hold', which holds stages on UNets",
    "unet-anchored": "'hold', or [Merge(), Hold(every=5)]",
    "dit-anchored": "'hold', or [Merge(skip_first=0.25), Hold(every=5)]",
}


def presets() -> dict[str, Merge | Hold]:
    """Every preset, by name."""
    return dict(_PRESETS)


def resolve(technique: Any, fields: Mapping[str, Any]) -> Techniques:
    """The techniques that the arguments of `apply` ask for. Fields are only allowed with the name of a preset."""
    if isinstance(technique, str) and not technique.lower().endswith(_FILES):
        return Techniques.of(preset(technique).replace(**fields))
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
                f"technique is {kind}; give a Merge, a Hold, a list of one of each, the name of a preset "
                f"({', '.join(_PRESETS)}), or the path of a .json or .yaml file"
            )
    if not listed:
        raise TokenMergeError("the list of techniques is empty; give a Merge, a Hold or one of each, or call remove")
    return Techniques.of(*listed)


def preset(name: str) -> Merge | Hold:
    """A preset by its name."""
    if name in _OLD_PRESETS:
        raise TokenMergeError(f"preset {name!r} belongs to tokenmerge 0.1; use {_OLD_PRESETS[name]}")
    if ":" in name or "+" in name:
        raise TokenMergeError(
            f"{name!r} is the notation of the command line; in Python, give fields by name, as in apply(pipe, 'toma', "
            "ratio=0.5), and both techniques as a list, as in [Merge(ratio=0.5), Hold()]"
        )
    if name not in _PRESETS:
        raise TokenMergeError(
            f"preset {name!r} is unknown{did_you_mean(name, _PRESETS)}; use one of {', '.join(_PRESETS)}, or the path "
            "of a .json or .yaml file"
        )
    return _PRESETS[name]


def read_file(path: Path) -> Techniques:
    """The techniques in a JSON or YAML file."""
    if not path.is_file():
        raise TokenMergeError(f"technique file {str(path)!r} does not exist; give an existing .json or .yaml file")
    try:
        text = path.read_text(encoding="utf-8")
        return from_data(_parse_json(text) if path.suffix.lower() == ".json" else _parse_yaml(text))
    except UnicodeDecodeError as error:
        raise TokenMergeError(f"technique file {str(path)!r} is not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise TokenMergeError(f"technique file {str(path)!r} cannot be read ({error.strerror})") from error
    except TokenMergeError as error:
        raise TokenMergeError(f"technique file {str(path)!r}: {error}") from error


def from_data(data: Any) -> Techniques:
    """Techniques from plain data: one mapping of fields that names its technique, or a list of them."""
    listed = data if isinstance(data, list) else [data]
    if not listed:
        raise TokenMergeError(f"the list of techniques is empty; {_EXAMPLE}")
    return Techniques.of(*map(_one, listed))


_EXAMPLE = 'a technique is a mapping, as in {"technique": "merge", "ratio": 0.5} or {"technique": "hold", "every": 3}'


def _one(data: Any) -> Merge | Hold:
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else f"a value of type {type(data).__name__}"
        raise TokenMergeError(f"found {found} instead of a technique; {_EXAMPLE}")
    # In YAML, names need not be strings.
    values = {str(name): value for name, value in data.items()}
    kind = values.pop("technique", None)
    if kind is None and values and values.keys() <= {*Merge.field_docs(), *OLD_FIELDS}:
        dropped = [name for name in OLD_FIELDS if name in values and name not in _TRANSLATED]
        notes = "".join(f"; {name} is gone: {OLD_FIELDS[name]}" for name in dropped)
        new = json.dumps(new_form(values), default=str)
        raise TokenMergeError(f"this is a config of tokenmerge 0.1; its new form is {new}{notes}")
    if not isinstance(kind, str) or kind not in TECHNIQUES:
        raise TokenMergeError(f"technique is {kind!r}; it must be one of {', '.join(TECHNIQUES)}. {_EXAMPLE}")
    try:
        TECHNIQUES[kind].check_names(values)
    except TypeError as error:
        raise TokenMergeError(str(error)) from error
    return TECHNIQUES[kind](**values)


def new_form(old: Mapping[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
    """A config of version 0.1 in today's form. Fields that are gone are left out; `anchor_every` becomes a Hold."""
    schedule = old.get("schedule")
    values = {**old, **(schedule if isinstance(schedule, Mapping) else {})}
    if values.get("method") == "none":
        return {"technique": "merge", "ratio": 0.0}
    every = values.get("anchor_every") or None
    # Without a start, version 0.1 began at the first step; today's default is later.
    fields = {"every": every, "start": values.get("start", 0.0), "stop": values.get("stop")}
    hold = {"technique": "hold", **{name: value for name, value in fields.items() if value is not None}}
    if values.get("method") == "hold":
        return {**hold, "what": "stages" if values.get("sites") == "stage" else "blocks"}
    default = Merge().to_dict()
    if values.get("sites") != "component":
        # Spans are gone, and components had no effect on other sites.
        del default["sites"], default["components"]
    changed = {name: value for name, value in values.items() if name in default and value != default[name]}
    merge = {"technique": "merge", **changed}
    return [merge, hold] if every else merge


def _misplaced(technique: Any, fields: Mapping[str, Any]) -> TypeError:
    """The error for fields given without the name of a preset. It shows what to write instead."""
    unknown = [name for name in fields if all(name not in cls.field_docs() for cls in TECHNIQUES.values())]
    if unknown:
        known = dict.fromkeys([*Merge.field_docs(), *Hold.field_docs()])
        return unknown_field("neither Merge nor Hold has a", unknown[0], list(known))
    if technique is None:
        fact = "fields need a technique"
    elif isinstance(technique, str | Path):
        fact = "fields cannot be combined with a file: write them into it"
    else:
        fact = "fields cannot be combined with an existing technique: give them to its class"
    classes = (Hold, Merge) if isinstance(technique, Hold) else (Merge, Hold)
    arguments = {cls: _arguments(fields, cls) for cls in classes}
    for cls, text in arguments.items():
        if fields.keys() <= cls.field_docs().keys():
            name = {Merge: "toma", Hold: "hold"}[cls]
            return TypeError(f"{fact}; write apply(pipe, {cls.__name__}({text})) or apply(pipe, {name!r}, {text})")
    both = ", ".join(f"{cls.__name__}({text})" for cls, text in arguments.items())
    return TypeError(f"{fact}; write apply(pipe, [{both}])")


def _arguments(fields: Mapping[str, Any], cls: type[Merge] | type[Hold]) -> str:
    """The fields that `cls` has, as arguments in Python."""
    return ", ".join(f"{name}={value!r}" for name, value in fields.items() if name in cls.field_docs())


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenMergeError(f"not valid JSON at line {error.lineno}, column {error.colno} ({error.msg})") from error
    except ValueError as error:
        # Python refuses integers of thousands of digits.
        raise TokenMergeError(f"not valid JSON ({error.args[0].partition(';')[0]}); write shorter numbers") from error


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise TokenMergeError("YAML needs PyYAML; pip install tokenmerge[yaml], or use JSON") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        # Errors about values, such as a date in month 13, have no position.
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise TokenMergeError(f"not valid YAML{where} ({reason})") from error

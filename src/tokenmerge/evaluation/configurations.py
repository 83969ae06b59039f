"""The list of configurations to compare, as typed.

none                                    the unmerged model, which is always there
default                                 the preset of the model's family
toma                                    a preset
toma:ratio=0.5,regions=stripe:64        a preset with fields changed
default:components=self_attention,mlp   a list: what has no = belongs to the field before it
my.yaml:ratio=0.25                      a YAML or JSON file, as it is or with fields changed
mine@toma:regions=whole,span=3          under a name of one's own
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import MergeConfig, TokenMergeError, load_preset
from ..options import config_fields, parse_as

BASELINE = "none"
_DEFAULT = "default"
_LONGEST = 100


@dataclass(frozen=True)
class Configuration:
    """One way to make pictures, under the name it was asked for by."""

    label: str
    config: MergeConfig

    @property
    def merges(self) -> bool:
        return self.config.method != BASELINE

    @property
    def folder(self) -> str:
        """The label as a file name, which may not be long."""
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", self.label).strip("._") or "_"
        if len(name) <= _LONGEST:
            return name
        return f"{name[:_LONGEST]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"

    @property
    def series(self) -> str:
        """The label without its ratio: configurations that differ in nothing else make one line in a plot."""
        head, fields = _parts(self.label)
        kept = [f"{name}={value}" for name, value in fields.items() if name != "ratio"]
        return f"{head}:{','.join(kept)}" if kept else head


def read_configurations(
    asked: Sequence[str | Configuration], ratios: Sequence[float] | None, family_preset: str
) -> tuple[Configuration, ...]:
    """The baseline first, then what was asked for, in order; where a text gives no ratio, once for each of `ratios`."""
    made = [Configuration(BASELINE, load_preset(BASELINE))]
    for text in asked:
        if isinstance(text, Configuration):
            made.append(text)
            continue
        name, typed = _named(text)
        head, changes = _split(typed)
        base = _base(head, family_preset).replace(**changes)
        if text == BASELINE:
            continue
        if ratios and "ratio" not in changes and base.method != BASELINE:
            comma = "," if _parts(name)[1] else ":"
            made += [Configuration(f"{name}{comma}ratio={ratio:g}", base.replace(ratio=ratio)) for ratio in ratios]
        else:
            made.append(Configuration(name, base))
    _check_different(made)
    return tuple(made)


def _named(text: str) -> tuple[str, str]:
    """The name of a configuration and what it is: the same, where no name is given."""
    match = re.fullmatch(r"([^@:=,]+)@(.+)", text.strip())
    return (match[1], match[2]) if match else (text.strip(), text)


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """What a text begins with, and the fields it changes."""
    head, fields = _parts(text)
    return head, {name: _value(text, name, value) for name, value in fields.items()}


def _parts(text: str) -> tuple[str, dict[str, str]]:
    """The same, with values as they were typed."""
    match = re.fullmatch(r"(.+?)(?::(\w+=.*))?", text.strip())
    if not match:
        raise TokenMergeError("a configuration is empty; write a preset, as in toma:ratio=0.5")
    head, rest = match.groups()
    fields: dict[str, str] = {}
    name = ""
    for part in rest.split(",") if rest else ():
        if "=" not in part:
            fields[name] += f",{part}"
            continue
        name, _, value = part.partition("=")
        if name in fields:
            raise TokenMergeError(f"configuration {text!r} gives {name} twice; give it once")
        fields[name] = value
    return head, fields


def _value(text: str, name: str, value: str) -> Any:
    known = config_fields()
    if name not in known:
        raise TokenMergeError(f"configuration {text!r} has no field {name!r}; fields are {', '.join(known)}")
    try:
        return parse_as(known[name])(value)
    except ValueError as error:
        raise TokenMergeError(f"configuration {text!r}: {name} cannot be {value!r} ({error})") from error


def _base(head: str, family_preset: str) -> MergeConfig:
    return load_preset(family_preset if head == _DEFAULT else head)


def _check_different(configurations: Sequence[Configuration]) -> None:
    """Refuse what would be made twice, or be kept in one folder."""
    for kind in ("config", "folder"):
        seen: dict[Any, str] = {}
        for configuration in configurations:
            value = getattr(configuration, kind)
            if value in seen:
                raise TokenMergeError(
                    f"configurations {seen[value]!r} and {configuration.label!r} are the same; leave one out"
                )
            seen[value] = configuration.label

"""The list of configurations to compare, as typed.

none                                    the unmerged model, which is always there
default                                 what `apply` does: held blocks or stages, or with a ratio anchored merging
toma                                    a preset
toma:ratio=0.5,regions=stripe:64        a preset with fields changed
toma:components=self_attention,mlp      a list: what has no = belongs to the field before it
my.yaml:ratio=0.25                      a YAML or JSON file, as it is or with fields changed
mine@toma:regions=whole,ratio=0.25      under a name of one's own
toma + first-block:threshold=0.1        with a step cache of diffusers
none + first-block:threshold=0.1        the same without merging
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..caches import StepCache, read_cache
from ...presets import DEFAULT, Defaults, default_preset, load_preset
from ...config import MergeConfig
from ...errors import TokenMergeError, did_you_mean
from ..typed import config_fields, parse_as, read_fields

BASELINE = "none"
_CACHE = " + "
_LONGEST = 100


@dataclass(frozen=True)
class Configuration:
    """One way to make pictures, under the name it was asked for by."""

    label: str
    config: MergeConfig
    cache: StepCache | None = None

    @property
    def merges(self) -> bool:
        return self.config.method != BASELINE

    @property
    def what(self) -> tuple[MergeConfig, StepCache | None]:
        """Everything but its name."""
        return self.config, self.cache

    @property
    def folder(self) -> str:
        """The label as a file name, which may not be long."""
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", self.label).strip("._") or "_"
        if len(name) <= _LONGEST:
            return name
        return f"{name[:_LONGEST]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"

    @property
    def series(self) -> str:
        """The label without its ratio and its cache's threshold: configurations that differ in nothing else make one
        line in a plot."""
        merging, _, cache = self.label.partition(_CACHE)
        return f"{_without(merging, 'ratio')}{_CACHE + _without(cache, 'threshold') if cache else ''}"

    @property
    def knobs(self) -> tuple[float, ...]:
        """The ratio or ratios, where tokens are merged, and the threshold of the cache, where it has one."""
        threshold = dict(self.cache.values).get("threshold") if self.cache else None
        own = self.config.ratios if self.config.part_ratios else (self.config.ratio,)
        ratios = own if self.merges else ()
        return (*ratios, threshold) if threshold is not None else ratios


def read_configurations(
    asked: Sequence[str | Configuration], ratios: Sequence[float] | None, defaults: Defaults
) -> tuple[Configuration, ...]:
    """The baseline first, then what was asked for, in order; where a text gives no ratio, and none for
    parts, once for each of `ratios`."""
    made = [Configuration(BASELINE, load_preset(BASELINE))]
    for text in asked:
        if isinstance(text, Configuration):
            made.append(text)
            continue
        name, typed = _named(text)
        merging, plus, typed_cache = typed.partition(_CACHE)
        head, changes = _split(merging)
        swept = bool(ratios) and "ratio" not in changes
        base = _base(head, {**changes, "ratio": None} if swept else changes, defaults).changed(**changes)
        cache = read_cache(typed_cache) if plus else None
        if text == BASELINE:
            continue
        if ratios and swept and base.method != BASELINE and not base.holds and not base.part_ratios:
            named, plus, named_cache = name.partition(_CACHE)
            comma = "," if _parts(named)[1] else ":"
            for ratio in ratios:
                label = f"{named}{comma}ratio={ratio:g}{plus}{named_cache}"
                made.append(Configuration(label, base.replace(ratio=ratio), cache))
        else:
            made.append(Configuration(name, base, cache))
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
    return read_fields(text, "configuration", "toma:ratio=0.5")


def _without(text: str, field: str) -> str:
    head, fields = _parts(text)
    kept = [f"{name}={value}" for name, value in fields.items() if name != field]
    return f"{head}:{','.join(kept)}" if kept else head


def _value(text: str, name: str, value: str) -> Any:
    known = config_fields()
    if name not in known:
        raise TokenMergeError(
            f"configuration {text!r} has no field {name!r}{did_you_mean(name, known)}; fields are {', '.join(known)}"
        )
    try:
        return parse_as(known[name])(value)
    except ValueError as error:
        raise TokenMergeError(f"configuration {text!r}: {name} cannot be {value!r} ({error})") from error


def _base(head: str, changes: Mapping[str, Any], defaults: Defaults) -> MergeConfig:
    """The preset that a text begins with, before its changes; "default" is what `apply` would take with them."""
    return load_preset(default_preset(changes, defaults) if head == DEFAULT else head)


def _check_different(configurations: Sequence[Configuration]) -> None:
    """Refuse what would be made twice, or be kept in one folder."""
    for kind in ("what", "folder"):
        seen: dict[Any, str] = {}
        for configuration in configurations:
            value = getattr(configuration, kind)
            if value in seen:
                raise TokenMergeError(
                    f"configurations {seen[value]!r} and {configuration.label!r} are the same; leave one out"
                )
            seen[value] = configuration.label

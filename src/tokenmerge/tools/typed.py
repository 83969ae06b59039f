"""Techniques as people type them: `toma-tile:ratio=0.5 + hold:every=3 + mag`.

Parts are joined by ` + `. A part is a preset, a file, a step cache of diffusers, or `none`, the plain model; fields
follow a colon. `name@...` gives a name of one's own. `tokenmerge eval --help` has examples.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from ..config import Techniques
from ..errors import TokenMergeError, did_you_mean
from ..families import Family
from ..presets import presets, resolve
from .caches import CACHES, StepCache, read_cache
from .fields import parse_as, read_fields

PLAIN = "none"
NO_TECHNIQUES = Techniques()
_PLUS = " + "
_EXAMPLE = "'toma-tile:ratio=0.5 + hold:every=3'"
# Fields that are swept: configurations that differ in nothing else make one line in a plot.
_SWEPT = ("ratio", "every", "threshold")
_LONGEST = 100


@dataclass(frozen=True)
class Configuration:
    """One way to draw pictures: techniques and a step cache, under the name they were asked for by."""

    label: str
    techniques: Techniques = NO_TECHNIQUES
    cache: StepCache | None = None

    @property
    def is_plain(self) -> bool:
        return self.what == (NO_TECHNIQUES, None)

    @property
    def what(self) -> tuple[Techniques, StepCache | None]:
        """Everything but its name."""
        return self.techniques, self.cache

    @property
    def folder(self) -> str:
        """The label as a file name, which may not be long."""
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", self.label).strip("._") or "_"
        if len(name) <= _LONGEST:
            return name
        return f"{name[:_LONGEST]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"

    @property
    def series(self) -> str:
        """The label without the fields that are swept."""
        return joined([_without_swept(part) for part in self.label.split(_PLUS)])

    @property
    def knobs(self) -> dict[str, float]:
        """The fields that are swept, as far as it has them: ratio, every, threshold."""
        merge, hold = self.techniques
        threshold = dict(self.cache.values).get("threshold") if self.cache else None
        values = (merge.ratio if merge else None, hold.every if hold else None, threshold)
        return {name: value for name, value in zip(_SWEPT, values, strict=True) if value is not None}


@dataclass(frozen=True)
class Part:
    """One part of a configuration as typed: a preset, a file, a step cache or `none`, and its fields."""

    head: str
    fields: Mapping[str, str]

    @classmethod
    def read(cls, text: str) -> Part:
        return cls(*read_fields(text, "technique", _EXAMPLE))

    @property
    def is_cache(self) -> bool:
        return self.head in CACHES

    def techniques(self) -> Techniques:
        """The techniques that it names, with its fields changed."""
        if self.head == PLAIN:
            if self.fields:
                raise TokenMergeError(f"'{PLAIN}' is the plain model and has no fields; leave them out")
            return NO_TECHNIQUES
        # What has an ending is a file, or means to be one.
        if self.head not in presets() and not Path(self.head).suffix:
            raise _unknown(self.head)
        return _changed(resolve(self.head, {}), self.fields)

    def __str__(self) -> str:
        told = ",".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.head}:{told}" if told else self.head


@dataclass(frozen=True)
class Typed:
    """A configuration as typed, read and checked."""

    name: str  # of one's own, or nothing
    parts: tuple[Part, ...]
    configuration: Configuration
    merging: int | None  # the place of the part that merges

    @property
    def takes_ratio(self) -> bool:
        """Whether it merges at a ratio that was not typed."""
        return self.merging is not None and "ratio" not in self.parts[self.merging].fields

    def with_ratio(self, ratio: float) -> Configuration:
        """The same at another ratio, which its label tells."""
        assert self.merging is not None
        techniques, cache = self.configuration.what
        assert techniques.merge is not None
        parts = [Part(self.name, {})] if self.name else list(self.parts)
        place = 0 if self.name else self.merging
        parts[place] = replace(parts[place], fields={**parts[place].fields, "ratio": f"{ratio:g}"})
        return Configuration(joined(parts), techniques._replace(merge=techniques.merge.replace(ratio=ratio)), cache)


def read_typed(text: str) -> Typed:
    """A configuration as typed, or an error that says what is wrong with it."""
    match = re.fullmatch(r"([^@:=,+]+)@(.+)", text.strip())
    name, body = (match[1].strip(), match[2].strip()) if match else ("", text.strip())
    try:
        parts = [Part.read(part) for part in re.split(r"\s+\+(?:\s+|$)", body)]
        techniques = _techniques(parts, body)
        caches = [part for part in parts if part.is_cache]
        if len(caches) > 1:
            raise TokenMergeError(f"it has two step caches, {caches[0]} and {caches[1]}; leave one out")
        cache = read_cache(str(caches[0])) if caches else None
        merging = next((place for place, part in enumerate(parts) if _merges(part)), None)
    except TokenMergeError as error:
        raise TokenMergeError(f"technique {text.strip()!r}: {error}") from error
    return Typed(name, tuple(parts), Configuration(name or joined(parts), techniques, cache), merging)


def _techniques(parts: Sequence[Part], body: str) -> Techniques:
    """All techniques of a configuration."""
    found = [part.techniques() for part in parts if not part.is_cache]
    if not found:
        raise TokenMergeError(f"a step cache without a technique is written '{PLAIN} + {body}'")
    if len(found) > 1 and NO_TECHNIQUES in found:
        raise TokenMergeError(f"'{PLAIN}' is the plain model and goes with a step cache only; leave it out")
    return Techniques.of(*(each for techniques in found for each in techniques if each is not None))


def _merges(part: Part) -> bool:
    return not part.is_cache and part.techniques().merge is not None


def joined(parts: Sequence[Part]) -> str:
    """Parts as they are typed."""
    return _PLUS.join(map(str, parts))


def default_techniques(family: Family) -> tuple[str, ...]:
    """What commands compare where no technique is typed: merging, holding, and both."""
    return family.merging, "hold", f"{family.merging}{_PLUS}hold"


def read_configurations(
    asked: Sequence[str | Configuration], ratios: Sequence[float] | None = None
) -> tuple[Configuration, ...]:
    """The plain model first, then what was asked for, in order; what merges and gives no ratio, once for each of
    `ratios`."""
    made = [Configuration(PLAIN)]
    takes = False
    for item in asked:
        if isinstance(item, Configuration):
            made.append(item)
            continue
        typed = read_typed(item)
        if typed.configuration == made[0]:
            continue
        if ratios and typed.takes_ratio:
            takes = True
            made += [typed.with_ratio(ratio) for ratio in ratios]
        else:
            made.append(typed.configuration)
    if ratios and not takes:
        told = ", ".join(configuration.label for configuration in made[1:] or made)
        raise TokenMergeError(
            f"--ratios is for techniques that merge and give no ratio, and there is only {told}; leave it out, or add "
            "a technique such as toma"
        )
    _check_different(made)
    return tuple(made)


def _changed(techniques: Techniques, typed: Mapping[str, str]) -> Techniques:
    """Techniques with fields changed, each in the technique that has it."""
    there = [each for each in techniques if each is not None]
    changes: list[dict[str, Any]] = [{} for _ in there]
    for name, value in typed.items():
        having = [place for place, each in enumerate(there) if name in each.field_docs()]
        if len(having) > 1:
            raise TokenMergeError(f"{name} is a field of both techniques in the file; write it into the file")
        if not having:
            known = [field for each in there for field in each.field_docs()]
            told = " and ".join(type(each).__name__ for each in there)
            near = did_you_mean(name, known)
            raise TokenMergeError(f"{told} has no field {name!r}{near}; fields are {', '.join(known)}")
        try:
            changes[having[0]][name] = parse_as(get_type_hints(type(there[having[0]]))[name])(value)
        except ValueError as error:
            raise TokenMergeError(f"{name}: {error}") from error
    return Techniques.of(*(each.replace(**changed) for each, changed in zip(there, changes, strict=True)))


def _unknown(head: str) -> TokenMergeError:
    known = [*presets(), *CACHES]
    way_out = f"use a preset ({', '.join(presets())}), a .json or .yaml file, or a step cache ({', '.join(CACHES)})"
    if "+" in head:
        way_out = f"put spaces around +, as in {_EXAMPLE}"
    return TokenMergeError(f"{head!r} is unknown{did_you_mean(head, known)}; {way_out}")


def _without_swept(text: str) -> Part:
    part = Part.read(text)
    return replace(part, fields={name: value for name, value in part.fields.items() if name not in _SWEPT})


def _check_different(configurations: Sequence[Configuration]) -> None:
    """Refuse what would be made twice, or be kept in one folder."""
    for kind in ("what", "folder"):
        seen: dict[Any, str] = {}
        for configuration in configurations:
            value = getattr(configuration, kind)
            if value in seen:
                raise TokenMergeError(
                    f"techniques {seen[value]!r} and {configuration.label!r} are the same; leave one out"
                )
            seen[value] = configuration.label

"""Techniques as people type them: `toma-tile:ratio=0.5 + hold:every=3 + mag`.

Parts are joined by ` + `. A part is a preset, a file, a rival (a step cache or a schedule), or `none`, the plain model.
Fields follow a colon. `name@...` gives the whole a name of your own. `tokenmerge eval --help` has examples.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from ..config import Techniques, unknown_field
from ..errors import TokenMergeError, did_you_mean
from ..families import Family
from ..presets import presets, resolve
from .fields import parse_as, read_fields
from .rivals.reading import CACHES, RIVALS, SCHEDULES, Rival, read_rival

PLAIN = "none"
NO_TECHNIQUES = Techniques()
_PLUS = " + "
_EXAMPLE = "'toma-tile:ratio=0.5 + hold:every=3'"
# Configurations that differ in these fields only make one line in a plot.
_SWEPT = ("ratio", "every", "threshold", "interval", "steps", "count")
# Longest name of a folder.
_LONGEST = 100


@dataclass(frozen=True)
class Configuration:
    """One way to draw pictures: techniques, a step cache and a schedule, under a label."""

    label: str
    techniques: Techniques = NO_TECHNIQUES
    cache: Rival | None = None
    schedule: Rival | None = None

    @property
    def is_plain(self) -> bool:
        return self.what == (NO_TECHNIQUES, None, None)

    @property
    def what(self) -> tuple[Techniques, Rival | None, Rival | None]:
        """Everything but the label."""
        return self.techniques, self.cache, self.schedule

    @property
    def rivals(self) -> tuple[Rival, ...]:
        """The schedule and the step cache, if any."""
        return tuple(each for each in (self.schedule, self.cache) if each is not None)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as a record of results."""
        return {
            "label": self.label,
            "techniques": self.techniques.to_list(),
            "cache": self.cache.to_dict() if self.cache else None,
            "schedule": self.schedule.to_dict() if self.schedule else None,
        }

    @property
    def folder(self) -> str:
        """The label as a folder name of limited length."""
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", self.label).strip("._") or "_"
        if len(name) <= _LONGEST:
            return name
        return f"{name[:_LONGEST]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"

    @property
    def series(self) -> str:
        """The label without swept fields."""
        return joined([_without_swept(part) for part in self.label.split(_PLUS)])

    @property
    def knobs(self) -> dict[str, float]:
        """The swept fields that the configuration has: ratio, every, threshold, interval, steps."""
        merge, hold = self.techniques
        cached = dict(self.cache.values) if self.cache else {}
        values = {
            "ratio": merge.ratio if merge else None,
            "every": hold.every if hold else None,
            "threshold": cached.get("threshold"),
            "interval": cached.get("interval"),
            "steps": self.schedule.steps if self.schedule else None,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Part:
    """One part of a configuration as typed: a preset, a file, a rival or `none`, and its fields."""

    head: str
    fields: Mapping[str, str]

    @classmethod
    def read(cls, text: str) -> Part:
        return cls(*read_fields(text, "technique", _EXAMPLE))

    @property
    def is_rival(self) -> bool:
        return self.head in RIVALS

    def techniques(self) -> Techniques:
        """The techniques that this part names, with its fields changed."""
        if self.head == PLAIN:
            if self.fields:
                raise TokenMergeError(f"'{PLAIN}' is the plain model and has no fields; leave them out")
            return NO_TECHNIQUES
        # A name with an ending is meant as a file.
        if self.head not in presets() and not Path(self.head).suffix:
            raise _unknown(self.head)
        return _changed(resolve(self.head, {}), self.fields)

    def __str__(self) -> str:
        typed = ",".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.head}:{typed}" if typed else self.head


@dataclass(frozen=True)
class Typed:
    """A configuration as typed, read and checked."""

    name: str  # a name of the user's own, or empty
    parts: tuple[Part, ...]
    configuration: Configuration
    merging: int | None  # index of the part that merges

    @property
    def takes_ratio(self) -> bool:
        """Whether it merges and no ratio was typed."""
        return self.merging is not None and "ratio" not in self.parts[self.merging].fields

    def with_ratio(self, ratio: float) -> Configuration:
        """The configuration at another ratio, with the ratio in its label."""
        assert self.merging is not None
        techniques = self.configuration.techniques
        assert techniques.merge is not None
        parts = [Part(self.name, {})] if self.name else list(self.parts)
        place = 0 if self.name else self.merging
        parts[place] = replace(parts[place], fields={**parts[place].fields, "ratio": f"{ratio:g}"})
        changed = techniques._replace(merge=techniques.merge.replace(ratio=ratio))
        return replace(self.configuration, label=joined(parts), techniques=changed)


def read_typed(text: str) -> Typed:
    """Read a configuration as typed; an error says what is wrong with it."""
    name, body = _name_and_body(text)
    try:
        parts = _parts(body)
        techniques = _techniques(parts, body)
        cache, schedule = _only(parts, CACHES, "step caches"), _only(parts, SCHEDULES, "schedules")
        if cache is not None and cache.calibrated and schedule is not None:
            raise TokenMergeError(f"{cache.name} is calibrated on the plain schedule; leave out {schedule.name}")
        merging = next((place for place, part in enumerate(parts) if _merges(part)), None)
    except TokenMergeError as error:
        raise TokenMergeError(f"technique {text.strip()!r}: {error}") from error
    return Typed(name, tuple(parts), Configuration(name or joined(parts), techniques, cache, schedule), merging)


def heads(text: str) -> list[str]:
    """The presets, files and rivals that a typed configuration names. Reads no file."""
    return [part.head for part in _parts(_name_and_body(text)[1])]


def _name_and_body(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"([^@:=,+]+)@(.+)", text.strip())
    return (match[1].strip(), match[2].strip()) if match else ("", text.strip())


def _parts(body: str) -> list[Part]:
    return [Part.read(part) for part in re.split(r"\s+\+(?:\s+|$)", body)]


def _techniques(parts: Sequence[Part], body: str) -> Techniques:
    """The techniques of all parts together."""
    found = [part.techniques() for part in parts if not part.is_rival]
    if not found:
        raise TokenMergeError(f"a step cache or schedule alone needs the plain model beside it: '{PLAIN} + {body}'")
    if len(found) > 1 and NO_TECHNIQUES in found:
        raise TokenMergeError(
            f"'{PLAIN}' is the plain model and combines with a step cache or schedule only; leave it out"
        )
    return Techniques.of(*(each for techniques in found for each in techniques if each is not None))


def _only(parts: Sequence[Part], names: Sequence[str], nouns: str) -> Rival | None:
    """The one part whose head is among `names`, as a rival; None without one. nouns: what they are, for an error."""
    found = [part for part in parts if part.head in names]
    if len(found) > 1:
        raise TokenMergeError(f"there are two {nouns}, {found[0]} and {found[1]}; leave one out")
    return read_rival(str(found[0])) if found else None


def _merges(part: Part) -> bool:
    return not part.is_rival and part.techniques().merge is not None


def joined(parts: Sequence[Part]) -> str:
    """Parts as one text, in the form that people type."""
    return _PLUS.join(map(str, parts))


def default_techniques(family: Family) -> tuple[str, ...]:
    """What commands compare if no technique is typed: Merge, Hold, and both."""
    return family.merging, "hold", f"{family.merging}{_PLUS}hold"


def read_configurations(
    asked: Sequence[str | Configuration], ratios: Sequence[float] | None = None
) -> tuple[Configuration, ...]:
    """The plain model, then `asked` in order. What merges without a typed ratio comes once for each of `ratios`."""
    made = [Configuration(PLAIN)]
    swept = False
    for item in asked:
        if isinstance(item, Configuration):
            made.append(item)
            continue
        typed = read_typed(item)
        if typed.configuration == made[0]:
            continue
        if ratios and typed.takes_ratio:
            swept = True
            made += [typed.with_ratio(ratio) for ratio in ratios]
        else:
            made.append(typed.configuration)
    if ratios and not swept:
        labels = ", ".join(configuration.label for configuration in made[1:] or made)
        raise TokenMergeError(
            f"--ratios is for techniques that merge without a typed ratio, but there is only {labels}; leave it "
            "out, or add a technique such as toma"
        )
    _check_different(made)
    return tuple(made)


def _changed(techniques: Techniques, typed: Mapping[str, str]) -> Techniques:
    """Techniques with fields changed. Each field goes to the technique that has it."""
    present = [each for each in techniques if each is not None]
    changes: list[dict[str, Any]] = [{} for _ in present]
    for name, value in typed.items():
        owners = [place for place, each in enumerate(present) if name in each.field_docs()]
        if len(owners) > 1:
            raise TokenMergeError(f"both techniques in the file have a field {name}; change it in the file")
        if not owners:
            known = [field for each in present for field in each.field_docs()]
            fact = "neither Merge nor Hold has a" if len(present) > 1 else f"{type(present[0]).__name__} has no"
            raise TokenMergeError(str(unknown_field(fact, name, known)))
        try:
            changes[owners[0]][name] = parse_as(get_type_hints(type(present[owners[0]]))[name])(value)
        except ValueError as error:
            raise TokenMergeError(f"{name}: {error}") from error
    return Techniques.of(*(each.replace(**changed) for each, changed in zip(present, changes, strict=True)))


def _unknown(head: str) -> TokenMergeError:
    known = [*presets(), *RIVALS]
    way_out = f"use a preset ({', '.join(presets())}), a .json or .yaml file, or a rival ({', '.join(RIVALS)})"
    if head == "+":
        way_out = f"put quotes around what + joins, as in {_EXAMPLE}"
    elif "+" in head:
        way_out = f"put spaces around +, as in {_EXAMPLE}"
    return TokenMergeError(f"{head!r} is unknown{did_you_mean(head, known)}; {way_out}")


def _without_swept(text: str) -> Part:
    part = Part.read(text)
    return replace(part, fields={name: value for name, value in part.fields.items() if name not in _SWEPT})


def _check_different(configurations: Sequence[Configuration]) -> None:
    """Refuse configurations that are equal, or would share a folder."""
    for kind in ("what", "folder"):
        seen: dict[Any, str] = {}
        for configuration in configurations:
            value = getattr(configuration, kind)
            if value in seen:
                raise TokenMergeError(
                    f"techniques {seen[value]!r} and {configuration.label!r} are the same; leave one out"
                )
            seen[value] = configuration.label

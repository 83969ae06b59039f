"""The search space of settings, and candidates drawn from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ...config import TOLERANCE, Hold, Merge, Techniques
from ...errors import TokenMergeError
from ...families import Family
from ...merging.methods import method_for
from ..fields import differing
from ..typed import Configuration, Part, Typed, joined

Changes = Mapping[str, Any]
Axes = Mapping[str, tuple[Changes, ...]]

_STARTS: tuple[Changes, ...] = tuple({"start": start} for start in (0.0, 0.1, 0.2, 0.3))

# A candidate takes one entry per axis. Fields that depend on each other share an axis, so that every combination makes
# sense: for hard clusters the pseudo-inverse equals the transpose, and soft ones need it.
MERGE_AXES: Axes = {
    "ratio": tuple({"ratio": ratio} for ratio in (0.25, 0.5, 0.75, 0.875, 0.9375)),
    "regions": tuple({"regions": f"tile:{side}x{side}", "merge_regions": None} for side in (2, 4, 8)),
    "maps": (
        {"unmerge": "transpose", "temperature": 0.001},
        {"unmerge": "pinv", "temperature": 0.05},
    ),
    "refresh": (
        {"destinations_every": 10, "weights_every": 5},
        {"destinations_every": 1, "weights_every": 1},
    ),
    "start": _STARTS,
    "skip_first": tuple({"skip_first": share} for share in (0, 0.125, 0.25, 0.375)),
    "skip_last": tuple({"skip_last": share} for share in (0, 0.25)),
}
HOLD_AXES: Axes = {
    "steps": (
        *({"tolerance": tolerance, "every": None} for tolerance in (0.05, 0.1, 0.2, 0.4, 0.8)),
        *({"tolerance": None, "every": every} for every in (2, 3, 5)),
    ),
    "start": _STARTS,
}
# Fields of Hold that replace each other.
_INSTEAD = ("tolerance", "every")
# For models with stages: hold all stages, or transformer blocks only.
WHAT: tuple[Changes, ...] = tuple({"what": what} for what in ("auto", "blocks"))
# Candidates that are always tried, as a user would try them first.
FIXED: dict[str, tuple[Changes, ...]] = {
    Merge.NAME: ({"ratio": 0.5}, {"ratio": 0.75}),
    Hold.NAME: ({"tolerance": TOLERANCE}, {"tolerance": 2 * TOLERANCE}),
}
# More would take days.
MOST = 1000
# After so many draws without a new candidate, there are presumably no more.
_PATIENCE = 2000


@dataclass(frozen=True)
class Searched:
    """A technique whose fields are searched, except those that were typed."""

    part: Part
    base: Merge | Hold
    axes: Axes

    def changed(self, changes: Changes) -> Merge | Hold:
        """The technique with `changes`, except in typed fields."""
        typed = set(self.part.fields)
        if not typed.isdisjoint(_INSTEAD):
            typed.update(_INSTEAD)
        return self.base.replace(**{name: value for name, value in changes.items() if name not in typed})

    def drawn(self, generator: Random) -> Merge | Hold:
        chosen = [generator.choice(axis) for axis in self.axes.values()]
        return self.changed({name: value for changes in chosen for name, value in changes.items()})

    def typed(self, technique: Merge | Hold) -> Part:
        """A technique as it would be typed: with the fields typed before, and those in which it differs."""
        differences = differing(technique, self.base)
        if isinstance(technique, Hold):
            # Leave out the unset one of the two fields that replace each other.
            differences.pop("tolerance" if technique.tolerance is None else "every", None)
        return Part(self.part.head, {**self.part.fields, **differences})


def searched(typed: Typed, family: Family) -> tuple[Searched, ...]:
    """The techniques of a configuration, each with its free axes."""
    for rival in typed.configuration.rivals:
        raise TokenMergeError(
            f"{typed.configuration.label!r}: tune searches only techniques; leave out {rival.name}, or name it with "
            "--rivals"
        )
    found = []
    for part in typed.parts:
        techniques = [each for each in part.techniques() if each is not None]
        if len(techniques) != 1:
            kind = "both techniques" if techniques else "no technique"
            raise TokenMergeError(f"{str(part)!r} holds {kind}; give tune presets, or files of one technique each")
        axes = dict(MERGE_AXES) if isinstance(techniques[0], Merge) else dict(HOLD_AXES)
        if isinstance(techniques[0], Hold) and family.stages is not None:
            axes["what"] = WHAT
        fixed = {*part.fields, *(method_for(techniques[0]).unread if isinstance(techniques[0], Merge) else ())}
        free = {name: axis for name, axis in axes.items() if fixed.isdisjoint(axis[0])}
        found.append(Searched(part, techniques[0], free))
    return tuple(found)


def draw_candidates(asked: Sequence[Typed], family: Family, count: int, seed: int) -> tuple[Configuration, ...]:
    """`count` different candidates: the fixed ones for all of `asked`, then ones drawn by a generator with `seed`."""
    kinds = [searched(typed, family) for typed in asked]
    found: dict[Techniques, Configuration] = {}
    for kind in kinds:
        for changes in zip(*(FIXED[each.base.NAME] for each in kind), strict=True):
            _add(found, kind, [each.changed(change) for each, change in zip(kind, changes, strict=True)])
    fixed = len(found)
    if not fixed <= count <= MOST:
        raise TokenMergeError(f"--candidates is {count}; it must be from {fixed}, which are always tried, to {MOST}")
    generator, misses = Random(seed), 0
    while len(found) < count:
        kind, before = generator.choice(kinds), len(found)
        techniques = [each.drawn(generator) for each in kind]
        if all(isinstance(each, Hold) or fits(each) for each in techniques):
            _add(found, kind, techniques)
        misses = misses + 1 if len(found) == before else 0
        if misses > _PATIENCE:
            raise TokenMergeError(
                f"--candidates is {count}, but only {len(found)} different ones exist; ask for fewer, or leave more "
                "fields of --techniques open"
            )
    return tuple(found.values())


def _add(found: dict[Techniques, Configuration], kind: Sequence[Searched], techniques: Sequence[Merge | Hold]) -> None:
    label = joined([each.typed(technique) for each, technique in zip(kind, techniques, strict=True)])
    chosen = Techniques.of(*techniques)
    found.setdefault(chosen, Configuration(label, chosen))


def fits(merge: Merge) -> bool:
    """Whether the method can remove exactly this ratio. Otherwise the candidate would be refused, or repeat another."""
    method = method_for(merge)
    if "regions" in method.unread:
        try:
            method.effective(merge)
        except TokenMergeError:
            return False
        return True
    height, width = merge.select_in.tile or (1, 1)
    return (merge.ratio * height * width).is_integer()

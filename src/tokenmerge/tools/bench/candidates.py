"""Candidates: what `bench` compares, and what each does at every step of a schedule."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...config import SELECTIONS, Merge, Techniques
from ...errors import TokenMergeError
from ...merging.methods import method_for
from ...planning.plan import timeline_of
from ..typed import NO_TECHNIQUES, Configuration

_USUAL = Merge(method="lower-bound")
# The fields in which the lower bound of linear merging differs from a technique; they share all others.
BOUND: dict[str, Any] = {name: getattr(_USUAL, name) for name in ("method", *method_for(_USUAL).unread)}
# Methods that merge linearly.
_LINEAR = ("toma", *SELECTIONS)


@dataclass(frozen=True)
class Candidate:
    """One row of a comparison: a denoiser with techniques, or the plain one."""

    label: str
    techniques: Techniques = NO_TECHNIQUES

    def to_dict(self) -> dict[str, Any]:
        """Its part of a record."""
        return {"label": self.label, "techniques": self.techniques.to_list()}

    def phases(self, steps: int) -> list[str]:
        """What every step does, by the timeline. With techniques the first step is a phase of its own: it reads the
        layout of the tokens from the device. A lower bound only ever reuses maps, as they are free by definition."""
        merge, hold = self.techniques
        settled = method_for(merge).effective(merge) if merge is not None and merge.ratio > 0 else None
        phases = [str(step) for step in timeline_of(settled, hold).steps(steps)]
        if self.techniques == NO_TECHNIQUES:
            return phases
        if merge is not None and merge.method == "lower-bound":
            return [re.sub("select|reweigh", "reuse", phase) for phase in phases]
        return [f"first {phases[0]}", *phases[1:]]


def candidates_for(configurations: Sequence[Configuration]) -> list[Candidate]:
    """One candidate per configuration. If it only merges, and linearly, its lower bound comes before it."""
    found: dict[str, Candidate] = {}
    for each in configurations:
        for rival in each.rivals:
            raise TokenMergeError(
                f"{each.label!r}: bench times single steps, but {rival.name} has its own schedule or decides by the "
                "picture what runs; use eval, which times whole pictures, or leave it out"
            )
        merge, hold = each.techniques
        label = _with_ratio(each.label, merge)
        if merge is not None and hold is None and merge.method in _LINEAR:
            bound = Candidate(f"lower-bound of {label}", Techniques(merge.replace(**BOUND)))
            if all(each.techniques != bound.techniques for each in found.values()):
                found[bound.label] = bound
        found[label] = Candidate(label, each.techniques)
    return list(found.values())


def visits(phases: Sequence[str]) -> dict[int, str | None]:
    """The steps that run in one image so that every phase is timed once. Timed steps name their phase. The others
    (None) only renew maps or keep residuals that later steps need."""
    laps = {_lap(phase, phases): phase for phase in dict.fromkeys(phases)}
    return {step: laps.get(step) for step in range(max(laps) + 1) if step in laps or is_needed(step, phases)}


def is_needed(step: int, phases: Sequence[str]) -> bool:
    """Whether later steps depend on this one: it renews maps or keeps residuals."""
    # A lower bound says that it reuses maps, but has to make them once.
    makes = "reuse" in phases[step] and not any("select" in before for before in phases[:step])
    return makes or re.search("select|reweigh|kept", phases[step]) is not None


def _lap(phase: str, phases: Sequence[str]) -> int:
    """The step that is timed for a phase: the first one with everything usual before it."""
    steps = [step for step, each in enumerate(phases) if each == phase]
    if phase == "held":
        kept = [step for step, each in enumerate(phases) if "kept" in each]
        # A usual held step extrapolates from two residuals.
        return next((step for step in steps if len(kept) > 1 and step > kept[1]), steps[0])
    made = any("select" in before for before in phases[: steps[0]])
    # Without a select before it, the first reuse makes the maps on the host, and the device runs dry before the second.
    return steps[0] if made or "reuse" not in phase else steps[:3][-1]


def trial_step(phases: Sequence[str]) -> int:
    """The first merged step; the first step if none is merged."""
    return next((step for step, phase in enumerate(phases) if "merged" in phase), 0)


def typical_step(phases: Sequence[str]) -> int:
    """The second step of the most frequent phase, or its only one: the first may also begin an image or make a bound's
    maps. Only phases that reuse maps count; without any, those that are not full; without those too, all.
    """
    reused = [phase for phase in phases if phase.startswith("merged, reuse")]
    others = [phase for phase in phases if "full" not in phase]
    (phase, _), *_ = Counter(reused or others or phases).most_common(1)
    return [step for step, each in enumerate(phases) if each == phase][:2][-1]


def _with_ratio(label: str, merge: Merge | None) -> str:
    """The label, with the ratio of the preset where none was typed: every row shows what share it removes."""
    if merge is None or "ratio=" in label or " + " in label:
        return label
    return f"{label}{',' if ':' in label else ':'}ratio={merge.ratio:g}"

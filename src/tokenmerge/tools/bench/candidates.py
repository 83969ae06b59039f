"""Candidates: what `bench` compares, and what each of them does at every step of a schedule."""

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
# What the bound of linear merging has in place of a technique's own; the rest they share.
BOUND: dict[str, Any] = {name: getattr(_USUAL, name) for name in ("method", *method_for(_USUAL).unread)}
# Methods whose merging is linear.
_LINEAR = ("toma", *SELECTIONS)


@dataclass(frozen=True)
class Candidate:
    """One row of a comparison; without techniques the plain denoiser."""

    label: str
    techniques: Techniques = NO_TECHNIQUES

    def to_dict(self) -> dict[str, Any]:
        """What records say of it."""
        return {"label": self.label, "techniques": self.techniques.to_list()}

    def phases(self, steps: int) -> list[str]:
        """What every step does, as the timeline tells it. The first is a phase of its own, since an image begins there:
        how its tokens lie is read from the device. The maps of a bound cost nothing by definition."""
        merge, hold = self.techniques
        settled = method_for(merge).effective(merge) if merge is not None and merge.ratio > 0 else None
        phases = [str(step) for step in timeline_of(settled, hold).steps(steps)]
        if self.techniques == NO_TECHNIQUES:
            return phases
        if merge is not None and merge.method == "lower-bound":
            return [re.sub("select|reweigh", "reuse", phase) for phase in phases]
        return [f"first {phases[0]}", *phases[1:]]


def candidates_for(configurations: Sequence[Configuration]) -> list[Candidate]:
    """A candidate for each configuration, and where it merges alone and linearly, before it the bound of that."""
    found: dict[str, Candidate] = {}
    for each in configurations:
        for rival in each.rivals:
            raise TokenMergeError(
                f"{each.label!r}: bench times the steps of techniques one by one, and {rival.name} has a schedule of "
                "its own or decides by the picture what runs; use eval, which times whole pictures, or leave it out"
            )
        merge, hold = each.techniques
        label = _told(each.label, merge)
        if merge is not None and hold is None and merge.method in _LINEAR:
            bound = Candidate(f"lower-bound of {label}", Techniques(merge.replace(**BOUND)))
            if all(each.techniques != bound.techniques for each in found.values()):
                found[bound.label] = bound
        found[label] = Candidate(label, each.techniques)
    return list(found.values())


def visits(phases: Sequence[str]) -> dict[int, str | None]:
    """The steps of an image that are run to time every phase, each with the phase it is a lap of, if it is one. Beside
    laps, all steps run that renew maps or keep residuals: what later ones do depends on them."""
    laps = {_lap(phase, phases): phase for phase in dict.fromkeys(phases)}
    return {step: laps.get(step) for step in range(max(laps) + 1) if step in laps or is_needed(step, phases)}


def is_needed(step: int, phases: Sequence[str]) -> bool:
    """Whether later steps depend on this one: it renews maps or keeps residuals."""
    # A bound has to make the maps that it is said to reuse.
    makes = "reuse" in phases[step] and not any("select" in before for before in phases[:step])
    return makes or re.search("select|reweigh|kept", phases[step]) is not None


def _lap(phase: str, phases: Sequence[str]) -> int:
    """The step that is timed for a phase: the first that has it, and all that it usually has before it."""
    steps = [step for step, each in enumerate(phases) if each == phase]
    if phase == "held":
        kept = [step for step, each in enumerate(phases) if "kept" in each]
        # Extrapolation takes two residuals.
        return next((step for step in steps if len(kept) > 1 and step > kept[1]), steps[0])
    made = any("select" in before for before in phases[: steps[0]])
    # The first makes maps in spite of its name, and before the second the device ran dry, since the host made them.
    return steps[0] if made or "reuse" not in phase else steps[:3][-1]


def trial_step(phases: Sequence[str]) -> int:
    """The first step that merges, or where none does the first."""
    return next((step for step, phase in enumerate(phases) if "merged" in phase), 0)


def typical_step(phases: Sequence[str]) -> int:
    """The second step, or else the only one, of the most frequent phase: of those that reuse maps, or where none does
    of those that are not full, or else of all. The first may also begin an image, or make a bound's maps."""
    reused = [phase for phase in phases if phase.startswith("merged, reuse")]
    others = [phase for phase in phases if "full" not in phase]
    (phase, _), *_ = Counter(reused or others or phases).most_common(1)
    return [step for step, each in enumerate(phases) if each == phase][:2][-1]


def _told(label: str, merge: Merge | None) -> str:
    """A label that tells the ratio, where it is a preset's own: without it a row does not say what was removed."""
    if merge is None or "ratio=" in label or " + " in label:
        return label
    return f"{label}{',' if ':' in label else ':'}ratio={merge.ratio:g}"

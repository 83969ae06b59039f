"""The timeline: the kind of every step, and what it renews. Runtime, plans, benchmarks and summaries all ask it."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..config import Hold, Merge

# The kinds of step: on all tokens, on fewer, or not at all.
FULL, MERGED, HELD = "full", "merged", "held"
# Steps nearer to each other than this, in even steps, are alike even where a picture begins.
_NEAR = 0.15
# When a method makes its maps: as fields say, once per image, or in every call.
DUE, ONCE, ALWAYS = "due", "once", "always"


class Place(NamedTuple):
    """Where a step lies in the schedule. `at` counts steps; under uneven schedules, what they amount to."""

    at: float
    position: float | None  # share of the schedule that lies behind, if its length is known
    to_next: float = 1.0  # how far the next step is


class Step(NamedTuple):
    """What one step does."""

    kind: str
    keeps: bool = False  # whether Hold keeps the residuals of this step
    maps: str = ""  # of a merged step: select, reweigh or reuse

    def __str__(self) -> str:
        words = [self.kind, self.maps, "kept" if self.keeps else ""]
        return ", ".join(word for word in words if word)


class Timeline:
    """The kind of every step, from the techniques and what came before."""

    def __init__(self, merge: Merge | None, hold: Hold | None, renews: str = DUE) -> None:
        self.merge = merge
        self.hold = hold if hold is not None and hold.every > 1 else None
        self._renews = renews

    @property
    def needs_length(self) -> bool:
        """Whether what a step does depends on how many there are."""
        return any(each is not None and each.windowed for each in (self.merge, self.hold))

    def step(self, now: Place, kept: Place | None, *, may_hold: bool = True) -> Step:
        """What a step does. kept: the last step of this image whose residuals were kept, if there is one."""
        position = now.position or 0.0
        runs = MERGED if self.merge is not None and _merges(self.merge, position) else FULL
        hold = self.hold
        if hold is None or not may_hold or position >= hold.stop:
            return Step(runs)
        if position < hold.start:
            # Under an uneven schedule several steps may lie in one place.
            if kept is not None and 0.0 < now.at - kept.at < _NEAR:
                return Step(HELD)
            return Step(runs, keeps=0.0 < now.to_next < _NEAR)
        if kept is None or (kept.position or 0.0) < hold.start or now.at - kept.at > _farthest(hold, kept):
            return Step(runs, keeps=True)
        return Step(HELD)

    def maps(self, step: int, selected: int | None, weighed: int | None) -> str:
        """What a merged step renews, given the steps of the last selection and weighing of this image."""
        if self._renews == ALWAYS or selected is None or weighed is None:
            return "select"
        if self._renews == ONCE or self.merge is None:
            return "reuse"
        if step - selected >= self.merge.destinations_every:
            return "select"
        return "reweigh" if step - weighed >= self.merge.weights_every else "reuse"

    def steps(self, total: int) -> list[Step]:
        """Every step of an image under an even schedule, with one call a step."""
        found: list[Step] = []
        kept, selected, weighed = None, None, None
        for number in range(total):
            now = Place(number, number / total)
            step = self.step(now, kept)
            if step.kind == MERGED:
                step = step._replace(maps=self.maps(number, selected, weighed))
                selected = number if step.maps == "select" else selected
                weighed = weighed if step.maps == "reuse" else number
            kept = now if step.keeps else kept
            found.append(step)
        return found


def _merges(merge: Merge, position: float) -> bool:
    """Whether a step lies in the window. The last one of an uneven schedule may lie at its very end."""
    return merge.start <= position and (position < merge.stop or merge.stop == 1.0)


def _farthest(hold: Hold, kept: Place) -> int:
    """How far from a kept step others may be held. Residuals change fastest at first, so the distance to the next kept
    step grows over the window, from half of `every` to one and a half times; it is never a single step, where nothing
    would be saved."""
    share = 0.5 if kept.position is None else (kept.position - hold.start) / (hold.stop - hold.start)
    return math.ceil(max(2.0, hold.every * (0.5 + share))) - 1

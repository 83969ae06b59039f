"""The timeline: the kind of every step, and what it renews. Runtime, plans, benchmarks and summaries all ask it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..config import Hold, Merge
from .levels import Place, even_levels, place_at

# The kinds of step: on all tokens, on fewer, or not at all.
FULL, MERGED, HELD = "full", "merged", "held"
# When a method makes its maps: as fields say, once per image, or in every call.
DUE, ONCE, ALWAYS = "due", "once", "always"
# Residuals bend again where a picture ends, which errors before do not tell: from this share of the steps on, at most
# this share of them, and always two, may be held in a row.
_END, _IN_A_ROW = 0.85, 0.07
# With `every`, drift from one full step to the next that a schedule may lead to, over `every`: pictures decide nothing
# there, and steps that move them far would wreck them.
_EXPECTED = 0.01
# Over a tolerance, drift up to the next full step that steps are held with however far off they are, and that none are
# held beyond.
_HARDLY, _FAR = 0.01, 0.2
# Distances, in those that were extrapolated over, from which on two points give no line.
_TOO_FAR = 4.0
# A full step makes up for no more than this, over its error: what it gives out bends more than it moves.
_MOST_OWED = 2.5
# How much residuals of the bundled models bend, and the least that is believed: in noise alone they hardly do, which
# tells nothing of the picture to come.
USUAL_BEND, _LEAST_BEND = 0.6, 0.3
# The first error is that of step 2, and is read when step 3 has begun.
_FIRST_KNOWN = 3


class Kept(NamedTuple):
    """What Hold knows of an image so far."""

    last: Place  # the last step whose residuals were kept
    before: Place | None = None  # the one before it, if a slope may be taken between the two
    bend: float | None = None  # how much residuals bend, by the error of an extrapolation; None before there was one
    held: tuple[Place, ...] = ()  # steps that were held since the last kept one

    def growth_to(self, now: Place) -> float:
        """How errors grow up to a step: of a line through two points with the distances from both, of one residual
        with that from it."""
        far = abs(now.at - self.last.at)
        return far if self.before is None else far * (far + abs(self.last.at - self.before.at))

    def error_at(self, now: Place) -> float:
        """The relative error of an extrapolation to a step."""
        assert self.bend is not None
        return self.bend * now.bends * self.growth_to(now)

    def owed(self, now: Place) -> float:
        """What the held steps have missed, over the error that a full step shows: errors, by how far each step moves
        the picture."""
        here = self.growth_to(now) * now.weight
        missed = sum(self.growth_to(place) * place.weight for place in self.held)
        return min(missed / here, _MOST_OWED) if here else 0.0

    def drift_to(self, now: Place) -> float | None:
        """How far the picture would drift from the last kept step up to this one, if it can be told: errors, by how far
        each step moves it."""
        if self.before is None or self.bend is None:
            return None
        return sum(self.error_at(place) * place.weight for place in (*self.held, now))


def bend_of(error: float, now: Place, kept: Kept) -> float | None:
    """How much residuals bend, from the error of extrapolating them to a step; NaN where that is not finite."""
    # Nonsense is told wherever it came from: a bend that was found before must not stand for it.
    if not math.isfinite(error):
        return math.nan
    if kept.before is None:
        return None
    far, apart = abs(now.at - kept.last.at), abs(kept.last.at - kept.before.at)
    # A picture begins far above all other noise, and a line from there tells nothing of how residuals bend.
    if not far or apart > _TOO_FAR * far:
        return None
    return error / (now.bends * far * (far + apart))


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
        self.hold = hold if hold is not None and hold.acts else None
        self._renews = renews

    @property
    def needs_length(self) -> bool:
        """Whether what a step does depends on how many there are."""
        return any(each is not None and each.windowed for each in (self.merge, self.hold))

    def step(self, now: Place, kept: Kept | None, *, may_hold: bool = True) -> Step:
        """What a step does. kept: what Hold knows of this image, if it has kept a step."""
        runs = MERGED if self.merge is not None and _merges(self.merge, now.share or 0.0) else FULL
        hold = self.hold
        if hold is None or not may_hold:
            return Step(runs)
        (start, stop), cleared = hold.window, now.cleared or 0.0
        if cleared >= stop and stop < 1.0:
            # The first step after the window shows how far off the last ones that were held have been.
            return Step(runs, keeps=kept is not None and bool(kept.held))
        # What comes before the window is kept all the same: it shows slopes and errors. Nothing comes after the last
        # step that would mend its errors.
        if cleared < start or now.last or kept is None or not _may_be_held(hold, now, kept):
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

    def steps(self, total: int, levels: Sequence[float] | None = None) -> list[Step]:
        """Every step of an image, with one call a step. levels: of noise to signal; without them, of an even schedule.

        With a tolerance these are the steps to be expected: residuals of the bundled models bend as here.
        """
        found: list[Step] = []
        kept, selected, weighed = None, None, None
        for number in range(total):
            now = place_at(number, total, levels or even_levels(total))
            step = self.step(now, kept)
            if step.kind == MERGED:
                step = step._replace(maps=self.maps(number, selected, weighed))
                selected = number if step.maps == "select" else selected
                weighed = weighed if step.maps == "reuse" else number
            if step.keeps:
                kept = Kept(now, kept.last if kept else None, USUAL_BEND if number >= _FIRST_KNOWN else None)
            elif kept is not None:
                # Nothing is known after a step that ran and was not kept.
                kept = kept._replace(held=(*kept.held, now)) if step.kind == HELD else None
            found.append(step)
        return found


def _merges(merge: Merge, share: float) -> bool:
    return merge.start <= share < merge.stop


def _may_be_held(hold: Hold, now: Place, kept: Kept) -> bool:
    if kept.bend is not None and not math.isfinite(kept.bend):
        return False
    distance = now.number - kept.last.number
    if now.share is not None and now.share >= _END and distance >= _distance_to_end(now, kept.last):
        return False
    if hold.every is not None:
        near = distance < _distance(hold.every, hold, kept.last)
        return near and (hold.start is not None or _is_smooth(hold.every, now, kept))
    if kept.bend is None or hold.tolerance is None:
        return False
    kept = kept._replace(bend=max(kept.bend, _LEAST_BEND))
    drift = kept.drift_to(now)
    if drift is None:
        return False
    # Far above the picture, steps hardly move it; below, a great stride may move it far.
    if drift <= _HARDLY * hold.tolerance:
        return True
    # Errors grow along the rest of a picture, the more the noisier it is.
    return kept.error_at(now) / now.bends <= hold.tolerance and drift <= _FAR * hold.tolerance


def _distance_to_end(now: Place, last: Place) -> int:
    """Steps from a kept one to the next where a picture ends: the rest is shared out evenly up to the last step."""
    assert now.share
    total = round(now.number / now.share)
    rest, most = total - 1 - last.number, max(2, int(_IN_A_ROW * total)) + 1
    return math.ceil(rest / math.ceil(rest / most))


def _is_smooth(every: int, now: Place, kept: Kept) -> bool:
    """Whether a picture would drift little up to a step, if residuals bent as usual and the full step before the last
    lay as far back as this one lies ahead."""
    before = kept.last._replace(at=2 * kept.last.at - now.at)
    drift = kept._replace(before=before, bend=USUAL_BEND).drift_to(now)
    return drift is not None and drift <= _EXPECTED * every


def _distance(every: int, hold: Hold, kept: Place) -> int:
    """Steps from a kept one to the next. Residuals change fastest at first, so it grows over the window, from half of
    `every` to one and a half times; it is never a single step, where nothing would be saved."""
    start, stop = hold.window
    share = 0.5 if kept.cleared is None else (kept.cleared - start) / (stop - start)
    return math.ceil(max(2.0, every * (0.5 + share)))

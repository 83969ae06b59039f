"""The timeline: the kind of every step, and what it renews. Runtime, plans, benchmarks and summaries all ask it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..config import Hold, Merge
from .levels import Place, even_levels, place_at

# The kinds of step: on all tokens, on fewer, or not at all.
FULL, MERGED, HELD = "full", "merged", "held"
# When a method makes its maps: as `destinations_every` and `weights_every` say, once per image, or in every call.
DUE, ONCE, ALWAYS = "due", "once", "always"
# Near its end a picture's residuals bend again, which earlier errors do not foretell. Once the first share of the steps
# is done, at most the second share of all steps may be held in a row. Two always may.
_END, _IN_A_ROW = 0.85, 0.07
# With `every`, errors decide nothing, so steps that move the picture far must run. The most drift that is expected
# between two full steps, per unit of `every`.
_EXPECTED = 0.01
# Drift since the last kept step, per unit of `tolerance`. Up to the first a step is held whatever its error; above the
# second it runs.
_NEGLIGIBLE, _MOST_DRIFT = 0.01, 0.2
# The error of a line tells no curvature if its points lie more than this many times as far apart as it extrapolates.
_TOO_FAR_APART = 4.0
# Bound of `Kept.owed`. A larger correction would bend the output of a full step more than it moves the picture.
_MOST_OWED = 2.5
# `Kept.bend` of the bundled models, and the least that we believe: in nearly pure noise residuals hardly bend, which
# says nothing about the picture to come.
USUAL_BEND, _LEAST_BEND = 0.6, 0.3
# The last kept step when the first error is read. It is measured at step 2, and on its way from the device at step 3.
_FIRST_KNOWN = 3


class Kept(NamedTuple):
    """What Hold knows of an image so far, and the law of errors: how far off an extrapolation to a step will be."""

    last: Place  # the last step whose residuals were kept
    before: Place | None = None  # the kept step before it; None if no slope may be taken between the two
    bend: float | None = None  # measured curvature of residuals, over `Place.curvature`; None before the first error
    held: tuple[Place, ...] = ()  # the steps held since the last kept one

    def growth_to(self, now: Place) -> float:
        """How the absolute error grows with distance, up to a constant factor.

        A line through two points: |now - last| * |now - before|. One residual without a slope: |now - last|.
        """
        ahead = abs(now.at - self.last.at)
        return ahead if self.before is None else ahead * (ahead + abs(self.last.at - self.before.at))

    def error_at(self, now: Place) -> float:
        """The expected relative error of extrapolating to a step: bend * curvature * growth."""
        assert self.bend is not None
        return self.bend * now.curvature * self.growth_to(now)

    def owed(self, now: Place) -> float:
        """How many times the full step `now` adds its own error, to make up for the held steps before it.

        sum of growth * weight over the held steps, divided by growth * weight of `now`; bounded.
        """
        shown = self.growth_to(now) * now.weight
        missed = sum(self.growth_to(place) * place.weight for place in self.held)
        return min(missed / shown, _MOST_OWED) if shown else 0.0

    def drift_to(self, now: Place) -> float | None:
        """How far the picture would drift if all steps since the last kept one were held, up to and including `now`.

        sum of error * weight over these steps; None if no error is known or the line has no slope.
        """
        if self.before is None or self.bend is None:
            return None
        return sum(self.error_at(place) * place.weight for place in (*self.held, now))


def bend_of(error: float, now: Place, kept: Kept) -> float | None:
    """`Kept.bend` by the relative error of extrapolating to a step: the inverse of `Kept.error_at`.

    None if the error says nothing about it; NaN if the error is not finite.
    """
    # Non-finite errors come first: an older, finite bend must not hide them.
    if not math.isfinite(error):
        return math.nan
    if kept.before is None:
        return None
    ahead, apart = abs(now.at - kept.last.at), abs(kept.last.at - kept.before.at)
    # The first step may lie far above all others in noise; a line from there does not show how residuals bend.
    if not ahead or apart > _TOO_FAR_APART * ahead:
        return None
    return error / (now.curvature * ahead * (ahead + apart))


class Step(NamedTuple):
    """What one step does."""

    kind: str
    keeps: bool = False  # whether Hold keeps the residuals of this step
    maps: str = ""  # of a merged step: select, reweigh or reuse

    def __str__(self) -> str:
        words = [self.kind, self.maps, "kept" if self.keeps else ""]
        return ", ".join(word for word in words if word)


class Timeline:
    """The kind of every step, from the techniques and the steps before it."""

    def __init__(self, merge: Merge | None, hold: Hold | None, renews: str = DUE) -> None:
        self.merge = merge
        self.hold = hold if hold is not None and hold.acts else None
        self._renews = renews

    @property
    def needs_length(self) -> bool:
        """Whether the kind of a step depends on the number of steps."""
        return any(each is not None and each.windowed for each in (self.merge, self.hold))

    def step(self, now: Place, kept: Kept | None, *, may_hold: bool = True) -> Step:
        """What a step does. kept: what Hold knows of this image; None before the first kept step."""
        merge, hold = self.merge, self.hold
        runs = MERGED if merge is not None and merge.start <= (now.share or 0.0) < merge.stop else FULL
        if hold is None or not may_hold:
            return Step(runs)
        (start, stop), cleared = hold.window, now.cleared or 0.0
        if cleared >= stop and stop < 1.0:
            # The first step after the window is kept: it measures the error of the held steps before it.
            return Step(runs, keeps=kept is not None and bool(kept.held))
        # Steps before the window are kept, too, for slopes and errors. The last step runs, as none could correct it.
        if cleared < start or now.last or kept is None or not _may_be_held(hold, now, kept):
            return Step(runs, keeps=True)
        return Step(HELD)

    def maps(self, step: int, selected: int | None, weighed: int | None) -> str:
        """What a merged step renews. selected, weighed: the steps of this image that last selected and weighed."""
        if self._renews == ALWAYS or selected is None or weighed is None:
            return "select"
        if self._renews == ONCE or self.merge is None:
            return "reuse"
        if step - selected >= self.merge.destinations_every:
            return "select"
        return "reweigh" if step - weighed >= self.merge.weights_every else "reuse"

    def steps(self, total: int, levels: Sequence[float] | None = None) -> list[Step]:
        """Every step of an image with one call per step. levels: noise to signal; if unknown, those of an even flow.

        With a tolerance, these are the expected steps: we assume that residuals bend as in the bundled models.
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
                # A step that ran without being kept ends what is known.
                kept = kept._replace(held=(*kept.held, now)) if step.kind == HELD else None
            found.append(step)
        return found


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
    # In nearly pure noise, steps hardly move the picture; later, one large step may move it far.
    if drift <= _NEGLIGIBLE * hold.tolerance:
        return True
    # An early error grows over the rest of the picture. So the bound of the relative error is tolerance / sqrt(r).
    return kept.error_at(now) / now.curvature <= hold.tolerance and drift <= _MOST_DRIFT * hold.tolerance


def _distance_to_end(now: Place, last: Place) -> int:
    """Steps from a kept one to the next near the end of a picture: the remaining ones are divided evenly."""
    assert now.share
    total = round(now.number / now.share)
    remaining, most = total - 1 - last.number, max(2, int(_IN_A_ROW * total)) + 1
    return math.ceil(remaining / math.ceil(remaining / most))


def _is_smooth(every: int, now: Place, kept: Kept) -> bool:
    """Whether the picture is expected to drift little up to a step.

    Assumes that residuals bend as usual, and that the last two kept steps are as far apart as this step lies ahead.
    """
    before = kept.last._replace(at=2 * kept.last.at - now.at)
    drift = kept._replace(before=before, bend=USUAL_BEND).drift_to(now)
    return drift is not None and drift <= _EXPECTED * every


def _distance(every: int, hold: Hold, kept: Place) -> int:
    """Steps from a kept one to the next. Residuals change fastest at first, so the distance grows over the window, from
    0.5 to 1.5 times `every`. It is at least 2, since 1 would hold nothing."""
    start, stop = hold.window
    share = 0.5 if kept.cleared is None else (kept.cleared - start) / (stop - start)
    return math.ceil(max(2.0, every * (0.5 + share)))

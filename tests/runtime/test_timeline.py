"""The timeline: it sets the kind of every step from the techniques and the number of steps, and pictures follow it."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import tiny
import tokenmerge
from tokenmerge import Hold, Merge
from tokenmerge.families import denoiser_of
from tokenmerge.merging.methods import method_for
from tokenmerge.runtime.levels import Place, even_levels, noise_levels, place_at, planned_levels
from tokenmerge.runtime.state import APPLIED
from tokenmerge.runtime.timeline import ALWAYS, DUE, FULL, HELD, MERGED, ONCE, Kept, Step, Timeline, bend_of

totals = st.integers(1, 60)
windows = st.tuples(st.floats(0, 0.9), st.floats(0, 1)).filter(lambda window: window[0] < window[1])
merges = st.builds(
    lambda window, **fields: Merge(start=window[0], stop=window[1], **fields),
    windows,
    destinations_every=st.integers(1, 12),
    weights_every=st.integers(1, 12),
)
holds = st.builds(lambda window, every: Hold(start=window[0], stop=window[1], every=every), windows, st.integers(2, 12))
renewals = st.sampled_from((DUE, ONCE, ALWAYS))


tolerances = st.builds(
    lambda window, tolerance: Hold(start=window[0], stop=window[1], tolerance=tolerance), windows, st.floats(0.01, 1.0)
)


def inside(technique: Merge | Hold | None, number: int, total: int) -> bool:
    """Whether a step lies in the window. Windows of Merge count steps; those of Hold count noise."""
    if technique is None:
        return False
    if isinstance(technique, Merge):
        return technique.start <= number / total < technique.stop
    return technique.start <= places(total)[number].cleared and not is_over(technique, number, total)


def is_over(hold: Hold, number: int, total: int) -> bool:
    return hold.stop <= places(total)[number].cleared and hold.stop < 1.0


def places(total: int) -> list[Place]:
    return [place_at(number, total, even_levels(total)) for number in range(total)]


@settings(max_examples=300, deadline=None)
@given(merge=st.none() | merges, hold=st.none() | holds | tolerances, total=totals, renews=renewals)
def test_what_every_step_is(merge: Merge | None, hold: Hold | None, total: int, renews: str) -> None:
    steps = Timeline(merge, hold, renews).steps(total)
    assert len(steps) == total
    for number, step in enumerate(steps):
        # Merge decides how a step runs, Hold whether it does.
        runs = MERGED if inside(merge, number, total) else FULL
        assert step.kind in ((runs, HELD) if inside(hold, number, total) else (runs,))
        assert bool(step.maps) == (step.kind == MERGED)
        # Every step that runs is kept until Hold's window ends, and so is a step that directly follows a held one.
        shows = number > 0 and steps[number - 1].kind == HELD
        kept = hold is not None and (shows or not is_over(hold, number, total))
        assert step.keeps == (kept and step.kind != HELD)
    assert steps[-1].kind != HELD, "the last step shows"


@settings(max_examples=200, deadline=None)
@given(merge=merges, hold=holds | tolerances, total=totals)
def test_neither_technique_moves_the_steps_of_the_other(merge: Merge, hold: Hold, total: int) -> None:
    both = Timeline(merge, hold).steps(total)
    held = Timeline(None, hold).steps(total)
    assert [step.kind == HELD for step in both] == [step.kind == HELD for step in held]
    assert [step.keeps for step in both] == [step.keeps for step in held]
    merged = Timeline(merge, None).steps(total)
    assert all(one.kind == other.kind for one, other in zip(both, merged, strict=True) if one.kind != HELD)


@settings(max_examples=200, deadline=None)
@given(hold=holds, total=totals)
def test_kept_steps_lie_closer_at_first_and_at_the_end(hold: Hold, total: int) -> None:
    steps = Timeline(None, hold).steps(total)
    # The kept step after the window follows its end, not the distances tested here.
    kept = [number for number, step in enumerate(steps) if step.keeps and not is_over(hold, number, total)]
    # Nothing can be held before a first residual is kept.
    assert kept[:1] == [0] * (not is_over(hold, 0, total))
    distances = {later: later - earlier for earlier, later in pairwise(kept) if later < 0.85 * total}
    grown = [distance for later, distance in distances.items() if later != total - 1]
    assert grown == sorted(grown), "they must not shrink"
    assert all(distance <= max(2, 1.5 * hold.every + 1) for distance in distances.values())
    ends = [later - earlier for earlier, later in pairwise(kept) if later >= 0.85 * total]
    assert all(distance <= max(3, 0.07 * total + 1) for distance in ends[1:])


@pytest.mark.parametrize(
    ("every", "total", "start", "kept"),
    [
        (5, 28, 0.2, [0, 1, 2, 4, 9, 15, 22, 25, 27]),
        (3, 28, 0.2, [0, 1, 2, 4, 7, 11, 15, 20, 24, 27]),
        (2, 6, 0.0, [0, 2, 5]),
    ],
)
def test_which_steps_are_kept(every: int, total: int, start: float, kept: list[int]) -> None:
    steps = Timeline(None, Hold(every=every, start=start)).steps(total)
    assert [number for number, step in enumerate(steps) if step.keeps] == kept


@pytest.mark.parametrize("last", [8, 12, 16, 20])
def test_an_error_within_the_tolerance_is_held(last: int) -> None:
    """By hand: a tolerance 1% above the error holds the step, and one 1% below does not. At noise to signal 1 the bound
    of the error is the tolerance itself; elsewhere it is divided by the square root of noise to signal."""
    place = places(30)
    noise = [(30 - number) / max(number, 1e-3) for number in range(30)]
    kept = Kept(place[last], place[last - 1], bend=0.5)
    line = (place[last + 1].at - place[last].at) * (place[last + 1].at - place[last - 1].at)
    assert kept.error_at(place[last + 1]) == pytest.approx(0.5 * line / math.sqrt(noise[last + 1]))
    for share, kind in ((1.01, HELD), (0.99, FULL)):
        assert Timeline(None, Hold(tolerance=share * 0.5 * line)).step(place[last + 1], kept).kind == kind


def test_great_strides_are_not_held_and_noise_alone_always_is() -> None:
    kept = Kept(place_at(1, 4, [9.0, 4.0, 2.0, 1.0]), place_at(0, 4, [9.0, 4.0, 2.0, 1.0]), bend=0.3)
    hold = Timeline(None, Hold(tolerance=0.3, start=0.0))
    for after, kind in ((1.9, HELD), (0.01, FULL)):
        assert hold.step(place_at(2, 4, [9.0, 4.0, 2.0, after]), kept).kind == kind
    noise = [9000.0, 4000.0, 900.0, 400.0]
    kept = Kept(place_at(1, 9, noise), place_at(0, 9, noise), bend=0.3)
    assert hold.step(place_at(2, 9, noise), kept).kind == HELD


def test_what_is_owed() -> None:
    """By hand: roots of noise to signal are 4, 3, 2, 1 and 0.5; the picture moves from each level to the next."""
    place = [place_at(number, 5, [16.0, 9.0, 4.0, 1.0, 0.25]) for number in range(5)]
    ways = [math.sqrt(1 + level) for level in (9.0, 4.0, 1.0, 0.25, 0.0)]
    moves = [before - after for before, after in pairwise(ways)]
    kept = Kept(place[1], place[0], held=(place[2],))
    assert kept.owed(place[3]) == pytest.approx(1 * 2 * moves[1] / (2 * 3 * moves[2]))
    alone = Kept(place[1], held=(place[2],))
    assert alone.owed(place[3]) == pytest.approx(1 * moves[1] / (2 * moves[2]))
    assert Kept(place[1], place[0]).owed(place[2]) == 0.0
    assert kept.owed(place[3]._replace(weight=1e-6)) == 2.5
    assert kept.owed(place[3]._replace(weight=0.0)) == 0.0


def test_where_the_length_is_not_known_kept_steps_are_evenly_far() -> None:
    timeline, kept, found = Timeline(None, Hold(every=5, start=0.0)), None, []
    for number in range(20):
        now = Place(number, float(number))
        if timeline.step(now, kept).keeps:
            kept = Kept(now)
            found.append(number)
    assert found == [0, 5, 10, 15]


# Holding by a tolerance.


def drawn(hold: Hold, total: int, bend: float | None) -> list[str]:
    """The kinds of steps if every kept step measures this bend."""
    timeline, kept, kinds = Timeline(None, hold), None, []
    for now in places(total):
        step = timeline.step(now, kept)
        kinds.append(step.kind)
        if step.keeps:
            kept = Kept(now, kept.last if kept else None, bend)
    return kinds


def test_nothing_is_held_before_an_error_is_known() -> None:
    assert HELD not in drawn(Hold(start=0.0), 20, None)


@pytest.mark.parametrize("bend", [math.nan, math.inf])
@pytest.mark.parametrize("hold", [Hold(start=0.0), Hold(every=5, start=0.0)], ids=["tolerance", "every"])
def test_nothing_is_held_by_an_error_that_is_none(hold: Hold, bend: float) -> None:
    assert HELD not in drawn(hold, 20, bend)


def test_straight_residuals_are_held_to_the_end() -> None:
    kinds = drawn(Hold(start=0.0), 20, 0.0)
    assert kinds[:2] == [FULL, FULL]
    assert kinds[-1] == FULL
    assert kinds.count(FULL) <= 8


@settings(max_examples=100, deadline=None)
@given(total=st.integers(4, 60), bend=st.floats(0.01, 10.0), tolerance=st.floats(0.01, 1.0), times=st.floats(1.0, 5.0))
def test_a_larger_tolerance_never_runs_more_steps(total: int, bend: float, tolerance: float, times: float) -> None:
    small, large = (drawn(Hold(tolerance=each), total, bend).count(FULL) for each in (tolerance, tolerance * times))
    # One more step may run if a kept step lies closer to the end.
    assert large <= small + 1


def test_full_steps_depend_on_the_schedule_more_than_on_how_many_steps_it_has() -> None:
    counts = [drawn(Hold(tolerance=0.2), total, 1.0).count(FULL) for total in (28, 56, 112)]
    assert counts[2] < 2 * counts[0]


def test_an_error_tells_how_much_residuals_bend() -> None:
    """On parabolas the bend is exact: from one error it predicts every other."""
    first, second, third, fourth = (Place(number, at) for number, at in enumerate((0.0, 1.0, 1.5, 3.5)))

    def error(kept: Kept, now: Place) -> float:
        assert kept.before is not None
        slope = (kept.last.at**2 - kept.before.at**2) / (kept.last.at - kept.before.at)
        return abs(kept.last.at**2 + slope * (now.at - kept.last.at) - now.at**2)

    seen = Kept(second, first)
    bend = bend_of(error(seen, third), third, seen)
    later = Kept(third, second, bend)
    assert later.error_at(fourth) == pytest.approx(error(later, fourth))


def test_a_line_from_far_away_tells_nothing() -> None:
    near, far = Place(1, 100.0), Place(0, 0.0)
    assert bend_of(0.1, Place(2, 101.0), Kept(near, far)) is None
    assert bend_of(0.1, near, Kept(near, far)) is None
    assert bend_of(0.1, Place(2, 200.0), Kept(near)) is None


@given(merge=st.none() | merges, total=totals)
def test_hold_every_step_holds_nothing(merge: Merge | None, total: int) -> None:
    timeline = Timeline(merge, Hold(every=1))
    assert timeline.steps(total) == Timeline(merge, None).steps(total)
    assert not timeline.needs_length or (merge is not None and merge.windowed)


def test_a_call_that_may_not_be_held_runs_and_is_not_kept() -> None:
    timeline = Timeline(None, Hold(every=3, start=0.0))
    for now in (Place(0, 0.0), Place(1, 0.1)):
        assert timeline.step(now, Kept(Place(0, 0.0)), may_hold=False) == Step(FULL)


@settings(max_examples=200, deadline=None)
@given(merge=merges, hold=st.none() | holds | tolerances, total=totals)
def test_maps_are_renewed_when_due_and_steps_that_do_not_run_renew_nothing(
    merge: Merge, hold: Hold | None, total: int
) -> None:
    steps = Timeline(merge, hold).steps(total)
    selected = weighed = None
    for number, step in enumerate(steps):
        if step.kind != MERGED:
            continue
        if selected is None or number - selected >= merge.destinations_every:
            assert step.maps == "select"
        else:
            assert step.maps == ("reweigh" if number - weighed >= merge.weights_every else "reuse")
        selected = number if step.maps == "select" else selected
        weighed = weighed if step.maps == "reuse" else number


@pytest.mark.parametrize(
    ("renews", "maps"),
    [
        (DUE, ["select", "reuse", "reweigh", "select", "reuse", "reweigh"]),
        (ONCE, ["select", *["reuse"] * 5]),
        (ALWAYS, ["select"] * 6),
    ],
)
def test_when_maps_are_made(renews: str, maps: list[str]) -> None:
    timeline = Timeline(Merge(destinations_every=3, weights_every=2), None, renews)
    assert [step.maps for step in timeline.steps(6)] == maps


@pytest.mark.parametrize(
    ("step", "selected", "weighed", "maps"),
    [(0, None, None, "select"), (4, 0, 0, "reuse"), (5, 0, 0, "reweigh"), (9, 0, 5, "reuse"), (10, 0, 5, "select")],
)
def test_what_is_due_at_a_step(step: int, selected: int | None, weighed: int | None, maps: str) -> None:
    assert Timeline(Merge(), None).maps(step, selected, weighed) == maps


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (Step(FULL), "full"),
        (Step(FULL, keeps=True), "full, kept"),
        (Step(MERGED, maps="select"), "merged, select"),
        (Step(MERGED, keeps=True, maps="reuse"), "merged, reuse, kept"),
        (Step(HELD), "held"),
    ],
)
def test_a_step_in_words(step: Step, told: str) -> None:
    assert str(step) == told


@pytest.mark.parametrize(("merge", "hold", "needed"), [(Merge(), None, False), (Merge(stop=0.5), None, True)])
def test_the_length_is_needed_for_windows_only(merge: Merge, hold: Hold | None, needed: bool) -> None:
    assert Timeline(merge, hold).needs_length == needed
    assert Timeline(merge, Hold(every=3, start=0.0)).needs_length == needed
    assert Timeline(merge, Hold(every=3, start=0.2)).needs_length


# Pictures follow the timeline.

WAYS: dict[str, list[Any]] = {
    "merged": [Merge(regions="tile:2x2", destinations_every=4, weights_every=3)],
    "merged in a window": [Merge(regions="tile:2x2", start=0.25, stop=0.8)],
    "held": [Hold(every=3)],
    "blocks held in a window": [Hold(every=2, start=0.0, stop=0.7, what="blocks")],
    "both": [Merge(regions="tile:2x2", stop=0.6, destinations_every=4, weights_every=2), Hold(every=2)],
    "both with one map": [Merge(method="pool"), Hold(every=4, start=0.0)],
}


@pytest.mark.parametrize("kind", ["sdxl", "sd3", "flux"])
@pytest.mark.parametrize("techniques", WAYS.values(), ids=WAYS)
def test_a_picture_takes_the_steps_of_its_timeline(kind: str, techniques: list[Any]) -> None:
    pipe = tiny.build(kind)
    plan = tokenmerge.plan(pipe, techniques, height=64, width=64, steps=12)
    tokenmerge.apply(pipe, techniques)
    denoiser = denoiser_of(pipe)
    applied, took = vars(denoiser)[APPLIED], []

    def see(*_: Any) -> None:
        step = applied.state.step
        maps = {group._due.maps for group in applied.merging.groups} if step.kind == MERGED else {""}
        took.append(step._replace(maps=maps.pop()))
        assert not maps, "groups differ"

    denoiser.register_forward_pre_hook(see)
    tiny.draw(pipe, steps=12)
    merge = next((each for each in techniques if isinstance(each, Merge)), None)
    hold = next((each for each in techniques if isinstance(each, Hold)), None)
    timeline = Timeline(merge, hold, method_for(merge).RENEWS if merge else DUE)
    expected = timeline.steps(12, noise_levels(pipe.scheduler))
    assert took == expected
    assert tokenmerge.summary(pipe).steps == Counter(step.kind for step in expected)
    assert list(plan.timeline) == timeline.steps(12, planned_levels(pipe.scheduler, 12))

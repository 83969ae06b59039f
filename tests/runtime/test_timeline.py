"""The timeline: the kind of every step from the techniques and the number of steps; and that steps then are that."""

from __future__ import annotations

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
from tokenmerge.runtime.state import APPLIED
from tokenmerge.runtime.timeline import ALWAYS, DUE, FULL, HELD, MERGED, ONCE, Place, Step, Timeline

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


def inside(technique: Merge | Hold | None, number: int, total: int) -> bool:
    return technique is not None and technique.start <= number / total < technique.stop


@settings(max_examples=300, deadline=None)
@given(merge=st.none() | merges, hold=st.none() | holds, total=totals, renews=renewals)
def test_what_every_step_is(merge: Merge | None, hold: Hold | None, total: int, renews: str) -> None:
    steps = Timeline(merge, hold, renews).steps(total)
    assert len(steps) == total
    for number, step in enumerate(steps):
        # Merge decides how a step runs, Hold whether it does.
        runs = MERGED if inside(merge, number, total) else FULL
        assert step.kind in ((runs, HELD) if inside(hold, number, total) else (runs,))
        assert bool(step.maps) == (step.kind == MERGED)
        # Every step that runs in Hold's window is kept, and no other.
        assert step.keeps == (inside(hold, number, total) and step.kind != HELD)


@settings(max_examples=200, deadline=None)
@given(merge=merges, hold=holds, total=totals)
def test_neither_technique_moves_the_steps_of_the_other(merge: Merge, hold: Hold, total: int) -> None:
    both = Timeline(merge, hold).steps(total)
    held = Timeline(None, hold).steps(total)
    assert [step.kind == HELD for step in both] == [step.kind == HELD for step in held]
    assert [step.keeps for step in both] == [step.keeps for step in held]
    merged = Timeline(merge, None).steps(total)
    assert all(one.kind == other.kind for one, other in zip(both, merged, strict=True) if one.kind != HELD)


@settings(max_examples=200, deadline=None)
@given(hold=holds, total=totals)
def test_kept_steps_lie_closer_at_first(hold: Hold, total: int) -> None:
    steps = Timeline(None, hold).steps(total)
    window = [number for number in range(total) if inside(hold, number, total)]
    kept = [number for number, step in enumerate(steps) if step.keeps]
    # A residual is there before anything is held.
    assert kept[:1] == window[:1]
    distances = [later - earlier for earlier, later in pairwise(kept)]
    assert distances == sorted(distances), "they must not shrink"
    assert all(2 <= distance <= max(2, 1.5 * hold.every + 1) for distance in distances)


@pytest.mark.parametrize(
    ("every", "total", "start", "kept"),
    [
        (5, 28, 0.2, [6, 9, 13, 18, 24]),
        (3, 28, 0.2, [6, 8, 10, 13, 16, 19, 23, 27]),
        (5, 50, 0.2, [10, 13, 16, 20, 24, 29, 34, 40, 47]),
        (3, 30, 0.2, [6, 8, 10, 12, 15, 18, 21, 25, 29]),
        (2, 6, 0.0, [0, 2, 4]),
    ],
)
def test_which_steps_are_kept(every: int, total: int, start: float, kept: list[int]) -> None:
    steps = Timeline(None, Hold(every=every, start=start)).steps(total)
    assert [number for number, step in enumerate(steps) if step.keeps] == kept


def test_where_the_length_is_not_known_kept_steps_are_evenly_far() -> None:
    timeline, kept, found = Timeline(None, Hold(every=5, start=0.0)), None, []
    for number in range(20):
        now = Place(number, None)
        if timeline.step(now, kept).keeps:
            kept = now
            found.append(number)
    assert found == [0, 5, 10, 15]


@given(merge=st.none() | merges, total=totals)
def test_hold_every_step_holds_nothing(merge: Merge | None, total: int) -> None:
    timeline = Timeline(merge, Hold(every=1))
    assert timeline.steps(total) == Timeline(merge, None).steps(total)
    assert not timeline.needs_length or (merge is not None and merge.windowed)


def test_a_call_that_may_not_be_held_runs_and_is_not_kept() -> None:
    timeline = Timeline(None, Hold(start=0.0))
    for now in (Place(0, 0.0), Place(1, 0.1)):
        assert timeline.step(now, Place(0, 0.0), may_hold=False) == Step(FULL)


@settings(max_examples=200, deadline=None)
@given(merge=merges, hold=st.none() | holds, total=totals)
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
    assert Timeline(merge, Hold(start=0.0)).needs_length == needed
    assert Timeline(merge, Hold(start=0.2)).needs_length


# That pictures are drawn so.

WAYS: dict[str, list[Any]] = {
    "merged": [Merge(regions="tile:2x2", destinations_every=4, weights_every=3)],
    "merged in a window": [Merge(regions="tile:2x2", start=0.25, stop=0.8)],
    "held": [Hold(every=3)],
    "blocks held in a window": [Hold(every=2, start=0.0, stop=0.7, what="blocks")],
    "both": [Merge(regions="tile:2x2", stop=0.6, destinations_every=4, weights_every=2), Hold(every=2)],
    "both with one map": [Merge(method="pool"), Hold(every=4, start=0.1)],
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
    expected = Timeline(merge, hold, method_for(merge).RENEWS if merge else DUE).steps(12)
    assert took == expected == list(plan.timeline)
    assert tokenmerge.summary(pipe).steps == Counter(step.kind for step in expected) == plan.steps

"""Hosts other than diffusers: they report the noise of every evaluation and batch conditions as they like."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from tokenmerge import Hold, Merge
from tokenmerge.applying import hosted, hosted_plan
from tokenmerge.config import Techniques
from tokenmerge.families import family_of
from tokenmerge.families.base import Calls
from tokenmerge.families.calls import DenoiserCall
from tokenmerge.planning import Summary
from tokenmerge.runtime.levels import even_levels
from tokenmerge.runtime.sigmas import SigmaFollower
from tokenmerge.runtime.state import APPLIED

STEPS = 8
# The conditions in each call of a step.
JOINED, SPLIT, TURNED, TWICE = (("a", "b"),), (("a",), ("b",)), (("b",), ("a",)), (("a", "b"), ("a",))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return tiny.denoiser_of(tiny.build("flux"))


def driven(
    model: Any, technique: Hold | Merge | tuple[Merge, Hold] | None, orders: Sequence[Any]
) -> tuple[list[dict[str, Tensor]], Summary | None]:
    """The outputs of each condition and the guided picture at every step. orders: the calls of each step."""
    family = family_of(model)
    asked: list[tuple[str, ...]] = []

    class HostedCalls(Calls):
        def read(self, *call: Any) -> DenoiserCall:
            return family.calls.read(*call)._replace(conditions=asked[-1])

    table = replace(family, calls=HostedCalls())
    example = family.example(model, 2, 16, 16)
    levels = even_levels(STEPS)
    follower = SigmaFollower(levels)

    def call(conditions: tuple[str, ...], step: int) -> dict[str, Tensor]:
        asked.append(conditions)
        rows = ["ab".index(each) for each in conditions]
        given = {name: value if name.endswith("_ids") else value[rows] for name, value in example.items()}
        given["timestep"] = torch.full((len(rows),), 1.0 - step / STEPS)
        with torch.no_grad():
            return dict(zip(conditions, model(**given, return_dict=False)[0], strict=True))

    def steps() -> list[dict[str, Tensor]]:
        outputs = []
        for step, calls in enumerate(orders):
            found: dict[str, Tensor] = {}

            def run(calls: Any = calls, step: int = step, found: dict[str, Tensor] = found) -> Tensor:
                # If a condition comes twice, its first output counts.
                for each in reversed([call(conditions, step) for conditions in calls]):
                    found.update(each)
                return torch.stack([3.0 * found["a"] - 2.0 * found.get("b", found["a"])])

            picture = follower.evaluate(levels[step], torch.zeros(1, *example["hidden_states"].shape[1:]), run)
            outputs.append({**found, "picture": picture})
        return outputs

    if technique is None:
        return steps(), None
    techniques = technique if isinstance(technique, tuple) else (technique,)
    plan = hosted_plan(model, table, Techniques.of(*techniques), lambda: False)
    with hosted(model, table, plan, follower) as told:
        return steps(), told()


def check_same(one: Sequence[dict[str, Tensor]], other: Sequence[dict[str, Tensor]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        for name, each in mine.items():
            torch.testing.assert_close(each, theirs[name], atol=1e-5, rtol=1e-4)


HOLD = Hold(every=2, start=0.0)


def test_conditions_may_be_split_and_joined_between_any_steps(model: Any) -> None:
    plain, _ = driven(model, None, [JOINED] * STEPS)
    joined, told = driven(model, HOLD, [JOINED] * STEPS)
    assert told is not None
    assert told.steps["held"] >= 3
    assert any(not torch.allclose(one["a"], other["a"], atol=1e-4) for one, other in zip(joined, plain, strict=True))
    for orders in ([SPLIT] * STEPS, [JOINED, SPLIT, TURNED] * 2 + [JOINED, TURNED], [SPLIT, JOINED] * (STEPS // 2)):
        outputs, mine = driven(model, HOLD, orders)
        assert mine is not None
        assert mine.steps == told.steps
        check_same(outputs, joined)


def test_a_condition_that_comes_twice_has_two_residuals(model: Any) -> None:
    once, told = driven(model, HOLD, [JOINED] * STEPS)
    twice, mine = driven(model, HOLD, [TWICE] * STEPS)
    assert told is not None
    assert mine is not None
    assert mine.steps == told.steps
    check_same(once, twice)


def test_a_condition_that_comes_late_runs_until_it_is_known(model: Any) -> None:
    plain, _ = driven(model, None, [JOINED] * STEPS)
    late, told = driven(model, HOLD, [(("a",),)] * 3 + [JOINED] * (STEPS - 3))
    check_same([{"b": late[3]["b"]}], [plain[3]])
    assert told is not None
    assert told.steps["held"] >= 2


def test_a_condition_that_pauses_has_missed_nothing(model: Any) -> None:
    """Windows of a video pause like this: they differ from step to step."""
    plain, _ = driven(model, None, [JOINED] * STEPS)
    paused, _ = driven(model, HOLD, [JOINED] * 3 + [(("a",),)] * 3 + [JOINED] * (STEPS - 6))
    check_same([{"b": paused[6]["b"]}], [plain[6]])


PREDICTION = Hold(every=2, start=0.0, what="prediction")


def test_a_held_prediction_asks_the_model_nothing(model: Any) -> None:
    """It lies on the line through the last two guided predictions, or repeats the last if the slope proved wrong."""
    plain, _ = driven(model, None, [JOINED] * STEPS)
    held, told = driven(model, PREDICTION, [JOINED] * STEPS)
    assert told is not None
    asked = ["a" in each for each in held]
    assert told.steps == {"full": asked.count(True), "held": asked.count(False)} == {"full": 4, "held": 4}
    roots = [level**0.5 for level in even_levels(STEPS)]
    full: list[int] = []
    moved = 0
    for number, each in enumerate(held):
        if asked[number]:
            full.append(number)
            # The samples in this test do not depend on earlier held steps.
            assert torch.equal(each["picture"], plain[number]["picture"])
            continue
        last = held[full[-1]]["picture"]
        line = last
        if len(full) > 1:
            slope = (last - held[full[-2]]["picture"]) / (roots[full[-1]] - roots[full[-2]])
            line = last + slope * (roots[number] - roots[full[-1]])
        moved += not torch.equal(each["picture"], last)
        assert torch.equal(each["picture"], last) or torch.allclose(each["picture"], line, atol=1e-4)
    assert moved


def test_predictions_are_held_however_a_host_joins_conditions(model: Any) -> None:
    joined, told = driven(model, PREDICTION, [JOINED] * STEPS)
    assert told is not None
    for orders in ([SPLIT] * STEPS, [JOINED, SPLIT, TURNED] * 2 + [JOINED, TURNED], [SPLIT, JOINED] * (STEPS // 2)):
        outputs, mine = driven(model, PREDICTION, orders)
        assert mine is not None
        assert mine.steps == told.steps
        pictures, others = ([{"picture": each["picture"]} for each in both] for both in (outputs, joined))
        check_same(pictures, others)


@pytest.mark.parametrize("renews", [True, False])
def test_steps_that_run_run_merged_beside_a_held_prediction(model: Any, renews: bool) -> None:
    """Hold takes no slope across a renewed map."""
    every = 1 if renews else STEPS
    merge = Merge(ratio=0.5, regions="tile:2x2", destinations_every=every, weights_every=every)
    both, told = driven(model, (merge, PREDICTION), [JOINED] * STEPS)
    assert told is not None
    assert told.steps == {"merged": 4, "held": 4}
    held = [number for number, each in enumerate(both) if "a" not in each]
    stays = [torch.equal(both[number]["picture"], both[number - 1]["picture"]) for number in held]
    assert all(stays) == renews


@pytest.mark.parametrize("technique", [HOLD, PREDICTION], ids=["blocks", "prediction"])
def test_what_is_held_is_freed_with_the_picture(model: Any, technique: Hold) -> None:
    """Without waiting for the garbage collector: GPU memory is scarce."""
    follower = SigmaFollower(even_levels(STEPS))
    plan = hosted_plan(model, family_of(model), Techniques.of(technique), lambda: False)
    gc.collect()
    gc.disable()
    try:
        with hosted(model, family_of(model), plan, follower):
            state = weakref.ref(vars(model)[APPLIED].state)
            follower.evaluate(1.0, torch.zeros(1, 1), lambda: torch.zeros(1, 1))
            assert state() is not None
        assert state() is None
    finally:
        gc.enable()


def test_auto_holds_predictions_under_noise_where_the_host_gives_them(model: Any) -> None:
    family = family_of(model)
    for noisy, predicts, what in ((True, True, "prediction"), (True, False, "blocks"), (False, True, "blocks")):
        plan = hosted_plan(model, family, Techniques.of(Hold()), lambda n=noisy: n, lambda p=predicts: p)
        assert plan.techniques.hold is not None
        assert plan.techniques.hold.what == what


def test_the_model_is_left_as_it_was(model: Any) -> None:
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    first, _ = driven(model, None, [JOINED] * 2)
    driven(model, HOLD, [JOINED] * STEPS)
    driven(model, PREDICTION, [JOINED] * STEPS)
    driven(model, Merge(), [SPLIT] * 2)
    again, _ = driven(model, None, [JOINED] * 2)
    assert all(torch.equal(one["a"], other["a"]) for one, other in zip(first, again, strict=True))
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_solver_may_choose_its_own_steps() -> None:
    follower = SigmaFollower([4.0, 2.0, 1.0])
    places = []
    for level in (4.0, 3.0, 1.5, 1.0):
        follower.evaluate(level, torch.zeros(1, 1), lambda: torch.zeros(1, 1))
        places.append(follower.clock.place())
    assert [place.number for place in places] == [0, 1, 2, 3]
    assert follower.clock.total == 4
    assert [place.last for place in places] == [False, False, False, True]
    assert [place.at for place in places] == pytest.approx([-(level**0.5) for level in (4.0, 3.0, 1.5, 1.0)])

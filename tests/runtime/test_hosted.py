"""A host other than diffusers: it tells the noise of every evaluation, and joins conditions as it likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from tokenmerge import Hold, Merge
from tokenmerge.api import hosted, hosted_plan
from tokenmerge.config import Techniques
from tokenmerge.families import family_of
from tokenmerge.planning import Summary
from tokenmerge.runtime.levels import even_levels
from tokenmerge.runtime.sigmas import SigmaFollower

STEPS = 8
# Which conditions each call of a step has.
JOINED, SPLIT, TURNED, TWICE = (("a", "b"),), (("a",), ("b",)), (("b",), ("a",)), (("a", "b"), ("a",))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return tiny.denoiser_of(tiny.build("flux"))


def driven(
    model: Any, technique: Hold | Merge | None, orders: Sequence[Any]
) -> tuple[list[dict[str, Tensor]], Summary | None]:
    """What every condition gives at every step; orders: of calls, step by step."""
    family = family_of(model)
    asked: list[tuple[str, ...]] = []
    table = replace(family, read=lambda *call: family.read(*call)._replace(conditions=asked[-1]))
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
            follower.evaluate(levels[step])
            # Of a condition that comes twice the first time counts.
            found = [call(conditions, step) for conditions in calls]
            outputs.append({name: each for one in reversed(found) for name, each in one.items()})
        return outputs

    if technique is None:
        return steps(), None
    plan = hosted_plan(model, table, Techniques.of(technique), lambda: False)
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


def test_the_model_is_left_as_it_was(model: Any) -> None:
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    first, _ = driven(model, None, [JOINED] * 2)
    driven(model, HOLD, [JOINED] * STEPS)
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
        follower.evaluate(level)
        places.append(follower.clock.place())
    assert [place.number for place in places] == [0, 1, 2, 3]
    assert follower.clock.total == 4
    assert [place.last for place in places] == [False, False, False, True]
    assert [place.at for place in places] == pytest.approx([-(level**0.5) for level in (4.0, 3.0, 1.5, 1.0)])

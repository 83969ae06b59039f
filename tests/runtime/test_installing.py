"""`apply` raises the compiler's recompile limit, a global setting; it is restored with the last model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.runtime import installing
from tokenmerge.runtime.installing import _GRAPHS, observe_calls

TECHNIQUES = [Merge(), Hold(every=3, start=0.2), [Merge(), Hold(every=3, start=0.2)]]


@pytest.fixture(autouse=True)
def _limit_of_eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    # Models of other tests may still be there.
    monkeypatch.setattr(installing._Limit, "users", 0)
    monkeypatch.setattr(installing._Limit, "before", None)
    with torch._dynamo.config.patch(recompile_limit=8):
        yield


def limit() -> int:
    return torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("technique", TECHNIQUES, ids=["merge", "hold", "both"])
def test_remove_gives_the_limit_back(technique: Any) -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), technique)
    assert limit() == _GRAPHS
    tokenmerge.apply(pipe, technique)
    assert limit() == _GRAPHS
    tokenmerge.remove(pipe)
    assert limit() == 8
    tokenmerge.remove(pipe)
    assert limit() == 8


def test_the_last_model_gives_it_back() -> None:
    one, other = (tokenmerge.apply(tiny.build("flux"), Merge()) for _ in range(2))
    tokenmerge.remove(one)
    assert limit() == _GRAPHS
    tokenmerge.remove(other)
    assert limit() == 8


def test_a_with_block_gives_it_back() -> None:
    pipe = tiny.build("sdxl")
    with tokenmerge.applied(pipe, Hold(every=3, start=0.2)):
        assert limit() == _GRAPHS
    assert limit() == 8


@pytest.mark.parametrize("technique", TECHNIQUES, ids=["merge", "hold", "both"])
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_model_that_is_deleted_gives_it_back(kind: str, technique: Any) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), technique)
    tiny.draw(pipe)
    del pipe
    gc.collect()
    assert limit() == 8


def test_an_apply_that_fails_gives_it_back() -> None:
    pipe = tiny.build("flux")
    with pytest.raises(TokenMergeError):
        tokenmerge.apply(pipe, Merge(method="todo", sites="component"))
    assert limit() == 8


@pytest.mark.parametrize("way", ["remove", "delete"])
def test_another_limit_that_was_set_since_is_left_alone(way: str) -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), Merge())
    torch._dynamo.config.recompile_limit = 100
    if way == "remove":
        tokenmerge.remove(pipe)
    del pipe
    gc.collect()
    assert limit() == 100
    # Later models respect it too.
    other = tokenmerge.apply(tiny.build("flux"), Merge())
    assert limit() == 100
    tokenmerge.remove(other)
    assert limit() == 100


def test_a_limit_that_is_higher_already_stays() -> None:
    torch._dynamo.config.recompile_limit = 500
    pipe = tokenmerge.apply(tiny.build("flux"), Merge())
    assert limit() == 500
    tokenmerge.remove(pipe)
    assert limit() == 500


def test_one_raised_after_a_higher_one_is_given_back_to_what_it_was() -> None:
    first = tokenmerge.apply(tiny.build("flux"), Merge())
    tokenmerge.remove(first)
    torch._dynamo.config.recompile_limit = 16
    second = tokenmerge.apply(tiny.build("flux"), Merge())
    assert limit() == _GRAPHS
    tokenmerge.remove(second)
    assert limit() == 16


def test_calls_are_observed_until_that_is_undone() -> None:
    module, seen = torch.nn.Linear(2, 2), []
    undo = observe_calls(
        module,
        lambda module, args, kwargs: seen.append(("before", len(args), sorted(kwargs))),
        lambda module, args, output: seen.append(("after", tuple(output.shape))),
    )
    module(input=torch.zeros(3, 2))
    with pytest.raises(RuntimeError):
        module(torch.zeros(3, 5))
    assert seen == [("before", 0, ["input"]), ("after", (3, 2)), ("before", 1, [])]
    undo()
    undo()
    module(torch.zeros(3, 2))
    assert len(seen) == 3

"""diffusers' context parallelism: two processes draw one picture over gloo (`tests/shards.py`)."""

from __future__ import annotations

import json
import multiprocessing
from functools import partial
from typing import Any

import pytest

import shards

Outcomes = list[dict[str, Any]]
# Pictures drawn by one process and by two differ by up to this much.
ROUNDING = 2e-6

# The server imports everything once; both processes are forked from it.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["shards"])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The results of all cases, one dict per process."""
    folder = tmp_path_factory.mktemp("shards")
    processes = [SERVER.Process(target=shards.main, args=(rank, folder)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=900)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def both(outcomes: Outcomes, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The results of one case in both processes."""
    found = [outcome[request.param] for outcome in outcomes]
    for each in found:
        assert "failed" not in each, each["failed"]
    return found


def of_case(*functions: Any) -> pytest.MarkDecorator:
    names = [name for name, case in shards.CASES.items() if getattr(case, "func", case) in functions]
    assert names
    return pytest.mark.parametrize("both", names, indirect=True)


@of_case(shards.picture)
def test_pictures_equal_those_of_one_process(both: list[dict[str, Any]]) -> None:
    for each in both:
        assert each["off"] < ROUNDING
        assert each["steps"] == each["alone"]["steps"]
        assert sum(each["steps"].values()) == shards.STEPS


@of_case(shards.picture)
def test_processes_decide_alike_and_as_one_would(both: list[dict[str, Any]]) -> None:
    one, other = both
    assert one["errors"] == other["errors"]
    assert one["drift"] == other["drift"]
    assert one["errors"] == pytest.approx(one["alone"]["errors"], rel=1e-5)
    assert one["drift"] == pytest.approx(one["alone"]["drift"], rel=1e-5)


@of_case(shards.picture)
def test_each_process_keeps_residuals_of_its_own_tokens(both: list[dict[str, Any]]) -> None:
    assert sum(each["bytes"] for each in both) == both[0]["alone"]["bytes"]


def test_some_steps_were_held_by_a_tolerance(outcomes: Outcomes) -> None:
    for name, case in shards.CASES.items():
        if isinstance(case, partial) and case.func is shards.picture and "hold" in case.args:
            assert outcomes[0][name]["steps"]["held"] >= 2
            assert len(outcomes[0][name]["errors"]) >= 3


@of_case(shards.without_a_table)
def test_without_a_table_the_same_is_held(both: list[dict[str, Any]]) -> None:
    for each in both:
        assert each["off"] < ROUNDING
        assert "3 of 3 blocks" in each["told"]
        assert each["told"] == each["alone"]


@of_case(shards.nonsense)
def test_nonsense_in_one_process_is_seen_by_both(both: list[dict[str, Any]]) -> None:
    one, other = both
    assert one == other
    assert one["nonsense"] == 1
    assert "held" in one["kinds"]
    assert one["kinds"][-2:] == ["full", "full"]


@of_case(shards.refused)
def test_what_needs_all_tokens_is_refused_and_leaves_nothing(both: list[dict[str, Any]]) -> None:
    for each in both:
        for error in each["errors"].values():
            assert error.startswith("context parallel splits the tokens of an image among 2 processes")
            assert error.endswith("or use Hold")
        assert each["same"]
        assert each["off"] == 0.0


@of_case(shards.refused_after)
def test_it_is_refused_too_where_it_was_applied_before(both: list[dict[str, Any]]) -> None:
    for each in both:
        assert each["error"].startswith("context parallel splits the tokens of an image among 2 processes")
        assert each["off"] < ROUNDING


@pytest.mark.parametrize(
    ("both", "told", "begin", "way_out"),
    [
        ("straddling tiles", "16 tiles of 16x1 on the 16x16", "0, 128", "use smaller regions, such as 'stripe', or"),
        (
            "straddling stripes",
            "7 stripes of 5 on the 7x5",
            "0, 18",
            "use an image size with a multiple of 2 tokens",
        ),
    ],
    indirect=["both"],
)
def test_regions_that_lie_in_two_parts_are_refused(
    both: list[dict[str, Any]], told: str, begin: str, way_out: str
) -> None:
    for each in both:
        assert each["error"].startswith(f"{told} token grid: some straddle the shards of two processes")
        assert f"which begin at tokens {begin}; {way_out}" in each["error"]
        assert each["error"].endswith(", or Hold")
        assert each["planned"] == each["error"]
        assert each["off"] == 0.0


@of_case(shards.removed)
def test_remove_is_exact(both: list[dict[str, Any]]) -> None:
    for each in both:
        assert each == {"same": True, "changed": True, "equal": True}


@of_case(shards.summed_up)
def test_what_is_told_is_true(both: list[dict[str, Any]]) -> None:
    for each in both:
        assert each["grid"] == "16x16"
        assert each["tokens"] == "128 -> 64"
        assert each["regions"] == "64 tiles of 2x2, 32 in this process"
        assert each["planned"] == 128
        assert "each process has only the map of its own tokens" in each["maps"]


@of_case(shards.compiled)
def test_blocks_are_compiled_once(both: list[dict[str, Any]]) -> None:
    for each in both:
        assert each["off"] < ROUNDING
        assert each["graphs"] > 0
        assert each["again"] == 0

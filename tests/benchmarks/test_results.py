"""Tables and plots are made from the result files, and every row names its techniques in a form that the commands
read."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest

from tokenmerge.config import Techniques
from tokenmerge.families import families
from tokenmerge.presets import from_data
from tokenmerge.tools.cli.main import parser
from tokenmerge.tools.paper.studies import STUDIES
from tokenmerge.tools.typed import read_configurations, read_typed

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
FILES = sorted(RESULTS.rglob("*.jsonl"))
BOUND = "lower-bound of "


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


OF_TECHNIQUES = [path for path in FILES if "techniques" in read(path)[0]]


def named(path: Path) -> str:
    return str(path.relative_to(RESULTS))


def names_of_studies() -> dict[str, Techniques]:
    """Techniques that the paper's studies give names of their own."""
    typed = [read_typed(text) for study in STUDIES for text in study.configurations]
    return {each.name: each.configuration.techniques for each in typed if each.name}


def test_there_are_results() -> None:
    assert len(FILES) > 30
    assert len(OF_TECHNIQUES) > 20
    assert not [named(path) for path in FILES if "config" in read(path)[0]]


@pytest.mark.parametrize("path", OF_TECHNIQUES, ids=named)
def test_labels_and_techniques_say_the_same(path: Path) -> None:
    own_names = names_of_studies() if path.parent.name == "reproduction" else {}
    for row in read(path):
        label = row["label"].removeprefix(BOUND)
        if label in own_names:
            meant, cache, schedule = own_names[label], None, None
        else:
            meant, cache, schedule = read_typed(label).configuration.what
        if row["label"].startswith(BOUND):
            assert meant.merge is not None
            meant = Techniques.of(meant.merge.replace(method="lower-bound"))
        # Fields newer than the row are missing from it, and have their defaults.
        told = from_data(row["techniques"]) if row["techniques"] else Techniques()
        assert told == meant, row["label"]
        # Rows of benchmarks have no `cache`.
        assert row.get("cache") == (cache.to_dict() if cache else None), row["label"]
        # Older results have no `schedule`.
        assert row.get("schedule") == (schedule.to_dict() if schedule else None), row["label"]


@pytest.mark.parametrize("path", OF_TECHNIQUES, ids=named)
def test_steps_are_of_the_kinds_that_a_technique_has(path: Path) -> None:
    for row in read(path):
        told = row.get("kinds", row.get("steps_by_phase"))
        if not told:
            continue
        kinds = {phase.removeprefix("first ").split(",")[0] for phase in told}
        there = {each["technique"] for each in row["techniques"]}
        assert ("merged" in kinds) == ("merge" in there), row["label"]
        assert ("held" in kinds) == ("hold" in there), row["label"]
        assert kinds <= {"full", "merged", "held", "skipped"}
        assert sum(told.values()) == row["steps"]


@pytest.mark.parametrize(("model", "preset"), [("tiny-flux", "dit"), ("tiny-sdxl", "unet")])
def test_fronts_are_lists_of_configurations(model: str, preset: str) -> None:
    """The commands read the argument files, which list everything in the results."""
    options = parser().parse_args(["eval", f"@{BENCHMARKS / 'fronts' / f'{model}.args'}"])
    assert (options.model, options.batch) == (model, 16)
    asked = read_configurations(options.techniques)
    assert len(asked) == len(options.techniques) + 1
    labels = {each.label for each in asked}
    assert {"toma:ratio=0.5", f"{preset}:ratio=0.5", "hold:every=3", f"{preset}:ratio=0.5 + hold:every=3"} <= labels
    # Every measured configuration is listed, and can be measured again.
    for path in (RESULTS / "fronts").glob(f"{model}-*.jsonl"):
        assert {row["label"] for row in read(path)} <= labels


@pytest.mark.parametrize("name", ["goals", "whole"])
def test_results_are_of_the_configurations_that_are_listed(name: str) -> None:
    options = parser().parse_args(["eval", f"@{BENCHMARKS / f'{name}.args'}"])
    rows = [row for row in read(RESULTS / f"{name}.jsonl") if row["techniques"]]
    runs = {(row["model"], row["steps"]) for row in rows}
    assert {model for model, _ in runs} == {"tiny-flux", "tiny-sdxl"}
    for run in runs:
        assert [row["label"] for row in rows if (row["model"], row["steps"]) == run] == options.techniques
    for row in rows:
        assert (row["size"], row["prompts"]) == ([*options.size], options.number)
        # Held steps cost a little. With a tolerance, steps differ by picture, and `kinds` counts those of one.
        assert "every" not in row["label"] or row["kinds"]["full"] / row["steps"] < row["work"] < 0.6
        assert row["worst"]["lpips"]["worst"] >= row["metrics"]["lpips"]["mean"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a script, which must succeed, in this process, where everything is already imported."""

    def run(script: str, *arguments: str) -> None:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        code = None
        try:
            runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        assert not code

    return run


def test_tables_are_those_of_the_result_files(run: Callable[..., None]) -> None:
    run("tables.py", "--check")


def test_every_result_file_is_told_of() -> None:
    documents = "\n".join(
        path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    )
    # The paper's own figures appear beside our measurements.
    expected = {named(path) for path in FILES} - {"reproduction/paper.jsonl"}
    assert [name for name in sorted(expected) if name not in documents] == []


def test_denoisers_that_are_said_to_have_a_table_have_one() -> None:
    rows = [row for row in read(RESULTS / "generic.jsonl") if row["outcome"] != "not tried"]
    tabled = tuple(family.denoiser for family in families())
    for row in rows:
        # A variant's label begins with the name of its class.
        kind = getattr(diffusers, row["class"].partition(" ")[0])
        assert row["table"] == issubclass(kind, tabled), row["class"]
    assert {each.__name__ for each in tabled} <= {row["class"] for row in rows}


def test_denoisers_are_tried_without_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tried = importlib.import_module("generic").tried("FluxTransformer2DModel")
    assert tried["runs"] == [["transformer_blocks.0", "single_transformer_blocks.2"]]
    assert tried["checks"] == {"plain": True, "again": True, "removed": True, "table": True}


def test_runs_that_wait_for_a_gpu_can_be_made(run: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    run("models.py", "--plan")
    told = capsys.readouterr().out
    for tokens in ("4096 -> 1024", "6889 -> 1743", "32760 -> 8736", "75600 -> 20160"):
        assert tokens in told
    # Hold leaves out a step even in klein's 4 steps.
    assert "Of 4 steps: 3 full, 1 held." in told
    assert all(f"{model}-random" in told for model in ("flux2-klein", "qwen", "z-image", "wan", "wan-1.3b"))


@pytest.mark.parametrize(("script", "folder"), [("figure5.py", "reproduction"), ("fronts.py", "fronts")])
def test_plots_can_be_drawn_anew(script: str, folder: str, tmp_path: Path, run: Callable[..., None]) -> None:
    run(script, "--to", str(tmp_path))
    drawn = {path.name for path in tmp_path.iterdir()}
    assert len(drawn) >= 2
    assert drawn <= {path.name for path in (ROOT / "docs" / folder).iterdir()}
    assert all(path.stat().st_size < 120_000 for path in tmp_path.iterdir())

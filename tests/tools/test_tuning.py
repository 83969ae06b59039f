"""`tokenmerge tune`: what is drawn, who goes on, what is chosen, and that interruptions change nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

import tokenmerge
from interrupts import interrupt
from judges import write_networks
from tokenmerge import MergeConfig, TokenMergeError
from tokenmerge.families import family_of
from tokenmerge.tools.loading import empty_denoiser, load_pipeline
from tokenmerge.presets import Defaults, load_preset
from tokenmerge.tools.cli.main import main
from tokenmerge.tools.evaluation.configurations import Configuration, read_configurations
from tokenmerge.tools.evaluation.prompts import read_prompts
from tokenmerge.tools.drawing.generate import Request, draw
from tokenmerge.tools.quality.metrics import BY_NAME
from tokenmerge.tools.quality.networks import Sources
from tokenmerge.tools.quality.statistics import Estimate
from tokenmerge.tools.tuning.goal import Budget, Point, SpeedUp, read_goal
from tokenmerge.tools.tuning.halving import front, layers, rung_sizes, survivors
from tokenmerge.tools.tuning.samples import shares
from tokenmerge.tools.tuning.search import Search, tune
from tokenmerge.tools.tuning.space import (
    AXES,
    FIXED,
    HELD_AXES,
    HELD_FIXED,
    STAGE_AXES,
    draw_candidates,
    fits_regions,
)

MSE = BY_NAME["mse"]
FAMILIES = {Defaults("dit-anchored"): "tiny-flux", Defaults("unet-anchored", "unet-hold"): "tiny-sdxl"}
ALWAYS = len(FIXED) + len(HELD_FIXED)
# Of any drift: the fastest is wanted.
BUDGET = Budget(MSE, 1e5)
# The fixed candidates and one that is drawn, in as many steps as it takes for all of them to merge in some.
SEARCH = Search(
    "tiny-flux",
    read_prompts(),
    BUDGET,
    candidates=ALWAYS + 1,
    rungs=2,
    number=1,
    steps=5,
    guidance=1.0,
    size="256x256",
    repeats=2,
    device="cpu",
)
COMMAND = ["tune", "--candidates", str(ALWAYS + 1), "--rungs", "2", "--number", "1", "--steps", "5"]
COMMAND += ["--guidance", "1", "--size", "256x256", "--repeats", "2", "--device", "cpu"]

# Started once with everything imported; children are copies of it, so that a start costs little.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tokenmerge.tools.tuning.search", "diffusers", "matplotlib.figure", __name__])


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that nobody disturbed, made once for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tuning"
    with FileLock(f"{out}.lock"):
        if not (out / "preset.yaml").exists():
            assert tune(SEARCH, out, resume=out.exists()).reached
    return out


def point(seconds: float, drift: float, name: str = "") -> Point:
    """A setting of a model that takes one second unmerged."""
    label = name or f"{seconds:g} s, {drift:g}"
    return Point(Configuration(label, MergeConfig()), seconds, 1.0 / seconds, Estimate(drift))


def labels(points: list[Point]) -> list[str]:
    return [item.configuration.label for item in points]


@pytest.mark.parametrize("defaults", FAMILIES)
def test_candidates_are_different_and_repeat_by_their_seed(defaults: Defaults) -> None:
    drawn = draw_candidates(defaults, 60, seed=3)
    assert drawn == draw_candidates(defaults, 60, seed=3)
    assert drawn[:20] == draw_candidates(defaults, 20, seed=3)
    assert len({item.config for item in drawn}) == len({item.folder for item in drawn}) == 60
    fixed = [load_preset(defaults.merging).replace(**changes) for changes in FIXED]
    for preset in dict.fromkeys(("hold", defaults.holding)):
        fixed += [load_preset(preset).replace(**changes) for changes in HELD_FIXED]
    assert [item.config for item in drawn[: len(fixed)]] == fixed
    assert drawn[len(fixed) :] != draw_candidates(defaults, 60, seed=4)[len(fixed) :]
    # What a table shows can be typed.
    typed = read_configurations([item.label for item in drawn], None, defaults)
    assert [item.config for item in typed[1:]] == [item.config for item in drawn]


@pytest.mark.parametrize(("defaults", "model"), FAMILIES.items())
def test_models_take_every_candidate(defaults: Defaults, model: str) -> None:
    denoiser, scale = empty_denoiser(model)
    assert family_of(denoiser).defaults == defaults
    for candidate in draw_candidates(defaults, 40, seed=0):
        plan = tokenmerge.plan(denoiser, candidate.config, height=256, width=256, vae_scale_factor=scale)
        assert any(not site.skipped for site in plan.sites)


@pytest.mark.parametrize("defaults", FAMILIES)
def test_no_candidate_is_without_meaning(defaults: Defaults) -> None:
    configs = [item.config for item in draw_candidates(defaults, 600, seed=1)]
    for config in configs:
        assert config.gap == "last" or config.schedule.anchor_every
        assert (config.unmerge == "pinv") == (config.temperature > 0.01)
        assert config.unmerge == "transpose" or config.merge == "mean"
        if config.regions == "tile:2x2":
            assert all((4 * ratio).is_integer() for ratio in config.ratios)
    # Of 600 every entry of every axis is drawn.
    for axes, holds, sites in ((AXES, False, "block"), (HELD_AXES, True, "block"), (STAGE_AXES, True, "stage")):
        drawn = [config for config in configs if (config.holds, config.sites) == (holds, sites)]
        for axis in axes.values() if drawn else ():
            for changes in axis:
                assert any(config.replace(**changes) == config for config in drawn), changes


def test_regions_that_cannot_remove_what_is_asked() -> None:
    assert not fits_regions(MergeConfig(ratio=0.375, regions="tile:2x2"))
    assert fits_regions(MergeConfig(ratio=0.375, regions="tile:4x4"))
    assert not fits_regions(MergeConfig(block_ratios=(0.25, 0.375), regions="tile:2x2"))


@pytest.mark.parametrize("count", [ALWAYS - 1, 1001])
def test_numbers_of_candidates_that_cannot_be(count: int) -> None:
    with pytest.raises(TokenMergeError, match=f"--candidates is {count}"):
        draw_candidates(Defaults("dit-anchored"), count, seed=0)


def dominates(first: Point, second: Point) -> bool:
    """Nowhere worse and somewhere better."""
    ours, theirs = (first.seconds, first.drift.mean), (second.seconds, second.drift.mean)
    return ours != theirs and ours[0] <= theirs[0] and ours[1] <= theirs[1]


@pytest.mark.parametrize("seed", range(20))
def test_a_front_is_what_no_point_dominates(seed: int) -> None:
    generator = Random(seed)
    points = [point(generator.randint(1, 6), generator.randint(1, 6), str(number)) for number in range(15)]
    expected = [one for one in points if not any(dominates(two, one) for two in points)]
    assert sorted(labels(front(points))) == sorted(labels(expected))


def test_layers_are_fronts_of_what_is_left() -> None:
    generator = Random(0)
    points = [point(generator.randint(1, 9), generator.randint(1, 9), str(number)) for number in range(40)]
    found = layers(points)
    assert sorted(labels([item for layer in found for item in layer])) == sorted(labels(points))
    for place, layer in enumerate(found):
        assert not any(dominates(one, two) for one in layer for two in layer)
        for deeper in (item for below in found[place + 1 :] for item in below):
            assert any(dominates(item, deeper) for item in layer)
    assert [item.seconds for item in front(points)] == sorted(item.seconds for item in found[0])


def test_the_better_half_goes_on() -> None:
    baseline = point(1, 0, "none")
    fast, middle, slow = point(0.4, 90, "fast"), point(0.6, 40, "middle"), point(0.9, 5, "slow")
    worse, useless = point(0.7, 60, "worse"), point(1.2, 3, "useless")
    points = [useless, worse, slow, middle, fast]
    within_50, thrice = Budget(MSE, 50), SpeedUp(MSE, 2.4)
    assert labels(survivors(points, baseline, within_50, 5)) == ["middle", "fast", "slow", "worse", "useless"]
    assert labels(survivors(points, baseline, thrice, 3)) == ["fast", "middle", "slow"]
    # Just above the budget is nearer to its line, but what would be chosen stays.
    above = point(0.5, 51, "above")
    assert labels(survivors([above, slow], baseline, within_50, 1)) == ["slow"]


def test_rungs_halve() -> None:
    assert rung_sizes(24, 3) == [24, 12, 6]
    assert rung_sizes(7, 4) == [7, 4, 2, 1]


def test_goals_choose() -> None:
    points = [point(0.5, 80), point(0.8, 20), point(0.9, 10), point(1.1, 1)]
    budget, wish = Budget(MSE, 20), SpeedUp(MSE, 1.2)
    assert budget.best_first(points) == [points[1], points[2]]
    assert wish.best_first(points) == [points[1], points[0]]
    assert budget.nearest(points) == wish.nearest(points) == points[1]
    # Slower than unmerged is within no budget, and nearest to none.
    assert not Budget(MSE, 5).best_first(points)
    assert Budget(MSE, 5).nearest(points) == points[2]
    assert Budget(MSE, 5).nearest(points[3:]) == points[3]
    assert SpeedUp(MSE, 3).nearest(points) == points[0]
    assert budget.bound == "MSE of 20 or less and a speed-up above 1x"
    assert budget.distance(points[0]) == pytest.approx(budget.distance(point(0.5, 5)))
    assert budget.distance(point(0.5, 0)) == float("inf")


def test_goals_as_typed(tmp_path: Path) -> None:
    sources = Sources(write_networks(tmp_path))
    assert read_goal("mse=50", None, None, sources) == Budget(MSE, 50)
    assert read_goal("50", None, "mse", sources) == Budget(MSE, 50)
    assert read_goal(None, 1.5, None, sources) == SpeedUp(BY_NAME["lpips"], 1.5)
    assert read_goal("0.1", None, None, sources).metric.name == "lpips"


@pytest.mark.parametrize("number", [1, 3, 5, 100])
def test_no_sample_comes_twice(number: int) -> None:
    prompts = [str(place) for place in range(number)]
    counts = (2, 4, 8, 16, 16)
    found = list(shares([*prompts, *prompts], counts, seed=7))
    samples = [(prompt, seed) for share in found for prompt in share.prompts for seed in share.seeds]
    assert len(samples) == len(set(samples))
    seen: set[str] = set()
    for share, count in zip(found, counts, strict=True):
        assert count <= share.count < count + number
        assert share.count == len(share.prompts) * len(share.seeds)
        assert share.fresh == seen.isdisjoint(share.prompts)
        seen |= set(share.prompts)
    assert found[0].prompts != tuple(prompts[:2]) or number < 5


def test_what_a_search_writes(finished: Path) -> None:
    found = json.loads((finished / "front.json").read_text())
    assert {path.name for path in finished.iterdir()} == {
        "front.json",
        "front.md",
        "front.png",
        "preset.yaml",
        "rungs",
    }
    assert [len(rung["points"]) for rung in found["rungs"]] == [7, 4]
    # The race is one of ways of merging, each with a drift of its own.
    lines = [json.loads(line) for line in (finished / "rungs" / "1" / "results.jsonl").read_text().splitlines()]
    # Of 5 steps start=0.2 leaves one whole, and one or two of the other four are anchors.
    assert [line["modes"].get("merged", 0) for line in lines[1:]] == [2, 2, 3, 5, 2, 2, 2]
    assert len({one["drift"]["mean"] for one in found["rungs"][0]["points"]} - {0.0}) == 7
    assert [len(rung["prompts"]) for rung in found["rungs"]] == [1, 2]
    last = found["rungs"][-1]["points"]
    undominated = [
        one
        for one in last
        if one["speed_up"] > 1
        and not any(
            two["seconds"] < one["seconds"] and two["drift"]["mean"] < one["drift"]["mean"]
            for two in last
            if two != one
        )
    ]
    assert {one["label"] for one in found["front"]} == {"none"} | {one["label"] for one in undominated}
    assert found["chosen"]["label"] == min(last, key=lambda one: one["seconds"])["label"]
    assert found["chosen"]["speed_up"] > 1
    assert Image.open(finished / "front.png").width > 600
    text = (finished / "front.md").read_text()
    (marked,) = [line for line in text.splitlines() if line.startswith("| * |")]
    assert marked.endswith(f"| {found['chosen']['label']} |")
    assert "4 prompts that the search had not seen" in text
    header = [line for line in (finished / "preset.yaml").read_text().splitlines() if line.startswith("#")]
    for words in ("MSE", "256x256 pixels", "5 steps", "tiny-flux"):
        assert any(words in line for line in header)


def test_a_preset_reproduces_its_drift(finished: Path) -> None:
    """By the pipeline itself, without the harness: the same prompts and seeds have the same MSE."""
    found = json.loads((finished / "front.json").read_text())
    pipe, defaults = load_pipeline("tiny-flux", torch.float32, torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    (held_out,) = found["held_out"]

    def pictures() -> Any:
        made = []
        for prompt in held_out["prompts"]:
            for seed in held_out["seeds"]:
                request = Request(prompt, 5, 256, 256, (), 1.0, defaults)
                made.append(np.asarray(draw(pipe, request, (seed,), 5, torch.device("cpu"))[0][0], dtype=np.float64))
        return np.stack(made)

    unmerged = pictures()
    tokenmerge.apply(pipe, preset=str(finished / "preset.yaml"))
    merged = pictures()
    assert ((unmerged - merged) ** 2).mean() == pytest.approx(found["chosen"]["drift"]["mean"], rel=1e-9)
    assert found["chosen"]["drift"]["mean"] > 1


def copy_of_times(finished: Path, out: Path) -> None:
    """Seconds as they were measured, with what says how, and nothing else: what is chosen depends on them."""
    for folder in (finished / "rungs").iterdir():
        shutil.copytree(folder / "timing", out / "rungs" / folder.name / "timing")
        shutil.copy(folder / "run.json", out / "rungs" / folder.name)


def work(out: Path) -> None:
    """What a child does."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    tune(SEARCH, out, resume=True)


def test_interruptions_change_nothing(finished: Path, tmp_path: Path) -> None:
    copy_of_times(finished, tmp_path)
    command = [sys.executable, "-m", "tokenmerge", *COMMAND, "--budget", "mse=1e5", "--resume", "--out", str(tmp_path)]
    printed = interrupt(command, lambda: any(tmp_path.glob("rungs/1/images/dit*/*.png")))
    assert f"tokenmerge: what was made is kept in {tmp_path}; go on with --resume\n" in printed
    assert "begins anew" not in printed
    for stage in ("rungs/2/images/*_*", "rungs/held-out-1/images/none"):
        child = SERVER.Process(target=work, args=(tmp_path,))
        child.start()
        while child.is_alive() and not list(tmp_path.glob(f"{stage}/*.png")):
            time.sleep(0.01)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert not (tmp_path / "preset.yaml").exists()
    tune(SEARCH, tmp_path, resume=True)
    for name in ("preset.yaml", "front.json", "front.md"):
        assert (tmp_path / name).read_text() == (finished / name).read_text()


def test_what_was_begun_goes_on_only_as_it_was(finished: Path) -> None:
    before = (finished / "preset.yaml").read_text()
    with pytest.raises(TokenMergeError, match="add --resume"):
        tune(SEARCH, finished)
    for changes, words in (
        ({"steps": 6}, "begun with steps 5, not 6"),
        ({"seed": 1}, "begun with --seed 0, not 1"),
        ({"number": 2}, "begun with --number 1, not 2"),
        ({"candidates": ALWAYS + 2}, f"begun with --candidates {ALWAYS + 1}, not {ALWAYS + 2}"),
    ):
        with pytest.raises(TokenMergeError, match=words):
            tune(replace(SEARCH, **changes), finished, resume=True)
    assert (finished / "preset.yaml").read_text() == before


def test_a_goal_out_of_reach_is_told_with_the_nearest(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rung is that of another goal: it measures all candidates for any."""
    shutil.copytree(finished / "rungs" / "1", tmp_path / "rungs" / "1")
    goal = ["--rungs", "1", "--speed-up", "50", "--metric", "mse"]
    assert main([*COMMAND, *goal, "--resume", "--json", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert not found["reached"]
    assert "begins anew" not in printed.err
    error = printed.err.splitlines()[-1]
    assert "nothing that was tried has a speed-up of 50x or more" in error
    assert found["chosen"]["label"] == max(found["rungs"][-1]["points"], key=lambda one: one["speed_up"])["label"]
    assert found["chosen"]["label"] in error
    assert not (tmp_path / "preset.yaml").exists()
    assert load_preset(str(tmp_path / "nearest.yaml")).to_dict() == found["chosen"]["config"]
    header = (tmp_path / "nearest.yaml").read_text()
    assert "# Not reached" in header
    assert f"# tokenmerge {' '.join([*COMMAND, *goal])}" in header


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "neither --budget nor --speed-up was given"),
        (["--budget", "mse=9", "--speed-up", "2"], "both --budget and --speed-up were given"),
        (["--budget", "mse=much"], "is not understood"),
        (["--budget", "mse=-1"], "must be positive"),
        (["--budget", "mse=nan"], "must be positive"),
        (["--budget", "ssim=0.9"], "choose from mse, lpips, dino"),
        (["--budget", "mse=9", "--metric", "lpips"], "leave one out"),
        (["--speed-up", "1", "--metric", "mse"], "must be above 1"),
        (["--speed-up", "2", "--metric", "dino", "--dino", "no/dino"], "or use --metric mse"),
        (["--budget", "dino=2", "--dino", "no/dino"], "or use --budget mse=100"),
        (["--budget", "mse=9", "--candidates", "5"], "is 5; it must be from 6, which are always tried, to 1000"),
        (["--budget", "mse=9", "--candidates", "0"], "is 0; it must be from 6, which are always tried, to 1000"),
        (["--budget", "mse=9", "--candidates", "6", "--rungs", "4"], "use fewer rungs"),
        (["--budget", "mse=9", "--rungs", "0"], "--rungs is 0"),
        (["--budget", "mse=9", "--rungs", "9"], "use fewer rungs"),
        (["--budget", "mse=9", "--repeats", "0"], "--repeats is 0"),
        (["--budget", "mse=9", "--model", "absent"], "'absent' is not bundled"),
        (["--budget", "mse=9", "--prompts", "absent.txt"], "cannot be read"),
        (["--budget", "mse=9", "--size", "70x70"], "multiples of"),
        (["--budget", "mse=9", "--size", "64x64", "--steps", "0"], "--steps is 0"),
        (["--budget", "mse=9", "--batch", "0"], "--batch is 0"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--device", "cpu", *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("tokenmerge: ")
    assert words in error
    assert not list(tmp_path.iterdir())


def test_to_go_on_with_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--budget", "mse=9", "--size", "70x70", "--resume", "--out", str(tmp_path / "out")]
    assert main(["tune", "--device", "cpu", *options]) == 2
    assert f"tokenmerge: {tmp_path / 'out'} holds nothing yet: begins anew\n" in capsys.readouterr().err


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TokenMergeError, match="one process"):
        tune(SEARCH, tmp_path)

"""`tokenmerge tune`: drawing candidates, survivors of a rung and the choice; interruptions change nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from interrupts import interrupt
from judges import write_networks
from PIL import Image

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.config import METHODS, Techniques
from tokenmerge.families import Family, denoiser_of
from tokenmerge.presets import read_file
from tokenmerge.tools.cli.main import main
from tokenmerge.tools.drawing.pictures import save_picture
from tokenmerge.tools.drawing.request import Request, draw, token_counts
from tokenmerge.tools.drawing.studio import Studio
from tokenmerge.tools.evaluation import run
from tokenmerge.tools.evaluation.prompts import read_prompts
from tokenmerge.tools.evaluation.run import Evaluation
from tokenmerge.tools.loading import load_pipeline, outline
from tokenmerge.tools.measure import counted_calls
from tokenmerge.tools.quality.metrics import BY_NAME
from tokenmerge.tools.quality.networks import Sources
from tokenmerge.tools.quality.statistics import Estimate
from tokenmerge.tools.tuning import report
from tokenmerge.tools.tuning.goal import Budget, Point, SpeedUp, read_goal
from tokenmerge.tools.tuning.halving import front, layers, rung_sizes, survivors
from tokenmerge.tools.tuning.rivals import read_rivals
from tokenmerge.tools.tuning.samples import shares
from tokenmerge.tools.tuning.search import Search, tune
from tokenmerge.tools.tuning.space import HOLD_AXES, MERGE_AXES, WHAT, draw_candidates, fits
from tokenmerge.tools.typed import Configuration, default_techniques, read_configurations, read_typed

MSE = BY_NAME["mse"]
MODELS = ("tiny-flux", "tiny-sdxl")
# Fixed candidates: two that merge, two that hold and two that do both.
ALWAYS = 6
# Any drift is allowed, so that the fastest point wins.
BUDGET = Budget(MSE, 1e5)
RIVALS = ("steps", "first-block:threshold=0.1")
# The fixed candidates and a drawn one; five steps are enough for the drawn one to hold some.
SEARCH = Search(
    model="tiny-flux",
    prompts=read_prompts(),
    goal=BUDGET,
    rivals=RIVALS,
    candidates=ALWAYS + 1,
    rungs=2,
    number=1,
    steps=5,
    guidance=1.0,
    size=(64, 64),
    repeats=1,
    device="cpu",
)
COMMAND = ["tune", "--candidates", str(ALWAYS + 1), "--rungs", "2", "--number", "1", "--steps", "5"]
COMMAND += ["--guidance", "1", "--size", "64x64", "--repeats", "1", "--device", "cpu", "--rivals", *RIVALS]

# Imports everything once; children fork from it and start fast.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tokenmerge.tools.tuning.search", "diffusers", "matplotlib.figure", __name__])


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def lap_by_work(evaluation: Evaluation) -> dict[str, Any]:
    """One second per billion operations: times that do not depend on the machine or its load."""
    studio = evaluation._studio
    with counted_calls(denoiser_of(studio.pipe)) as counter:
        studio.draw(evaluation.task.prompts[0], (0,))
    seconds = dict.fromkeys(("seconds", "denoiser_seconds"), counter.operations / 1e9)
    return {**seconds, "batch": 1, "peak_memory": None, "graphs": None, "tokens": token_counts(studio.pipe)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted search."""
    out = tmp_path_factory.mktemp("tuning")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluation, "_lap", lap_by_work)
        assert tune(SEARCH, out).reached
    return out


def point(seconds: float, drift: float, name: str = "") -> Point:
    """A point of a model whose plain picture takes one second."""
    label = name or f"{seconds:g} s, {drift:g}"
    return Point(Configuration(label, Techniques(Merge())), seconds, 1.0 / seconds, Estimate(drift))


def labels(points: list[Point]) -> list[str]:
    return [item.configuration.label for item in points]


def drawn(family: Family, count: int, seed: int, typed: tuple[str, ...] = ()) -> tuple[Configuration, ...]:
    return draw_candidates([read_typed(text) for text in typed or default_techniques(family)], family, count, seed)


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> Family:
    return outline(request.param).family


def test_candidates_are_different_and_repeat_by_their_seed(family: Family) -> None:
    found = drawn(family, 60, seed=3)
    assert found == drawn(family, 60, seed=3)
    assert found[:20] == drawn(family, 20, seed=3)
    assert len({item.techniques for item in found}) == len({item.folder for item in found}) == 60
    merging = family.merging
    assert [item.label for item in found[:ALWAYS]] == [
        merging,
        f"{merging}:ratio=0.75",
        "hold",
        "hold:tolerance=0.4",
        f"{merging} + hold",
        f"{merging}:ratio=0.75 + hold:tolerance=0.4",
    ]
    assert found[ALWAYS:] != drawn(family, 60, seed=4)[ALWAYS:]
    # Labels in tables can be typed again.
    typed = read_configurations([item.label for item in found])
    assert [item.techniques for item in typed[1:]] == [item.techniques for item in found]
    kinds = {(item.techniques.merge is None, item.techniques.hold is None) for item in found[ALWAYS:]}
    assert kinds == {(False, True), (True, False), (False, False)}


@pytest.mark.parametrize("model", MODELS)
def test_models_take_every_candidate(model: str) -> None:
    small = outline(model)
    for candidate in drawn(small.family, 40, seed=0):
        plan = tokenmerge.plan(
            small.denoiser, candidate.techniques, height=256, width=256, vae_scale_factor=small.scale
        )
        assert plan.merged_sites or plan.runs


def test_no_candidate_is_without_meaning(family: Family) -> None:
    found = [item.techniques for item in drawn(family, 600, seed=1)]
    for merge in (each.merge for each in found if each.merge is not None):
        assert (merge.unmerge == "pinv") == (merge.temperature > 0.01)
        if merge.regions == "tile:2x2":
            assert (4 * merge.ratio).is_integer()
    # 600 draws cover every entry of every axis.
    held = {**HOLD_AXES, **({"what": WHAT} if family.stages else {})}
    for place, axes in ((0, MERGE_AXES), (1, held)):
        there = [each[place] for each in found if each[place] is not None]
        for axis in axes.values():
            for changes in axis:
                assert any(each.replace(**changes) == each for each in there), changes
    if not family.stages:
        assert {each.hold.what for each in found if each.hold} == {"auto"}


@pytest.mark.parametrize("model", MODELS)
def test_rivals_are_all_that_the_model_can_have(model: str) -> None:
    studio = Studio(replace(SEARCH, model=model, steps=28))
    found, left_out = read_rivals(None, studio)
    caches = {"tiny-flux": ["first-block", "mag", "taylorseer", "cache-dit"], "tiny-sdxl": ["deepcache"]}[model]
    names = [each.rivals[0].name for each in found]
    assert names == [name for name in (*caches, "steps", "unipc", "dpm++") for _ in range(2)]
    assert set(left_out) == {"first-block", "mag", "taylorseer", "cache-dit", "deepcache"} - {*caches}
    assert found[-1].label == "none + dpm++:steps=9"
    assert read_rivals([each.label for each in found], studio) == (found, {})
    assert read_rivals(["none"], studio) == ((), {})


def test_a_rival_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmerge.tools.rivals.base.find_spec", lambda name: None)
    _, left_out = read_rivals(None, Studio(SEARCH))
    assert left_out["cache-dit"] == 'cache-dit needs a package that is missing: pip install "tokenmerge[rivals]"'
    assert left_out["deepcache"].startswith("DeepCache is for UNets")
    told = report.Outcome(BUDGET, (), (), "", left_out=left_out).rival_notes()
    assert f"Rivals left out: cache-dit: {left_out['cache-dit']}." in told


def test_a_search_whose_rivals_are_behind_says_so() -> None:
    ours, slower, faster = point(0.5, 10, "ours"), point(0.9, 9, "slower"), point(0.2, 11, "faster")
    rung = report.Rung(next(shares(["a"], [1], 0)), point(1, 0), (ours,), None, {})
    outcome = report.Outcome(Budget(MSE, 10), (rung,), (rung,), "", rivals=(slower, faster))
    assert outcome.ahead == []
    assert outcome.rival_notes() == ["No measured rival meets the goal better."]
    assert replace(outcome, goal=Budget(MSE, 11)).ahead == [faster]
    # If none of our points meets the goal, any rival that does is ahead.
    assert replace(outcome, goal=Budget(MSE, 9)).ahead == [slower]


def test_what_is_typed_stays_as_it_is(family: Family) -> None:
    typed = ("toma-tile:ratio=0.25,seed=3 + hold:every=4,start=0.1", "hold:start=0.3")
    found = drawn(family, 20, seed=0, typed=typed)
    assert {(item.techniques.merge is None) for item in found} == {True, False}
    for item in found:
        merge, hold = item.techniques
        if merge is not None:
            assert (merge.ratio, merge.seed, merge.sites) == (0.25, 3, "component")
            assert (hold.every, hold.start) == (4, 0.1)
            assert item.label.startswith("toma-tile:ratio=0.25,seed=3")
        else:
            assert hold.start == 0.3
    assert len({item.techniques.hold.every for item in found if item.techniques.merge is None}) > 1
    assert len({item.techniques.merge.regions for item in found if item.techniques.merge}) > 1


@pytest.mark.parametrize(
    ("typed", "count", "words"),
    [
        ((), ALWAYS - 1, f"--candidates is 5; it must be from {ALWAYS}, which are always tried, to 1000"),
        ((), 1001, "--candidates is 1001"),
        (("hold:every=3",), 900, "different ones exist; ask for fewer, or leave more fields of --techniques open"),
        (("none",), 10, "'none' holds no technique"),
        (("none + mag",), 10, "tune searches only techniques; leave out mag, or name it with --rivals"),
    ],
)
def test_candidates_that_cannot_be(typed: tuple[str, ...], count: int, words: str) -> None:
    with pytest.raises(TokenMergeError) as caught:
        drawn(outline("tiny-flux").family, count, seed=0, typed=typed)
    assert words in str(caught.value)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "todo"])
def test_no_candidate_has_what_its_method_does_not_read(method: str) -> None:
    """Planning would also refuse a ratio that the method cannot have."""
    asked = read_typed(f"{'unet' if method == 'toma' else method}:seed=0")
    found = draw_candidates([asked], outline("tiny-sdxl").family, 20, seed=0)
    for each in found:
        assert each.techniques.merge is not None
        tokenmerge.plan(tiny.sdxl_unet(), each.techniques, height=256, width=256, vae_scale_factor=8)


def test_ratios_that_cannot_be_had() -> None:
    assert not fits(Merge(ratio=0.375, regions="tile:2x2"))
    assert fits(Merge(ratio=0.375, regions="tile:4x4"))
    assert not fits(Merge(method="pool", ratio=0.25))
    assert fits(Merge(method="pool", ratio=0.875))


def dominates(first: Point, second: Point) -> bool:
    """Whether `first` is nowhere worse and somewhere better."""
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
    plain = point(1, 0, "none")
    fast, middle, slow = point(0.4, 90, "fast"), point(0.6, 40, "middle"), point(0.9, 5, "slow")
    worse, useless = point(0.7, 60, "worse"), point(1.2, 3, "useless")
    points = [useless, worse, slow, middle, fast]
    within_50, thrice = Budget(MSE, 50), SpeedUp(MSE, 2.4)
    assert labels(survivors(points, plain, within_50, 5)) == ["middle", "fast", "slow", "worse", "useless"]
    assert labels(survivors(points, plain, thrice, 3)) == ["fast", "middle", "slow"]
    # `above` lies nearer to the budget than `slow`, but only `slow` meets it and would be chosen.
    above = point(0.5, 51, "above")
    assert labels(survivors([above, slow], plain, within_50, 1)) == ["slow"]


def test_rungs_halve() -> None:
    assert rung_sizes(24, 3) == [24, 12, 6]
    assert rung_sizes(7, 4) == [7, 4, 2, 1]


def test_goals_choose() -> None:
    points = [point(0.5, 80), point(0.8, 20), point(0.9, 10), point(1.1, 1)]
    budget, wish = Budget(MSE, 20), SpeedUp(MSE, 1.2)
    assert budget.best_first(points) == [points[1], points[2]]
    assert wish.best_first(points) == [points[1], points[0]]
    assert budget.nearest(points) == wish.nearest(points) == points[1]
    # A point slower than the plain model meets no budget and is nearest only if it is alone.
    assert not Budget(MSE, 5).best_first(points)
    assert Budget(MSE, 5).nearest(points) == points[2]
    assert Budget(MSE, 5).nearest(points[3:]) == points[3]
    assert SpeedUp(MSE, 3).nearest(points) == points[0]
    assert budget.bound == "MSE of 20 or less and a speed-up above 1x"
    assert budget.distance(points[0]) == pytest.approx(budget.distance(point(0.5, 5)))
    assert budget.distance(point(0.5, 0)) == float("inf")


def test_goals_as_typed(tmp_path: Path) -> None:
    sources = Sources(write_networks(tmp_path))
    assert read_goal(("mse", 50.0), None, None, sources) == Budget(MSE, 50)
    assert read_goal((None, 50.0), None, "mse", sources) == Budget(MSE, 50)
    assert read_goal(None, 1.5, None, sources) == SpeedUp(BY_NAME["lpips"], 1.5)
    assert read_goal((None, 0.1), None, None, sources).metric.name == "lpips"


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
    # Merge and Hold really take part, so that drifts differ.
    lines = [json.loads(line) for line in (finished / "rungs" / "1" / "results.jsonl").read_text().splitlines()]
    kinds = [line["kinds"] for line in lines[1:]]
    assert kinds[:2] == [{"merged": 5}] * 2
    # A tolerance holds no step of so short a run.
    assert kinds[2:ALWAYS] == [*[{"full": 5}] * 2, *[{"merged": 5}] * 2]
    assert any("held" in kind for kind in kinds[ALWAYS:])
    assert len({one["drift"]["mean"] for one in found["rungs"][0]["points"]} - {0.0}) >= 3
    assert [len(rung["prompts"]) for rung in found["rungs"]] == [1, 2]
    last = found["rungs"][-1]["points"]
    places = {one["label"]: (one["seconds"], one["drift"]["mean"]) for one in last}
    places["none"] = (found["rungs"][-1]["plain"]["seconds"], 0.0)
    undominated = {
        label
        for label, one in places.items()
        if not any(two != one and two[0] <= one[0] and two[1] <= one[1] for two in places.values())
    }
    assert {one["label"] for one in found["front"]} == undominated
    told = ["none + steps:count=2", "none + steps:count=1", "none + first-block:threshold=0.1"]
    assert [one["label"] for one in found["rivals"]] == told
    assert min(one["drift"]["mean"] for one in found["rivals"] if one["schedule"]) > 0
    assert found["chosen"]["schedule"] is found["chosen"]["cache"] is None
    assert found["chosen"]["label"] in [one["label"] for one in last if one["seconds"] == min(places.values())[0]]
    assert found["chosen"]["speed_up"] > 1
    assert Image.open(finished / "front.png").width > 600
    text = (finished / "front.md").read_text()
    fastest = max(found["rivals"], key=lambda one: one["speed_up"])
    assert f"| {fastest['label']} |" in next(line for line in text.splitlines() if line.startswith("| rival |"))
    assert f"A rival is ahead: {fastest['label']}, MSE" in text
    assert "and of 3 rivals, on 2 prompts:" in text
    (marked,) = [line for line in text.splitlines() if line.startswith("| * |")]
    assert marked.endswith(f"| {found['chosen']['label']} |")
    assert "4 prompts that the search had not seen" in text
    header = [line for line in (finished / "preset.yaml").read_text().splitlines() if line.startswith("#")]
    for words in ("MSE", "64x64 pixels", "5 steps", "tiny-flux"):
        assert any(words in line for line in header)


def test_a_preset_reproduces_its_drift(finished: Path) -> None:
    """The pipeline alone, without the harness, gives the same MSE for the same prompts and seeds."""
    found = json.loads((finished / "front.json").read_text())
    pipe, defaults = load_pipeline("tiny-flux", torch.float32, torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    (held_out,) = found["held_out"]

    def pictures() -> Any:
        made = []
        for prompt in held_out["prompts"]:
            for seed in held_out["seeds"]:
                request = Request(prompt, 5, 64, 64, 1.0, defaults)
                made.append(np.asarray(draw(pipe, request, (seed,))[0][0], dtype=np.float64))
        return np.stack(made)

    plain = pictures()
    tokenmerge.apply(pipe, finished / "preset.yaml")
    assert ((plain - pictures()) ** 2).mean() == pytest.approx(found["chosen"]["drift"]["mean"], rel=1e-9)
    assert found["chosen"]["drift"]["mean"] > 1


@pytest.mark.parametrize(
    "techniques", [Techniques(Merge(ratio=0.25)), Techniques(hold=Hold()), Techniques(Merge(), Hold())]
)
@pytest.mark.parametrize("ending", [".yaml", ".json"])
def test_what_was_found_is_a_file_that_apply_reads(
    techniques: Techniques, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without PyYAML the file is JSON, which has no comments."""
    if ending == ".json":
        monkeypatch.setattr(report, "find_spec", lambda name: None)
    chosen = Point(Configuration("some", techniques), 0.5, 2.0, Estimate(1.0))
    monkeypatch.setattr(report.Outcome, "chosen", chosen)
    monkeypatch.setattr(report.Outcome, "findings", lambda self: ["Found\nso."])
    outcome = report.Outcome(BUDGET, (), (), "tokenmerge tune")
    assert outcome.file == f"preset{ending}"
    path = tmp_path / outcome.file
    path.write_text(report.preset_text(outcome))
    assert read_file(path) == techniques
    assert ("# Found so.\n# tokenmerge tune\n" in path.read_text()) == (ending == ".yaml")


def test_a_search_of_version_0_1_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "rungs" / "1").mkdir(parents=True)
    old = {"configurations": {"none": {"method": "none", "schedule": {}}}, "refused": {}, "environment": {}}
    (tmp_path / "rungs" / "1" / "run.json").write_text(json.dumps(old))
    with pytest.raises(TokenMergeError, match=r"holds an evaluation of tokenmerge 0\.1, .*; give another --out"):
        tune(SEARCH, tmp_path, resume=True)


def copy_of_times(finished: Path, out: Path) -> None:
    """Copy only the times and their settings: the choice depends on them, and a second search would measure others."""
    for folder in (finished / "rungs").iterdir():
        shutil.copytree(folder / "timing", out / "rungs" / folder.name / "timing")
        shutil.copy(folder / "run.json", out / "rungs" / folder.name)


def work(out: Path, last: str) -> None:
    """The work of a child process, which dies once it has written a picture that matches the pattern `last`."""
    os.environ["HF_HUB_OFFLINE"] = "1"

    def save(picture: Any, path: Path) -> None:
        save_picture(picture, path)
        if path.match(last):
            os.kill(os.getpid(), signal.SIGKILL)

    run.save_picture = save
    tune(SEARCH, out, resume=True)


def test_interruptions_change_nothing(finished: Path, tmp_path: Path) -> None:
    copy_of_times(finished, tmp_path)
    command = [sys.executable, "-m", "tokenmerge", *COMMAND, "--budget", "mse=1e5", "--resume", "--out", str(tmp_path)]
    printed = interrupt(command, lambda: any(tmp_path.glob("rungs/1/images/dit*/*.png")))
    assert f"tokenmerge: finished files are kept in {tmp_path}; continue with --resume\n" in printed
    assert "holds nothing yet" not in printed
    for last in ("rungs/2/images/*_*/*.png", "rungs/held-out-1/images/none/*.png"):
        child = SERVER.Process(target=work, args=(tmp_path, last))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert not (tmp_path / "preset.yaml").exists()
    tune(SEARCH, tmp_path, resume=True)
    for name in ("preset.yaml", "front.json", "front.md"):
        # Ignore commits: one may happen while tests run.
        first, second = (re.sub('"commit": ".*"', "", (out / name).read_text()) for out in (finished, tmp_path))
        assert first == second


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
    """The first rung of another goal is reused: it measures all candidates, whatever the goal."""
    shutil.copytree(finished / "rungs" / "1", tmp_path / "rungs" / "1")
    goal = ["--rungs", "1", "--speed-up", "50", "--metric", "mse"]
    assert main([*COMMAND, *goal, "--resume", "--json", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert not found["reached"]
    assert "holds nothing yet" not in printed.err
    error = printed.err.splitlines()[-1]
    assert "no candidate has a speed-up of 50x or more" in error
    assert found["chosen"]["label"] == max(found["rungs"][-1]["points"], key=lambda one: one["speed_up"])["label"]
    assert found["chosen"]["label"] in error
    assert not (tmp_path / "preset.yaml").exists()
    assert read_file(tmp_path / "nearest.yaml").to_list() == found["chosen"]["techniques"]
    header = (tmp_path / "nearest.yaml").read_text()
    assert "# Not reached" in header
    assert f"# tokenmerge {' '.join([*COMMAND, *goal])}" in header


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "one of the arguments --budget --speed-up is required"),
        (["--budget", "mse=9", "--speed-up", "2"], "--speed-up: not allowed with argument --budget"),
        (["--budget", "mse=much"], "--budget: 'much' is not a number"),
        (["--budget", "mse=-1"], "--budget: -1.0 is out of range; it must be above 0"),
        (["--budget", "mse=nan"], "--budget: nan is out of range"),
        (["--budget", "ssim=0.9"], "choose from mse, lpips, dino"),
        (["--budget", "mse=9", "--metric", "lpips"], "leave one out"),
        (["--speed-up", "1", "--metric", "mse"], "it must be above 1"),
        (["--speed-up", "2", "--metric", "dino", "--dino", "no/dino"], "or use --metric mse"),
        (["--budget", "dino=2", "--dino", "no/dino"], "or use --budget mse=100"),
        (["--budget", "mse=9", "--candidates", "5"], "is 5; it must be from 6, which are always tried, to 1000"),
        (["--budget", "mse=9", "--candidates", "0"], "--candidates: 0 is out of range"),
        (["--budget", "mse=9", "--candidates", "6", "--rungs", "4"], "use fewer rungs"),
        (["--budget", "mse=9", "--rungs", "0"], "--rungs: 0 is out of range"),
        (["--budget", "mse=9", "--rungs", "9"], "use fewer rungs"),
        (["--budget", "mse=9", "--repeats", "0"], "--repeats: 0 is out of range"),
        (["--budget", "mse=9", "--model", "absent"], "model 'absent' is unknown"),
        (["--budget", "mse=9", "--prompts", "absent.txt"], "cannot be read"),
        (["--budget", "mse=9", "--size", "70x70"], "multiples of"),
        (["--budget", "mse=9", "--techniques", "none + mag"], "tune searches only techniques"),
        (["--budget", "mse=9", "--rivals", "deepcache"], "'deepcache' is refused: DeepCache is for UNets"),
        (["--budget", "mse=9", "--rivals", "hold"], "'hold' is not a rival; use first-block, mag"),
        (["--budget", "mse=9", "--batch", "0"], "--batch: 0 is out of range"),
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
    # The refusal comes only after the start: no candidate merges or holds at this size.
    options = ["--budget", "mse=9", "--size", "16x16", "--techniques", "toma-tile:levels=9", "--candidates", "2"]
    options += ["--rungs", "1", "--resume", "--out", str(tmp_path / "out")]
    assert main(["tune", "--device", "cpu", *options]) == 2
    assert f"tokenmerge: {tmp_path / 'out'} holds nothing yet; starting from the beginning\n" in capsys.readouterr().err


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TokenMergeError, match="one process"):
        tune(SEARCH, tmp_path)

"""`tokenmerge eval` and `tokenmerge metrics`: their files and refusals; interruptions and several processes change
nothing."""

from __future__ import annotations

import csv
import gc
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from interrupts import interrupt
from judges import write_networks
from PIL import Image, ImageColor
from skimage.color import rgb2lab

from saved import save_sdxl
from tokenmerge import TokenMergeError
from tokenmerge.planning.drift import UNCALIBRATED
from tokenmerge.tools import files, measure
from tokenmerge.tools.cli.main import main, parser
from tokenmerge.tools.drawing.pictures import to_tensor
from tokenmerge.tools.drawing.request import draw
from tokenmerge.tools.drawing.studio import Setup, Studio
from tokenmerge.tools.evaluation import plots, table
from tokenmerge.tools.evaluation.folder import Folder, Sample, read_picture
from tokenmerge.tools.evaluation.prompts import read_prompts
from tokenmerge.tools.evaluation.results import Results, Row
from tokenmerge.tools.evaluation.run import Task, evaluate
from tokenmerge.tools.evaluation.yardstick import fine_pictures
from tokenmerge.tools.loading import load_pipeline
from tokenmerge.tools.measure import timed_calls
from tokenmerge.tools.paper.studies import STUDIES, Study
from tokenmerge.tools.quality import compare
from tokenmerge.tools.quality.metrics import BY_NAME
from tokenmerge.tools.quality.networks import Sources
from tokenmerge.tools.quality.statistics import Estimate
from tokenmerge.tools.rivals.diffusers_caches import DIFFUSERS_CACHES
from tokenmerge.tools.typed import read_configurations

PROMPTS = ("a photo of a rose", "a <b>daisy</b> & more")
SEEDS = (0, 7)
CONFIGURATIONS = ("dit:ratio=0.5 + hold:every=2,start=0", "toma-stripe:ratio=0.25")
# The metrics whose networks `judges` can make.
METRICS = ("mse", "psnr", "ssim", "lpips", "dino", "clip", "fid", "kid")
# Steps of the second yardstick, whose metrics are distances.
FINE = 3
DISTANCES = ("mse", "lpips", "dino")
FINE_METRICS = {f"{name}_fine" for name in DISTANCES}
KILLS = 10
TIMES = ("seconds", "speed_up", "denoiser_seconds", "denoiser_speed_up")
WHERE = {"device": "a machine", "torch": "one"}

# Imports everything once; children fork from it and start fast.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tokenmerge.tools.evaluation.run", "diffusers", "matplotlib.figure", __name__])


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_networks(tmp_path_factory.mktemp("networks"))


def task(networks: Path, **changes: Any) -> Task:
    """An evaluation of 12 small pictures, and of 4 with more steps."""
    given = {
        "seeds": SEEDS,
        "steps": 2,
        "reference_steps": FINE if changes.get("steps", 2) < FINE else 0,
        "size": (64, 64),
        "metrics": METRICS,
        "sources": Sources(networks),
        "repeats": 1,
        "device": "cpu",
    }
    return Task(**{"model": "tiny-flux", "techniques": CONFIGURATIONS, "prompts": PROMPTS, **given, **changes})


def short_task(networks: Path, **changes: Any) -> Task:
    """One picture of each configuration, judged by one metric."""
    given = {"prompts": PROMPTS[:1], "seeds": SEEDS[:1], "reference_steps": 0, "metrics": ("mse",), "repeats": 0}
    return task(networks, **{**given, **changes})


@pytest.fixture(scope="module")
def finished(networks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted evaluation."""
    out = tmp_path_factory.mktemp("evaluation")
    assert evaluate(task(networks), out) is not None
    return out


def comparable(out: Path) -> dict[str, Any]:
    """Everything an evaluation wrote except times, by path."""
    kept: dict[str, Any] = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name = path.relative_to(out).as_posix()
        if name.startswith(("timing/", "plots/")) or name == "report.html":
            kept[name] = "there"
        elif name == "table.csv":
            rows = csv.DictReader(path.read_text().splitlines())
            kept[name] = [{key: row[key] for key in row if key not in TIMES} for row in rows]
        elif name == "table.md":
            kept[name] = re.sub(r"^(\| [^|]+ \|)(?: [^|]+ \|){4}", r"\1", path.read_text(), flags=re.MULTILINE)
        elif name == "results.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            kept[name] = [
                {key: _without_commit(line[key]) for key in line if key not in ("timing", *TIMES)} for line in lines
            ]
        elif name == "run.json":
            kept[name] = {key: _without_commit(value) for key, value in json.loads(path.read_text()).items()}
        else:
            kept[name] = path.read_bytes()
    return kept


def _without_commit(value: Any) -> Any:
    """Ignore commits: one may happen while tests run."""
    return {key: item for key, item in value.items() if key != "commit"} if isinstance(value, dict) else value


def work(networks: Path, out: Path) -> None:
    """The work of a child process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    evaluate(task(networks), out, resume=True)


def test_what_an_evaluation_writes(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * len(PROMPTS) * len(SEEDS)
    for line in lines:
        assert (finished / line["image"]).is_file()
        assert Image.open(finished / line["image"]).size == (64, 64)
        assert ("mse" in line) == (line["label"] != "none")
        assert "clip" in line
    results = [json.loads(line) for line in (finished / "results.jsonl").read_text().splitlines()]
    assert [result["label"] for result in results] == ["none", *CONFIGURATIONS]
    for result in results:
        own = [line for line in lines if line["label"] == result["label"]]
        for name, value in result["metrics"].items():
            if name not in ("fid", "kid"):
                assert value["mean"] == pytest.approx(sum(line[name] for line in own) / len(own))
                assert value["interval"] > 0
        plain = result["label"] == "none"
        assert set(result["metrics"]) == FINE_METRICS | ({"clip"} if plain else set(METRICS))
        # Drift relative to the distance between the plain picture and the one with more steps.
        errors = results[0]["metrics"]
        assert result["shares"] == pytest.approx(
            {} if plain else {n: result["metrics"][n]["mean"] / errors[f"{n}_fine"]["mean"] for n in DISTANCES}
        )
        assert result["reference_steps"] == FINE
        assert 0 < result["timing"]["denoiser_seconds"] < result["timing"]["median"]
        assert result["timing"]["batch"] == 1
        assert (result["prompts"], result["seeds"], result["model"]) == (2, 2, "tiny-flux")
    assert "-> 32" in results[1]["timing"]["tokens"]
    # A run of two steps can hold none.
    assert [result["kinds"] for result in results] == [{}, {"merged": 2}, {"merged": 2}]
    assert results[0]["work"] == 1
    assert results[1]["work"] < 0.9
    assert {path.stem for path in (finished / "plots").iterdir()} == set(METRICS) | FINE_METRICS
    assert not list(finished.rglob("*.partial"))
    header, _, *rows = (finished / "table.md").read_text().splitlines()
    times = ["s / picture", "speed-up", "denoiser s", "denoiser speed-up"]
    assert [cell.strip() for cell in header.split("|")[1:7]] == ["configuration", *times, "work"]
    assert f"| LPIPS ↓ | LPIPS to {FINE} steps ↓ |" in header
    assert header.endswith("| share of schedule's error |")
    assert rows[1].endswith(f"| {100 * results[1]['shares']['lpips']:.3g} % |")
    assert f"The second yardstick is the plain picture with {FINE} steps." in (finished / "table.md").read_text()
    assert "±" in rows[1]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value for name, value in attributes if name == "src" and value]


def test_the_page_shows_every_picture_and_runs_no_text_of_a_prompt(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    links = _Links()
    links.feed(page)
    assert {unquote(source) for source in links.sources} == {
        path.relative_to(finished).as_posix()
        for kind in ("images", "plots")
        for path in finished.glob(f"{kind}/**/*.png")
    }
    assert "b" not in links.tags
    assert "a &lt;b&gt;daisy&lt;/b&gt; &amp; more" in page


def test_a_picture_is_the_one_that_its_prompt_seed_and_configuration_make_alone(
    finished: Path, tmp_path: Path, networks: Path
) -> None:
    """One configuration, prompt and seed make the same bytes as in the whole evaluation."""
    alone = Task(
        model="tiny-flux",
        techniques=CONFIGURATIONS[1:],
        prompts=PROMPTS[1:],
        seeds=SEEDS[1:],
        steps=2,
        size=(64, 64),
        metrics=("mse",),
        repeats=0,
        device="cpu",
    )
    evaluate(alone, tmp_path)
    for label in ("none", "toma-stripe_ratio=0.25"):
        (picture,) = (tmp_path / "images" / label).iterdir()
        twin = finished / "images" / label / picture.name.replace("0000-", "0001-")
        assert picture.read_bytes() == twin.read_bytes()


def kept_files(out: Path) -> dict[Path, tuple[int, int]]:
    """Files made so far, with inode and time, which change if a file is made again."""
    kinds = ("images", "values", "features", "sets", "timing", "work")
    paths = [path for kind in kinds for path in out.glob(f"{kind}/**/*.*") if path.suffix in (".png", ".json", ".npy")]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths if path.is_file()}


def test_kills_at_random_moments_change_nothing(finished: Path, networks: Path, tmp_path: Path) -> None:
    """Each kill follows a random number of new files and a random delay, so that kills spread over all the work."""
    moments = random.Random(0)
    expected = comparable(finished)
    kills = rounds = 0
    while kills < KILLS:
        out, rounds = tmp_path / f"round-{rounds}", rounds + 1
        before: dict[Path, tuple[int, int]] = {}
        killed = True
        while killed:
            child = SERVER.Process(target=work, args=(networks, out))
            child.start()
            if kills < KILLS:
                enough = len(before) + moments.randrange(6)
                while child.is_alive() and len(kept_files(out)) < enough:
                    time.sleep(0.01)
                child.join(moments.uniform(0, 0.3))
                child.kill()
            child.join()
            now = kept_files(out)
            assert {path: now.get(path) for path in before} == before, "something was lost or made twice"
            before = now
            killed = child.exitcode == -signal.SIGKILL
            kills += killed
        assert child.exitcode == 0
        assert comparable(out) == expected


def killed_while_writing(path: Path) -> None:
    def write(file: Any) -> None:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    files.write_file(path, write)


def test_a_process_killed_while_it_writes_leaves_no_file(finished: Path, networks: Path, tmp_path: Path) -> None:
    child = SERVER.Process(target=killed_while_writing, args=(tmp_path / "images" / "picture.png",))
    child.start()
    child.join()
    (left_over,) = (tmp_path / "images").iterdir()
    assert left_over.name.endswith(files.PARTIAL)
    evaluate(short_task(networks), tmp_path, resume=True)
    assert not left_over.exists()


def test_two_processes_write_what_one_does(finished: Path, networks: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    # --multi_gpu also starts several processes without GPUs; accelerate starts only one without this option.
    launch = "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    launch += " --dynamo_backend no --main_process_port 0 -m tokenmerge eval"
    command = [sys.executable, "-m", *launch.split(), "--techniques", *CONFIGURATIONS]
    command += ["--prompts", str(tmp_path / "prompts.json"), "--seeds", "0,7", "--steps", "2"]
    command += ["--size", "64x64", "--metrics", ",".join(METRICS), "--networks", str(networks), "--repeats", "1"]
    command += ["--device", "cpu", "--reference-steps", str(FINE), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 processes share the work" in done.stderr
    assert done.stdout.count("report.html") == 1
    assert comparable(tmp_path / "out") == comparable(finished)


def test_an_interrupted_evaluation_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenmerge", "eval", "--size", "64x64", "--steps", "1", "--device", "cpu"]
    command += ["--metrics", "mse", "--repeats", "0", "--out", str(tmp_path)]
    printed = interrupt(command, lambda: any(tmp_path.glob("images/none/*.png")))
    assert "continue with --resume" in printed


def test_what_was_begun_goes_on_only_as_it_was(finished: Path, networks: Path) -> None:
    before = comparable(finished)
    with pytest.raises(TokenMergeError, match="add --resume"):
        evaluate(task(networks), finished)
    for changes, words in (
        ({"steps": 3}, "begun with steps 2, not 3"),
        ({"seeds": (0, 8)}, "begun with seeds"),
        ({"metrics": ("mse",)}, "begun with networks"),
        ({"dtype": "bfloat16"}, "begun with dtype"),
        ({"reference_steps": 4}, "begun with reference_steps 3, not 4"),
        ({"reference_steps": 0}, "begun with reference_steps 3, not 0"),
    ):
        with pytest.raises(TokenMergeError, match=words):
            evaluate(task(networks, **changes), finished, resume=True)
    assert comparable(finished) == before


def test_metrics_that_were_measured_before_are_kept(networks: Path, tmp_path: Path) -> None:
    small = task(networks, seeds=(0,), repeats=0)
    for metrics, told in ((("mse", "ssim"), ["mse", "mse_fine", "ssim"]), (("psnr",), ["psnr"])):
        results = evaluate(replace(small, metrics=metrics), tmp_path / "pairs", resume=True)
        assert results is not None
        assert [metric.name for metric in results.metrics] == told
    for path in tmp_path.glob("pairs/values/*/*.json"):
        own = ["mse_fine"] if path.parent.name == "none" else ["mse", "mse_fine", "psnr", "ssim"]
        assert list(json.loads(path.read_text())) == own
    for name in ("kid", "fid"):
        results = evaluate(replace(small, metrics=(name,)), tmp_path / "sets", resume=True)
        assert results is not None
        assert [metric.name for metric in results.metrics] == [name]
    kept = list(tmp_path.glob("sets/sets/*.json"))
    assert len(kept) == len(CONFIGURATIONS)
    assert all(list(json.loads(path.read_text())) == ["fid", "kid"] for path in kept)


def test_a_commit_is_that_of_this_code_and_not_of_what_lies_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    installed = tmp_path / "measure.py"
    installed.touch()
    monkeypatch.setattr(measure, "__file__", str(installed))
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "theirs"], check=True)
    assert measure._commit() is None
    subprocess.run([*git, "add", "measure.py"], check=True)
    assert measure._commit() is not None


def test_commits_are_all_kept_and_versions_must_be_the_same(
    networks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = short_task(networks)
    for commit, kept in (("aaa", "aaa"), ("bbb", "aaa, bbb"), ("aaa", "aaa, bbb")):
        monkeypatch.setattr(
            "tokenmerge.tools.evaluation.run.environment", lambda device, c=commit: {**WHERE, "commit": c}
        )
        results = evaluate(small, tmp_path, resume=True)
        assert results is not None
        assert results.settings["environment"]["commit"] == kept
    monkeypatch.setattr("tokenmerge.tools.evaluation.run.environment", lambda device: {**WHERE, "torch": "another"})
    with pytest.raises(TokenMergeError, match="begun with environment torch"):
        evaluate(small, tmp_path, resume=True)


def test_an_evaluation_goes_on_with_every_kind_of_cache(networks: Path, tmp_path: Path) -> None:
    cached = tuple(f"{name}@none + {name}" for name in (kind.name for kind in DIFFUSERS_CACHES))
    small = short_task(networks, guidance=1.0, techniques=cached)
    begun = evaluate(small, tmp_path)
    before = kept_files(tmp_path)
    continued = evaluate(small, tmp_path, resume=True)
    assert begun is not None
    assert continued is not None
    assert begun.settings == continued.settings
    assert kept_files(tmp_path) == before
    changed = [f"{item}:spatial_attention_block_skip_range=3" if "faster" in item else item for item in cached]
    with pytest.raises(TokenMergeError, match="begun with caches faster"):
        evaluate(replace(small, techniques=changed), tmp_path, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_to_go_on_with_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: bool) -> None:
    told = f"tokenmerge: {tmp_path / 'out'} holds nothing yet; starting from the beginning\n"
    Folder(tmp_path / "out").begin({"environment": {}}, resume=resume)
    assert capsys.readouterr().err == (told if resume else "")
    Folder(tmp_path / "out").begin({"environment": {}}, resume=True)
    assert capsys.readouterr().err == ""


def test_values_that_json_has_none_of_are_the_same_when_read_again(tmp_path: Path) -> None:
    asked = {"size": (4, 4), "threshold": float("inf"), "nested": {"range": (-1, 681)}, "environment": {}}
    kept = Folder(tmp_path).begin(asked, resume=False)
    assert Folder(tmp_path).begin(asked, resume=True) == kept
    with pytest.raises(TokenMergeError, match="begun with nested range"):
        Folder(tmp_path).begin({**asked, "nested": {"range": (-1, 680)}}, resume=True)


@pytest.mark.parametrize(
    ("begun", "now", "words"),
    [
        (["hold", "dit"], ["hold", "dit", "toma"], "with hold, dit; toma was not among them"),
        (["hold", "dit"], ["hold"], "with hold, dit; dit is left out now"),
        (["hold", "dit"], ["toma", "pool"], "; toma, pool were not among them, and hold, dit are left out now"),
        ([], ["hold"], "with none; hold was not among them"),
        (["m@toma:start=0.2"], ["m@toma:start=0.1"], "with configurations m merge start 0.2, not 0.1"),
        (["m@toma + hold"], ["m@toma + hold:every=4"], "with configurations m hold tolerance 0.2, not none"),
        (["m@toma"], ["m@toma + hold"], "without configurations m hold"),
        (
            [f"toma:seed={seed}" for seed in range(8)],
            ["hold"],
            "with toma:seed=0, toma:seed=1, toma:seed=2, toma:seed=3, toma:seed=4, toma:seed=5 and 2 more; hold was",
        ),
    ],
)
def test_other_configurations_are_told_by_name(tmp_path: Path, begun: list[str], now: list[str], words: str) -> None:
    def settings(typed: list[str]) -> dict[str, Any]:
        made = read_configurations(typed)
        return {"configurations": {item.label: item.techniques.to_list() for item in made}, "environment": {}}

    Folder(tmp_path).begin(settings(begun), resume=False)
    with pytest.raises(TokenMergeError) as caught:
        Folder(tmp_path).begin(settings(now), resume=True)
    assert words in str(caught.value)
    assert str(caught.value).endswith("; ask for the same, or give another --out")
    assert "{" not in str(caught.value)


def test_metrics_and_timed_batches_may_come_later(finished: Path, networks: Path, tmp_path: Path) -> None:
    for metrics, repeats in ((("mse",), 0), (("mse", "fid", "clip"), 0), (METRICS, 1)):
        results = evaluate(task(networks, metrics=metrics, repeats=repeats), tmp_path, resume=True)
        assert results is not None
        assert all((row.timing is not None) == bool(repeats) for row in results.rows)
    assert comparable(tmp_path) == comparable(finished)
    with pytest.raises(TokenMergeError, match="begun with repeats 1, not 0"):
        evaluate(task(networks, repeats=0), tmp_path, resume=True)


def test_the_second_yardstick_may_come_later(finished: Path, networks: Path, tmp_path: Path) -> None:
    """Existing pictures are not made again, and the result equals an evaluation that had the yardstick all along."""
    evaluate(task(networks, reference_steps=0), tmp_path)
    before = kept_files(tmp_path)
    assert not any("fine" in path.read_text() for path in before if path.suffix == ".json")
    evaluate(task(networks), tmp_path, resume=True)
    unchanged = {path for path in before if "values" not in path.parts}
    now = kept_files(tmp_path)
    assert {path: now[path] for path in unchanged} == {path: before[path] for path in unchanged}
    assert comparable(tmp_path) == comparable(finished)


def test_the_second_yardstick_is_the_plain_picture_with_more_steps(finished: Path) -> None:
    studio = Studio(Setup(model="tiny-flux", size=(64, 64), steps=FINE, device="cpu", threads=1))
    studio.pipe.set_progress_bar_config(disable=True)
    (picture,), _ = studio.draw(PROMPTS[0], SEEDS[:1])
    kept, sample = Folder(finished), Sample(0, PROMPTS[0], SEEDS[0])
    fine = read_picture(kept.image(fine_pictures(FINE), sample))
    assert torch.equal(to_tensor(picture), fine)
    for configuration in read_configurations(CONFIGURATIONS):
        far = compare(fine, read_picture(kept.image(configuration, sample)))["mse"]
        assert json.loads(kept.values(configuration, sample).read_text())["mse_fine"] == pytest.approx(far)


def test_rivals_are_evaluated_and_gone_on_with(networks: Path, tmp_path: Path) -> None:
    """One rival equals the second yardstick: its distance to it is zero."""
    rivals = ("none + cache-dit:threshold=1,warmup=1", "none + unipc:steps=2", "none + steps:count=5")
    asked = short_task(networks, steps=4, prompts=PROMPTS, techniques=rivals, reference_steps=5, repeats=1)
    results = evaluate(asked, tmp_path)
    assert results is not None
    assert [row.estimates["mse"].mean > 0 for row in results.rows[1:]] == [True, True, True]
    assert results.rows[3].estimates["mse_fine"].mean == 0
    assert results.shares(results.rows[3])["mse"] == 1
    assert [results.work(row) for row in results.rows][2:] == [2 / 4, 5 / 4]
    told = [row.to_dict() for row in results.rows]
    assert [line["cache"] and line["cache"]["name"] for line in told] == [None, "cache-dit", None, None]
    assert [line["schedule"] and line["schedule"]["name"] for line in told] == [None, None, "unipc", "steps"]
    before = kept_files(tmp_path)
    lost = Folder(tmp_path).image(results.rows[1].configuration, results.samples[1])
    made = lost.read_bytes()
    lost.unlink()
    evaluate(asked, tmp_path, resume=True)
    assert lost.read_bytes() == made
    changed = {path for path, kept in kept_files(tmp_path).items() if before[path] != kept}
    assert changed == {lost}
    others = (rivals[0], "none + unipc:steps=2,order=1", rivals[2])
    with pytest.raises(TokenMergeError, match="steps=2,order=1 was not among them"):
        evaluate(replace(asked, techniques=others), tmp_path, resume=True)


def test_a_damaged_file_is_named(finished: Path, networks: Path, tmp_path: Path) -> None:
    small = short_task(networks)
    evaluate(small, tmp_path)
    (picture,) = (tmp_path / "images" / "none").iterdir()
    picture.write_bytes(b"no picture")
    for path in (tmp_path / "values").rglob("*.json"):
        path.unlink()
    with pytest.raises(TokenMergeError, match=rf"{re.escape(str(picture))} cannot be read .* delete it"):
        evaluate(small, tmp_path, resume=True)
    picture.unlink()
    evaluate(small, tmp_path, resume=True)
    assert picture.read_bytes() == (finished / "images" / "none" / picture.name).read_bytes()


@pytest.mark.parametrize("resume", [False, True])
def test_an_evaluation_of_version_0_1_is_not_gone_on_with(networks: Path, tmp_path: Path, resume: bool) -> None:
    """Version 0.1 kept another form of config for each configuration."""
    old = {"none": {"method": "none", "schedule": {"anchor_every": 0}}, "hold": {"method": "hold", "schedule": {}}}
    files.write_text(tmp_path / "run.json", json.dumps({"configurations": old, "environment": {}}))
    with pytest.raises(TokenMergeError, match=r"holds an evaluation of tokenmerge 0\.1, .*; give another --out"):
        evaluate(task(networks, metrics=("mse",), repeats=0), tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("kept", ["images/none/0000-0-a.png", "values/none/0000-0-a.json", "timing/none/0000.json"])
@pytest.mark.parametrize("resume", [False, True])
def test_files_that_nothing_says_the_settings_of_are_refused(tmp_path: Path, kept: str, resume: bool) -> None:
    settings = {"steps": 6, "environment": {}}
    Folder(tmp_path).begin(settings, resume=False)
    files.write_text(tmp_path / kept, "made")
    (tmp_path / "run.json").write_text('{"steps"')
    with pytest.raises(TokenMergeError, match=r"run.json cannot be read .*; .*: give another --out"):
        Folder(tmp_path).begin(settings, resume=resume)
    (tmp_path / "run.json").unlink()
    with pytest.raises(TokenMergeError, match=r"no run.json that says how they were made; give another --out"):
        Folder(tmp_path).begin({**settings, "steps": 5}, resume=resume)
    assert not (tmp_path / "run.json").exists()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenMergeError, match=r"No space left on device.*free some space"):
        files.write_file(tmp_path / "picture.png", lambda file: _to_full_disk())
    assert not list(tmp_path.iterdir())


def _to_full_disk() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x" * 4096)


def test_steps_too_few_to_save_are_told(networks: Path, tmp_path: Path) -> None:
    typed = ("hold", "dit", "at once@hold:every=2,start=0", "both@dit + hold:every=2,start=0")
    results = evaluate(short_task(networks, steps=3, techniques=typed), tmp_path)
    assert results is not None
    kinds = [{}, {"full": 3}, {"merged": 3}, {"full": 2, "held": 1}, {"merged": 2, "held": 1}]
    assert [row.kinds for row in results.rows] == kinds
    (told,) = [note for note in table.notes(results) if "nothing was saved" in note]
    assert told.startswith("hold: ")
    assert told in (tmp_path / "table.md").read_text()


def test_calls_that_no_graph_replays_are_told(networks: Path, tmp_path: Path) -> None:
    results = evaluate(short_task(networks, steps=1, techniques=("tomesd",), repeats=1), tmp_path)
    assert results is not None
    assert not any("CUDA graph" in note for note in table.notes(results))
    plain, merged = results.rows
    # Graphs record calls of the plain model, but none of the other configuration.
    rows = (
        replace(plain, timing={**plain.timing, "graphs": 3}),
        replace(merged, timing={**merged.timing, "graphs": 0}),
    )
    (told,) = [note for note in table.notes(replace(results, rows=rows)) if "CUDA graph" in note]
    assert "could be recorded with tomesd" in told


def write_photographs(folder: Path, seed: int) -> Path:
    """Three photographs, with the same names for every seed."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir()
    for number in range(3):
        noise = torch.randint(256, (40 + number, 30, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(noise.numpy()).save(folder / f"{number}.jpg")
    return folder


def test_photographs_may_be_the_reference_of_sets(networks: Path, tmp_path: Path) -> None:
    photographs = write_photographs(tmp_path / "photographs", 0)
    asked = short_task(networks, seeds=SEEDS, metrics=("fid", "kid"), reference=photographs)
    results = evaluate(asked, tmp_path / "out")
    assert results is not None
    # The plain model also has a distance to photographs.
    assert all(set(row.estimates) == {"fid", "kid"} for row in results.rows)
    assert len(list((tmp_path / "out" / "reference").iterdir())) == 3
    # Other photographs with the same names would give other distances.
    others = write_photographs(tmp_path / "others", 1)
    with pytest.raises(TokenMergeError, match=r"begun with reference 0\.jpg"):
        evaluate(replace(asked, reference=others), tmp_path / "out", resume=True)
    moved = photographs.rename(tmp_path / "moved")
    again = evaluate(replace(asked, reference=moved), tmp_path / "out", resume=True)
    assert again is not None
    assert [row.estimates for row in again.rows] == [row.estimates for row in results.rows]


def test_a_batch_is_timed_as_one(networks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def watched(pipe: Any, request: Any, seeds: Any, on_step: Any = None) -> Any:
        sizes.append(len(seeds))
        return draw(pipe, request, seeds)

    monkeypatch.setattr("tokenmerge.tools.drawing.studio.draw", watched)
    results = evaluate(short_task(networks, batch=3, repeats=2), tmp_path)
    assert results is not None
    # An untimed batch precedes every lap.
    assert sizes == [1] * 3 + [3] * 12
    assert all(row.timing and row.timing["batch"] == 3 and len(row.timing["seconds"]) == 2 for row in results.rows)


def test_laps_come_in_turn_and_only_missing_ones_are_made(
    networks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two laps are lost from two rounds over three configurations."""
    asked = short_task(networks, repeats=2)
    written: list[str] = []

    def watched(path: Path, text: str) -> None:
        if "timing" in path.parts:
            written.append(f"{path.stem} {path.parent.name}")
        files.write_text(path, text)

    monkeypatch.setattr("tokenmerge.tools.evaluation.run.write_text", watched)
    evaluate(asked, tmp_path)
    folders = [item.folder for item in read_configurations(CONFIGURATIONS)]
    assert written == [f"{lap} {folder}" for lap in ("0000", "0001") for folder in folders]
    lost = [
        tmp_path / "timing" / folder / f"{lap}.json" for folder, lap in ((folders[2], "0000"), (folders[0], "0001"))
    ]
    for path in lost:
        path.unlink()
    before = kept_files(tmp_path)
    written.clear()
    results = evaluate(asked, tmp_path, resume=True)
    assert written == [f"0000 {folders[2]}", f"0001 {folders[0]}"]
    assert {path: kept_files(tmp_path)[path] for path in before} == before
    assert results is not None
    for row in results.rows:
        kept = [
            json.loads((tmp_path / "timing" / row.configuration.folder / f"{lap}.json").read_text())
            for lap in ("0000", "0001")
        ]
        assert row.timing is not None
        assert row.seconds == pytest.approx(sum(lap["seconds"] for lap in kept) / 2)
        assert row.denoiser_seconds == pytest.approx(sum(lap["denoiser_seconds"] for lap in kept) / 2)
        speed_up = results.rows[0].timing["denoiser_seconds"] / row.timing["denoiser_seconds"]
        assert results.line(row)["denoiser_speed_up"] == pytest.approx(speed_up)


def test_the_time_of_a_call_is_that_of_the_module_alone() -> None:
    """Every call counts once, including other hooks, but the time between calls does not count."""
    module = torch.nn.Identity()
    module.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    with timed_calls(module, torch.device("cpu")) as watch:
        for _ in range(2):
            module(torch.zeros(1))
            time.sleep(0.5)
    module(torch.zeros(1))
    laps = watch.milliseconds()
    assert len(laps) == 2
    assert all(20 <= lap < 500 for lap in laps)


@pytest.mark.parametrize(("model", "preset"), [("tiny-flux", "dit"), ("tiny-sdxl", "unet")])
def test_fronts_are_lists_of_techniques(model: str, preset: str) -> None:
    """The files for `tokenmerge eval @FILE`."""
    path = Path(__file__).parents[2] / "benchmarks" / "fronts" / f"{model}.args"
    options = parser().parse_args(["eval", f"@{path}"])
    assert (options.model, options.size, options.batch) == (model, (512, 512), 16)
    found = read_configurations(options.techniques)
    assert len(found) == len(options.techniques) + 1
    wanted = {"toma:ratio=0.5", f"{preset}:ratio=0.5", "hold:every=3", f"{preset}:ratio=0.5 + hold:every=3"}
    assert wanted <= {item.label for item in found}


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.txt", "one\n\n  two  \n", {}, ("one", "two")),
        ("a.csv", '\ufeffid,Prompt\n1,"a, ""b""\nc"\n2,d\n', {}, ('a, "b"\nc', "d")),
        ("a.tsv", 'Prompt\tCategory\n"half a quote\tx\nplain\ty\n', {}, ('"half a quote', "plain")),
        ("a.tsv", "Prompt\tCategory\np\tx\n", {"column": "category"}, ("x",)),
        ("a.json", '["one", "two", "three"]', {"limit": 2}, ("one", "two")),
        ("a.json", '[{"prompt": "one", "seed": 3}]', {}, ("one",)),
        ("a.json", '{"1": "rose", "2": "daisy"}', {"template": "a {}!"}, ("a rose!", "a daisy!")),
        ("a.jsonl", '{"prompt": "one"}\n\n"two"\n', {}, ("one", "two")),
    ],
)
def test_prompts_of_every_kind_of_file(
    tmp_path: Path, name: str, content: str, options: dict[str, Any], expected: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(content)
    assert read_prompts(str(tmp_path / name), **options) == expected


def test_flowers_are_built_in() -> None:
    flowers = read_prompts()
    assert len(set(flowers)) == 102
    assert "a photo of a sunflower" in flowers
    assert read_prompts(template="{}", limit=1) == ("pink primrose",)


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("a.txt", "\n", {}, "holds no prompt"),
        ("a.csv", "id,text\n1,x\n", {}, "choose one with --column: id, text"),
        ("a.json", "3", {}, "a list or a mapping"),
        ("a.json", "[1]", {}, "prompt 1 of"),
        ("a.json", "[", {}, "is not JSON in UTF-8"),
        ("a.pdf", "", {}, "neither 'flowers' nor a file"),
        ("a.txt", "x", {"template": "no place"}, "exactly one {}"),
    ],
)
def test_prompt_files_that_cannot_be(
    tmp_path: Path, name: str, content: str, options: dict[str, Any], words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenMergeError, match=re.escape(words)):
        read_prompts(str(tmp_path / name), **options)


def test_a_prompt_file_that_is_not_there() -> None:
    with pytest.raises(TokenMergeError, match="cannot be read"):
        read_prompts("absent.txt")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--techniques", "dit:levels=2"], "only one"),
        (["--techniques", "hold", "--ratios", "0.5"], "there is only hold"),
        (["--seeds", "1,1"], "--seeds: '1,1' repeats a seed; give distinct ones"),
        (["--batch", "0"], "1 or more"),
        (["--reference-steps", "9", "--steps", "9"], "--reference-steps is 9; it must be more than the 9 steps"),
        (["--reference-steps", "-1"], "--reference-steps: -1 is out of range; it must be 0 or more"),
        (["--metrics", "sscd", "--networks", "."], "whose network is missing"),
        (["--metrics", "beauty"], "choose from"),
        (["--networks", "absent"], "is not a folder"),
        (["--number", "1", "--metrics", "fid", "--networks", "NETWORKS"], "two pictures or more"),
        (["--reference", "absent", "--metrics", "mse"], "is not a folder"),
        (["--techniques", "none + mag", "--compile"], "leave out --compile"),
        (["--techniques", "none + taylor"], "(did you mean 'taylorseer'?)"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    networks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(networks) if option == "NETWORKS" else option for option in options]
    assert main(["eval", "--size", "64x64", "--device", "cpu", *given]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("tokenmerge: ")
    assert words in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.folder)
def test_every_study_runs_quickly(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reproduce", study.names[-1], "--quick", "--size", "64x64", "--steps", "2", "--repeats", "0"]
    arguments += ["--device", "cpu", "--metrics", "mse", "--number", "1", "--out", str(tmp_path)]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    labels = [line["label"] for line in result["results"]]
    refused = result["settings"]["refused"]
    assert len(labels) + len(refused) == 1 + len(study.configurations)
    assert all(label.startswith("todo") for label in refused)
    assert len({line["metrics"]["mse"]["mean"] for line in result["results"][1:]}) > 1


def test_a_study_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "table99"]) == 2
    assert "choose from table1" in capsys.readouterr().err


def test_a_refused_configuration_is_an_error_or_told(networks: Path, tmp_path: Path) -> None:
    asked = short_task(networks)
    wrong = ("dit:levels=2", *CONFIGURATIONS)
    with pytest.raises(TokenMergeError, match=r"'dit:levels=2' is refused: .* only one"):
        evaluate(replace(asked, techniques=wrong), tmp_path / "error")
    results = evaluate(replace(asked, techniques=wrong, tell_refused=True), tmp_path / "told")
    assert results is not None
    assert [row.configuration.label for row in results.rows] == ["none", *CONFIGURATIONS]
    assert "dit:levels=2 is refused: " in (tmp_path / "told" / "table.md").read_text()


CACHED = (
    "dit:ratio=0.5 + first-block:threshold=0.9",
    "none + first-block:threshold=0.9",
    "fast@none + mag:threshold=0.9",
)


def test_caches_are_judged_like_configurations(networks: Path, tmp_path: Path) -> None:
    """Pictures do not depend on the order of configurations, and calibrations are kept."""
    refused = ("hold + mag", "dit + taylorseer", "none + faster")
    given = {"prompts": PROMPTS, "steps": 6, "repeats": 1, "tell_refused": True}
    asked = short_task(networks, techniques=(*CACHED, *refused), **given)
    results = evaluate(asked, tmp_path / "all")
    assert results is not None
    labels = ["none", *CACHED[:2], "fast"]
    assert [row.configuration.label for row in results.rows] == labels
    assert [row.to_dict()["cache"] and row.to_dict()["cache"]["name"] for row in results.rows] == [
        None,
        "first-block",
        "first-block",
        "mag",
    ]
    drifts = [row.estimates["mse"].mean for row in results.rows[1:]]
    assert len(set(drifts)) == 3
    assert all(drift > 0 for drift in drifts)
    told = (tmp_path / "all" / "table.md").read_text()
    assert "hold + mag is refused: Hold and the mag cache both skip steps; leave one of them out." in told
    assert "dit + taylorseer is refused: a cache (taylorseer_cache) stores tensors inside of blocks" in told
    assert "none + faster is refused: the faster cache takes each denoiser call for a new step" in told
    ratios = json.loads((tmp_path / "all" / "calibration.json").read_text())["mag_ratios"]
    assert len(ratios) == 6

    calibration = tmp_path / "all" / "calibration.json"
    before = kept_files(tmp_path / "all"), calibration.stat().st_mtime_ns
    lost = tmp_path / "all" / "images" / "fast" / f"{results.samples[1].name}.png"
    made = lost.read_bytes()
    lost.unlink()
    evaluate(asked, tmp_path / "all", resume=True)
    assert lost.read_bytes() == made
    before[0].pop(lost)
    after = kept_files(tmp_path / "all"), calibration.stat().st_mtime_ns
    assert {path: after[0][path] for path in before[0]} == before[0]
    assert after[1] == before[1]

    evaluate(replace(asked, techniques=(CACHED[1], CACHED[0]), repeats=0), tmp_path / "turned")
    for folder in (tmp_path / "turned" / "images").iterdir():
        for picture in folder.iterdir():
            assert picture.read_bytes() == (tmp_path / "all" / "images" / folder.name / picture.name).read_bytes()
    assert not (tmp_path / "turned" / "calibration.json").exists()


def test_the_model_of_an_evaluation_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search evaluates several times, but only garbage collection frees a pipeline that has drawn."""
    seen: list[weakref.ref[Any]] = []

    def load(*arguments: Any) -> Any:
        pipe, defaults = load_pipeline(*arguments)
        seen.append(weakref.ref(pipe.transformer))
        return pipe, defaults

    monkeypatch.setattr("tokenmerge.tools.drawing.studio.load_pipeline", load)
    gc.disable()
    try:
        given = {"model": "tiny-flux", "techniques": ("toma",), "prompts": PROMPTS[:1], "device": "cpu"}
        evaluate(Task(**given, steps=1, size=(64, 64), metrics=("mse",), repeats=0), tmp_path)
        # Look before the next automatic collection.
        kept = [each() is not None for each in seen]
    finally:
        gc.enable()
    assert kept == [False]


def test_unets_are_evaluated_too(tmp_path: Path) -> None:
    model = str(save_sdxl(tmp_path / "sdxl"))
    given = {"model": model, "prompts": PROMPTS, "device": "cpu"}
    results = evaluate(Task(**given, steps=4, size=(64, 64), metrics=("mse",), batch=2, repeats=1), tmp_path / "out")
    assert results is not None
    # The family's default techniques.
    assert [row.configuration.label for row in results.rows] == ["none", "unet", "hold", "unet + hold"]
    # A tolerance holds none of only four steps.
    assert [row.estimates["mse"].mean > 0 for row in results.rows[1:]] == [True, False, True]


def test_what_hold_estimates_stands_beside_what_is_measured(tmp_path: Path) -> None:
    model, techniques = str(save_sdxl(tmp_path / "sdxl")), ("hold:every=2,start=0", "hold:every=1")
    given = {"model": model, "prompts": PROMPTS[:2], "techniques": techniques, "device": "cpu"}
    results = evaluate(Task(**given, steps=8, size=(64, 64), metrics=("psnr",), repeats=0), tmp_path / "out")
    assert results is not None
    plain, held, whole = results.rows
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    told = [line["estimated_psnr"] for line in lines if line["label"] == techniques[0]]
    assert len(told) == 2
    assert held.estimated.psnr == pytest.approx(sum(told) / 2)
    assert plain.estimated is None
    assert whole.estimated is None, "nothing was held"
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| estimated PSNR |" in table
    # The estimate is not calibrated for random weights.
    assert f"| ~{held.estimated.psnr:.0f} |" in table
    assert UNCALIBRATED in table
    (line,) = (line for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines() if "every=2" in line)
    assert json.loads(line)["estimate_calibrated"] is False
    with (tmp_path / "out" / "table.csv").open() as file:
        assert [row["estimate_calibrated"] for row in csv.DictReader(file)] == ["", "False", ""]


def test_a_figure_that_was_compared_has_no_mark(tmp_path: Path) -> None:
    task = Task(model="tiny-flux", prompts=PROMPTS[:1], techniques=["hold:every=2"], device="cpu", repeats=0)
    results = evaluate(replace(task, steps=8, size=(64, 64), metrics=("psnr",)), tmp_path / "out")
    assert results is not None
    assert results.rows[1].estimated.calibrated
    assert UNCALIBRATED not in (tmp_path / "out" / "table.md").read_text()


def test_the_worst_pictures_stand_beside_the_mean(tmp_path: Path) -> None:
    model, out = str(save_sdxl(tmp_path / "sdxl")), tmp_path / "out"
    given = {"model": model, "prompts": PROMPTS, "techniques": ["hold:every=3,start=0"], "device": "cpu", "steps": 6}
    results = evaluate(Task(**given, size=(64, 64), metrics=("mse", "psnr"), repeats=0), out)
    assert results is not None
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    errors = [line["mse"] for line in lines if line["label"] != "none"]
    held = results.to_dict()["results"][1]["worst"]
    assert held["mse"] == {"one_in_twenty": max(errors), "worst": max(errors)}
    assert held["psnr"]["worst"] == pytest.approx(10 * math.log10(255**2 / max(errors)))
    assert held["mse"]["worst"] > results.rows[1].estimates["mse"].mean
    header, _, plain, row = (line.split(" | ") for line in (out / "table.md").read_text().splitlines()[:4])
    column = header.index("MSE of the worst")
    assert row[column] == f"{max(errors):.1f}, {max(errors):.1f}"
    assert not plain[column]
    with (out / "table.csv").open() as file:
        assert [row["mse_worst"] for row in csv.DictReader(file)] == ["", str(max(errors))]


def drawn_plot(labels: list[str], times: list[float], drifts: list[float]) -> Any:
    """The plot of the plain model and of `labels`, with these times and drifts; the plain model comes first."""
    made = read_configurations(labels)
    rows = [
        Row(item, {"mse": Estimate(drift, 3.0)}, {"denoiser_seconds": seconds, "batch": 1}, {})
        for item, seconds, drift in zip(made, times, drifts, strict=True)
    ]
    settings = {"model": "some", "size": [64, 64], "steps": 1, "dtype": "float32", "compile": None, "scheduler": None}
    settings |= {"prompts": ["a"], "seeds": [0], "paired": False, "reference_steps": 0, "environment": WHERE}
    # Pass only what a plot needs.
    results = Results(None, settings, None, tuple(rows), (), {})  # type: ignore[arg-type]
    series = dict.fromkeys(row.configuration.series for row in rows[1:])
    drawn = plots._draw(results, BY_NAME["mse"], {name: plots.series_style(place) for place, name in enumerate(series)})
    drawn.draw_without_rendering()
    return drawn


def test_points_of_a_plot_tell_their_ratio_or_how_often_steps_run() -> None:
    labels = [
        "hold:every=2",
        "hold:every=5",
        "dit:ratio=0.5",
        "dit:ratio=0.5 + hold:every=3",
        "none + mag:threshold=0.1",
    ]
    drawn = drawn_plot(labels, [1.0, 0.6, 0.3, 0.7, 0.4, 0.5], [0.0, 5.0, 20.0, 90.0, 95.0, 40.0])
    (axes,) = drawn.axes
    texts = {text.get_text(): text.xy for text in axes.texts}
    # Points of Hold differ in time, and only points that merge show a ratio.
    assert texts == {
        "every 2": (0.6, 5.0),
        "every 5": (0.3, 20.0),
        "0.5": (0.7, 90.0),
        "0.5, every 3": (0.4, 95.0),
        "threshold 0.1": (0.5, 40.0),
    }
    assert axes.get_xlabel() == "denoiser seconds per picture, in batches of 1"
    told = drawn._suptitle.get_text()
    assert told == "MSE: mean squared difference of pixels, 0-255; numbers are ratios"
    held = drawn_plot(["hold"], [1.0, 0.5], [0.0, 5.0])
    assert "ratios" not in held._suptitle.get_text()


def test_without_times_there_is_nothing_to_plot_quality_against(networks: Path, tmp_path: Path) -> None:
    evaluate(short_task(networks, techniques=("hold:every=2", "hold:every=5")), tmp_path)
    assert not list(tmp_path.glob("plots/*"))
    assert "Quality against cost" not in (tmp_path / "report.html").read_text()


def test_plots_stay_readable_with_many_and_long_names(recwarn: pytest.WarningsRecorder) -> None:
    many = [f"{'long ' * 40}{number}@dit:ratio={number / 100}" for number in range(30, 60)]
    drawn_plot(many, [1.0 + place / 7 for place in range(31)], [float(place % 5) for place in range(31)])
    # matplotlib warns if the labels leave no room for the plot.
    assert not [str(item.message) for item in recwarn if "layout" in str(item.message)]


def test_sixteen_series_are_told_apart_in_colour_and_in_print() -> None:
    styles = [plots.series_style(place) for place in range(128)]
    assert len({tuple(style.values()) for style in styles}) == 128
    first = styles[:16]
    assert len({(style["marker"], style["markerfacecolor"] == "white") for style in first}) == 16
    # Side by side, a difference of 2 in CIELAB is just visible.
    shades = rgb2lab(torch.tensor([[ImageColor.getrgb(style["color"]) for style in first]], dtype=torch.uint8).numpy())
    distances = torch.pdist(torch.tensor(shades[0]))
    assert distances.min() > 20


def test_numbers_in_a_plot_do_not_overlap() -> None:
    labels = [f"toma:skip_first={number},ratio={ratio}" for number in range(12) for ratio in (0.25, 0.5, 0.75)]
    places = range(len(labels) + 1)
    drawn = drawn_plot(labels, [1 + 0.01 * (place % 5) for place in places], [100.0 + place % 7 for place in places])
    numbers = [text for text in drawn.axes[0].texts if text.get_visible()]
    assert 8 < len(numbers) <= 36
    boxes = [number.get_window_extent() for number in numbers]
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])


def test_missing_networks_are_named_in_every_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], networks: Path
) -> None:
    (tmp_path / "networks").mkdir()
    arguments = ["eval", "--size", "64x64", "--steps", "1", "--number", "1", "--device", "cpu", "--repeats", "0"]
    arguments += ["--networks", str(tmp_path / "networks"), "--clip", str(networks / "clip"), "--dino", "no/dino"]
    assert main([*arguments, "--json", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert "DINO is missing: no/dino cannot be loaded from the hub" in printed.err
    assert any(line.startswith("DINO") for line in result["missing"])
    # Without --json, missing networks are reported at the start and not again under the table.
    assert main([*arguments, "--resume", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("missing:") == len(result["missing"])
    assert "missing:" not in printed.out
    assert "1 step, float32; 1 prompt x 1 seed;" in printed.out
    for name in ("table.md", "report.html"):
        assert "DINO is missing" in (tmp_path / "out" / name).read_text()
    assert set(result["results"][1]["metrics"]) >= {"mse", "psnr", "ssim", "clip"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of three pictures with the same names and different suffixes."""
    root = tmp_path_factory.mktemp("pairs")
    for name, ending in (("first", "png"), ("second", "bmp")):
        (root / name).mkdir()
        for number in range(3):
            values = torch.randint(256, (48, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
            values = values if name == "first" else values // 2
            Image.fromarray(values.numpy()).save(root / name / f"{number}.{ending}")
    return root / "first", root / "second"


def test_metrics_of_two_folders(
    pairs: tuple[Path, Path], networks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("a rose\na tulip\na daisy\n")
    arguments = ["metrics", *map(str, pairs), "--networks", str(networks), "--device", "cpu"]
    arguments += ["--prompts", str(tmp_path / "prompts.txt"), "--metrics", ",".join(METRICS)]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["counts"] == {"reference": 3, "test": 3}
    assert set(result["metrics"]) == set(METRICS)
    assert list(result["pictures"]) == ["0.bmp", "1.bmp", "2.bmp"]
    # The test pictures halve uniform noise: the mean square of the difference over 0 to 255.
    taken = sum((value - value // 2) ** 2 for value in range(256)) / 256
    assert result["metrics"]["mse"]["mean"] == pytest.approx(taken, rel=0.05)
    assert main(arguments) == 0
    assert "3 pictures against 3" in capsys.readouterr().out


def test_intervals_of_folders_are_those_of_the_evaluation_that_made_them(
    finished: Path, networks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.loads((finished / "results.jsonl").read_text().splitlines()[1])
    pictures = [json.loads(text) for text in (finished / "metrics.jsonl").read_text().splitlines()]
    mine = sorted((item for item in pictures if item["label"] == line["label"]), key=lambda item: item["image"])
    (tmp_path / "prompts.json").write_text(json.dumps(mine))
    folders = [str(finished / "images" / "none"), str((finished / mine[0]["image"]).parent)]
    arguments = ["metrics", *folders, "--metrics", "mse,ssim,fid,kid", "--networks", str(networks), "--device", "cpu"]
    prompts = ["--prompts", str(tmp_path / "prompts.json")]
    assert main([*arguments, *prompts, "--json"]) == 0
    grouped = json.loads(capsys.readouterr().out)
    assert grouped["intervals_over"] == "prompts"
    for name in ("mse", "ssim", "fid", "kid"):
        assert line["metrics"][name]["interval"] > 0
        assert grouped["metrics"][name] == pytest.approx(line["metrics"][name])

    assert main([*arguments, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["intervals_over"] == "pictures"
    assert alone["metrics"]["mse"]["interval"] != pytest.approx(line["metrics"]["mse"]["interval"])
    assert main(arguments) == 0
    assert "Every picture counts as independent" in capsys.readouterr().out
    assert main([*arguments, *prompts]) == 0
    assert "All pictures of a prompt count as one sample" in capsys.readouterr().out


@pytest.mark.parametrize("threads", ["0", "-1"])
def test_threads_that_cannot_be_are_refused(
    pairs: tuple[Path, Path], threads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", *map(str, pairs), "--metrics", "mse", "--threads", threads]) == 2
    assert f"--threads: {threads} is out of range; it must be 1 or more" in capsys.readouterr().err


def test_equal_folders_are_infinitely_like_each_other(
    pairs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", str(pairs[0]), str(pairs[0]), "--metrics", "psnr,ssim", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["metrics"]
    assert values["psnr"] == {"mean": "inf", "interval": None}
    assert values["ssim"]["mean"] == pytest.approx(1)


def test_sets_need_no_pairs(pairs: tuple[Path, Path], networks: Path, tmp_path: Path) -> None:
    for name in ("x", "y"):
        Image.new("RGB", (20, 50), "red").save(tmp_path / f"{name}.png")
    assert main(["metrics", str(pairs[0]), str(tmp_path), "--metrics", "fid,kid", "--networks", str(networks)]) == 0


def test_folders_that_cannot_be_compared(
    pairs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: object) -> str:
        assert main(["metrics", *map(str, arguments), "--metrics", "mse"]) == 2
        return capsys.readouterr().err

    assert "is not a folder" in refusal(pairs[0], tmp_path / "absent")
    assert "holds no picture" in refusal(pairs[0], tmp_path)
    for number in range(3):
        Image.new("RGB", (64, 48)).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").rename(tmp_path / "3.png")
    assert "2 pictures have no partner, first '2'" in refusal(pairs[0], tmp_path)
    Image.new("RGB", (64, 49)).save(tmp_path / "2.png")
    (tmp_path / "3.png").unlink()
    assert "64x48 pixels and" in refusal(pairs[0], tmp_path)
    (tmp_path / "2.png").write_bytes(b"no picture")
    assert "cannot be read as a picture" in refusal(pairs[0], tmp_path)
    Image.new("RGB", (64, 49)).save(tmp_path / "1.jpg")
    assert "have the same name" in refusal(pairs[0], tmp_path)
    (tmp_path / "prompts.txt").write_text("one\n")
    assert main(["metrics", *map(str, pairs), "--prompts", str(tmp_path / "prompts.txt")]) == 2
    assert "1 prompt for 3 pictures" in capsys.readouterr().err
    assert main(["metrics", *map(str, pairs), "--metrics", "clip", "--clip", "no/clip"]) == 2

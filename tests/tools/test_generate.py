"""`tokenmerge generate` on the bundled models: real pictures, correct figures, and errors of one line."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupt_when
from PIL import Image

import tiny
import tokenmerge
import tokenmerge_models
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.families.calls import TokenGrid
from tokenmerge.planning.drift import UNCALIBRATED, Drift
from tokenmerge.tools import quality
from tokenmerge.tools.cli.main import main
from tokenmerge.tools.drawing import pictures
from tokenmerge.tools.drawing.comparison import Comparison, Shot, draw_rows, report
from tokenmerge.tools.drawing.studio import Studio
from tokenmerge.tools.loading import BUNDLED, Outline, load_pipeline
from tokenmerge.tools.typed import read_configurations


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_bundled_files_are_those_that_were_trained() -> None:
    assert tuple(tokenmerge_models.models()) == BUNDLED
    for folder in tokenmerge_models.models().values():
        for line in (folder / "SHA256SUMS").read_text().splitlines():
            digest, name = line.split("  ")
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("model", BUNDLED)
def test_bundled_pipelines_run_with_both_techniques_at_every_size(model: str) -> None:
    pipe, defaults = load_pipeline(model, torch.float32, torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    tokenmerge.apply(pipe, [Merge(ratio=0.5), Hold(every=2, start=0.0)])
    for height, width in ((256, 256), (256, 384), (128, 128)):
        image = pipe(
            "a photo of a sunflower", height=height, width=width, num_inference_steps=3, **defaults.call
        ).images[0]
        assert image.size == (width, height)
        assert tokenmerge.summary(pipe).steps == {"merged": 2, "held": 1}
        tokens = height * width // 64
        assert f"{tokens} -> {tokens // 2}" in {group["tokens"] for group in tokenmerge.summary(pipe).groups}


def shots(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out, parse_constant=_no_constant)["shots"]
    return found


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize(("model", "merging"), [("tiny-flux", "dit"), ("tiny-sdxl", "unet")])
def test_without_techniques_a_picture_shows_all_four(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, merging: str
) -> None:
    """The picture of `make demo`: plain, Merge, Hold and both, with times and drift."""
    monkeypatch.chdir(tmp_path)
    small = ["--model", model, "--steps", "12", "--size", "64x64"]
    assert main(["generate", "a photo of a rose", *small, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["picture"] == "a-photo-of-a-rose-0.png"
    assert [path.name for path in tmp_path.iterdir()] == [result["picture"]]
    # Four pictures side by side, with three difference maps below.
    width, height = Image.open(tmp_path / result["picture"]).size
    assert 4 * 320 < width < 5 * 320
    assert 2 * 320 < height < 3 * 320
    assert [shot["label"] for shot in result["shots"]] == ["none", merging, "hold", f"{merging} + hold"]
    assert [[each["technique"] for each in shot["techniques"]] for shot in result["shots"]] == [
        [],
        ["merge"],
        ["hold"],
        ["merge", "hold"],
    ]
    assert [sorted(shot["kinds"]) for shot in result["shots"]] == [
        [],
        ["merged"],
        ["full", "held"],
        ["held", "merged"],
    ]
    for shot in result["shots"]:
        assert shot["seconds"] > 0
        if shot["label"] == "hold":
            assert shot["estimated_psnr"] > 0
        if shot["techniques"]:
            assert shot["mse"] > 0
            assert shot["psnr"] == pytest.approx(10 * torch.log10(torch.tensor(255**2 / shot["mse"])).item(), abs=1e-3)


@pytest.mark.parametrize(("calibrated", "told"), [(True, "41"), (False, "~41")])
def test_an_estimate_that_was_never_compared_says_so(calibrated: bool, told: str) -> None:
    figures = {"mse": 5.0, "psnr": 41.1, "ssim": 0.99}
    plain, held = read_configurations(["hold"])
    estimate = Drift(41.2, 3.0, calibrated)
    drawn = Image.new("RGB", (8, 8))
    shots = [
        Shot(plain, 0, drawn, 2.0, "", {}),
        Shot(held, 0, drawn, 1.0, "", {"full": 9, "held": 7}, 2.0, figures, estimate=estimate),
    ]
    text = report([shots])
    assert f" {told} " in text
    assert (UNCALIBRATED in text) != calibrated
    assert shots[1].to_dict()["estimated_psnr"] == 41.2
    assert shots[1].to_dict()["estimate_calibrated"] == calibrated


def test_a_slow_moment_of_the_machine_costs_no_technique_its_place() -> None:
    """Laps take turns, so that one slow moment does not spoil the plain time against which all others are compared."""
    asked = Comparison(model="tiny-flux", prompt="a rose", size=(64, 64), steps=3)
    studio = Studio(asked)
    moments = iter([2.0])

    def wait(*_: Any) -> None:
        """Delay the first picture that has all steps."""
        if len(studio.pipe.scheduler.timesteps) == asked.steps:
            time.sleep(next(moments, 0.0))

    hook = denoiser_of(studio.pipe).register_forward_pre_hook(wait)
    ((plain, held),) = draw_rows(studio, asked, read_configurations(["hold:every=2,start=0"]))
    hook.remove()
    assert plain.seconds < 2.0
    assert held.kinds == {"full": 2, "held": 1}
    assert plain.seconds / held.seconds == pytest.approx(held.speed_up)


def test_several_seeds_ratios_and_what_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rose.png"
    arguments = ["generate", "a rose", "--steps", "3", "--size", "64x64", "--ratios", "0.25,0.5", "--number", "2"]
    arguments += ["--seed", "3", "--techniques", "dit:start=0", "hold", "--show-destinations", "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    found = shots(capsys)
    labels = ("none", "dit:start=0,ratio=0.25", "dit:start=0,ratio=0.5", "hold")
    assert [(shot["seed"], shot["label"]) for shot in found] == [(seed, label) for seed in (3, 4) for label in labels]
    assert [shot["tokens"] for shot in found[:4]] == ["", "64 -> 48", "64 -> 32", ""]
    assert found[1]["mse"] < found[2]["mse"]
    # Pictures, drift and destinations, for both seeds.
    assert Image.open(out).height > 6 * 320


@pytest.mark.parametrize(
    ("technique", "kinds"),
    [
        ("hold", {"full": 2}),
        ("dit:start=0.9", {"full": 2}),
        ("dit", {"merged": 2}),
        ("hold:every=2,start=0", {"full": 2}),
    ],
)
def test_steps_too_few_to_save_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], technique: str, kinds: dict[str, int]
) -> None:
    """If no step saves anything, the report does not blame size or batch. Equal pictures have an infinite PSNR, for
    which JSON has no number."""
    saves = kinds != {"full": 2}
    arguments = ["generate", "a rose", "--steps", "2", "--size", "64x64", "--techniques", technique]
    arguments += ["--out", str(tmp_path / "a.png")]
    assert main([*arguments, "--json"]) == 0
    plain, shot = shots(capsys)
    assert (plain["kinds"], shot["kinds"]) == ({}, kinds)
    assert (shot["mse"] == 0) == (not saves)
    assert (shot["psnr"] == "inf") == (not saves)
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert (f"{technique}: Steps of the last image: 2 full: nothing was saved." in printed) == (not saves)
    assert saves or "larger --size" not in printed


def test_as_many_threads_are_taken_as_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        arguments = ["generate", "a rose", "--steps", "1", "--size", "64x64", "--techniques", "none", "--json"]
        assert main([*arguments, "--threads", str(before + 1), "--out", str(tmp_path / "a.png")]) == 0
    finally:
        torch.set_num_threads(before)
    assert json.loads(capsys.readouterr().out)["environment"]["threads"] == str(before + 1)


@pytest.mark.parametrize("technique", ["dit", "none"])
def test_a_cache_is_compared_with_the_plain_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], technique: str
) -> None:
    cached = f"{technique} + mag:threshold=0.5"
    arguments = ["generate", "a rose", "--steps", "6", "--size", "64x64", "--out", str(tmp_path / "a.png"), "--json"]
    assert main([*arguments, "--techniques", *dict.fromkeys((technique, cached))]) == 0
    plain, *others = shots(capsys)
    assert plain["cache"] is None
    assert (others[-1]["label"], others[-1]["cache"]["name"]) == (cached, "mag")
    assert others[-1]["mse"] > 0
    assert technique == "none" or others[0]["mse"] != others[1]["mse"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "100x150"], "multiples of 8, from 16: try 96x152"),
        (["--size", "132x132", "--model", "tiny-sdxl"], "multiples of 8"),
        (["--size", "8x64"], "try 16x64"),
        (["--techniques", "dit:levels=2"], "only one"),
        (["--techniques", "todo"], "use another method"),
        (["--techniques", "none + first-block:speed=1"], "no field 'speed'"),
        (
            ["--techniques", "hold", "--show-destinations"],
            "nothing merges here; add a technique that merges, such as dit",
        ),
        (["--techniques", "dit:ratio=0", "--show-destinations"], "nothing merges here"),
        (["--out", "rose.txt"], "rose.txt does not end like a picture file; use .png, .jpg or .webp"),
        (["--out", "rose"], "does not end like a picture file"),
        (["--out", "/dev/null/rose.png"], "/dev/null/rose.png cannot be written"),
        (["--techniques", "none + mag", "--model", "tiny-sdxl"], "has no enable_cache"),
        (["--techniques", "dit + hold + mag"], "Hold and the mag cache both skip steps; leave one of them out"),
        (["--techniques", "none + mag", "--device", "cpu", "--compile", "blocks"], "leave out --compile"),
        (["--techniques", "unet:merge_regions=stripe:8", "--model", "tiny-sdxl"], "use the same kind for both"),
        (["--techniques", "dit:merge_regions=tile:2x2"], "use larger merge_regions"),
    ],
)
def test_what_a_model_cannot_have_is_told_before_it_is_loaded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("tokenmerge.tools.drawing.studio.load_pipeline", load)
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "a rose", *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("tokenmerge: ")
    assert printed.count("\n") == 1
    assert words in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("technique", "words"),
    [
        ("dit + taylorseer", "stores tensors inside of blocks"),
        ("none + faster", "use another cache"),
    ],
)
def test_caches_that_do_not_go_with_a_technique_are_told_before_a_picture_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, technique: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "a rose", "--size", "64x64", "--techniques", technique]) == 2
    printed = capsys.readouterr().err
    assert words in printed.splitlines()[-1]
    assert "none:" not in printed, "a picture was begun"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", tiny.FAMILIES)
@pytest.mark.parametrize("levels", [2, 3, 4])
def test_sizes_are_those_that_the_pipeline_takes_as_they_are(
    kind: str, levels: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # diffusers does not propagate its warnings, and earlier commands may have silenced it.
    log = logging.getLogger("diffusers")
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.WARNING, log.name)
    pipe = tiny.build(kind, vae=tiny.vae(levels, 16 if kind == "sd3" else 4))

    def is_taken(side: int) -> bool:
        """Whether the pipeline accepts a size and does not replace it by another."""
        caplog.clear()
        accepted = inspect.signature(pipe.check_inputs).parameters
        arguments = dict.fromkeys(name for name, item in accepted.items() if item.default is item.empty)
        try:
            pipe.check_inputs(**{**arguments, "prompt": "a rose", "height": side, "width": side})
        except ValueError as error:
            return "divisible" not in str(error)
        return not caplog.records

    model = Outline("tiny", tiny.denoiser_of(pipe), pipe.vae_scale_factor)
    assert model.family is family_of(model.denoiser)
    for side in range(64, 129, 2):
        try:
            model.check_size(side, side)
        except TokenMergeError:
            assert not is_taken(side)
        else:
            assert is_taken(side)


def test_an_interrupted_run_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenmerge", "generate", "a rose", "--steps", "1000", "--out"]
    seen = interrupt_when([*command, str(tmp_path / "rose.png")], "none:")
    assert seen.endswith("tokenmerge: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8))
    with pytest.raises(TokenMergeError, match="cannot be written"):
        pictures.save_picture(picture, Path("/dev/full/picture.png"))
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenMergeError, match="cannot be written"):
        pictures.save_picture(picture, tmp_path / "file" / "picture.png")
    pictures.save_picture(picture, tmp_path / "new" / "picture.png")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["picture.png"]


def test_psnr_and_ssim_of_known_pictures() -> None:
    grey = torch.full((32, 32, 3), 100, dtype=torch.uint8)
    assert quality.compare(grey, grey) == {"mse": 0.0, "psnr": float("inf"), "ssim": pytest.approx(1.0)}
    # The SSIM of two flat pictures depends only on their means: (2ab + c) / (a^2 + b^2 + c).
    other = torch.full((32, 32, 3), 110, dtype=torch.uint8)
    constant = (0.01 * 255) ** 2
    expected = (2 * 100 * 110 + constant) / (100**2 + 110**2 + constant)
    assert quality.compare(grey, other) == {
        "mse": 100.0,
        "psnr": pytest.approx(28.1308, abs=1e-4),
        "ssim": pytest.approx(expected),
    }
    with pytest.raises(TokenMergeError, match="same size"):
        quality.compare(grey, grey[:16])


def test_pictures_survive_the_way_through_tensors() -> None:
    values = torch.randint(256, (5, 7, 3), dtype=torch.uint8)
    assert torch.equal(pictures.to_tensor(pictures.to_picture(values)), values)


def test_equal_pictures_differ_nowhere_and_an_overlay_marks_destinations() -> None:
    picture = pictures.to_picture(torch.randint(256, (32, 32, 3), dtype=torch.uint8))
    assert pictures.to_tensor(pictures.difference(picture, picture)).float().mean() < 2
    overlay = pictures.overlay_map(picture, TokenGrid(2, 2), torch.tensor([0, 0, 3, 3]), torch.zeros(4))
    assert overlay.getpixel((8, 8)) == (24, 24, 28)
    assert overlay.getpixel((16, 8)) == (214, 40, 40)

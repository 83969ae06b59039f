"""`tokenmerge generate` on the bundled models: real pictures, honest figures, and errors of one line."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import tiny
import tokenmerge
from tokenmerge import TokenMergeError, pictures, quality
from tokenmerge.tools.loading import CallDefaults, bundled_models, load_pipeline
from tokenmerge.tools.cli.main import main
from tokenmerge.tools.drawing.generate import picture_size
from tokenmerge.merging.grid import TokenGrid

MODELS = Path(tokenmerge.__file__).parent / "models"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_bundled_files_are_those_that_were_trained() -> None:
    assert "tiny-flux" in bundled_models()
    for model in bundled_models():
        for line in (MODELS / model / "SHA256SUMS").read_text().splitlines():
            digest, name = line.split("  ")
            assert hashlib.sha256((MODELS / model / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("model", bundled_models())
@pytest.mark.parametrize("size", [(256, 256), (512, 512), (256, 384)])
def test_bundled_pipelines_run_merged_at_every_size(model: str, size: tuple[int, int]) -> None:
    pipe, defaults = load_pipeline(model, torch.float32, torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    tokenmerge.apply(pipe, ratio=0.5, **tiny.PLAIN)
    image = pipe(
        "a photo of a sunflower", height=size[0], width=size[1], num_inference_steps=2, **defaults.call
    ).images[0]
    assert image.size == (size[1], size[0])
    assert tokenmerge.summary(pipe).steps == {"merged": 2}
    counts = {group["tokens"] for group in tokenmerge.summary(pipe).groups}
    tokens = size[0] * size[1] // 64
    assert f"{tokens} -> {tokens // 2}" in counts


def test_a_picture_and_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "generate",
        "a photo of a rose",
        "--steps",
        "4",
        "--ratios",
        "0.25,0.5",
        "--number",
        "2",
        "--seed",
        "3",
    ]
    assert main([*arguments, "--show-destinations", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["picture"] == "a-photo-of-a-rose-3.png"
    picture = Image.open(tmp_path / result["picture"])
    assert picture.width > 7 * 320
    assert [path.name for path in tmp_path.iterdir()] == [result["picture"]]
    assert [(shot["seed"], shot["variant"]) for shot in result["shots"]] == [
        (seed, variant)
        for seed in (3, 4)
        for variant in ("original", "toma 0.25, anchor every 5", "toma 0.5, anchor every 5")
    ]
    for shot in result["shots"]:
        assert shot["seconds"] > 0
        if shot["config"]:
            assert shot["psnr"] == pytest.approx(10 * torch.log10(torch.tensor(255**2 / shot["mse"])).item(), abs=1e-3)
    assert result["shots"][1]["mse"] < result["shots"][2]["mse"]


def test_a_coverage_target_is_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--size", "64x64", "--steps", "3", "--out", str(tmp_path / "rose.png"), "--json"]
    target = ["--ratio", "0.75", "--coverage", "0", "--destinations-every", "2", "--preset", "dit"]
    assert main(["generate", "a rose", *options, *target]) == 0
    shot = json.loads(capsys.readouterr().out)["shots"][1]
    assert (shot["variant"], shot["config"]["coverage"]) == ("toma to 0.75, coverage 0", 0.0)
    assert shot["tokens"] == "64 -> 16"


@pytest.mark.parametrize(
    ("options", "modes", "tokens"),
    [
        (["--ratio", "0.5"], {"full": 1, "anchor": 1}, "64 -> 32"),
        (["--start", "0", "--anchor-every", "0"], {"merged": 2}, "64 -> 32"),
        # Blocks that are held have none between.
        (["--start", "0"], {"anchor": 1, "merged": 1}, ""),
        (["--start", "0.9"], {"full": 2}, ""),
    ],
)
def test_steps_too_few_to_merge_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], modes: dict[str, int], tokens: str
) -> None:
    """Where no step saves anything, neither size nor batch are why a picture takes as long as before."""
    arguments = ["generate", "a rose", "--steps", "2", "--size", "64x64", *options, "--out", str(tmp_path / "a.png")]
    assert main([*arguments, "--json"]) == 0
    original, merged = json.loads(capsys.readouterr().out)["shots"]
    assert (original["modes"], merged["modes"]) == ({}, modes)
    assert (original["tokens"], merged["tokens"]) == ("", tokens)
    assert (merged["mse"] == 0) == ("merged" not in modes)
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    told = "anchor every 5: Steps of the last image: 1 whole, 1 whole and merged (anchors): nothing was saved."
    if not tokens:
        told = "held, anchor every 3: Steps of the last image: 2 whole: nothing was saved."
    assert (told in printed) == ("merged" not in modes)
    assert "merged" in modes or "larger size" not in printed


@pytest.mark.parametrize(
    ("options", "label"),
    [(["--ratio", "0.5"], "toma 0.5, anchor every 5 + mag"), (["--method", "none"], "unmerged + mag")],
)
def test_a_cache_is_compared_with_the_plain_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], label: str
) -> None:
    arguments = ["generate", "a rose", "--steps", "6", "--size", "64x64", *options, "--out", str(tmp_path / "a.png")]
    assert main([*arguments, "--cache", "mag:threshold=0.5", "--json"]) == 0
    original, cached = json.loads(capsys.readouterr().out)["shots"]
    assert (original["cache"], cached["cache"]["name"], cached["variant"]) == (None, "mag", label)
    assert main([*arguments, "--json"]) == 0
    _, uncached = json.loads(capsys.readouterr().out)["shots"]
    assert cached["mse"] != uncached["mse"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "no/such-model"], "not bundled (tiny-flux"),
        (["--size", "100x150"], "multiples of 8, from 16: try 96x152"),
        (["--size", "132x132", "--model", "tiny-sdxl"], "multiples of 8"),
        (["--size", "8x64"], "try 16x64"),
        (["--size", "large"], "width x height"),
        (["--steps", "0"], "1 or more"),
        (["--ratio", "1"], "[0, 1)"),
        (["--device", "cuda:77"], "cannot be used"),
        (["--levels", "2"], "only one"),
        (["--cache", "first-block:speed=1"], "no field 'speed'"),
        (["--cache", "mag"], "; leave out --cache, or add --ratio 0.5 or --method none"),
        (["--cache", "mag", "--preset", "hold"], "or add --ratio 0.5 or --method none in place of --preset"),
        (["--show-destinations"], "blocks are held; give a --ratio"),
        (["--show-destinations", "--method", "none"], "nothing does here; give a --ratio above 0"),
        (["--show-destinations", "--ratios", "0.5,0"], "nothing does here; give a --ratio above 0"),
        (["--show-destinations", "--step-ratios", "0,0"], "nothing does here; give a --ratio above 0"),
        (["--out", "rose.txt"], "rose.txt does not end as a picture does; use .png, .jpg or .webp"),
        (["--out", "rose"], "does not end as a picture does"),
        (["--out", "/dev/null/rose.png"], "/dev/null/rose.png cannot be written"),
        (["--ratio", "0.5", "--cache", "taylorseer"], "stores tensors inside of blocks"),
        (["--cache", "mag", "--model", "tiny-sdxl"], "has no enable_cache"),
        (["--cache", "mag", "--device", "cpu", "--compile", "blocks"], "leave out --compile"),
        (["--device", "cpu", "--compile", "graphs"], "use --compile blocks"),
        (["--coverage", "1.5"], "[0, 1]"),
        (["--ratio", "0.75", "--ratios", "0.25"], "both --ratio and --ratios were given"),
        (["--merge-regions", "stripe:8", "--model", "tiny-sdxl"], "use the same kind for both"),
        (["--merge-regions", "tile:2x2"], "use larger merge_regions"),
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
    assert main(["generate", "a rose", *options]) == 2
    printed = capsys.readouterr().err
    error = printed.splitlines()[-1]
    assert error.startswith("tokenmerge: ")
    assert words in error
    assert "original:" not in printed, "a picture was begun"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", tiny.FAMILIES)
@pytest.mark.parametrize("levels", [2, 3, 4])
def test_sizes_are_those_that_the_pipeline_takes_as_they_are(
    kind: str, levels: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # diffusers keeps its warnings to itself.
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    pipe = tiny.build(kind, vae=tiny.vae(levels, 16 if kind == "sd3" else 4))

    def is_taken(side: int) -> bool:
        """Whether the pipeline neither refuses a size nor takes another in its place."""
        caplog.clear()
        accepted = inspect.signature(pipe.check_inputs).parameters
        arguments = dict.fromkeys(name for name, item in accepted.items() if item.default is item.empty)
        try:
            pipe.check_inputs(**{**arguments, "prompt": "a rose", "height": side, "width": side})
        except ValueError as error:
            return "divisible" not in str(error)
        return not caplog.records

    for side in range(64, 129, 2):
        try:
            assert picture_size(f"{side}x{side}", CallDefaults(), pipe) == (side, side)
        except TokenMergeError:
            assert not is_taken(side)
        else:
            assert is_taken(side)


def test_an_interrupted_run_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenmerge", "generate", "a rose", "--steps", "1000"]

    def heed_interrupts() -> None:
        # A shell's background jobs, and what they start, are deaf to them.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    ) as process:
        assert process.stderr is not None
        printed = ""
        while "original" not in printed and (character := process.stderr.read(1)):
            printed += character
        process.send_signal(signal.SIGINT)
        printed += process.stderr.read()
    assert process.returncode == 130
    assert printed.endswith("tokenmerge: interrupted\n")
    assert "Traceback" not in printed
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
    # Of two flat pictures only the means count: (2ab + c) / (a^2 + b^2 + c).
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

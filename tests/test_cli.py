"""The command line: what it prints, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokenmerge.tools.cli.main import main
from tokenmerge.config import METHODS
from tokenmerge.tools.typed import FIELDS, config_fields

SDXL = {
    "_class_name": "UNet2DConditionModel",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 2,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the configs of SDXL, Flux and SD3 at their real size, and no weights."""
    folder = tmp_path_factory.mktemp("models")
    files = {
        "sdxl/model_index.json": {"_class_name": "StableDiffusionXLPipeline", "unet": ["diffusers", "x"]},
        "sdxl/unet/config.json": SDXL,
        "sdxl/vae/config.json": {"block_out_channels": [128, 256, 512, 512]},
        "flux/config.json": {"_class_name": "FluxTransformer2DModel"},
        "sd3/config.json": {"_class_name": "SD3Transformer2DModel"},
        "other/config.json": {"_class_name": "PriorTransformer"},
        "vae/model_index.json": {"_class_name": "VaePipeline", "vae": ["diffusers", "AutoencoderKL"]},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    (folder / "empty").mkdir()
    return folder


def run(*arguments: str) -> int:
    return main(arguments)


@pytest.mark.parametrize("method", METHODS)
def test_plan_takes_every_method(method: str, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ratio = [] if method == "hold" else ["--ratio", "0.5"]
    assert run("plan", "--model", str(models / "sdxl"), "--method", method, *ratio, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["config"]["method"] == method
    kept = {"none": 1, "hold": 0}.get(method, 0.5)
    merged = [(tokens, [tokens * kept]) for tokens in (4096, 1024)]
    assert [(group["tokens"], group["merged"]) for group in plan["groups"]] == merged
    assert (plan["saved"] > 0) == (method != "none")
    # ToDo shortens keys and values only, which no rotary table may turn.
    assert run("plan", "--model", str(models / "flux"), "--method", method) == (2 if method == "todo" else 0)


def test_plan_of_sdxl_from_its_config(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--model", str(models / "sdxl"), "--preset", "toma-tile", "--ratio", "0.5", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["sites"]) == 3 * 70
    assert [(group["grid"], group["tokens"], group["merged"]) for group in plan["groups"]] == [
        ("64x64", 4096, [2048]),
        ("32x32", 1024, [512]),
    ]
    # By hand: blocks of width 640 on 4096 tokens, ten of them, and of 1280 on 1024, sixty.
    work = {tokens: 7 * width**2 * tokens + 2 * width * tokens**2 for tokens, width in ((4096, 640), (1024, 1280))}
    half = {4096: 7 * 640**2 * 2048 + 2 * 640 * 2048**2, 1024: 7 * 1280**2 * 512 + 2 * 1280 * 512**2}
    total = 10 * work[4096] + 60 * work[1024]
    saved = 10 * (work[4096] - half[4096]) + 60 * (work[1024] - half[1024])
    assert plan["saved"] == pytest.approx(saved / total)
    assert 0 < plan["spent"] < 0.05


@pytest.mark.parametrize(
    ("size", "grid", "regions"),
    [
        (("1024", "1024"), "64x64", "256 tiles of 4x4"),
        (("1080", "1920"), "67x120", "536 ragged tiles of 15"),
        (("832", "1216"), "52x76", "247 tiles of 4x4"),
        (("1000", "1000"), "62x62", "ragged tiles"),
    ],
)
def test_plan_of_flux_at_every_size(
    models: Path, capsys: pytest.CaptureFixture[str], size: tuple[str, str], grid: str, regions: str
) -> None:
    where = ["--height", size[0], "--width", size[1], "--ratio", "0.5", "--skip-first", "5"]
    assert run("plan", "--model", str(models / "flux"), *where) == 0
    printed = capsys.readouterr().out
    assert "47 of 57 sites" in printed
    assert grid in printed
    assert regions in printed
    assert "5 x one of the first 5 blocks of joint (skip_first)" in printed


@pytest.mark.parametrize(("options", "done"), [([], "held"), (["--ratio", "0.5"], "merged")])
def test_sites_can_be_listed(models: Path, capsys: pytest.CaptureFixture[str], options: list[str], done: str) -> None:
    assert run("plan", "--model", str(models / "sdxl"), "--levels", "2", "--sites-list", *options) == 0
    printed = capsys.readouterr().out
    assert f"down_blocks.1.attentions.0.transformer_blocks.0  [level-2]  {done}" in printed
    assert "level-4 is not among levels (2,)" in printed


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("missing/model", [], "there is no folder "),
        ("empty", [], "model_index.json or config.json"),
        ("other", [], "PriorTransformer"),
        ("vae", [], "without a unet or transformer"),
        ("flux", ["--ratio", "1.5"], "[0, 1)"),
        ("flux", ["--regions", "tile:0x8"], "zero"),
        ("flux", ["--levels", "2"], "only one"),
        ("flux", ["--skip-first", "38"], "no site"),
        ("flux", ["--preset", "toma", "--components", "cross_attention"], "no site"),
        ("flux", ["--sites", "component"], "anchor_every=0"),
        ("flux", ["--preset", "best"], "unknown"),
        ("flux", ["--height", "4"], "larger size"),
        ("flux", ["--height", "8"], "8x1024 pixels are less than one token of 16x16; give a larger size"),
        ("sd3", ["--width", "8"], "1024x8 pixels are less than one token of 16x16; give a larger size"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(
    models: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    options: list[str],
    words: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("plan", "--model", str(models / model), *options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tokenmerge: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err


@pytest.mark.parametrize("command", ["plan", "generate", "bench", "eval --metrics mse", "tune --budget mse=100"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/nope/folder", "there is no folder /nope/folder; give a bundled name (tiny-flux, tiny-sdxl)"),
        ("./tiny-flux", "there is no folder ./tiny-flux; "),
        ("../nope", "there is no folder ../nope; "),
        ("~/nope", "there is no folder ~/nope; "),
        ("no/such/model", "it is no folder here, and the hub has no model of that name"),
    ],
)
def test_a_folder_that_is_not_there_is_not_looked_for_in_the_hub(
    command: str,
    model: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(*command.split(), "--model", model) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_hub_id_without_a_network_is_one_line(models: Path) -> None:
    command = [sys.executable, "-m", "tokenmerge", "plan", "--model", "somebody/some-model"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(models / "empty")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "cannot be reached" in result.stderr


@pytest.mark.parametrize(
    ("options", "way"),
    [
        (["--preset", "dit", "--ratio", "0.5"], None),
        (["--preset", "dit-anchored", "--ratio", "0.5"], None),
        (["--preset", "dit-anchored", "--ratio", "0.02"], "; raise the ratio or anchor_every."),
        (["--preset", "toma", "--regions", "whole", "--ratio", "0.02"], "; raise the ratio."),
        (["--method", "none"], None),
    ],
)
def test_plan_says_when_merging_costs_more_than_it_saves(
    models: Path, capsys: pytest.CaptureFixture[str], options: list[str], way: str | None
) -> None:
    assert run("plan", "--model", str(models / "flux"), *options, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["saved"] < plan["spent"]) == (way is not None)
    assert run("plan", "--model", str(models / "flux"), *options) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "slower merged than unmerged" in line]
    assert [line.endswith(way or "") for line in told] == [True] * (way is not None)


def test_one_of_a_thing_is_told_in_the_singular(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--skip-first", "1", "--skip-last", "1", "--regions", "tile:1", "--anchor-every", "0"]
    assert run("plan", "--model", str(models / "flux"), "--height", "64", "--width", "64", *options) == 0
    printed = capsys.readouterr().out
    assert "1 x the first block of joint (skip_first)" in printed
    assert "1 x the last block of joint (skip_last)" in printed
    assert "1 tile of 4x4" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "--seeds", "a"], "argument --seeds: 'a' is no list of whole numbers, as in 0,1,2"),
        (["generate", "--ratios", "0.5,x"], "argument --ratios: '0.5,x' is no list of numbers, as in 0.25,0.5"),
        (["generate", "--skip-first", "x"], "argument --skip-first: 'x' is no number"),
    ],
)
def test_options_of_another_type_are_told_in_words(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit):
        run(*arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "--stpes", "3"], "eval has no option --stpes (did you mean '--steps'?); tokenmerge eval --help"),
        (["tune", "--speedup=2"], "tune has no option --speedup (did you mean '--speed-up'?)"),
        (["generate", "a rose", "--anchor_every", "3"], "(did you mean '--anchor-every'?)"),
        # Where what is needed was misspelt.
        (["plan", "--modle", "tiny-flux"], "plan has no option --modle (did you mean '--model'?)"),
        # Written in part.
        (["bench", "--dev", "cpu"], "bench has no option --dev (did you mean '--device'?)"),
        (["generate", "-steps", "3"], "generate has no option -steps (did you mean '--steps'?)"),
        (["presets", "--frobnicate"], "presets has no option --frobnicate; tokenmerge presets --help lists"),
        (["eval", "@FILE"], "eval has no option --sedes (did you mean '--seeds'?)"),
    ],
)
def test_a_misspelt_option_comes_with_the_nearest(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "arguments").write_text("--sedes\n0,1\n")
    assert run(*(word.replace("FILE", str(tmp_path / "arguments")) for word in arguments)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("tokenmerge: ")
    assert printed.count("\n") == 1
    assert words in printed


def test_two_dashes_end_the_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("generate", "--steps", "0", "--", "--a rose") == 2
    assert run("generate", "--steps", "0", "--", "--rose") == 2
    assert capsys.readouterr().err == 2 * "tokenmerge: --steps is 0; it must be 1 or more\n"


@pytest.mark.parametrize("command", ["generate", "plan", "bench", "eval", "reproduce", "metrics", "tune", "presets"])
def test_help_has_no_words_of_python(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    printed = capsys.readouterr().out
    for words in ("default: None", "default: (", ",)"):
        assert words not in printed


def test_help_tells_of_every_field_of_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert FIELDS.keys() == config_fields().keys()
    with pytest.raises(SystemExit):
        run("plan", "--help")
    printed = " ".join(capsys.readouterr().out.split())
    assert [name for name, told in FIELDS.items() if told not in printed] == []


@pytest.mark.parametrize("command", ["plan", "generate", "bench", "eval", "tune"])
@pytest.mark.parametrize(
    ("model", "way"),
    [("tiny-fluks", "did you mean 'tiny-flux'?"), ("some/model", "give one of those, a diffusers folder or a hub id")],
)
def test_an_unknown_model_is_told_alike_and_at_once(
    command: str,
    model: str,
    way: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    # Nobody listens there.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    options = {"eval": ["--metrics", "mse"], "tune": ["--budget", "mse=100"]}.get(command, [])
    begin = time.monotonic()
    assert run(command, "--model", model, *options) == 2
    assert time.monotonic() - begin < 10
    why = "it is no folder here, and the hub cannot be reached for it"
    told = f"tokenmerge: model {model!r} is not bundled (tiny-flux, tiny-sdxl are), {why}; {way}\n"
    assert capsys.readouterr().err.endswith(told)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["eval --metrics mse", "reproduce table2 --metrics mse", "tune --budget mse=100"])
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_file_in_the_place_of_a_folder_is_told(
    command: str, resume: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "afile").write_text("mine")
    assert run(*command.split(), "--device", "cpu", "--out", str(tmp_path / "afile"), *resume) == 2
    assert capsys.readouterr().err == f"tokenmerge: {tmp_path / 'afile'} is a file, not a folder; give another --out\n"
    assert (tmp_path / "afile").read_text() == "mine"


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("presets") == 0
    assert "toma-once" in capsys.readouterr().out
    assert run("presets", "--json") == 0
    assert json.loads(capsys.readouterr().out)["toma"]["merge_regions"] == "whole"

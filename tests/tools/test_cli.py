"""The command line: its output and its refusals."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokenmerge import Hold, Merge, presets
from tokenmerge.config import METHODS
from tokenmerge.tools import loading
from tokenmerge.tools.bench.comparison import MODES, ON_CPU, ON_GPU
from tokenmerge.tools.cli.main import main, parser
from tokenmerge.tools.cli.options import RIVALS
from tokenmerge.tools.loading import BUNDLED, outline
from tokenmerge.tools.quality.metrics import BY_NAME
from tokenmerge.tools.quality.networks import CLIP_MODEL, DINO_MODEL
from tokenmerge.tools.random_models import RANDOM_MODELS
from tokenmerge.tools.rivals.reading import CACHES, SCHEDULES

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
    technique = f"{method}:ratio=0.5"
    assert run("plan", "--model", str(models / "sdxl"), "--techniques", technique, "--json") == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["label"] == technique
    assert plan["techniques"][0]["method"] == method
    assert [(group["tokens"], group["merged"]) for group in plan["groups"]] == [(4096, 2048), (1024, 512)]
    assert plan["saved"] > 0
    # ToDo shortens only keys and values, which rotary embeddings do not allow.
    assert run("plan", "--model", str(models / "flux"), "--techniques", technique) == (2 if method == "todo" else 0)


def test_plan_of_sdxl_from_its_config(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--model", str(models / "sdxl"), "--techniques", "toma-tile:ratio=0.5", "--json") == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert len(plan["sites"]) == 3 * 70
    assert [(group["grid"], group["tokens"], group["merged"]) for group in plan["groups"]] == [
        ("64x64", 4096, 2048),
        ("32x32", 1024, 512),
    ]
    # By hand: ten blocks of width 640 on 4096 tokens, and sixty of width 1280 on 1024.
    work = {tokens: 7 * width**2 * tokens + 2 * width * tokens**2 for tokens, width in ((4096, 640), (1024, 1280))}
    half = {4096: 7 * 640**2 * 2048 + 2 * 640 * 2048**2, 1024: 7 * 1280**2 * 512 + 2 * 1280 * 512**2}
    total = 10 * work[4096] + 60 * work[1024]
    saved = 10 * (work[4096] - half[4096]) + 60 * (work[1024] - half[1024])
    assert plan["saved"] == pytest.approx(saved / total)
    assert 0 < plan["spent"] < 0.05


@pytest.mark.parametrize(
    ("size", "grid", "regions"),
    [
        ("1024x1024", "64x64", "256 tiles of 4x4"),
        ("1920x1080", "67x120", "536 ragged tiles of 15"),
        ("1216x832", "52x76", "247 tiles of 4x4"),
        ("1000x1000", "62x62", "ragged tiles"),
    ],
)
def test_plan_of_flux_at_every_size(
    models: Path, capsys: pytest.CaptureFixture[str], size: str, grid: str, regions: str
) -> None:
    assert run("plan", "--model", str(models / "flux"), "--size", size, "--techniques", "dit:skip_first=5") == 0
    printed = capsys.readouterr().out
    assert "47 of 57 sites" in printed
    assert grid in printed
    assert regions in printed
    assert "5 x one of the first 5 blocks of joint (skip_first)" in printed


@pytest.mark.parametrize(
    ("typed", "grid", "told"),
    [
        (("wan-random", "--size", "1280x720", "--frames", "81"), "21x45x80", "120 tiles of 3x10, 2400 tiles of 2x3x5"),
        (("wan-1.3b-random",), "21x30x52", "52 ragged tiles of 30, 1040 ragged tiles of 2x15"),
        (("wan-1.3b-random", "--frames", "77"), "20x30x52", "1040 ragged tiles of 2x15"),
    ],
)
def test_plan_of_a_video_needs_no_weights(
    typed: tuple[str, ...], grid: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--model", *typed, "--techniques", "video", "hold", "--json") == 0
    merged, held = json.loads(capsys.readouterr().out)
    assert [group["grid"] for group in (*merged["groups"], *held["groups"])] == [grid] * 2
    assert merged["groups"][0]["regions"] == told
    assert run("plan", "--model", "flux-random", "--frames", "5") == 2
    assert "makes single images; leave frames out" in capsys.readouterr().err


def test_plan_takes_what_apply_does_and_several(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--model", str(models / "sdxl"), "--json") == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert (plan["label"], plan["techniques"][0]["technique"]) == ("hold", "hold")
    typed = ["none", "unet + hold:every=5"]
    assert run("plan", "--model", str(models / "sdxl"), "--techniques", *typed, "--steps", "20", "--json") == 0
    plain, both = json.loads(capsys.readouterr().out)
    assert (plain["steps"], plain["saved"]) == ({"full": 20}, 0)
    assert both["steps"].keys() == {"merged", "held"}
    assert sum(both["steps"].values()) == 20


def test_sites_can_be_listed(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    technique = "unet:levels=2 + hold:what=blocks"
    assert run("plan", "--model", str(models / "sdxl"), "--techniques", technique, "--sites-list") == 0
    printed = capsys.readouterr().out
    for done in ("merged", "held"):
        assert f"down_blocks.1.attentions.0.transformer_blocks.0  [level-2]  {done}" in printed
    assert "level-4 is not among levels (2,)" in printed


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("missing/model", [], "there is no folder "),
        ("empty", [], "model_index.json or config.json"),
        ("other", [], "PriorTransformer"),
        ("vae", [], "without a unet or transformer"),
        ("flux", ["--techniques", "dit:ratio=1.5"], "[0, 1)"),
        ("flux", ["--techniques", "dit:regions=tile:0x8"], "zero"),
        ("flux", ["--techniques", "dit:levels=2"], "only one"),
        ("flux", ["--techniques", "dit:skip_first=38"], "no site"),
        ("flux", ["--techniques", "toma:components=cross_attention"], "no site"),
        ("flux", ["--techniques", "hold:what=stages"], "stages"),
        ("flux", ["--techniques", "best"], "unknown"),
        ("flux", ["--techniques", "none + mag"], "plan covers Merge and Hold only; leave out mag"),
        ("flux", ["--steps", "0"], "--steps: 0 is out of range; it must be 1 or more"),
        ("flux", ["--size", "1024x4"], "larger size"),
        # Width first, as in all commands.
        ("flux", ["--size", "1024x8"], "1024x8 pixels are less than one token of 16x16; give a larger size"),
        ("sd3", ["--size", "8x1024"], "8x1024 pixels are less than one token of 16x16; give a larger size"),
        ("flux", ["--size", "1024"], "--size: '1024' is not a size; write width x height in pixels, as in 512x384"),
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


@pytest.mark.parametrize(
    "command", ["plan", "generate", "bench", "eval --metrics mse", "tune --budget mse=100", "serve"]
)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/nope/folder", "there is no folder /nope/folder; give a bundled name (tiny-flux, tiny-sdxl)"),
        ("./tiny-flux", "there is no folder ./tiny-flux; "),
        ("../nope", "there is no folder ../nope; "),
        ("~/nope", "there is no folder ~/nope; "),
        ("no/such/model", "no folder here has that name, and the hub has no model of that name"),
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


@pytest.mark.parametrize(
    ("technique", "costs"),
    [("dit", False), ("dit + hold", False), ("toma:regions=whole,ratio=0.02", True), ("none", False)],
)
def test_plan_says_when_merging_costs_more_than_it_saves(
    models: Path, capsys: pytest.CaptureFixture[str], technique: str, costs: bool
) -> None:
    arguments = ["plan", "--model", str(models / "flux"), "--techniques", technique]
    assert run(*arguments, "--json") == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert (plan["saved"] < plan["spent"]) == costs
    assert run(*arguments) == 0
    assert ("slower than plain; raise the ratio." in capsys.readouterr().out) == costs


def test_one_of_a_thing_is_told_in_the_singular(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    technique = "dit:skip_first=1,skip_last=1,regions=tile:1"
    assert run("plan", "--model", str(models / "flux"), "--size", "64x64", "--techniques", technique) == 0
    printed = capsys.readouterr().out
    assert "1 x the first block of joint (skip_first)" in printed
    assert "1 x the last block of joint (skip_last)" in printed
    assert "1 tile of 4x4" in printed


# Options that are wrong for every model: refused before a model is looked up.
WRONG = {
    "--steps 0": "--steps: 0 is out of range; it must be 1 or more",
    "--steps x": "--steps: 'x' is not a whole number, as in 3",
    "--size large": "--size: 'large' is not a size",
    "--size 64": "write width x height in pixels, as in 512x384",
    "--guidance nan": "--guidance: nan is out of range; it must be a finite number",
    "--guidance inf": "--guidance: inf is out of range; it must be a finite number",
    "--techniques hodl": "(did you mean 'hold'?)",
    "--techniques hold:every=0": "every is 0",
    "--ratios 0.5,x": "--ratios: '0.5,x' is not a list of numbers, as in 0.25,0.5",
    "--techniques hold --ratios 0.5": "techniques that merge without a typed ratio, but there is only hold",
    "--threads 0": "--threads: 0 is out of range; it must be 1 or more",
    "--device cuda:77": "cannot be used",
    "--dtype int8": "--dtype: invalid choice: 'int8'",
    "--seed -1": "--seed: -1 is out of range; it must be from 0 to 9223372036854775807",
    "--seed 9223372036854775807 --number 2": "is out of range; seeds are from 0 to 9223372036854775807",
    "--seeds 0,-1": "--seeds: -1 is out of range; it must be from 0 to 9223372036854775807",
    "--seeds a": "--seeds: 'a' is not a whole number, as in 3",
    "--compile graphs --device cpu": "use --compile blocks",
    "--sizes 64x64,64": "--sizes: '64' is not a size",
    "--modes fast": "mode 'fast' is unknown; use eager, graph",
    "--modes graph --device cpu": "needs a CUDA device",
    "--settle nan": "--settle: nan is out of range; it must be 0 or more",
    "--budget mse=much": "--budget: 'much' is not a number, as in 0.5",
}


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    (chosen,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(chosen.choices)


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        (command, wrong)
        for command, made in command_parsers().items()
        for wrong in WRONG
        if {word for word in wrong.split() if word.startswith("--")} <= made._option_string_actions.keys()
        and command not in ("reproduce", "metrics")
    ],
)
def test_bad_options_are_told_before_a_model_is_loaded(
    command: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.chdir(tmp_path)
    for name in ("load_pipeline", "load_denoiser"):
        monkeypatch.setattr(loading, name, load)
    monkeypatch.setattr("tokenmerge.tools.drawing.studio.load_pipeline", load)
    monkeypatch.setattr("tokenmerge.tools.bench.comparison.load_denoiser", load)
    needed = {"eval": ["--metrics", "mse"], "tune": ["--budget", "mse=100"]}.get(command, [])
    assert run(command, *needed, *wrong.split()) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("tokenmerge: ")
    assert printed.count("\n") == 1
    assert WRONG[wrong] in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "--stpes", "3"], "eval has no option --stpes (did you mean '--steps'?); tokenmerge eval --help"),
        (["tune", "--speedup=2"], "tune has no option --speedup (did you mean '--speed-up'?)"),
        (["generate", "a rose", "--show_destinations"], "(did you mean '--show-destinations'?)"),
        # The required option itself is misspelt.
        (["plan", "--modle", "tiny-flux"], "plan has no option --modle (did you mean '--model'?)"),
        # An option may not be abbreviated.
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
    assert capsys.readouterr().err == 2 * (
        "tokenmerge: --steps: 0 is out of range; it must be 1 or more (see tokenmerge generate --help)\n"
    )


@pytest.mark.parametrize("command", command_parsers())
def test_help_has_no_words_of_python(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    printed = capsys.readouterr().out
    for words in ("default: None", "default: (", ",)"):
        assert words not in printed


@pytest.mark.parametrize("command", command_parsers())
def test_help_names_the_default_of_every_option(command: str) -> None:
    """Switches are off by default; help states the default of every other option."""
    for action in command_parsers()[command]._actions:
        switch = isinstance(action, argparse._HelpAction | argparse._StoreTrueAction)
        if not switch and not action.required:
            assert "default: " in (action.help or ""), f"{command} {action.dest}"


@pytest.mark.parametrize("command", ["generate", "plan", "bench", "eval", "tune"])
def test_help_tells_of_every_field_of_both_techniques(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    printed = " ".join(capsys.readouterr().out.split())
    for technique in (Merge, Hold):
        for name, meaning in technique.field_docs().items():
            assert f"{name} (" in printed
            assert meaning in printed


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("eval", ", ".join(BY_NAME)),
        ("eval", f"(default: {CLIP_MODEL})"),
        ("tune", f"(default: {DINO_MODEL})"),
        ("eval", ", ".join(CACHES[:-1]) + f" or {CACHES[-1]}"),
        ("eval", ", ".join(SCHEDULES[:-1]) + f" or {SCHEDULES[-1]}"),
        ("bench", ", ".join(MODES)),
        ("bench", f"(default: {ON_GPU.warmups} on a GPU, else {ON_CPU.warmups})"),
        ("bench", f"(default: {ON_GPU.settle:g} on a GPU, else {ON_CPU.settle:g})"),
        ("bench", f"(default: {ON_GPU.repeats} on a GPU, else {ON_CPU.repeats})"),
        ("bench", ", ".join(RANDOM_MODELS)),
        ("generate", ", ".join(BUNDLED)),
    ],
)
def test_help_tells_what_the_code_has(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help repeats lists and defaults that it cannot import without torch; they must agree with the code."""
    with pytest.raises(SystemExit):
        run(command, "--help")
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["generate", "eval", "plan", "bench", "tune"])
def test_help_shows_rivals_where_they_may_be_typed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    printed = capsys.readouterr().out
    assert all((typed in printed) == (command in ("generate", "eval")) for typed in RIVALS)


@pytest.mark.parametrize("command", ["plan", "generate", "bench", "eval", "tune", "serve"])
@pytest.mark.parametrize(("model", "near"), [("tiny-fluks", " (did you mean 'tiny-flux'?)"), ("some/model", "")])
def test_an_unknown_model_is_told_alike_and_at_once(
    command: str,
    model: str,
    near: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    # No server listens at this port.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    options = {"eval": ["--metrics", "mse"], "tune": ["--budget", "mse=100"]}.get(command, [])
    begin = time.monotonic()
    assert run(command, "--model", model, *options) == 2
    assert time.monotonic() - begin < 10
    why = "no folder here has that name, and the hub cannot be reached"
    way = "give a bundled name (tiny-flux, tiny-sdxl), a diffusers folder or a hub id"
    told = f"tokenmerge: model {model!r} is unknown{near}: {why}; {way}\n"
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


@pytest.mark.parametrize("command", ["plan", "generate", "bench", "eval --metrics mse", "tune --budget mse=100"])
def test_without_the_bundled_models_it_is_told_how_to_get_them(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    assert run(*command.split(), "--model", "tiny-sdxl") == 2
    printed = capsys.readouterr().err
    assert "'tiny-sdxl' comes with the package tokenmerge-models, which is not installed; " in printed
    assert "pip install ./models" in printed
    assert "pip install tokenmerge-models" in printed


def test_a_folder_does_not_hide_a_bundled_model_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-flux", "mine"):
        (tmp_path / name).mkdir()
    assert loading.whole_path("tiny-flux") == "tiny-flux"
    assert loading.whole_path("mine") == str(tmp_path.resolve() / "mine")


@pytest.mark.parametrize("words", [["presets"], ["--help"]])
def test_whoever_reads_may_stop(words: list[str]) -> None:
    """The reader of a pipe may close it early, as `head` does."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tokenmerge", *words]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert not result.stderr


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("presets") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(presets())
    assert any(line.split() == ["dit", "Merge", "skip_first=0.25"] for line in lines)
    assert run("presets", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["toma"]["merge_regions"] == "whole"
    assert listed["hold"]["technique"] == "hold"


def test_a_model_is_planned_at_its_own_size_by_default(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [outline(str(models / name)).own_size for name in ("sdxl", "flux", "sd3")] == [(1024, 1024)] * 3
    assert outline("tiny-sdxl").own_size == (256, 256)
    assert run("plan", "--model", "tiny-sdxl", "--techniques", "unet", "--json") == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert [group["tokens"] for group in plan["groups"]] == [1024, 256]


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("diffusers", "plan", "generate"),
        ("PIL", "generate", "generate"),
        ("gradio", "demo", "demo"),
        ("numpy", "metrics a b", "eval"),
    ],
)
def test_a_package_that_is_missing_is_told_with_its_extra(package: str, command: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from tokenmerge.tools.cli.main import main; "
        f"sys.exit(main({command.split()!r}))"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == f"tokenmerge: {package} is not installed; pip install tokenmerge[{extra}]\n"


def test_numbers_are_checked_before_anything_heavy_is_imported() -> None:
    typed = [
        *("generate --steps 0", "generate --guidance nan", "demo --port 0", "serve --max-batch 0", "plan --frames 0"),
        *("bench --batches 1,0", "eval --seeds 1,1", "tune", "tune --budget mse=0", "heal --lr 0", "heal --rank 0"),
        *("reproduce table1 --number 0", "metrics a b --threads 0"),
    ]
    code = (
        "import sys; from tokenmerge.tools.cli.main import main; "
        f"print([main(words.split()) for words in {typed}], 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == f"{[2] * len(typed)} False\n"


def test_the_parser_needs_no_heavy_package() -> None:
    code = (
        "import sys; from tokenmerge.tools.cli.main import parser; parser().format_help(); "
        "print(sorted({'torch', 'diffusers', 'transformers', 'matplotlib', 'PIL'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

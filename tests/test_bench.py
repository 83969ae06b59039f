"""The bench command: what it counts, what it prints, and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tokenmerge
from tokenmerge import TokenMergeError, bench
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.tools.loading import empty_denoiser
from tokenmerge.tools.sizes import RANDOM_MODELS
from tokenmerge.api import config_for
from tokenmerge.tools.bench import comparison
from tokenmerge.tools.bench.candidates import typical_step, visits
from tokenmerge.tools.bench.timing import Loop, begin_image
from tokenmerge.tools.cli.main import main


@pytest.mark.parametrize(
    ("options", "steps", "counts"),
    [
        ({}, 50, {"select": 5, "reweigh": 5, "reuse": 40}),
        ({"destinations_every": 50}, 50, {"select": 1, "reweigh": 9, "reuse": 40}),
        ({"weights_every": 1}, 20, {"select": 2, "reweigh": 18}),
        ({"start": 0.5}, 20, {"full": 10, "select": 1, "reweigh": 1, "reuse": 8}),
        ({"anchor_every": 3}, 13, {"anchor, select": 2, "reuse": 8, "anchor, reweigh": 3}),
        (
            {"step_ratios": (0, 0.25, 0.5)},
            12,
            {"full": 4, "select at 0.25": 1, "reuse at 0.25": 3, "select at 0.5": 1, "reuse at 0.5": 3},
        ),
        (
            {"step_ratios": (0.25, 0.5, 0.25)},
            12,
            {"select at 0.25": 2, "reuse at 0.25": 5, "select at 0.5": 1, "reuse at 0.5": 3, "reweigh at 0.25": 1},
        ),
        (
            {"step_ratios": (0.25, 0.5), "anchor_every": 3, "start": 0.25},
            8,
            {"full": 2, "anchor, select at 0.25": 1, "reuse at 0.25": 1, "anchor, reweigh at 0.25": 1}
            | {"anchor, select at 0.5": 1, "reuse at 0.5": 2},
        ),
    ],
)
def test_phases_are_those_of_a_pipeline(options: dict[str, Any], steps: int, counts: dict[str, int]) -> None:
    config = tokenmerge.MergeConfig(levels=(4,)).replace(**options)
    phases = bench.phases_of(config, steps)
    assert {phase: phases.count(phase) for phase in dict.fromkeys(phases)} == counts
    pipe = tokenmerge.apply(tiny.build("sdxl"), config)
    seen: list[str] = []
    pipe.unet.register_forward_hook(lambda *_: seen.append(pipe.unet._tokenmerge.state.phase))
    tiny.draw(pipe, steps=steps)
    assert seen == phases


@pytest.mark.parametrize(
    ("method", "counts"),
    [
        ("toma", {"first select": 1, "reuse": 9, "reweigh": 1, "select": 1}),
        ("lower-bound", {"reuse": 12}),
        ("pool", {"first select": 1, "reuse": 11}),
        ("tomesd", {"first select": 1, "select": 11}),
    ],
)
def test_phases_follow_the_method(method: str, counts: dict[str, int]) -> None:
    phases = bench.Candidate(method, tokenmerge.presets()[method]).phases(12)
    assert {phase: phases.count(phase) for phase in dict.fromkeys(phases)} == counts


@pytest.mark.parametrize(("presets", "changes"), [(["default", "hold"], {}), (["default"], {"method": "hold"})])
def test_held_blocks_come_once_whatever_ratios_are_asked_for(presets: list[str], changes: dict[str, str]) -> None:
    found = bench.candidates_for(tiny.sdxl_unet(), presets, (0.5, 0.75), changes)
    (held,) = [candidate.config for candidate in found if candidate.config and candidate.config.holds]
    assert held == tokenmerge.presets()["hold"]


@pytest.mark.parametrize("name", ["step_ratios", "block_ratios"])
def test_ratios_of_parts_come_once_whatever_ratios_are_asked_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(tokenmerge.presets()["pool"].replace(**{name: (0.25, 0.75)}).to_yaml())
    found = bench.candidates_for(tiny.sdxl_unet(), [str(path), "todo"], (0.5, 0.75), {})
    assert [item.label for item in found] == ["unpatched", f"{path} 0.25/0.75", "todo 0.5", "todo 0.75"]
    found = bench.candidates_for(tiny.sdxl_unet(), ["default"], (0.5, 0.75), {name: (0.25, 0.75)})
    assert [item.label for item in found[1:]] == ["lower-bound of default 0.25/0.75", "default 0.25/0.75"]


@pytest.mark.parametrize("ratios", [(), (0.5,)])
def test_a_misspelt_preset_comes_with_the_nearest(ratios: tuple[float, ...]) -> None:
    with pytest.raises(TokenMergeError, match=r"'defualt' is unknown \(did you mean 'default'\?\)"):
        bench.candidates_for(tiny.sdxl_unet(), ["hold", "defualt"], ratios, {})


@pytest.mark.parametrize("options", [{}, {"ratio": 0.25}, {"method": "tofu"}])
def test_the_default_has_a_name_everywhere(options: dict[str, Any]) -> None:
    unet = tiny.sdxl_unet()
    assert config_for(unet, preset="default", **options) == config_for(unet, **options)


def test_without_a_ratio_each_preset_has_its_own() -> None:
    found = bench.candidates_for(tiny.sdxl_unet(), ["default", "todo", "unet"], (), {})
    assert [item.label for item in found] == [
        "unpatched",
        "default",
        "todo 0.75",
        "lower-bound of unet 0.5",
        "unet 0.5",
    ]
    assert found[1].config == tokenmerge.presets()["unet-hold"]


@pytest.mark.parametrize(
    ("options", "steps", "step", "phase"),
    [
        ({}, 20, 2, "reuse"),
        ({"start": 0.2, "anchor_every": 5}, 20, 6, "reuse"),
        ({"start": 0.8}, 20, 18, "reuse"),
        ({"start": 0.8, "method": "lower-bound"}, 20, 17, "reuse"),
        ({"method": "lower-bound"}, 20, 1, "reuse"),
        ({"weights_every": 1}, 20, 2, "reweigh"),
        ({"step_ratios": (0, 0.25, 0.5, 0.5)}, 20, 12, "reuse at 0.5"),
        ({"start": 0.2, "anchor_every": 5}, 3, 2, "reuse"),
        ({"start": 0.5}, 2, 1, "select"),
        ({}, 1, 0, "select"),
    ],
)
def test_launches_are_counted_at_a_step_that_merges(options: dict[str, Any], steps: int, step: int, phase: str) -> None:
    config = tokenmerge.MergeConfig(levels=(4,)).replace(**options)
    phases = bench.Candidate("merged", config).phases(steps)
    assert typical_step(phases) == step
    # What a denoiser does there, when an image has come so far.
    loop, call, seen = _merged_unet(config, steps)
    begin_image(loop, call, step)
    call()
    assert seen[-1] == phase


def _merged_unet(config: tokenmerge.MergeConfig, steps: int) -> tuple[Loop, Callable[[], None], list[str]]:
    """What drives a denoiser, a call of it, and the phases of all calls so far."""
    unet = denoiser_of(tiny.build("sdxl"))
    loop = Loop(steps)
    arguments = family_of(unet).example(unet, 1, 16, 16)
    tokenmerge.apply(unet, config, scheduler=loop)
    seen: list[str] = []

    def call() -> None:
        with torch.inference_mode():
            unet(**arguments, return_dict=False)
        seen.append(unet._tokenmerge.state.phase)

    return loop, call, seen


@pytest.mark.parametrize("method", ["toma", "lower-bound", "pool"])
@pytest.mark.parametrize(
    "options", [{}, {"start": 0.25}, {"start": 0.25, "anchor_every": 3}, {"step_ratios": (0.75, 0, 0.5)}]
)
def test_laps_of_a_phase_do_what_it_says(method: str, options: dict[str, Any]) -> None:
    config = tokenmerge.MergeConfig(levels=(4,), method=method, ratio=0.75).replace(**options)
    phases = bench.Candidate("merged", config).phases(12)
    loop, call, seen = _merged_unet(config, 12)
    visited = visits(phases)
    assert {phase for phase in visited.values() if phase} == set(phases)
    if method == "lower-bound" and not options:
        assert visited == {0: None, 1: None, 2: "reuse"}
    for step in range(12):
        if step in visited:
            call()
            phase = visited[step]
            assert phase is None or phase.removeprefix("first ") == seen[-1]
        loop.step()


def test_launches_of_an_unmerged_denoiser_are_those_of_its_second_step() -> None:
    assert typical_step(bench.Candidate("unpatched").phases(50)) == 1
    assert typical_step(["full"]) == 0


@pytest.mark.parametrize("kind", ["sdxl", "sd", "sd3", "flux"])
def test_examples_are_calls_a_denoiser_takes(kind: str) -> None:
    denoiser = denoiser_of(tiny.build(kind))
    arguments = family_of(denoiser).example(denoiser, 2, 16, 24)
    with torch.no_grad():
        output = denoiser(**arguments, return_dict=False)[0]
    assert output.shape[0] == 2
    assert output.isfinite().all()


@pytest.mark.parametrize(("name", "billions"), [("sdxl-random", 2.57), ("flux-random", 11.9), ("sd35-random", 8.06)])
def test_random_models_have_their_real_size(name: str, billions: float) -> None:
    denoiser, scale = empty_denoiser(name)
    assert scale == 8
    assert sum(parameter.numel() for parameter in denoiser.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)
    assert set(RANDOM_MODELS) == {"sdxl-random", "flux-random", "sd35-random"}


ARGUMENTS = ["--sizes", "64x64,64x96", "--warmups", "1", "--repeats", "2", "--steps", "12"]


def test_bench_measures_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.jsonl"
    arguments = [
        "bench",
        "--model",
        "tiny-flux",
        *ARGUMENTS,
        "--loops",
        "1",
        "--rounds",
        "2",
        "--skip-first",
        "0",
        "--ratios",
        "0.5",
        "--out",
        str(out),
    ]
    assert main([*arguments, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    records = bench.read(out)
    labels = ["unpatched", "lower-bound of default 0.5", "default 0.5"]
    assert [record["label"] for record in records] == (labels + labels[::-1]) * 2
    assert all(label in printed for label in labels)
    for record in records:
        _check(record)
    assert main(["bench", "--table", str(out)]) == 0
    assert capsys.readouterr().out == printed


def _check(record: dict[str, Any]) -> None:
    assert sum(record["steps_by_phase"].values()) == 12
    assert record["laps_ms"].keys() == record["steps_by_phase"].keys()
    assert all(len(laps) == 2 for laps in record["laps_ms"].values())
    assert len(record["loop_ms"]) == 1
    assert record["command"].startswith("tokenmerge bench --model tiny-flux")
    assert "--out" not in record["command"]
    assert record["environment"]["torch"] == torch.__version__
    if record["config"]:
        assert record["config"]["skip_first"] == 0


def test_rounds_are_pooled_and_medians_summed() -> None:
    records = [
        {"label": label, "config": config, "laps_ms": laps, "loop_ms": [], "steps_by_phase": dict.fromkeys(laps, 10)}
        for label, config, laps in (
            ("unpatched", None, {"full": [3.0, 1.0]}),
            ("merged", {"ratio": 0.5}, {"reuse": [1.0], "select": [2.0]}),
            ("merged", {"ratio": 0.5}, {"reuse": [9.0, 1.0], "select": [2.0]}),
            ("unpatched", None, {"full": [6.0]}),
        )
    ]
    plain, merged = rows = bench.pool(records)
    assert (plain.schedule_ms, merged.schedule_ms) == (30.0, 30.0)
    assert bench.speed_up(merged, rows) == 1.0
    other = {**records[1], "config": {"ratio": 0.25}}
    assert len(bench.pool([*records, other])) == 3
    with pytest.raises(tokenmerge.TokenMergeError, match="no unpatched row"):
        bench.speed_up(merged, [merged])


def test_the_bound_is_that_of_the_changed_preset() -> None:
    denoiser, _ = empty_denoiser("sdxl-random")
    made = bench.candidates_for(denoiser, ["default", "tomesd"], [0.5], {"skip_first": 1, "anchor_every": 0})
    assert [each.label for each in made] == ["unpatched", "lower-bound of default 0.5", "default 0.5", "tomesd 0.5"]
    assert [each.config.method for each in made[1:]] == ["lower-bound", "toma", "tomesd"]
    assert all(each.config.skip_first == 1 for each in made[1:])


@pytest.mark.parametrize(
    "change",
    [
        {"start": 0.5},
        {"stop": 0.5},
        {"start": 0.5, "anchor_every": 3},
        {"skip_first": 2},
        {"merge": "pick"},
        {"span": 2},
    ],
)
def test_every_row_is_compared_with_its_own_bound(change: dict[str, Any], tmp_path: Path) -> None:
    denoiser, _ = empty_denoiser("flux-random")
    changed = tmp_path / "changed.yaml"
    changed.write_text(tokenmerge.presets()["dit"].replace(**change).to_yaml())
    made = bench.candidates_for(denoiser, ["dit", str(changed), "tomesd"], [0.5], {})
    # Twice and three times as fast as the unpatched one, and merging takes 10 and 20 % longer than that.
    times = dict(zip((each.label for each in made), (600.0, 300.0, 330.0, 200.0, 240.0, 250.0), strict=True))
    records = [
        {
            "label": each.label,
            **dict.fromkeys(("width", "height", "batch", "steps"), 1),
            **dict.fromkeys(("launches", "peak_bytes", "first_call_s")),
            "model": "flux-random",
            "mode": "eager",
            "config": each.config.to_dict() if each.config else None,
            "steps_by_phase": {"reuse": 1},
            "laps_ms": {"reuse": [times[each.label]]},
            "loop_ms": [],
            "environment": {"device": "none", "torch": "none"},
        }
        for each in made
    ]
    table = [line.split(" | ") for line in bench.report(records).splitlines() if line.startswith("|")]
    place = table[0].index("over its bound")
    assert [line[place] for line in table[2:]] == ["", "", "+10.0 %", "", "+20.0 %", ""]
    # Also from a file, where the order of the fields may be another.
    turned = [{**each, "config": each["config"] and dict(reversed(each["config"].items()))} for each in records[::-1]]
    assert all("+10.0 %" in line for line in bench.report(turned).splitlines() if line.startswith("| dit 0.5"))


@pytest.mark.parametrize("preset", ["hold", "dit-anchored"])
def test_gaps_that_follow_noise_levels_are_timed(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = ["--warmups", "0", "--settle", "0", "--repeats", "1", "--steps", "8"]
    assert main(["bench", "--sizes", "64x64", "--presets", preset, "--gap", "sigma", *counts, "--json"]) == 0
    last = json.loads(capsys.readouterr().out)[-1]
    assert last["config"]["gap"] == "sigma"
    assert any("anchor" in phase for phase in last["laps_ms"])


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    counts = ["--warmups", "0", "--settle", "0.5", "--repeats", "1", "--steps", "2"]
    assert main(["bench", "--sizes", "64x64", "--ratios", "0.5", *counts, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "fast"], "modes are eager, graph"),
        (["--modes", "graph", "--device", "cpu"], "needs a CUDA device"),
        (["--sizes", "64"], "write width x height"),
        (["--presets", "none-such"], "none-such"),
        (["--model", "no/such/folder/at-all"], "is not bundled (tiny-flux, tiny-sdxl are)"),
        (["--steps", "0"], "--steps is 0; it must be 1 or more"),
        (["--repeats", "0"], "--repeats is 0; it must be 1 or more"),
        (["--rounds", "0"], "--rounds is 0; it must be 1 or more"),
        (["--warmups", "-1"], "--warmups is -1; it must be 0 or more"),
        (["--loops", "-1"], "--loops is -1; it must be 0 or more"),
        (["--settle", "-1"], "--settle is -1.0; it must be a number of seconds from 0"),
        (["--settle", "inf"], "--settle is inf"),
        (["--settle", "nan"], "--settle is nan"),
        (["--batches", "1,0"], "--batches are [1, 0]; give numbers from 1"),
        (["--sizes", "70x70"], "70x70 pixels cannot be made; both sides must be multiples of 8, from 16"),
        # A whole number of latents, but not of tokens.
        (["--sizes", "64x64,64x68"], "64x68 pixels cannot be made"),
        (["--sizes", "0x0"], "0x0 pixels cannot be made"),
        (["--model", "tiny-sdxl", "--sizes", "70x72"], "multiples of 8, from 16: try 72x72"),
        # What only a candidate, or only a size, is refused for.
        (["--presets", "default,todo", "--ratios", "0.75"], "todo 0.75 is refused at 64x64: method 'todo'"),
        (
            ["--model", "tiny-sdxl", "--sizes", "64x64,16x16", "--levels", "4", "--ratios", "0.5"],
            "is refused at 16x16: at this size",
        ),
        (
            ["--sizes", "64x64,64x96", "--presets", "dit", "--regions", "tile:4x4", "--merge-regions", "stripe:2"],
            "dit 0.5 is refused at 64x96: on the 12x8 token grid",
        ),
        (["--backend", "triton", "--device", "cpu"], "backend='triton' cannot run here"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_timed(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    assert main(["bench", "--sizes", "64x64", "--steps", "4", "--out", str(out), *arguments]) == 2
    printed = capsys.readouterr()
    error = printed.err.strip().splitlines()[-1]
    assert error.startswith("tokenmerge: ")
    assert message in error
    assert printed.out == ""
    assert not out.exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: Any) -> None:
        raise AssertionError("a candidate was timed")

    monkeypatch.setattr(comparison, "measure_candidate", measure)
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "results.jsonl"):
        assert main(["bench", "--sizes", "64x64", "--steps", "2", "--out", str(out)]) == 2
        assert f"{out} cannot be written" in capsys.readouterr().err


def test_records_go_to_the_end_of_a_file_in_a_folder_that_need_not_be_there(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.jsonl"
    arguments = ["--sizes", "64x64", "--steps", "2", "--warmups", "0", "--repeats", "1", "--ratios", "0"]
    for rows in (2, 4):
        assert main(["bench", *arguments, "--presets", "pool", "--out", str(out)]) == 0
        assert len(bench.read(out)) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file"),
        (b"", "holds no record"),
        (b'{"laps_ms": {}', "line 1 of"),
        (b'\n{"label": "none"}', "line 2 of"),
        (b"[]", "no record of times"),
        (b"\xff\xfe", "is no text"),
    ],
)
def test_a_file_that_holds_no_times_is_refused(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["bench", "--table", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "give a file that bench --out has written" in error
    assert error.count("\n") == 1

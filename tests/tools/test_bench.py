"""The bench command: its counts, its output and its refusals."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError, presets
from tokenmerge.config import Techniques
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.families.scales import latent_frames
from tokenmerge.tools import bench
from tokenmerge.tools.bench import comparison
from tokenmerge.tools.bench.candidates import typical_step, visits
from tokenmerge.tools.bench.timing import Loop, begin_image, expect_usual_errors
from tokenmerge.tools.cli.main import main
from tokenmerge.tools.loading import outline
from tokenmerge.tools.random_models import RANDOM_MODELS, RandomModel
from tokenmerge.tools.typed import read_configurations


@pytest.mark.parametrize(
    ("techniques", "counts"),
    [
        (Techniques(), {"full": 12}),
        (
            Techniques(presets()["toma"]),
            {"first merged, select": 1, "merged, reuse": 9, "merged, reweigh": 1, "merged, select": 1},
        ),
        (Techniques(presets()["lower-bound"]), {"merged, reuse": 12}),
        (Techniques(presets()["pool"]), {"first merged, select": 1, "merged, reuse": 11}),
        (Techniques(presets()["tomesd"]), {"first merged, select": 1, "merged, select": 11}),
        (Techniques(Merge(ratio=0.0)), {"first full": 1, "full": 11}),
        (Techniques(hold=Hold(every=3, start=0.2)), {"first full, kept": 1, "full, kept": 4, "held": 7}),
        (Techniques(hold=Hold()), {"first full, kept": 1, "full, kept": 6, "held": 5}),
        (
            Techniques(presets()["pool"], Hold(start=0.0)),
            {"first merged, select, kept": 1, "held": 5, "merged, reuse, kept": 6},
        ),
    ],
)
def test_phases_are_those_of_the_timeline(techniques: Techniques, counts: dict[str, int]) -> None:
    assert Counter(bench.Candidate("some", techniques).phases(12)) == counts


def candidates(*typed: str, ratios: tuple[float, ...] | None = None) -> list[bench.Candidate]:
    return bench.candidates_for(read_configurations(typed, ratios))


def test_candidates_are_techniques_and_bounds_of_what_merges_linearly() -> None:
    found = candidates("todo", "unet:skip_first=1", "hold", "unet + hold", "fast@toma", ratios=(0.5, 0.75))
    assert [item.label for item in found] == [
        "none",
        "todo:ratio=0.5",
        "todo:ratio=0.75",
        "lower-bound of unet:skip_first=1,ratio=0.5",
        "unet:skip_first=1,ratio=0.5",
        "lower-bound of unet:skip_first=1,ratio=0.75",
        "unet:skip_first=1,ratio=0.75",
        "hold",
        "unet:ratio=0.5 + hold",
        "unet:ratio=0.75 + hold",
        "lower-bound of fast:ratio=0.5",
        "fast:ratio=0.5",
        "lower-bound of fast:ratio=0.75",
        "fast:ratio=0.75",
    ]
    assert found[3].techniques == Techniques(Merge(method="lower-bound", skip_first=1))
    assert found[7].techniques == Techniques(hold=Hold())
    # A label names the ratio even if it is the preset's own.
    assert [item.label for item in candidates("todo", "unet")][1:] == [
        "todo:ratio=0.75",
        "lower-bound of unet:ratio=0.5",
        "unet:ratio=0.5",
    ]


def test_what_a_bound_does_not_read_makes_no_bound_of_its_own() -> None:
    found = candidates("dit", "dit:similarity=dot,temperature=0.1,destinations_every=2")
    assert [each.label.startswith("lower-bound") for each in found] == [False, True, False, False]
    tokenmerge.plan(tiny.build("flux"), found[1].techniques, height=64, width=64)


def test_a_cache_has_no_steps_that_could_be_timed_one_by_one() -> None:
    with pytest.raises(TokenMergeError, match="decides by the picture what runs; use eval"):
        candidates("none + mag")


def driven_unet(techniques: Techniques, steps: int) -> tuple[Loop, Callable[[], str]]:
    """A loop that drives a UNet, and a function that calls the UNet and returns the phase of that call."""
    unet = denoiser_of(tiny.build("sdxl"))
    loop = Loop(steps)
    arguments = family_of(unet).example(unet, 1, 16, 16)
    tokenmerge.apply(unet, techniques, scheduler=loop)
    expect_usual_errors(unet)

    def renewals() -> tuple[int, int]:
        groups = tokenmerge.summary(unet).groups
        return sum(group["selected"] for group in groups), sum(group["weighed"] for group in groups)

    def call() -> str:
        clock, (selected, weighed) = unet._tokenmerge.state.follower.clock, renewals()
        image = clock.image
        with torch.inference_mode():
            unet(**arguments, return_dict=False)
        step = unet._tokenmerge.state.step
        if clock.image != image:
            selected = weighed = 0
        if step.kind == "merged":
            now = renewals()
            step = step._replace(maps="select" if now[0] > selected else "reweigh" if now[1] > weighed else "reuse")
        return str(step)

    return loop, call


MERGE = Merge(levels=(4,), regions="tile:2x2")
DRIVEN = {
    "merge": Techniques(MERGE),
    "late": Techniques(MERGE.replace(start=0.25)),
    "pool": Techniques(Merge(method="pool", levels=(4,))),
    "bound": Techniques(MERGE.replace(method="lower-bound")),
    "late bound": Techniques(MERGE.replace(method="lower-bound", start=0.25)),
    "hold": Techniques(hold=Hold(what="blocks")),
    "stages": Techniques(hold=Hold(every=4, start=0.1)),
    "both": Techniques(MERGE.replace(destinations_every=7, weights_every=3), Hold()),
    "both in windows": Techniques(MERGE.replace(stop=0.6, weights_every=2), Hold(every=2, start=0.4)),
}


@pytest.mark.parametrize("name", DRIVEN)
def test_laps_of_a_phase_do_what_it_says(name: str) -> None:
    """The phase is right even though other steps are skipped."""
    phases = bench.Candidate(name, DRIVEN[name]).phases(24)
    loop, call = driven_unet(DRIVEN[name], 24)
    visited = visits(phases)
    assert {phase for phase in visited.values() if phase} == set(phases)
    assert len(visited) <= 18
    if name == "bound":
        assert visited == {0: None, 1: None, 2: "merged, reuse"}
    loop.set_timesteps()
    for step in range(24):
        if step in visited:
            did = call()
            phase = visited[step]
            assert phase is None or phase.removeprefix("first ") == did
        loop.step()


@pytest.mark.parametrize("name", ["hold", "stages", "both", "both in windows"])
def test_a_held_lap_extrapolates_from_two_residuals(name: str) -> None:
    phases = bench.Candidate(name, DRIVEN[name]).phases(24)
    (lap,) = [step for step, phase in visits(phases).items() if phase == "held"]
    assert sum("kept" in phase for phase in phases[:lap]) >= 2


@pytest.mark.parametrize(
    ("name", "steps", "step"),
    [
        ("merge", 20, 2),
        ("late", 20, 7),
        ("bound", 20, 1),
        ("hold", 20, 7),
        ("both", 20, 2),
        ("late", 2, 1),
        ("merge", 1, 0),
    ],
)
def test_launches_are_counted_at_a_step_that_saves(name: str, steps: int, step: int) -> None:
    phases = bench.Candidate(name, DRIVEN[name]).phases(steps)
    assert typical_step(phases) == step
    # The denoiser really does this at that step of an image.
    loop, call = driven_unet(DRIVEN[name], steps)
    begin_image(loop, call, step)
    assert call() == phases[step].removeprefix("first ")


def test_launches_of_a_plain_denoiser_are_those_of_its_second_step() -> None:
    assert typical_step(bench.Candidate("none").phases(50)) == 1
    assert typical_step(["full"]) == 0


@pytest.mark.parametrize("kind", ["sdxl", "sd", "sd3", "flux"])
def test_examples_are_calls_a_denoiser_takes(kind: str) -> None:
    denoiser = denoiser_of(tiny.build(kind))
    arguments = family_of(denoiser).example(denoiser, 2, 16, 24)
    with torch.no_grad():
        output = denoiser(**arguments, return_dict=False)[0]
    assert output.shape[0] == 2
    assert output.isfinite().all()


# Published billions of parameters, and tokens of one denoiser call at the model's own size.
REAL_SIZES = {
    "sdxl-random": (2.57, 128 * 128),
    "flux-random": (11.9, 64 * 64),
    "sd35-random": (8.06, 64 * 64),
    "flux2-klein-random": (3.88, 64 * 64),
    "qwen-random": (20.43, 83 * 83),
    "z-image-random": (6.15, 64 * 64),
    "wan-random": (14.29, 21 * 30 * 52),
    "wan-1.3b-random": (1.42, 21 * 30 * 52),
}


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_random_models_have_their_real_size(name: str) -> None:
    model = outline(name)
    billions, tokens = REAL_SIZES[name]
    parameters = sum(parameter.numel() for parameter in model.denoiser.parameters())
    assert parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert all(parameter.is_meta for parameter in model.denoiser.parameters())
    width, height = model.own_size
    frames = latent_frames(model.family, None, model.frame_scale)
    call = model.family.calls.plan(model.denoiser, height // model.scale, width // model.scale, frames)
    assert call.tokens == tokens


TINY = {
    "wan-random": {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 8, "freq_dim": 16, "ffn_dim": 32},
    "qwen-random": {"num_attention_heads": 2, "attention_head_dim": 8, "joint_attention_dim": 8, "in_channels": 16}
    | {"out_channels": 4, "axes_dims_rope": (4, 2, 2)},
    "z-image-random": {"n_layers": 2, "n_refiner_layers": 1, "dim": 16, "n_heads": 2, "n_kv_heads": 2}
    | {"cap_feat_dim": 8, "axes_dims": (4, 2, 2), "axes_lens": (256, 32, 32)},
    "flux2-klein-random": {"num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
    | {"joint_attention_dim": 8, "in_channels": 16, "axes_dims_rope": (2, 2, 2, 2)},
}


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models with as few channels and blocks as possible."""
    for name, few in TINY.items():
        small = {**RANDOM_MODELS[name].config, "num_layers": 2, **few}
        monkeypatch.setitem(RANDOM_MODELS, name, RandomModel(small, size=(64, 64)))


ONCE = ("--steps", "6", "--warmups", "0", "--repeats", "1", "--device", "cpu")


@pytest.mark.usefixtures("tiny_models")
def test_a_video_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From end to end, in bfloat16, with the default techniques. Tiles of a video span frames."""
    out = tmp_path / "video.jsonl"
    asked = ["bench", "--model", "wan-random", "--sizes", "96x64", "--frames", "13", "--loops", "1"]
    assert main([*asked, *ONCE, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("**wan-random, 96x64, 13 frames, batch 1, eager**: 6 steps")
    records = bench.read(out)
    assert [record["label"] for record in records] == [
        "none",
        "lower-bound of video:ratio=0.5",
        "video:ratio=0.5",
        "hold",
        "video + hold",
    ]
    assert {(record["frames"], record["width"]) for record in records} == {(13, 96)}
    assert all("peak_bytes" in record for record in records)
    assert records[2]["techniques"][0]["regions"] == "tile:2x4x4"
    # Rows with another number of frames form another comparison.
    assert main([*asked[:6], "5", "--techniques", "hold", *ONCE, "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["bench", "--table", str(out)]) == 0
    assert capsys.readouterr().out.count("frames, batch 1, eager**") == 2


@pytest.mark.usefixtures("tiny_models")
@pytest.mark.parametrize("name", ["flux2-klein-random", "qwen-random", "z-image-random"])
def test_random_models_of_pictures_are_timed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", name, *ONCE, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["label"] for record in records][2:] == ["dit:ratio=0.5", "hold", "dit + hold"]
    with pytest.raises(TokenMergeError, match=r"frames is 9, but .* makes single images; leave frames out"):
        bench.run(bench.Task(model=name, frames=9, device="cpu"))


def test_bench_measures_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.jsonl"
    arguments = [
        "bench",
        "--model",
        "tiny-sdxl",
        "--sizes",
        "64x64,64x96",
        "--warmups",
        "0",
        "--repeats",
        "2",
        "--steps",
        "6",
        "--loops",
        "1",
    ]
    arguments += ["--rounds", "2", "--techniques", "unet:similarity=dot", "unet:ratio=0.5 + hold:every=2,start=0.1"]
    assert main([*arguments, "--device", "cpu", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    records = bench.read(out)
    merged = "unet:similarity=dot,ratio=0.5"
    labels = ["none", f"lower-bound of {merged}", merged, "unet:ratio=0.5 + hold:every=2,start=0.1"]
    assert [record["label"] for record in records] == (labels + labels[::-1]) * 2
    assert all(label in printed for label in labels)
    for record in records:
        _check(record)
    assert [each["technique"] for each in records[3]["techniques"]] == ["merge", "hold"]
    assert {"held", "merged, reuse, kept"} < set(records[3]["laps_ms"])
    assert main(["bench", "--table", str(out)]) == 0
    assert capsys.readouterr().out == printed


def _check(record: dict[str, Any]) -> None:
    assert sum(record["steps_by_phase"].values()) == 6
    assert record["laps_ms"].keys() == record["steps_by_phase"].keys()
    assert all(len(laps) == 2 for laps in record["laps_ms"].values())
    assert len(record["loop_ms"]) == 1
    assert record["command"].startswith("tokenmerge bench --model tiny-sdxl")
    assert "--out" not in record["command"]
    assert record["environment"]["torch"] == torch.__version__


def test_a_plain_bench_ends_soon_on_a_core(capsys: pytest.CaptureFixture[str]) -> None:
    """With all defaults, as a new user types it."""
    began = time.process_time()
    assert main(["bench", "--model", "tiny-sdxl", "--threads", "1", "--json"]) == 0
    assert time.process_time() - began < 100
    records = json.loads(capsys.readouterr().out)
    labels = ["none", "lower-bound of unet:ratio=0.5", "unet:ratio=0.5", "hold", "unet + hold"]
    assert [record["label"] for record in records] == labels
    assert {(record["width"], record["height"], record["steps"]) for record in records} == {(256, 256, 50)}


def row(label: str, techniques: Techniques, **laps: list[float]) -> dict[str, Any]:
    """A record with these laps in milliseconds."""
    return {
        "label": label,
        **dict.fromkeys(("width", "height", "frames", "batch", "steps"), 1),
        **dict.fromkeys(("launches", "peak_bytes", "first_call_s")),
        "model": "flux-random",
        "mode": "eager",
        "techniques": techniques.to_list(),
        "steps_by_phase": dict.fromkeys(laps, 10),
        "laps_ms": laps,
        "loop_ms": [],
        "environment": {"device": "none", "torch": "none"},
    }


def test_rounds_are_pooled_and_medians_summed() -> None:
    half = Techniques(Merge(ratio=0.5))
    records = [
        row("none", Techniques(), full=[3.0, 1.0]),
        row("merged", half, reuse=[1.0], select=[2.0]),
        row("merged", half, reuse=[9.0, 1.0], select=[2.0]),
        row("none", Techniques(), full=[6.0]),
    ]
    plain, merged = rows = bench.pool(records)
    assert (plain.schedule_ms, merged.schedule_ms) == (30.0, 30.0)
    assert bench.speed_up(merged, rows) == 1.0
    assert len(bench.pool([*records, row("merged", Techniques(Merge(ratio=0.25)), reuse=[1.0])])) == 3
    with pytest.raises(TokenMergeError, match="no plain row"):
        bench.speed_up(merged, [merged])


def test_hold_is_compared_with_its_full_steps() -> None:
    records = [
        row("none", Techniques(), first=[2.0], full=[2.0]),
        row("hold", Techniques(hold=Hold()), kept=[2.0], held=[0.1]),
    ]
    assert "| hold | 21 | 1.90x | +5.0 % |" in bench.report(records)


@pytest.mark.parametrize("change", ["start=0.5", "stop=0.5", "skip_first=2", "regions=tile:8x8", "ratio=0.75"])
def test_every_row_is_compared_with_its_own_bound(change: str) -> None:
    made = candidates("dit", f"dit:{change}", "tomesd", "hold", "dit + hold")
    # The bounds are two and three times as fast as the plain model; merging takes 10 % and 20 % longer than its bound.
    times = (600.0, 300.0, 330.0, 200.0, 240.0, 250.0, 190.0, 100.0)
    records = [row(each.label, each.techniques, reuse=[ms]) for each, ms in zip(made, times, strict=True)]
    table = [line.split(" | ") for line in bench.report(records).splitlines() if line.startswith("|")]
    place = table[0].index("over its bound")
    # The bound of Hold alone is its full steps, which are all ten here.
    assert [line[place] for line in table[2:]] == ["", "", "+10.0 %", "", "+20.0 %", "", "-68.3 %", ""]
    # Records from a file match too, although their fields may come in another order.
    turned = [
        {**each, "techniques": [dict(reversed(item.items())) for item in each["techniques"]]} for each in records[::-1]
    ]
    assert any("+10.0 %" in line for line in bench.report(turned).splitlines() if line.startswith("| dit:ratio=0.5 |"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats: 0 is out of range; it must be 1 or more"),
        (["--rounds", "0"], "--rounds: 0 is out of range; it must be 1 or more"),
        (["--warmups", "-1"], "--warmups: -1 is out of range; it must be 0 or more"),
        (["--loops", "-1"], "--loops: -1 is out of range; it must be 0 or more"),
        (["--settle", "-1"], "--settle: -1.0 is out of range; it must be 0 or more"),
        (["--settle", "inf"], "--settle: inf is out of range"),
        (["--batches", "1,0"], "--batches: 0 is out of range"),
        (["--sizes", "70x70"], "70x70 pixels cannot be drawn; both sides must be multiples of 8, from 16"),
        # 68 pixels are a whole number of latents, but not of tokens.
        (["--sizes", "64x64,64x68"], "64x68 pixels cannot be drawn"),
        (["--sizes", "0x0"], "'0x0' is not a size; write width x height in pixels"),
        (["--model", "tiny-sdxl", "--sizes", "70x72"], "multiples of 8, from 16: try 72x72"),
        # Refusals for one candidate or one size.
        (["--techniques", "dit", "todo"], "todo:ratio=0.75 is refused at 64x64: method 'todo'"),
        (
            ["--model", "tiny-sdxl", "--sizes", "64x64,16x16", "--techniques", "unet:levels=4"],
            "is refused at 16x16: at this size",
        ),
        (
            ["--sizes", "64x64,64x96", "--techniques", "dit:merge_regions=stripe:2"],
            "is refused at 64x96: on the 12x8 token grid",
        ),
        (["--techniques", "dit:backend=triton", "--device", "cpu"], "backend='triton' cannot run here"),
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
    arguments = ["--sizes", "64x64", "--steps", "2", "--warmups", "0", "--repeats", "1"]
    for rows in (2, 4):
        assert main(["bench", *arguments, "--techniques", "pool", "--out", str(out)]) == 0
        assert len(bench.read(out)) == rows


def test_a_bench_that_was_killed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    arguments = ["bench", "--sizes", "64x64,64x96", "--steps", "2", "--warmups", "0", "--repeats", "1", "--rounds", "2"]
    arguments += ["--techniques", "pool", "--device", "cpu", "--json", "--out", str(out)]
    assert main(arguments) == 0
    whole = json.loads(capsys.readouterr().out)
    lines = out.read_text().splitlines(keepends=True)
    assert len(lines) == 8
    # The kill came while the fifth row was being written.
    out.write_text("".join(lines[:4]) + lines[4][:50])
    assert main([*arguments, "--resume"]) == 0
    gone_on = json.loads(capsys.readouterr().out)
    assert gone_on[:4] == whole[:4]
    assert [row["label"] for row in gone_on] == [row["label"] for row in whole]
    assert bench.read(out) == gone_on
    assert all(row["command"] == whole[0]["command"] for row in gone_on)
    # With nothing left to measure, no model is loaded.
    monkeypatch.setattr(comparison, "load_denoiser", None)
    assert main([*arguments, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out) == gone_on


@pytest.mark.parametrize("name", ["torch", "device", "threads"])
def test_rows_of_another_machine_are_not_gone_on_with(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    arguments = ["bench", "--sizes", "64x64", "--steps", "1", "--warmups", "0", "--repeats", "1", "--out", str(out)]
    arguments += ["--techniques", "none", "--device", "cpu"]
    assert main(arguments) == 0
    (record,) = bench.read(out)
    record["environment"][name] = "another"
    out.write_text(json.dumps(record) + "\n")
    assert main([*arguments, "--resume"]) == 0
    assert len(bench.read(out)) == 2
    capsys.readouterr()


def test_nothing_is_gone_on_with_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--resume"]) == 2
    assert "--resume continues a file; give --out" in capsys.readouterr().err


def test_rows_of_a_resumed_run_are_compared_with_the_plain_one_of_its_conditions() -> None:
    """The commit may differ, but not the version of torch."""
    plain, merged = row("none", Techniques(), full=[2.0]), row("merged", Techniques(Merge(ratio=0.5)), reuse=[1.0])
    old, new = {"device": "none", "torch": "none", "commit": "a"}, {"device": "none", "torch": "none", "commit": "b"}
    gone_on = [{**plain, "environment": old}, {**merged, "environment": new}]
    assert bench.comparisons(gone_on) == [gone_on]
    assert "commits a, b" in bench.report(gone_on)
    again = [*gone_on, {**plain, "environment": new}]
    assert [len(found) for found in bench.comparisons(again)] == [1, 2]
    assert len(bench.comparisons([gone_on[0], {**gone_on[1], "environment": {**new, "torch": "other"}}])) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file"),
        (b"", "holds no record"),
        (b'{"laps_ms": {}', "line 1 of"),
        (b'\n{"label": "none"}', "line 2 of"),
        (b"[]", "is not a record of times"),
        (b'{"laps_ms": {}, "config": {}}', "line 1 of PATH is from tokenmerge 0.1"),
        (b"\xff\xfe", "is not text"),
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
    assert message.replace("PATH", str(path)) in error
    assert "give a file that bench --out has written" in error
    assert error.count("\n") == 1

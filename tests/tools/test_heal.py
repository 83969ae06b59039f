"""`tokenmerge heal` on the bundled models: training, resuming after a kill, reports and refusals."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline
from judges import SmallInception
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

import tiny
import tokenmerge
from tokenmerge import TokenMergeError
from tokenmerge.config import LARGEST_SEED
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.merging.places import merge_places
from tokenmerge.presets import preset
from tokenmerge.tools.cli.main import main
from tokenmerge.tools.drawing.request import Request
from tokenmerge.tools.drawing.studio import Setup, Studio
from tokenmerge.tools.evaluation.prompts import read_prompts
from tokenmerge.tools.healing import memory
from tokenmerge.tools.healing.adapter import Adapter
from tokenmerge.tools.healing.data import BLANK, read_items, split
from tokenmerge.tools.healing.memory import bytes_of_one
from tokenmerge.tools.healing.noising import NoisedCall, Noising, joined
from tokenmerge.tools.healing.run import LORA, LORA_FOR_COMFYUI, Healing, _accelerator, _Run, heal, held_out_calls
from tokenmerge.tools.healing.training import Lessons, Trainer, _order
from tokenmerge.tools.loading import load_pipeline
from tokenmerge.tools.quality.networks import Sources

ASKED = Healing(
    setup=Setup(model="tiny-flux", steps=3, size=(64, 64), device="cpu", threads=1),
    merge="dit:ratio=0.5",
    prompts=read_prompts(limit=3),
    number=4,
    held_out=1,
    rank=4,
    steps=8,
    batch=2,
    lr=0.001,
    every=4,
)
# The same settings for the command line.
TYPED = [
    *("--model", "tiny-flux", "--merge", "dit:ratio=0.5", "--number", "4", "--held-out", "1", "--rank", "4"),
    *("--steps", "8", "--batch", "2", "--lr", "0.001", "--every", "4", "--denoising-steps", "3", "--size", "64x64"),
    *("--device", "cpu", "--threads", "1"),
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("heal") / "out"
    assert heal(ASKED, out) is not None
    return out


@pytest.fixture
def pictures(done: Path, tmp_path: Path) -> Path:
    """A folder of pictures, with captions."""
    return Path(shutil.copytree(done / "pictures", tmp_path / "pictures"))


def trainer_of(size: tuple[int, int], rank: int) -> Trainer:
    merge = preset("dit")
    studio = Studio(Setup(model="tiny-flux", size=size, device="cpu", threads=1))
    denoiser = denoiser_of(studio.pipe)
    noising = Noising(studio.pipe, studio.request, merge)
    adapter = Adapter(denoiser, merge_places(denoiser, family_of(denoiser), merge), rank, 0)
    return Trainer(adapter, noising, merge, studio.device, "float32", at_once=8)


def test_the_loss_falls(pictures: Path) -> None:
    """The call stays the same: over few steps, other pictures and noise would change the loss more than training."""
    trainer = trainer_of(size=(64, 64), rank=4)
    denoiser = trainer.adapter.denoiser
    call = trainer.noising.call(read_items(pictures)[:2], ["a rose", ""], step=10, seed=0)
    runs = [0]
    denoiser.register_forward_hook(lambda *_: runs.append(runs.pop() + 1))
    before = trainer.errors([call])["merged"]
    # One plain call is the target of both the merged and the healed call.
    assert runs == [3]
    # A new LoRA changes nothing.
    assert trainer.errors([call])["healed"] == pytest.approx(before, rel=1e-5)
    losses = [trainer.learn([call], denoiser, 0.003) for _ in range(6)]
    assert losses[0] == pytest.approx(before, rel=1e-5)
    after = trainer.errors([call])
    assert after["healed"] < 0.8 * before
    assert after["merged"] == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize(("model", "merge"), [("tiny-flux", "dit"), ("tiny-sdxl", "unet")])
def test_every_step_has_the_noise_that_it_has_in_a_picture(model: str, merge: str, pictures: Path) -> None:
    """All 28 steps are covered: no image-to-image strength expresses every one of them."""
    studio = Studio(Setup(model=model, size=(64, 64), device="cpu", threads=1))
    expected: list[float] = []
    handle = denoiser_of(studio.pipe).register_forward_pre_hook(
        lambda _, args, kwargs: expected.append(timestep_of(args, kwargs)), with_kwargs=True
    )
    studio.draw("a rose", (0,))
    handle.remove()
    noising = Noising(studio.pipe, studio.request, preset(merge))
    (item,) = read_items(pictures)[:1]
    calls = [noising.call([item], ["a rose"], step, 0) for step in noising.steps]
    # Guidance may take two calls per step.
    assert [timestep_of(*call) for call in calls] == list(dict.fromkeys(expected))
    assert len(calls) == 28


def timestep_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float((kwargs["timestep"] if "timestep" in kwargs else args[1]).flatten()[0])


def test_guidance_is_that_of_pictures() -> None:
    rows = []
    for guidance in (1.0, 3.0):
        studio = Studio(Setup(model="tiny-sdxl", size=(64, 64), guidance=guidance, device="cpu", threads=1))
        noising = Noising(studio.pipe, studio.request, preset("unet"))
        rows.append(noising.call([BLANK], [""], 0, 0).rows)
    assert rows == [1, 2]


@pytest.mark.parametrize(("model", "merge"), [("tiny-flux", "dit"), ("tiny-sdxl", "unet")])
def test_pictures_and_captions_are_encoded_once(model: str, merge: str, pictures: Path) -> None:
    studio = Studio(Setup(model=model, size=(64, 64), steps=3, device="cpu", threads=1))
    pipe, items = studio.pipe, read_items(pictures)
    encoders = [pipe.vae.encoder, pipe.text_encoder, pipe.text_encoder_2]
    runs: list[str] = []
    for each in encoders:
        each.register_forward_pre_hook(lambda module, _: runs.append(type(module).__name__))
    noising = Noising(pipe, studio.request, preset(merge))
    runs.clear()
    first = noising.call(items[:2], ["a rose", "a daisy"], 1, 0)
    assert len(runs) == len(encoders) * 2
    noising.call(items[:2], ["a daisy", ""], 2, 5)
    assert len(runs) == len(encoders) * 2
    # Kept encodings equal new ones.
    for again in (noising, Noising(pipe, studio.request, preset(merge))):
        assert same(again.call(items[:2], ["a rose", "a daisy"], 1, 0), first)
    assert not {"encode", "encode_prompt", "get_timesteps"} & {*vars(pipe), *vars(pipe.vae)}


def same(one: NoisedCall, other: NoisedCall) -> bool:
    tensors = [[leaf for leaf in tree_leaves(tuple(call)) if isinstance(leaf, torch.Tensor)] for call in (one, other)]
    return len(tensors[0]) > 3 and all(torch.equal(*pair) for pair in zip(*tensors, strict=True))


@pytest.mark.parametrize(("model", "merge"), [("tiny-flux", "dit"), ("tiny-sdxl", "unet")])
def test_calls_at_different_noise_are_joined(model: str, merge: str, pictures: Path) -> None:
    studio = Studio(Setup(model=model, size=(64, 64), device="cpu", threads=1))
    denoiser, items = denoiser_of(studio.pipe), read_items(pictures)
    noising = Noising(studio.pipe, studio.request, preset(merge))
    calls = [noising.call(items[:2], ["a rose", ""], 3, 0), noising.call(items[2:3], ["a daisy"], 20, 1)]
    with torch.no_grad():
        expected = torch.cat([call.output(denoiser) for call in calls])
        torch.testing.assert_close(joined(calls).output(denoiser), expected, rtol=1e-4, atol=1e-4)


def test_a_batch_has_noise_of_all_parts_of_the_window(pictures: Path) -> None:
    trainer = trainer_of(size=(64, 64), rank=4)
    levels = [timestep_of(*trainer.noising.call([BLANK], [""], step, 0)) for step in trainer.noising.steps]
    for seed in range(3):
        (call,) = trainer.calls(read_items(pictures), random.Random(seed))
        assert [levels.index(float(level)) // 7 for level in call.kwargs["timestep"]] == [0, 1, 2, 3]


def test_pictures_one_at_a_time_have_destinations_of_their_own(pictures: Path) -> None:
    """Destinations are chosen as in drawing, and the gradient is the mean over the pictures."""
    trainer, items = trainer_of(size=(64, 64), rank=4), read_items(pictures)[:3]
    trainer.at_once = 1
    calls = trainer.calls(items, random.Random(0))
    assert [call.rows for call in calls] == [1, 1, 1]
    gradients = []
    for some in ([calls[0]], [calls[1]], [calls[2]], calls):
        trainer.rehearse(some)
        gradients.append(torch.cat([weight.grad.flatten() for weight in trainer.adapter.weights.values()]))
    torch.testing.assert_close(gradients[3], sum(gradients[:3]) / 3, rtol=1e-3, atol=1e-7)
    trainer.rehearse([joined(calls)])
    together = torch.cat([weight.grad.flatten() for weight in trainer.adapter.weights.values()])
    assert (together - gradients[3]).norm() > 0.05 * gradients[3].norm()


def test_what_finds_no_room_is_made_anew(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studio = Studio(Setup(model="tiny-flux", size=(64, 64), steps=3, device="cpu", threads=1))
    items = read_items(pictures)[:1]
    kept = Noising(studio.pipe, studio.request, preset("dit"))
    monkeypatch.setattr("tokenmerge.tools.healing.noising._ROOM", 0)
    anew = Noising(studio.pipe, studio.request, preset("dit"))
    for _ in range(2):
        assert same(kept.call(items, ["a rose"], 1, 0), anew.call(items, ["a rose"], 1, 0))


def test_the_loss_of_held_out_pictures_is_that_of_a_few(pictures: Path) -> None:
    """All held-out pictures would take as long as training."""
    studio = Studio(Setup(model="tiny-flux", size=(64, 64), steps=8, device="cpu", threads=1))
    noising = Noising(studio.pipe, studio.request, preset("dit"))
    calls = list(held_out_calls(noising, read_items(pictures)[:1] * 17, seed=0))
    assert len(calls) == 16 * 4
    assert len({timestep_of(*call) for call in calls}) == 4


def test_pipelines_that_do_not_noise_pictures_are_refused() -> None:
    """Their calls would all be those of the first step, whichever step was requested."""
    pipe = FluxKontextPipeline.from_pipe(tiny.build("flux"))
    with pytest.raises(TokenMergeError, match=r"FluxKontextPipeline takes pictures as references"):
        Noising(pipe, Request("", 4, 64, 64), preset("dit"))


def test_a_run_leaves_a_card_figures_and_pictures(done: Path) -> None:
    told = json.loads((done / "results.json").read_text())
    assert told["held_out_loss"]["healed"] != told["held_out_loss"]["merged"]
    assert [row["label"] for row in told["results"]] == ["none", "merged", "healed"]
    drift = {row["label"]: row["metrics"].get("mse", {}).get("mean") for row in told["results"]}
    assert drift["healed"] != drift["merged"]
    card = (done / "README.md").read_text()
    for words in ("tiny-flux", "method='toma'", "drawn by the plain model, 3 pictures", "8 steps of 2 x 1"):
        assert words in card
    with Image.open(done / "strip.png") as strip:
        assert strip.width > 3 * 64


def test_its_lora_is_for_merge_and_for_the_pipeline(done: Path) -> None:
    pipe, _ = load_pipeline("tiny-flux", torch.float32, torch.device("cpu"))
    tokenmerge.apply(pipe, "dit", ratio=0.5, lora=done / LORA)
    tokenmerge.remove(pipe)
    pipe.load_lora_weights(done / LORA)
    (adapters,) = pipe.get_list_adapters().values()
    assert len(adapters) == 1
    loaded = {name: weight for name, weight in pipe.transformer.named_parameters() if ".lora_B." in name}
    assert loaded
    assert all(weight.abs().max() > 0 for weight in loaded.values())
    with pytest.raises(TokenMergeError, match=r"healed for ratio=0\.5, but ratio=0\.25 is applied"):
        tokenmerge.apply(pipe, "dit", ratio=0.25, lora=done / LORA)


def content(path: Path) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Metadata and tensors of a weights file; metadata come in any order."""
    with safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name).flatten().tolist() for name in file.keys()}  # noqa: SIM118


def test_a_killed_run_goes_on_as_if_it_had_not_been(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(ASKED.prompts))
    command = [sys.executable, "-m", "tokenmerge", "heal", *TYPED, "--prompts", str(prompts), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (out / "checkpoint.pt").is_file() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (out / LORA).exists()
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] in (4, 8)
    outcome = heal(ASKED, out, resume=True)
    assert outcome is not None
    assert content(out / LORA) == content(done / LORA)
    told, before = (json.loads((each / "results.json").read_text()) for each in (out, done))
    assert told["loss"] == before["loss"]
    assert told["held_out_loss"] == before["held_out_loss"] != {}
    # Held-out losses are not measured again.
    kept = torch.load(out / "checkpoint.pt", weights_only=True)
    assert kept["held_out"] == told["held_out_loss"]
    torch.save({**kept, "held_out": {"merged": 2.0, "healed": 1.0}}, out / "checkpoint.pt")
    outcome = heal(ASKED, out, resume=True)
    assert outcome is not None
    assert outcome.progress.held_out == {"merged": 2.0, "healed": 1.0}


def test_what_is_there_is_not_overwritten(done: Path) -> None:
    with pytest.raises(TokenMergeError, match=r"holds a run of heal; add --resume"):
        heal(ASKED, done)
    with pytest.raises(TokenMergeError, match=r"was begun with rank 4, not 8"):
        heal(replace(ASKED, rank=8), done, resume=True)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_damaged_checkpoint_is_named(content: bytes | None, done: Path, tmp_path: Path) -> None:
    out = shutil.copytree(done, tmp_path / "out")
    if content is None:
        torch.save({"step": 4}, out / "checkpoint.pt")
    else:
        (out / "checkpoint.pt").write_bytes(content)
    with pytest.raises(TokenMergeError, match=r"checkpoint\.pt cannot be read .*; remove it to train anew"):
        heal(ASKED, out, resume=True)


def test_other_pictures_are_not_gone_on_with(pictures: Path, tmp_path: Path) -> None:
    """Other pictures would change which ones are held out and which are trained on."""
    asked = replace(ASKED, data=pictures, prompts=())
    for resume in (False, True):
        _Run(asked, tmp_path / "out", _accelerator(asked), resume)
    for change in (
        lambda: shutil.copy(pictures / "00000.png", pictures / "more.png"),
        lambda: (pictures / "00000.txt").write_text("another caption"),
        lambda: Image.new("RGB", (64, 64)).save(pictures / "00000.png"),
    ):
        before = {path: path.read_bytes() for path in pictures.iterdir()}
        change()
        with pytest.raises(TokenMergeError, match=r"was begun with pictures 4 \(\w+\), not \d \(\w+\)"):
            heal(asked, tmp_path / "out", resume=True)
        for path in pictures.iterdir():
            path.write_bytes(before[path]) if path in before else path.unlink()


def test_captions_and_pictures_of_every_kind(tmp_path: Path) -> None:
    tall = Image.new("RGB", (40, 20), "blue")
    tall.paste("red", (0, 0, 20, 20))
    turned = tall.getexif()
    turned[0x0112] = 6  # the orientation that a camera held upright writes
    tall.save(tmp_path / "tall.png", exif=turned)
    caption = tmp_path / "tall.txt"
    caption.write_text("a rose", encoding="utf-8-sig")
    (item,) = read_items(tmp_path)
    assert item.caption == "a rose"
    loaded = item.load(20, 40)
    assert loaded.getpixel((10, 5)) == (255, 0, 0)
    assert loaded.getpixel((10, 35)) == (0, 0, 255)
    caption.write_bytes(b"caf\xe9")
    with pytest.raises(TokenMergeError, match=r"caption .*tall\.txt cannot be read .*write it in UTF-8"):
        read_items(tmp_path)


def test_another_family_heals_too(pictures: Path, tmp_path: Path) -> None:
    """A UNet, whose guidance takes two rows per picture in a call. The user's pictures share one caption, and
    photographs are the reference of FID."""
    for number, caption in enumerate(sorted(pictures.glob("*.txt"))):
        caption.write_text("a rose")
        shutil.copy(caption.with_suffix(".png"), pictures / f"copy{number}.png")
        shutil.copy(caption, pictures / f"copy{number}.txt")
    (tmp_path / "networks").mkdir()
    torch.jit.script(SmallInception().eval()).save(str(tmp_path / "networks" / "default_1.pt"))
    sdxl = replace(ASKED.setup, model="tiny-sdxl")
    asked = replace(ASKED, setup=sdxl, merge=None, data=pictures, prompts=(), held_out=3, steps=3, every=2)
    asked = replace(asked, reference=pictures, sources=Sources(tmp_path / "networks"))
    outcome = heal(asked, tmp_path / "out")
    assert outcome is not None
    drawn = list((tmp_path / "out" / "evaluation" / "images" / "none").iterdir())
    assert len({picture.read_bytes() for picture in drawn}) == 3
    assert "3 prompts, a seed for each;" in str(outcome)
    fid = {row.configuration.label: row.estimates["fid"] for row in outcome.results.rows}
    loss = json.loads((tmp_path / "out" / "results.json").read_text())["fid_loss"]
    assert loss["merged"]["mean"] == pytest.approx(fid["merged"].mean - fid["none"].mean)
    assert loss["cut"]["mean"] == pytest.approx(1 - loss["healed"]["mean"] / loss["merged"]["mean"])
    assert all(each["interval"] > 0 for each in loss.values())
    assert (
        f"FID loss against plain pictures: {loss['merged']['mean']:.1f} ±"
        in (tmp_path / "out" / "README.md").read_text()
    )
    assert outcome.settings["merge"]["skip_first"] == 0
    pipe, _ = load_pipeline("tiny-sdxl", torch.float32, torch.device("cpu"))
    states = []
    for name in (LORA, LORA_FOR_COMFYUI):
        pipe.load_lora_weights(tmp_path / "out" / name)
        states.append({name: each for name, each in pipe.unet.named_parameters() if "lora_" in name})
        pipe.unload_lora_weights()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(each, states[1][name]) for name, each in states[0].items())


def test_two_processes_train_on_the_mean_of_their_gradients(pictures: Path, tmp_path: Path) -> None:
    options = ["--data", str(pictures), "--steps", "2", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tokenmerge", "heal", *TYPED, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    # Meanwhile, compute the same by hand.
    asked = replace(ASKED, data=pictures, prompts=(), steps=2)
    alone = _Run(asked, tmp_path / "alone", _accelerator(asked), resume=False)
    trainer, (items, _) = alone._trainer, split(alone._items, asked.held_out, asked.seed)
    lessons = Lessons(items, asked.steps, asked.batch, asked.lr, asked.seed)
    weights = trainer.adapter.weights
    for step in range(2):
        gradients = []
        for number in range(2):
            trainer.rehearse(trainer.calls(lessons.batch_at(step, number, 2), random.Random(f"0 {step} {number}")))
            gradients.append([weight.grad.clone() for weight in weights.values() if weight.grad is not None])
        for weight, one, other in zip(weights.values(), *gradients, strict=True):
            weight.grad = (one + other) / 2
        trainer.advance(lessons.rate(step))
    _, told = process.communicate()
    assert process.returncode == 0, told[-2000:]
    assert "2 steps of 2 x 2 pictures" in (tmp_path / "out" / "README.md").read_text()
    found = load_file(tmp_path / "out" / LORA)
    assert len(found) == len(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(found[f"transformer.{name}"], weight.detach(), rtol=1e-3, atol=1e-6)


def test_unreadable_pictures_are_named_and_left_out(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole,) = list(pictures.glob("00000.png"))
    for number in range(10):
        shutil.copy(whole, pictures / f"copy{number}.png")
    (pictures / "bad.png").write_bytes(whole.read_bytes()[:200])
    items = read_items(pictures)
    assert len(items) == 14
    assert "bad.png" in capsys.readouterr().err
    listed = tmp_path / "list.txt"
    listed.write_text("pictures/00000.png\npictures/00001.png\n")
    assert [item.caption for item in read_items(listed)] == list(ASKED.prompts[:2])
    for number in range(2):
        (pictures / f"worse{number}.png").write_bytes(b"")
    with pytest.raises(TokenMergeError, match=r"3 of 17 pictures cannot be read \(.*bad\.png.*\); at most 10%"):
        read_items(pictures)


def test_every_round_sees_every_picture(pictures: Path) -> None:
    items, held_out = split(read_items(pictures), 1, seed=3)
    assert len(held_out) == 1
    assert held_out[0] not in items
    lessons = Lessons(items, steps=100, batch=2, lr=1.0, seed=0)
    # Three steps of two processes, with batches of two, see three pictures four times each.
    seen = [item for step in range(3) for process in range(2) for item in lessons.batch_at(step, process, 2)]
    assert all(seen.count(item) == 4 for item in items)
    # The list is shuffled once per round.
    before = _order.cache_info().misses
    assert {len(lessons.batch_at(step, 0, 1)) for step in range(30)} == {2}
    assert _order.cache_info().misses - before <= 2 * 30 / 3
    rates = [lessons.rate(step) for step in range(100)]
    assert max(rates) == 1.0
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "holding": ({"merge": "dit + hold"}, r"heal trains a Merge alone"),
    "nothing merged": ({"merge": "dit:ratio=0"}, r"heal trains a Merge alone"),
    "no such technique": ({"merge": "tomato"}, r"'tomato' is unknown"),
    "not mergeable": ({"merge": "todo"}, r"use another method, such as 'pool'"),
    "half precision": ({"setup": replace(ASKED.setup, dtype="float16")}, r"gradients vanish; use bfloat16 or float32"),
    "largest seed": ({"seed": LARGEST_SEED}, r"seed \d+ is out of range"),
    "no window": ({"merge": "dit:start=0.9"}, r"none of 3 steps; use a wider window"),
    "few pictures": ({"held_out": 4}, r"there are 4 pictures, and 4 are held out"),
    "no reference": ({"reference": Path("nowhere")}, r"nowhere is not a folder"),
    "memory": (
        {"batch": 10**7, "at_once": 10**8},
        r"10000000 pictures at once takes about \S+ GiB, .*use --at-once \d+",
    ),
}


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_any_work(case: str, drawn: bool, pictures: Path, tmp_path: Path) -> None:
    changes, told = REFUSED[case]
    with pytest.raises(TokenMergeError, match=told):
        heal(replace(ASKED, **{"data": None if drawn else pictures, **changes}), tmp_path / "out")
    # No folder is left behind to block the next attempt.
    assert not (tmp_path / "out").exists()


def test_photographs_without_a_network_are_refused(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmerge.tools.quality.networks.find_spec", lambda name: None)
    with pytest.raises(TokenMergeError, match=r"FID and KID, whose network is missing: default_1\.pt"):
        heal(replace(ASKED, reference=pictures), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_step_takes_as_much_memory_as_was_told() -> None:
    """Blocks are checkpointed on a CPU too, so that only the peak shows what they need."""
    trainer = trainer_of(size=(128, 128), rank=32)
    cpu = torch.device("cpu")
    each = bytes_of_one(trainer, cpu)
    before = memory._used(cpu)
    if each is None or before is None:
        pytest.skip("this system does not tell how much memory a process uses")
    trainer.rehearse(trainer.calls([BLANK] * 6, random.Random(0)))
    after = memory._proc_bytes(Path("/proc/self/status"), "VmHWM")
    assert after is not None
    assert each / 2 < (after - before) / 6 < 2 * each


def test_pictures_are_drawn_by_the_plain_model(done: Path) -> None:
    """The model already has an adapter by then, but the pictures do not change."""
    studio = Studio(Setup(model="tiny-flux", size=(64, 64), steps=3, device="cpu", threads=1))
    (picture,), _ = studio.draw(ASKED.prompts[1], (1,))
    with Image.open(done / "pictures" / "00001.png") as drawn:
        assert drawn.tobytes() == picture.tobytes()


def test_an_empty_folder_and_none_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for data, told in ((tmp_path / "empty", "holds no picture"), (tmp_path / "nowhere", "nowhere does not exist")):
        assert main(["heal", *TYPED, "--data", str(data), "--out", str(tmp_path / "out")]) == 2
        assert told in capsys.readouterr().err.splitlines()[-1]

"""Schedulers by name: they draw the pictures, and results name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import tiny
import tokenmerge
from saved import save_sdxl
from tokenmerge import Hold, TokenMergeError
from tokenmerge.tools.cli.main import main, parser
from tokenmerge.tools.drawing import studio
from tokenmerge.tools.drawing.studio import Setup, Studio
from tokenmerge.tools.evaluation.run import Task, evaluate
from tokenmerge.tools.solvers import SCHEDULERS, scheduler_named

FRONTS = Path(__file__).parents[2] / "benchmarks" / "fronts"
CLASSES = {
    "sdxl": {"euler": "EulerDiscrete", "dpm++": "DPMSolverMultistep", "unipc": "UniPCMultistep"},
    "flux": {"euler": "FlowMatchEulerDiscrete", "dpm++": "DPMSolverMultistep", "unipc": "UniPCMultistep"},
}
KARRAS = "-karras"


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", CLASSES)
def test_a_scheduler_by_name_draws_the_picture(kind: str, name: str) -> None:
    # Flux's pipeline passes a time shift with every call.
    shifted = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = tiny.build(kind, **({"scheduler": shifted} if kind == "flux" else {}))
    own, plain = pipe.scheduler, tiny.draw(pipe, steps=12)
    config = dict(own.config)
    solver, karras = name.removesuffix(KARRAS), name.endswith(KARRAS)
    if kind == "flux" and karras and solver != "euler":
        with pytest.raises(TokenMergeError, match=f"has no Karras sigmas for flow models.*euler-karras or {solver}"):
            scheduler_named(name, own)
        return
    pipe.scheduler = scheduler_named(name, own)
    assert type(pipe.scheduler).__name__ == f"{CLASSES[kind][solver]}Scheduler"
    assert bool(pipe.scheduler.config.get("use_karras_sigmas")) == karras
    assert dict(own.config) == config
    picture = tiny.draw(pipe, steps=12)
    assert picture.isfinite().all()
    assert torch.equal(picture, plain) == (name == "euler")
    held = tiny.draw(tokenmerge.apply(pipe, Hold(every=2, start=0.2)), steps=12)
    assert held.isfinite().all()
    assert tokenmerge.summary(pipe).steps["held"] >= 3


def test_a_studio_draws_by_it_with_every_configuration() -> None:
    given: dict[str, Any] = {"model": "tiny-flux", "size": (64, 64), "steps": 3, "device": "cpu"}
    own, other = (Studio(Setup(**given, scheduler=name)) for name in (None, "euler-karras"))
    assert other.pipe.scheduler.config.use_karras_sigmas
    assert not own.pipe.scheduler.config.use_karras_sigmas
    first, second = (each.draw("a rose", (0,))[0][0].tobytes() for each in (own, other))
    assert first != second


@pytest.mark.parametrize("name", ["dpm++", "unipc"])
def test_solvers_shift_by_the_size_as_the_model_does(name: str) -> None:
    """Noise levels agree within the tolerance that the first one needs."""
    far = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=1.5, max_shift=2.5)
    pipe = tiny.build("flux", scheduler=far)
    tiny.draw(pipe, steps=5)
    pipe.scheduler = scheduler_named(name, far)
    tiny.draw(pipe, steps=5)
    torch.testing.assert_close(pipe.scheduler.sigmas, far.sigmas, atol=5e-3, rtol=0)


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_a_scheduler_that_the_pipeline_cannot_use_is_refused_before_pictures(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flux's pipeline passes a shift with every call, even if its scheduler takes none, as that of FLUX.1 schnell."""
    monkeypatch.chdir(tmp_path)
    whole = studio.load_pipeline

    def load(*given: Any) -> Any:
        pipe, defaults = whole(*given)
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, use_dynamic_shifting=False)
        return pipe, defaults

    monkeypatch.setattr(studio, "load_pipeline", load)
    options = ["--scheduler", "dpm++", "--size", "64x64", "--steps", "3", "--device", "cpu", "--techniques", "hold"]
    assert main([command, *options, *(["--metrics", "mse"] if command == "eval" else [])]) == 2
    assert "cannot draw this with DPMSolverMultistepScheduler (AssertionError); leave out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_scheduler_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--scheduler", "euler-caras"]) == 2
    assert "euler-karras" in capsys.readouterr().err


def test_an_evaluation_tells_its_scheduler_and_keeps_to_it(tmp_path: Path) -> None:
    model, out = str(save_sdxl(tmp_path / "sdxl")), tmp_path / "out"
    given: dict[str, Any] = {"model": model, "prompts": ["a", "b"], "techniques": ["hold:every=2"], "device": "cpu"}
    given |= {"steps": 4, "size": (64, 64), "metrics": ("mse",), "repeats": 0}
    evaluate(Task(**given, scheduler="dpm++-karras"), out)
    assert "4 steps of dpm++-karras" in (out / "table.md").read_text()
    assert {json.loads(line)["scheduler"] for line in (out / "results.jsonl").read_text().splitlines()} == {
        "dpm++-karras"
    }
    with pytest.raises(TokenMergeError, match="begun with scheduler dpm"):
        evaluate(Task(**given), out, resume=True)


@pytest.mark.parametrize("scheduler", ["euler-karras", "dpm++-karras"])
def test_fronts_under_other_schedulers_have_the_same_configurations(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists refer to each other by paths from the root of the repository."""
    monkeypatch.chdir(FRONTS.parents[1])
    own, other = (
        parser().parse_args(["eval", f"@benchmarks/fronts/{name}.args"])
        for name in ("tiny-sdxl", f"tiny-sdxl-{scheduler}")
    )
    assert other.scheduler == scheduler
    assert {**vars(other), "scheduler": None} == vars(own)

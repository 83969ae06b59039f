"""Rivals of Merge and Hold: each skips work, repeats its pictures, leaves no trace, and is refused early where it
cannot work."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.tools.cli.main import main
from tokenmerge.tools.drawing.studio import Setup, Studio
from tokenmerge.tools.measure import counted_calls
from tokenmerge.tools.rivals.base import Run
from tokenmerge.tools.rivals.reading import _KINDS, RIVALS, read_rival
from tokenmerge.tools.typed import Configuration, read_typed

STEPS = 8


def draw(pipe: Any, seed: int = 0, steps: int = STEPS) -> torch.Tensor:
    return tiny.draw(pipe, seed=seed, num_inference_steps=steps)


@contextmanager
def counted(**modules: nn.Module) -> Iterator[Counter[str]]:
    """Counts the calls of each module."""
    calls: Counter[str] = Counter()
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.update([name])) for name, module in modules.items()
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def belongings(pipe: Any) -> list[dict[str, Any]]:
    """Every attribute of a pipeline, its class and its modules, and the order of modules; without traces of calls."""
    denoiser = tiny.denoiser_of(pipe)
    # Attributes that any call of a pipeline sets.
    notes = ("_num_timesteps", "_guidance_scale", "_interrupt", "_joint_attention_kwargs", "_current_timestep")
    mine = [{name: value for name, value in vars(pipe).items() if name not in notes}, dict(vars(type(pipe)))]
    modules = [{**vars(module), "order": list(module._modules)} for module in denoiser.modules()]
    return [*mine, *modules]


# The rival as typed, the pipeline, and the number of calls of each `watched` module in 8 steps.
SKIPPING = [
    # The first block runs in every step; a large threshold lets the cache skip the others after warmup.
    ("cache-dit:threshold=100,warmup=3", "flux", {"first": 8, "last": 3}),
    ("cache-dit:threshold=100,warmup=3,taylorseer=1", "flux", {"first": 8, "last": 3}),
    ("cache-dit:threshold=100,warmup=2,continuous=2", "flux", {"first": 8, "last": 4}),
    ("cache-dit:threshold=0,warmup=3", "flux", {"first": 8, "last": 8}),
    ("deepcache:interval=3", "sdxl", {"first": 3, "middle": 3, "last": 8}),
    ("deepcache:interval=4", "sdxl", {"first": 2, "middle": 2, "last": 8}),
    ("deepcache:interval=4,branch=3", "sdxl", {"first": 8, "middle": 2, "last": 8}),
    ("deepcache:interval=1", "sdxl", {"first": 8, "middle": 8, "last": 8}),
]


def watched(pipe: Any) -> dict[str, nn.Module]:
    if hasattr(pipe, "transformer"):
        return {"first": pipe.transformer.transformer_blocks[0], "last": pipe.transformer.single_transformer_blocks[-1]}
    unet = pipe.unet
    # Modules inside the blocks that DeepCache replaces.
    return {
        "first": unet.down_blocks[0].resnets[0].conv1,
        "middle": unet.mid_block.resnets[0].conv1,
        "last": unet.up_blocks[-1].resnets[-1].conv1,
    }


@pytest.mark.parametrize(("text", "family", "calls"), SKIPPING)
def test_step_caches_skip_work_repeat_and_leave_nothing(text: str, family: str, calls: dict[str, int]) -> None:
    pipe, rival = tiny.build(family), read_rival(text)
    plain, other = draw(pipe), draw(pipe, seed=1)
    before = belongings(pipe)
    with rival.enabled(pipe, Run(STEPS)):
        with counted(**watched(pipe)) as ran:
            first = draw(pipe)
        assert ran == calls
        assert torch.equal(draw(pipe, seed=1), other) == (set(calls.values()) == {STEPS})
        assert torch.equal(draw(pipe), first)
    assert torch.equal(first, plain) == (set(calls.values()) == {STEPS})
    assert belongings(pipe) == before
    assert torch.equal(draw(pipe), plain)


@pytest.mark.parametrize(("text", "family"), [("cache-dit:threshold=100,warmup=3", "flux"), ("deepcache", "sdxl")])
def test_step_caches_go_with_merging(text: str, family: str) -> None:
    pipe = tiny.build(family)
    plain = draw(pipe)
    with tokenmerge.applied(pipe, Merge(ratio=0.5)):
        merged = draw(pipe)
        with read_rival(text).enabled(pipe, Run(STEPS)):
            both = draw(pipe)
            assert torch.equal(draw(pipe), both)
        assert torch.equal(draw(pipe), merged)
    assert torch.equal(draw(pipe), plain)
    assert not torch.equal(both, merged)


def test_a_failed_call_leaves_nothing_either() -> None:
    pipe = tiny.build("flux")
    plain = draw(pipe)
    before = belongings(pipe)
    hook = pipe.transformer.single_transformer_blocks[-1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), read_rival("cache-dit").enabled(pipe, Run(STEPS)):
        draw(pipe)
    hook.remove()
    assert belongings(pipe) == before
    assert torch.equal(draw(pipe), plain)


def test_guidance_in_calls_of_its_own_is_cached_apart() -> None:
    """`tiny-flux` makes two calls per step with guidance and one without."""
    for guidance, calls in ((2.5, 2), (1.0, 1)):
        studio = Studio(Setup(model="tiny-flux", size=(64, 64), steps=4, guidance=guidance, device="cpu"))
        studio.pipe.set_progress_bar_config(disable=True)
        configuration = typed("none + cache-dit:threshold=100,warmup=1")
        studio.attempt(configuration, "a rose")
        studio.configure(configuration)
        assert studio.pipe._context_kwargs["cache_config"].enable_separate_cfg == (calls == 2)
        with counted(last=studio.pipe.transformer.single_transformer_blocks[-1]) as ran:
            studio.draw("a rose", (0,))
        assert ran["last"] == calls
        studio.restore()
    with pytest.raises(TokenMergeError, match="one or two denoiser calls per step, but FluxPipeline makes 3"):
        read_rival("cache-dit").enabled(studio.pipe, Run(4, calls=3)).__enter__()


def typed(text: str) -> Configuration:
    return read_typed(text).configuration


SOLVERS = {"unipc": diffusers.UniPCMultistepScheduler, "dpm++": diffusers.DPMSolverMultistepScheduler}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("family", ["flux", "sdxl", "sd3"])
@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_are_those_of_diffusers(name: str, family: str, order: int) -> None:
    # Flux's pipeline passes a shift for the picture's size to any scheduler.
    dynamic = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)}
    pipe = tiny.build(family, **(dynamic if family == "flux" else {}))
    fine = draw(pipe, steps=40)
    own, before = pipe.scheduler, belongings(pipe)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": own.config.get("shift", 1.0)}
    wanted = SOLVERS[name].from_config(own.config, solver_order=order, **(flow if family != "sdxl" else {}))
    expected = draw(tiny.build(family, scheduler=wanted), steps=5)
    with read_rival(f"{name}:steps=5,order={order}").enabled(pipe, Run(5)):
        assert type(pipe.scheduler) is SOLVERS[name]
        assert torch.equal(draw(pipe, steps=5), expected)
        assert torch.equal(draw(pipe, steps=5), expected)
    assert pipe.scheduler is own
    assert belongings(pipe) == before
    # The solver approaches the same picture as many steps of the model's own scheduler.
    assert (expected - fine).pow(2).mean() < (draw(pipe, steps=1) - fine).pow(2).mean()


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_of_flow_models_have_the_shift_of_the_model(name: str) -> None:
    """Solvers have the noise levels of the model's own scheduler, within the tolerance that the first level needs."""
    studio = Studio(Setup(model="tiny-flux", size=(64, 64), steps=5, device="cpu"))
    studio.pipe.set_progress_bar_config(disable=True)
    studio.draw("a rose", (0,))
    own = studio.pipe.scheduler.sigmas
    with read_rival(f"{name}:steps=5").enabled(studio.pipe, Run(5)):
        studio.draw("a rose", (0,))
        torch.testing.assert_close(studio.pipe.scheduler.sigmas, own, atol=5e-3, rtol=0)


def test_a_flow_model_that_no_solver_can_shift_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some flow models have a fixed shift, yet Flux's pipeline passes a shift with every call."""
    studio = Studio(Setup(model="tiny-flux", size=(64, 64), steps=5, device="cpu"))
    studio.pipe.set_progress_bar_config(disable=True)
    own = studio.pipe.scheduler
    for changes, words in (
        (
            {"use_dynamic_shifting": False},
            "FluxPipeline cannot draw this with DPMSolverMultistepScheduler .*; leave out",
        ),
        (
            {"time_shift_type": "linear"},
            "shifts times exponentially, but the model's .* by 'linear'; leave out",
        ),
    ):
        studio.pipe.scheduler = type(own).from_config(own.config, **changes)
        with pytest.raises(TokenMergeError, match=words):
            studio.attempt(typed("none + dpm++:steps=4"), "a rose")


def test_schedules_draw_in_as_many_steps_as_they_say_beside_techniques_too() -> None:
    studio = Studio(Setup(model="tiny-flux", size=(64, 64), steps=6, device="cpu"))
    studio.pipe.set_progress_bar_config(disable=True)
    own, operations = studio.pipe.scheduler, {}
    for text in ("none", "none + steps:count=3", "none + unipc:steps=2", "hold:every=2,start=0 + dpm++:steps=4"):
        configuration = typed(text)
        studio.check(configuration)
        studio.attempt(configuration, "a rose")
        studio.configure(configuration)
        with counted_calls(studio.pipe.transformer) as counter:
            studio.draw("a rose", (0,))
        operations[text] = counter.operations
        kinds = tokenmerge.summary(studio.pipe).steps
        assert sum(kinds.values()) == (4 if "hold" in text else 0)
    plain, fewer, solver, held = operations.values()
    assert (fewer, solver) == (plain / 2, plain / 3)
    # Three of the four steps run in full.
    assert plain / 2 < held < plain * 4 / 6
    studio.restore()
    assert studio.pipe.scheduler is own
    assert tokenmerge.summary(studio.pipe).steps == {}


@pytest.mark.parametrize(
    ("model", "text", "words"),
    [
        ("tiny-flux", "none + deepcache", "DeepCache is for UNets (UNet2DConditionModel), but this is a Flux"),
        ("tiny-sdxl", "none + cache-dit", "cache-dit is for transformers, but UNet2DConditionModel is a UNet; use"),
        ("tiny-sdxl", "none + deepcache:branch=9", "branch is 9, but UNet2DConditionModel has branches from 0 to 8"),
        ("tiny-flux", "none + cache-dit:fn=5,bn=1", "6 of the 6 blocks of FluxTransformer2DModel in every step"),
        ("tiny-flux", "hold:every=3 + cache-dit", "Hold and the cache-dit cache both skip steps; leave one of them"),
        ("tiny-sdxl", "hold:every=3 + deepcache", "Hold and the deepcache cache both skip steps"),
        ("tiny-flux", "none + steps:count=28", "the plain schedule has 28 steps too; use another count"),
        ("tiny-flux", "none + unipc:order=2", "schedule 'unipc' needs steps; write it as in unipc:steps=14"),
        ("tiny-flux", "none + unipc:steps=9,order=4", "order is 4; it must be from 1 to 3"),
        ("tiny-sdxl", "none + deepcache:inteval=2", "(did you mean 'interval'?)"),
        ("tiny-sdxl", "none + deepcache:interval=0", "step cache 'deepcache': interval is 0; it must be 1 or more"),
        ("tiny-flux", "none + cache-dit:threshold=-1", "threshold is -1; it must be 0 or more"),
        ("tiny-flux", "none + cache-dit --compile blocks", "compiled blocks do not ask it"),
    ],
)
@pytest.mark.parametrize("command", ["eval", "generate"])
def test_what_cannot_be_is_refused_before_weights_are_loaded(
    command: str,
    model: str,
    text: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokenmerge.tools.drawing.studio.load_pipeline", None)
    text, *more = text.split(" --")
    options = [f"--{word}" if place == 0 else word for place, word in enumerate(" ".join(more).split())]
    arguments = [command, "--model", model, "--device", "cpu", *(["--metrics", "mse"] if command == "eval" else [])]
    assert main([*arguments, "--techniques", text, *options]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("model", "text"), [("tiny-flux", "cache-dit"), ("tiny-sdxl", "deepcache")])
def test_a_missing_package_is_named(
    model: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmerge.tools.rivals.base.find_spec", lambda name: None)
    assert main(["generate", "--model", model, "--techniques", f"none + {text}"]) == 2
    told = f'{text} needs a package that is missing: pip install "tokenmerge[rivals]"\n'
    assert capsys.readouterr().err.endswith(told)


def test_every_rival_has_an_example_that_is_read() -> None:
    for name in RIVALS:
        rival = read_rival(_KINDS[name].example)
        assert rival.name == name
        assert rival.to_dict()["name"] == name


def test_generate_compares_with_rivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--size", "64x64", "--steps", "4", "--device", "cpu", "--out", str(tmp_path / "a.png")]
    arguments += ["--techniques", "none + cache-dit:threshold=1,warmup=1", "hold:every=2,start=0 + unipc:steps=3"]
    assert main([*arguments, "--json"]) == 0
    plain, cached, solved = json.loads(capsys.readouterr().out)["shots"]
    assert (plain["cache"], plain["schedule"]) == (None, None)
    assert cached["cache"]["name"] == "cache-dit"
    assert solved["schedule"] == {"name": "unipc", "steps": 3, "order": 2}
    assert sum(solved["kinds"].values()) == 3
    assert Hold.NAME in {each["technique"] for each in solved["techniques"]}
    assert min(cached["mse"], solved["mse"]) > 0

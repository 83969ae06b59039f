"""Holding, alone and with merging: full steps are exact; held steps extrapolate and do not run what is held."""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

import tiny
import tokenmerge
import zoo
from tokenmerge import Hold, Merge
from tokenmerge.applying import token_maps
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.families.base import Block, Ports
from tokenmerge.holding.sites import _clipped
from traces import attributes, same

KINDS = ["sdxl", "sd3", "flux"]
MERGE = Merge(regions="tile:2x2", skip_first=0)
BLOCKS, STAGES = Hold(every=3, what="blocks", start=0.0), Hold(every=3, what="stages", start=0.0)
HELD = [*((kind, BLOCKS) for kind in KINDS), ("sdxl", STAGES)]
WAYS = [
    *(pytest.param(kind, [hold], id=f"{kind}-{hold.what}") for kind, hold in HELD),
    *(pytest.param(kind, [MERGE, hold], id=f"{kind}-merged-{hold.what}") for kind, hold in HELD),
]


def every(number: int, techniques: list[Any]) -> list[Any]:
    return [each.replace(every=number) if isinstance(each, Hold) else each for each in techniques]


class Loop:
    """Drives a bare denoiser step by step, with inputs of its own choice."""

    def __init__(self) -> None:
        self.timesteps = list(range(20, 0, -1))
        self.sigmas = torch.linspace(1, 0, 21)
        self.begin_index = 0

    def set_timesteps(self) -> None:
        pass

    def step(self) -> None:
        pass


def build(kind: str, *techniques: Merge | Hold) -> tuple[nn.Module, Loop]:
    """A denoiser of `tiny.py` or `zoo.py` with techniques, and the loop that drives it."""
    denoiser, loop = denoiser_of(tiny.build(kind) if kind in tiny.KINDS else zoo.MODELS[kind].build()), Loop()
    if techniques:
        tokenmerge.apply(denoiser, list(techniques), scheduler=loop)
    return denoiser, loop


@torch.no_grad()
def call(
    denoiser: nn.Module, scale: float = 1.0, height: int = 16, width: int = 16, batch: int = 2, **more: Any
) -> Tensor:
    arguments = family_of(denoiser).example(denoiser, batch, height, width)
    name = "sample" if "sample" in arguments else "hidden_states"
    arguments[name] = arguments[name] * scale
    return denoiser(**arguments, **more, return_dict=False)[0]


def running(kind: str, techniques: list[Any]) -> nn.Module:
    """A reference denoiser that holds nothing: every step runs, merged if the techniques merge."""
    denoiser, loop = build(kind, *(each for each in techniques if isinstance(each, Merge)))
    loop.set_timesteps()
    return denoiser


def runs(kind: str, techniques: list[Any], *scales: float, **more: Any) -> list[Tensor]:
    """The outputs of steps that run, each with its own maps."""
    return [call(running(kind, techniques), scale, **more) for scale in scales]


@pytest.mark.parametrize(("kind", "techniques"), WAYS)
def test_a_kept_step_is_exact_and_makes_the_same_input_exact(kind: str, techniques: list[Any]) -> None:
    (expected,) = runs(kind, techniques, 1.0)
    plain = call(build(kind)[0])
    denoiser, loop = build(kind, *every(5, techniques))
    loop.set_timesteps()
    assert torch.equal(call(denoiser), expected)
    for _ in range(2):
        loop.step()
        torch.testing.assert_close(call(denoiser), expected, rtol=1e-4, atol=1e-5)
    ran = "merged" if len(techniques) == 2 else "full"
    assert tokenmerge.summary(denoiser).steps == {ran: 1, "held": 2}
    tokenmerge.remove(denoiser)
    assert torch.equal(call(denoiser), plain)


@pytest.mark.parametrize(("kind", "hold"), HELD)
def test_a_full_step_makes_up_for_what_held_ones_missed(kind: str, hold: Hold) -> None:
    """The full step measures an error. A line through two points errs in proportion to the distances from both."""
    scales = [1.0, 1.2, 1.5, 1.9, 2.4, 3.0]
    plain, _ = build(kind)
    first, last = _ends(plain, hold)
    ports = first.kind.ports
    entered = [_seen(plain, first.module, "enters", ports, scale) for scale in scales]
    left = [_seen(plain, last.module, "leaves", last.kind.ports, scale) for scale in scales]
    residuals = [after - before for before, after in zip(entered, left, strict=True)]
    denoiser, loop = build(kind, hold)
    loop.set_timesteps()
    # A hook between blocks would split their run, so we observe the module after them.
    single = hold.what == "blocks" and kind == "sdxl"
    head = getattr(denoiser, "conv_norm_out" if kind == "sdxl" else "norm_out")
    kinds, made_up = [], []
    for scale, exact in zip(scales, left, strict=True):
        where = (_ends(denoiser, hold)[1].module, "leaves") if single else (head, "enters")
        made_up.append(_seen(denoiser, *where, ports if single else Ports(), scale)[:, -exact.shape[1] :] - exact)
        kinds.append(denoiser._tokenmerge.state.step.kind)
        loop.step()
    assert kinds == ["full", "held", "full", "held", "held", "full"]
    # Noise to signal is sigma / (1 - sigma); residuals are linear in its square root.
    at = [-math.sqrt((1 - n / 20) / max(n / 20, 1e-4)) for n in range(7)]
    way = [math.sqrt(1 + min(each**2, 100)) for each in at]
    line = residuals[2] + (residuals[2] - residuals[0]) * (at[5] - at[2]) / (at[2] - at[0])
    grown = [(at[n] - at[2]) * (at[n] - at[0]) * (way[n] - way[n + 1]) for n in range(6)]
    missed = (residuals[5] - line) * (grown[3] + grown[4]) / grown[5]
    assert missed.abs().max() > 1e-3
    torch.testing.assert_close(made_up[5], missed, rtol=1e-3, atol=1e-4)
    # A residual held without a slope errs in proportion to the distance from its step.
    grown = [(at[n] - at[0]) * (way[n] - way[n + 1]) for n in range(3)]
    torch.testing.assert_close(made_up[2], (residuals[2] - residuals[0]) * grown[1] / grown[2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["flux", "sd3", "flux2-klein-base", "chroma", "auraflow", "wan2.1"])
def test_pictures_are_the_same_in_one_run_or_in_many(kind: str) -> None:
    """The last run makes up for all, even if text joins the image tokens between runs."""
    bundled = kind in tiny.KINDS
    pipe = tiny.build(kind) if bundled else zoo.MODELS[kind].build()

    def draw() -> Tensor:
        return tiny.draw(pipe, steps=8) if bundled else zoo.draw(pipe, zoo.MODELS[kind], steps=8)

    plain = draw()
    tokenmerge.apply(pipe, Hold(every=3, start=0.0))
    few = draw()
    # The hook on a block splits the run: anything might act between two blocks now.
    denoiser = denoiser_of(pipe)
    handle = family_of(denoiser).blocks(denoiser)[0].module.register_forward_hook(lambda *_: None)
    many = draw()
    handle.remove()
    assert tokenmerge.summary(pipe).steps["held"] >= 3
    off = (few - plain).norm()
    assert off > 1e-3 * plain.norm()
    assert (many - few).norm() < 1e-4 * off


def owed(pipe: Any) -> list[float]:
    """The multiples of their errors that full steps added to make up for held ones, in an image of 16 steps."""
    denoiser, found = denoiser_of(pipe), []

    def note(*_: Any) -> None:
        (part,) = denoiser._tokenmerge.holding._now
        found.extend(float(each.owed) for each in part.residuals.values() if each.owed)

    handle = denoiser.register_forward_hook(note)
    tiny.draw(pipe, steps=16)
    handle.remove()
    return found


@pytest.mark.parametrize(
    ("scheduler", "changes", "made_up"),
    [
        (diffusers.EulerDiscreteScheduler, {}, True),
        (diffusers.DDIMScheduler, {"clip_sample": False}, True),
        (diffusers.DDIMScheduler, {"clip_sample": True}, False),
        (diffusers.DPMSolverMultistepScheduler, {"thresholding": True}, False),
    ],
)
def test_nothing_is_made_up_for_under_solvers_that_clip(scheduler: Any, changes: dict[str, Any], made_up: bool) -> None:
    pipe = tiny.build("sdxl")
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **changes)
    assert bool(owed(tokenmerge.apply(pipe, STAGES))) == made_up


@pytest.mark.parametrize(("merge", "made_up"), [({"destinations_every": 100, "weights_every": 100}, True), ({}, False)])
def test_nothing_is_made_up_for_across_a_changed_map(merge: dict[str, int], made_up: bool) -> None:
    often = {"destinations_every": 1, "weights_every": 1, **merge}
    pipe = tokenmerge.apply(tiny.build("sdxl"), [MERGE.replace(**often), STAGES])
    assert bool(owed(pipe)) == made_up


def test_nothing_is_made_up_for_steps_that_were_not_held() -> None:
    """A ControlNet that acts for a while has calls with their own residuals, and those of the others pause."""
    kind, more = BETWEEN["ControlNet of Flux"]
    denoiser, loop = build(kind, BLOCKS.replace(every=2))
    loop.set_timesteps()
    kinds, acts = [], range(5, 9)
    for step in range(10):
        output = call(denoiser, 1 + step / 10, **(more if step in acts else {}))
        kinds.append(denoiser._tokenmerge.state.step.kind)
        loop.step()
    assert [step for step, kind in enumerate(kinds) if kind == "held"] == [1, 3, 6, 7]
    assert torch.equal(output, call(tokenmerge.remove(denoiser), 1.9))


def _ends(denoiser: nn.Module, hold: Hold) -> tuple[Block, Block]:
    """The first and the last block of the last run."""
    family = family_of(denoiser)
    blocks = family.stages(denoiser) if hold.what == "stages" else family.blocks(denoiser)
    # Each transformer of a UNet is a run.
    single = hold.what == "blocks" and family.stages is not None
    return blocks[-1] if single else blocks[0], blocks[-1]


def _seen(denoiser: nn.Module, module: nn.Module, where: str, ports: Ports, scale: float) -> Tensor:
    """The tokens that enter or leave a module in one call."""
    found = []
    if where == "leaves":
        handle = module.register_forward_hook(lambda *call: found.append(ports.leaving(call[2])[0]))
    else:
        handle = module.register_forward_pre_hook(
            lambda _, args, kwargs: found.append(ports.tokens.read(args, kwargs).clone()), with_kwargs=True
        )
    call(denoiser, scale)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("kind", KINDS)
def test_held_blocks_do_not_run_and_change_tokens_as_at_the_full_step(kind: str) -> None:
    denoiser, loop = build(kind, BLOCKS.replace(every=5))
    blocks = family_of(denoiser).blocks(denoiser)
    ports, ran, seen = blocks[-1].kind.ports, [], []
    for block in blocks:
        first = next(module for module in block.module.modules() if isinstance(module, nn.Linear))
        first.register_forward_hook(lambda *_: ran.append(1))

    def watch(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.append((ports.tokens.read(args, kwargs), ports.outgoing(output)[0]))

    blocks[-1].module.register_forward_hook(watch, with_kwargs=True)
    loop.set_timesteps()
    call(denoiser)
    assert len(ran) == len(blocks)
    for _ in range(2):
        loop.step()
        call(denoiser, 0.5)
    assert len(ran) == len(blocks)
    (entered, left), (other, held), _ = seen
    assert not torch.equal(entered, other)
    torch.testing.assert_close(held, other + (left - entered), rtol=1e-4, atol=1e-5)
    loop.step()
    call(denoiser, 0.5)
    assert len(ran) == 2 * len(blocks)
    assert tokenmerge.summary(denoiser).steps == {"full": 2, "held": 2}
    assert token_maps(denoiser) == []


@pytest.mark.parametrize("size", [(16, 16), (18, 14)])
def test_held_stages_do_not_run_and_change_features_as_at_the_full_step(size: tuple[int, int]) -> None:
    denoiser, loop = build("sdxl", STAGES.replace(every=5))
    ran: list[str] = []
    inner = {name for name, _ in denoiser.named_modules() if name.startswith(("down_blocks", "mid_block", "up_blocks"))}
    for name, module in denoiser.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    entered, left = [], []
    denoiser.conv_in.register_forward_hook(lambda *_: entered.append(_[-1]))
    denoiser.conv_norm_out.register_forward_pre_hook(lambda _, given: left.append(given[0]))
    loop.set_timesteps()
    call(denoiser, 1.0, *size)
    assert inner & {*ran}
    ran.clear()
    for _ in range(2):
        loop.step()
        call(denoiser, 0.5, *size)
    assert not inner & {*ran}
    assert {"conv_in", "conv_out"} <= {*ran}
    torch.testing.assert_close(left[1], entered[1] + (left[0] - entered[0]), rtol=1e-4, atol=1e-5)
    told = tokenmerge.summary(denoiser)
    assert told.steps == {"full": 1, "held": 2}
    assert "stages" in str(told)
    # Two fp32 values per element that enters the first stage: the residual and its change.
    assert told.residual_bytes == 2 * entered[0].numel() * 4


def by_hook(denoiser: nn.Module, block: nn.Module) -> None:
    block.register_forward_hook(lambda _module, _args, output: shifted(output))


def by_telling_wrapper(denoiser: nn.Module, block: nn.Module) -> None:
    forward = block.forward
    block.forward = functools.wraps(forward)(lambda *args, **kwargs: shifted(forward(*args, **kwargs)))


class Shift(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return shifted(output)


def by_hook_of_diffusers(denoiser: nn.Module, block: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(block).register_hook(Shift(), "shift")


def by_loop_of_ones_own(denoiser: nn.Module, block: nn.Module) -> None:
    """Give the module that runs the blocks a custom forward, which may do anything between them."""
    name = next(name for name, module in denoiser.named_modules() if module is block)
    loop = denoiser.get_submodule(".".join(name.split(".")[:-2]))
    loop.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), loop)


def shifted(output: Any) -> Any:
    """A block's output with a ramp over the channels added to its image tokens."""
    *text, image = output if isinstance(output, tuple) else (output,)
    image = image + torch.linspace(-0.5, 0.5, image.shape[-1])
    return (*text, image) if isinstance(output, tuple) else image


@pytest.mark.parametrize("merged", [False, True], ids=["plain", "merged"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [by_hook, by_telling_wrapper, by_hook_of_diffusers, by_loop_of_ones_own])
def test_blocks_of_a_run_share_a_residual_unless_somebody_acts_between_them(
    kind: str, act: Callable[..., None], merged: bool
) -> None:
    """Merging also acts between blocks, but its sites never split a run."""
    sizes = []
    ways = [MERGE, BLOCKS.replace(every=4)] if merged else [BLOCKS.replace(every=4)]
    for acts in (False, True):
        denoiser, loop = build(kind, *ways)
        reference = running(kind, ways)
        for each in (denoiser, reference) if acts else ():
            blocks = family_of(each).blocks(each)
            act(each, next(block.module for block, after in itertools.pairwise(blocks) if block.line == after.line))
        whole = call(reference)
        loop.set_timesteps()
        # The input stays the same, so held and full steps must agree.
        for _ in range(5):
            torch.testing.assert_close(call(denoiser), whole, rtol=1e-4, atol=1e-5)
            loop.step()
        told = tokenmerge.summary(denoiser)
        assert told.steps == {"merged" if merged else "full": 2, "held": 3}
        sizes.append(told.residual_bytes)
    assert sizes[0] < sizes[1]


RESIDUAL = torch.linspace(-0.5, 0.5, 16).expand(2, 64, 16)
BETWEEN = {
    "layers that are skipped": ("sd3", {"skip_layers": [0]}),
    "ControlNet of SD3": ("sd3", {"block_controlnet_hidden_states": [RESIDUAL]}),
    "ControlNet of Flux": ("flux", {"controlnet_block_samples": [RESIDUAL] * 2}),
    "ControlNet of Chroma": (
        "chroma",
        {"controlnet_block_samples": [RESIDUAL] * 2, "controlnet_single_block_samples": [RESIDUAL]},
    ),
    # No residuals for single blocks: diffusers skips as many tokens there as there are of text, which leaves none.
    "ControlNet of Bria": ("bria", {"controlnet_block_samples": [RESIDUAL] * 2}),
}


@pytest.mark.parametrize(("kind", "more"), BETWEEN.values(), ids=BETWEEN)
def test_held_blocks_leave_room_for_what_acts_between_them(kind: str, more: dict[str, Any]) -> None:
    denoiser, loop = build(kind, BLOCKS.replace(every=5))
    expected, without = call(build(kind)[0], **more), call(build(kind)[0])
    assert (expected - without).abs().max() > 1e-3
    loop.set_timesteps()
    for _ in range(3):
        torch.testing.assert_close(call(denoiser, **more), expected, rtol=1e-4, atol=1e-5)
        # A second call of the step, as for guidance, without the addition.
        torch.testing.assert_close(call(denoiser), without, rtol=1e-4, atol=1e-5)
        loop.step()
    assert tokenmerge.summary(denoiser).steps == {"full": 1, "held": 2}


@pytest.mark.parametrize(("kind", "techniques"), WAYS)
def test_every_call_of_a_step_has_residuals_of_its_own(kind: str, techniques: list[Any]) -> None:
    scales = (1.0, 0.3, 2.0)
    expected = runs(kind, techniques, *scales)
    denoiser, loop = build(kind, *every(5, techniques))
    loop.set_timesteps()
    for _ in range(3):
        for scale, exact in zip(scales, expected, strict=True):
            torch.testing.assert_close(call(denoiser, scale), exact, rtol=1e-4, atol=1e-5)
        loop.step()


@pytest.mark.parametrize(("kind", "techniques"), WAYS)
def test_calls_of_a_step_may_differ_in_size(kind: str, techniques: list[Any]) -> None:
    """Skip-layer guidance calls with the whole batch and then with half of it."""
    expected = [*runs(kind, techniques, 1.0, batch=2), *runs(kind, techniques, 1.0, batch=1)]
    denoiser, loop = build(kind, *every(5, techniques))
    for _ in range(2):
        loop.set_timesteps()
        for _ in range(3):
            for batch, exact in zip((2, 1), expected, strict=True):
                torch.testing.assert_close(call(denoiser, batch=batch), exact, rtol=1e-4, atol=1e-5)
            loop.step()


@pytest.mark.parametrize(("kind", "techniques"), WAYS)
def test_other_sizes_and_batches(kind: str, techniques: list[Any]) -> None:
    denoiser, loop = build(kind, *every(3, techniques))
    for height, width in ((16, 16), (16, 24), (18, 14), (16, 16)):
        (exact,) = runs(kind, techniques, 1.0, height=height, width=width)
        loop.set_timesteps()
        for _ in range(2):
            result = call(denoiser, height=height, width=width)
            torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-5)
            loop.step()


def test_a_broken_picture_does_not_break_the_next() -> None:
    denoiser, loop = build("sdxl", BLOCKS.replace(every=2))
    loop.set_timesteps()
    good = [call(denoiser), loop.step(), call(denoiser)][2]
    loop.set_timesteps()
    assert call(denoiser, float("nan")).isnan().any()
    loop.set_timesteps()
    again = [call(denoiser), loop.step(), call(denoiser)][2]
    assert torch.equal(again, good)


@pytest.mark.parametrize(("kind", "techniques"), WAYS)
def test_a_kept_step_that_fails_does_not_count(kind: str, techniques: list[Any]) -> None:
    """A step may run out of memory and be tried again."""
    denoiser, loop = build(kind, *techniques)
    loop.set_timesteps()
    call(denoiser, 0.5)
    loop.set_timesteps()
    last = denoiser._tokenmerge.plan.runs[-1].blocks[-1].module

    def fail(*_: Any) -> None:
        raise MemoryError

    failing = next(leaf for leaf in last.modules() if not [*leaf.children()]).register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        call(denoiser)
    failing.remove()
    (whole,) = runs(kind, techniques, 1.0)
    for _ in range(3):
        torch.testing.assert_close(call(denoiser), whole, rtol=1e-4, atol=1e-4)
        loop.step()


@pytest.mark.parametrize(("kind", "hold"), HELD)
def test_a_kept_step_that_failed_is_made_again(kind: str, hold: Hold) -> None:
    results = []
    for fails in (False, True):
        denoiser, loop = build(kind, hold)
        loop.set_timesteps()
        outputs = []
        # Steps 0, 2, 5, 9, 14 and 17 are kept.
        for step in range(19):
            if fails and step == 5:
                last = denoiser.conv_out if hasattr(denoiser, "conv_out") else denoiser.proj_out
                handle = last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
                with pytest.raises(RuntimeError, match="no memory"):
                    call(denoiser, -1.0)
                assert denoiser._tokenmerge.state.step.keeps
                handle.remove()
            outputs.append(call(denoiser, 1 / (1 + step)))
            loop.step()
        results.append((outputs, tokenmerge.summary(denoiser).steps))
    (undisturbed, counted), (again, counted_again) = results
    assert counted_again == counted
    # After the failure, the error of the earlier held steps is unknown, so nothing is made up for.
    assert torch.equal(again[5], call(tokenmerge.remove(denoiser), 1 / 6))
    assert not torch.equal(again[5], undisturbed[5])
    # Two kept steps later, the failure has no effect any more.
    assert all(torch.equal(*pair) for pair in zip(again[14:], undisturbed[14:], strict=True))


@pytest.mark.parametrize(("kind", "hold"), HELD)
def test_a_held_step_that_failed_is_missed_once(kind: str, hold: Hold) -> None:
    results = []
    for fails in (False, True):
        denoiser, loop = build(kind, hold)
        loop.set_timesteps()
        for step in range(3):
            if fails and step == 1:
                last = denoiser.conv_out if hasattr(denoiser, "conv_out") else denoiser.proj_out
                handle = last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
                with pytest.raises(RuntimeError, match="no memory"):
                    call(denoiser)
                assert denoiser._tokenmerge.state.step.kind == "held"
                handle.remove()
            output = call(denoiser, 1 + step)
            loop.step()
        results.append(output)
    assert torch.equal(*results)


def test_residuals_hold_no_graph_of_gradients() -> None:
    denoiser, loop = build("sdxl", BLOCKS)
    loop.set_timesteps()
    arguments = family_of(denoiser).example(denoiser, 2, 16, 16)
    denoiser(**arguments, return_dict=False)
    runs = [run for run in denoiser._tokenmerge.holding.runs if run.current is not None]
    assert runs
    kept = [tensor for run in runs for stream in run.current.streams for tensor in (stream.value, stream.change)]
    assert all(isinstance(tensor, Tensor) for tensor in kept), "a run that was entered has kept nothing"
    assert not any(tensor.requires_grad for tensor in kept)


def test_more_calls_than_residuals_are_kept_for_run_whole() -> None:
    plain, _ = build("sdxl")
    denoiser, loop = build("sdxl", BLOCKS)
    loop.set_timesteps()
    for _ in range(2):
        for number in range(6):
            output = call(denoiser, 1 + number)
            if number >= 4:
                assert torch.equal(output, call(plain, 1 + number))
        loop.step()


@pytest.mark.parametrize("grows", ["with noise", "with steps"])
def test_residuals_extrapolate_in_the_square_root_of_the_noise(grows: str) -> None:
    """A residual linear in the square root is extrapolated exactly; one linear in steps is not."""
    denoiser, loop = build("sdxl", STAGES.replace(every=2))
    loop.sigmas = torch.linspace(1, 0, 21) ** 3
    (run,) = denoiser._tokenmerge.holding.runs
    levels = [step / 20 for step in range(4)]
    if grows == "with noise":
        levels = [(sigma / max(1 - sigma, 1e-4)) ** 0.5 for sigma in loop.sigmas.tolist()]
    loop.set_timesteps()
    for step in range(4):
        call(denoiser)
        if step == 0:
            (image,) = run.current.streams
            image.value.fill_(levels[step])
        if step == 2:
            # Pretend that the full step measured the grown residual.
            image.value.fill_(levels[0])
            run.current.keep((torch.full_like(image.value, levels[step]),))
        if step == 3:
            (extrapolated,) = run.current.now()
            error = (extrapolated - levels[step]).abs().max().item()
        loop.step()
    assert (error < 1e-4) == (grows == "with noise")


@pytest.mark.parametrize(("kind", "techniques"), WAYS)
def test_pictures_repeat_and_nothing_is_left_behind(kind: str, techniques: list[Any]) -> None:
    pipe = tiny.build(kind)
    original, before = tiny.draw(pipe, steps=9), attributes(pipe)
    held = tiny.draw(tokenmerge.apply(pipe, techniques), steps=9)
    assert (held - original).abs().mean() > 0
    for _ in range(2):
        assert torch.equal(tiny.draw(pipe, steps=9), held)
    tokenmerge.remove(pipe)
    after = attributes(pipe)
    # Every image sets new timesteps on the scheduler.
    assert all(same(before[name], after[name]) for name in before if name != "scheduler")
    assert torch.equal(tiny.draw(pipe, steps=9), original)


@pytest.mark.parametrize(("kind", "hold"), HELD)
def test_both_together_have_one_placement_per_module_and_one_residual_per_run(kind: str, hold: Hold) -> None:
    alone, both = tiny.build(kind), tiny.build(kind)
    for pipe, techniques in ((alone, hold), (both, [MERGE, hold])):
        tiny.draw(tokenmerge.apply(pipe, techniques), steps=8)
    assert tokenmerge.summary(both).residual_bytes == tokenmerge.summary(alone).residual_bytes > 0
    modules = [placement._module for placement in denoiser_of(both)._tokenmerge.installation._placements]
    assert len(modules) == len(set(modules))
    steps = tokenmerge.summary(alone).steps
    assert tokenmerge.summary(both).steps == {"merged": steps["full"], "held": steps["held"]}


def test_no_slope_is_taken_across_a_changed_map_or_the_edge_of_a_window() -> None:
    def slopes(merge: Merge) -> list[bool]:
        """For every kept step, whether the held steps after it have a slope."""
        denoiser, loop = build("sdxl", merge, BLOCKS.replace(every=2))
        loop.set_timesteps()
        found = []
        for _ in range(19):
            call(denoiser)
            (kept,) = denoiser._tokenmerge.holding._parts_by_size.values()
            if denoiser._tokenmerge.state.step.keeps:
                found.append(len(kept.steps) > 1)
            loop.step()
        return found

    kept = [0, 2, 4, 7, 10, 13, 16]
    lasting = MERGE.replace(destinations_every=100, weights_every=100)
    assert slopes(lasting) == [step > 0 for step in kept]
    # Weights are renewed at 0, 4, 10 and 16.
    renewed = MERGE.replace(destinations_every=100, weights_every=4)
    assert slopes(renewed) == [step not in (0, 4, 10, 16) for step in kept]
    assert slopes(MERGE.replace(destinations_every=7, weights_every=100)) == [step not in (0, 7, 16) for step in kept]
    # Merging begins at step 7 of 20, with the first map.
    assert slopes(lasting.replace(start=0.35)) == [step not in (0, 7) for step in kept]
    assert slopes(lasting.replace(stop=0.5)) == [step not in (0, 10) for step in kept]
    assert not any(slopes(tokenmerge.presets()["tomesd"]))


@pytest.mark.parametrize("kind", ["sd", *KINDS])
def test_hold_every_step_is_plain(kind: str) -> None:
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe)
    assert torch.equal(tiny.draw(tokenmerge.apply(pipe, Hold(every=1))), plain)
    merged = tiny.draw(tokenmerge.apply(pipe, MERGE))
    assert torch.equal(tiny.draw(tokenmerge.apply(pipe, [MERGE, Hold(every=1)])), merged)


def test_residuals_of_sizes_that_are_gone_are_given_up() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), BLOCKS)
    tiny.draw(pipe)
    one = tokenmerge.summary(pipe).residual_bytes
    # Residuals of two sizes that take turns are both kept.
    for size in ((64, 96), (64, 64)):
        tiny.draw(pipe, size=size)
    both = tokenmerge.summary(pipe).residual_bytes
    assert one < both < 3 * one
    for _ in range(3):
        tiny.draw(pipe)
    assert tokenmerge.summary(pipe).residual_bytes == one


def test_the_memory_of_residuals_is_told_and_does_not_grow() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), BLOCKS)
    assert tokenmerge.summary(pipe).residual_bytes == 0
    tiny.draw(pipe)
    counted = tokenmerge.summary(pipe).residual_bytes
    # Every run keeps two fp32 values per element of its tokens, for both guidance samples of the one call.
    firsts = [run.blocks[0] for run in pipe.unet._tokenmerge.plan.runs]
    assert counted == sum(2 * 2 * (32 // 2**block.level) ** 2 * block.width * 4 for block in firsts)
    tiny.draw(pipe)
    assert tokenmerge.summary(pipe).residual_bytes == counted
    assert "Residuals take" in str(tokenmerge.summary(pipe))


def test_held_stages_take_what_a_controlnet_adds() -> None:
    plain, _ = build("sdxl")
    shapes: list[torch.Size] = []
    handles = [plain.conv_in.register_forward_hook(lambda _module, _args, output: shapes.append(output.shape))]
    for stage in plain.down_blocks:
        add = lambda _module, _args, output: shapes.extend(each.shape for each in output[1])  # noqa: E731
        handles.append(stage.register_forward_hook(add))
    without = call(plain)
    for handle in handles:
        handle.remove()
    *down, mid = (torch.linspace(-0.5, 0.5, shape.numel()).view(shape) for shape in (*shapes, shapes[-1]))
    more = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    expected = call(plain, **more)
    assert (expected - without).abs().max() > 1e-3
    denoiser, loop = build("sdxl", STAGES.replace(every=5))
    loop.set_timesteps()
    for _ in range(3):
        torch.testing.assert_close(call(denoiser, **more), expected, rtol=1e-4, atol=1e-5)
        loop.step()
    assert tokenmerge.summary(denoiser).steps == {"full": 1, "held": 2}


@pytest.mark.parametrize("kind", [kind for kind in tiny.KINDS if kind.partition("-")[0] in ("sd", "sdxl")])
def test_stages_are_held_in_every_pipeline_of_unets(kind: str) -> None:
    pipe = tiny.build(kind)
    whole = tiny.draw(pipe, steps=8)
    pipe.unet.enable_freeu(0.9, 0.2, 1.1, 1.2)
    held = tiny.draw(tokenmerge.apply(pipe, STAGES), steps=8)
    assert held.isfinite().all()
    assert not torch.equal(held, whole)
    assert tokenmerge.summary(pipe).steps["held"] > 0
    pipe.unet.disable_freeu()
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, steps=8), whole)


@pytest.mark.parametrize("name", ["down_intrablock_additional_residuals", "down_block_additional_residuals"])
def test_held_stages_take_what_a_t2i_adapter_adds(name: str) -> None:
    plain, _ = build("sdxl")
    # Added in place after the first stage, inside the next two, and in place after the middle one.
    shapes = [(2, 8, 8, 8), (2, 8, 8, 8), (2, 16, 4, 4), (2, 16, 4, 4)]
    given = lambda: {name: [torch.linspace(-0.5, 0.5, math.prod(shape)).view(shape) for shape in shapes]}  # noqa: E731
    expected = call(plain, **given())
    assert (expected - call(plain)).abs().max() > 1e-3
    denoiser, loop = build("sdxl", STAGES.replace(every=5))
    loop.set_timesteps()
    for _ in range(3):
        more = given()
        torch.testing.assert_close(call(denoiser, **more), expected, rtol=1e-4, atol=1e-5)
        assert not more[name]
        loop.step()
    assert tokenmerge.summary(denoiser).steps == {"full": 1, "held": 2}


def test_what_others_do_between_stages_is_refused() -> None:
    denoiser, loop = build("sdxl", STAGES)
    loop.set_timesteps()
    by_hook(denoiser, denoiser.mid_block)
    with pytest.raises(tokenmerge.TokenMergeError, match=r"acts between the stages .* use Hold\(what='blocks'\)"):
        call(denoiser)


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_models_without_stages_are_refused(kind: str) -> None:
    pipe = tiny.build(kind)
    with pytest.raises(tokenmerge.TokenMergeError, match="has none; use what='blocks'"):
        tokenmerge.apply(pipe, STAGES)
    assert tokenmerge.summary(pipe).plan is None
    assert tokenmerge.summary(tokenmerge.apply(pipe)).plan.techniques.hold == Hold(what="blocks")


BLOCKLESS: dict[str, dict[str, Any]] = {
    "latent upscaler": {
        "down_block_types": ("KDownBlock2D", *["KCrossAttnDownBlock2D"] * 3),
        "up_block_types": (*["KCrossAttnUpBlock2D"] * 3, "KUpBlock2D"),
        "mid_block_type": None,
        "block_out_channels": (32, 32, 64, 64),
        "layers_per_block": 2,
        "norm_num_groups": None,
        "resnet_time_scale_shift": "scale_shift",
        "time_embedding_type": "fourier",
    },
    "Kandinsky and IF": {
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "block_out_channels": (8, 16),
    },
}


@pytest.mark.parametrize("changes", BLOCKLESS.values(), ids=BLOCKLESS)
def test_unets_without_transformer_blocks_have_stages_to_hold(changes: dict[str, Any]) -> None:
    pipe = tiny.build("sd", unet=tiny.sd_unet(**changes))
    whole = tiny.draw(pipe, steps=8)
    for technique in (Merge(), BLOCKS):
        with pytest.raises(tokenmerge.TokenMergeError, match=r"no transformer blocks to .*what='stages'"):
            tokenmerge.apply(pipe, technique)
    held = tiny.draw(tokenmerge.apply(pipe), steps=8)
    assert held.isfinite().all()
    assert not torch.equal(held, whole)
    told = tokenmerge.summary(pipe)
    assert told.plan.techniques.hold == Hold(what="stages")
    assert told.steps["held"] > 0
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, steps=8), whole)


def test_a_plan_of_held_stages_counts_their_transformer_blocks() -> None:
    pipe = tiny.build("sdxl")
    blocks, stages = (tokenmerge.plan(pipe, hold, height=128, width=128) for hold in (BLOCKS, STAGES))
    assert stages.saved == blocks.saved > 0
    assert "not counted" in str(stages)
    assert stages.runs[0].blocks[0].name == "down_blocks.0"


def test_held_blocks_take_what_merged_tokens_cannot_follow() -> None:
    pipe = tiny.build("sdxl")
    for module in pipe.unet.modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(16, dim=1)
    plain = tiny.draw(pipe, steps=8)
    held = tiny.draw(tokenmerge.apply(pipe, Hold(every=2, start=0.2, what="blocks")), steps=8)
    assert 0 < (held - plain).norm() < 0.01 * plain.norm()


def test_residuals_stay_within_fp16() -> None:
    largest = torch.finfo(torch.float16).max
    tokens = torch.tensor([0.9 * largest, -0.9 * largest, 1.0], dtype=torch.float16)
    assert _clipped(tokens + tokens).tolist() == [largest, -largest, 2.0]


@pytest.mark.parametrize(("kind", "hold"), [("sd3", BLOCKS), ("sdxl", STAGES)])
def test_what_is_made_up_stays_within_fp16(kind: str, hold: Hold) -> None:
    denoiser, loop = build(kind, hold)
    denoiser.half()
    loop.set_timesteps()
    for _ in range(2):
        call(denoiser)
        loop.step()
    for run in denoiser._tokenmerge.holding.runs:
        if run.current is not None:
            run.current.streams[0].value.fill_(-6e4)
    output = call(denoiser)
    (error, _) = next(run for run in denoiser._tokenmerge.holding.runs if run.current is not None).current.squares
    assert error.isfinite().all()
    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("technique", "steps", "told"),
    [
        (Hold(every=3, start=0.2), 2, "2 full"),
        (Hold(every=3, start=0.2), 1, "1 full"),
        (BLOCKS, 1, "1 full"),
        (Merge(start=0.9), 2, "2 full"),
    ],
)
def test_so_few_steps_that_nothing_is_saved_say_so(technique: Merge | Hold, steps: int, told: str) -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), technique)
    tiny.draw(pipe, steps=steps)
    summary = str(tokenmerge.summary(pipe))
    assert f"{told}: nothing was saved. To save more, with more drift: Hold(every=2, start=0)" in summary

"""Anchored merging: whole at anchors, and between them the change that was missing there is added."""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tiny
import tokenmerge
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.api import token_maps
from tokenmerge.merging.sites import _clipped
from traces import attributes, same

KINDS = ["sdxl", "sd3", "flux"]
ANCHORED: dict[str, Any] = {**tiny.PLAIN, "ratio": 0.5, "skip_first": 0, "anchor_every": 3}
HELD: dict[str, Any] = {"preset": "hold", "start": 0.0}
STAGES: dict[str, Any] = {"preset": "unet-hold", "start": 0.0}
CASES = [
    *(pytest.param(kind, {}, id=f"anchored-{kind}") for kind in KINDS),
    *(pytest.param(kind, HELD, id=f"held-{kind}") for kind in KINDS),
    pytest.param("sdxl", STAGES, id="stages-sdxl"),
]


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


def build(kind: str, **options: Any) -> tuple[nn.Module, Loop]:
    denoiser, loop = denoiser_of(tiny.build(kind)), Loop()
    if options:
        tokenmerge.apply(denoiser, scheduler=loop, **{**({} if "preset" in options else ANCHORED), **options})
    return denoiser, loop


@torch.no_grad()
def call(
    denoiser: nn.Module, scale: float = 1.0, height: int = 16, width: int = 16, batch: int = 2, **more: Any
) -> Tensor:
    arguments = family_of(denoiser).example(denoiser, batch, height, width)
    name = "sample" if "sample" in arguments else "hidden_states"
    arguments[name] = arguments[name] * scale
    return denoiser(**arguments, **more, return_dict=False)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "option", [{}, {"gap": "linear"}, {"merge": "pick"}, {"method": "random"}, {"unmerge": "pinv"}, {"trust": 0.5}]
)
def test_an_anchor_is_exact_and_its_gap_makes_the_same_input_exact(kind: str, option: dict[str, Any]) -> None:
    plain, _ = build(kind)
    expected = call(plain)
    # Half as far apart at first: steps 0 and 3.
    denoiser, loop = build(kind, **option, anchor_every=5)
    loop.set_timesteps()
    assert torch.equal(call(denoiser), expected)
    for _ in range(2):
        loop.step()
        torch.testing.assert_close(call(denoiser), expected, rtol=1e-4, atol=1e-5)
    # The next anchor, with another input, which the gap follows.
    other = call(plain, 0.5)
    loop.step()
    assert torch.equal(call(denoiser, 0.5), other)
    loop.step()
    if option.get("gap") != "linear":
        torch.testing.assert_close(call(denoiser, 0.5), other, rtol=1e-4, atol=1e-5)
    # Without anchors merging is far from exact, so that the above says something.
    merged, _ = build(kind, anchor_every=0, **{name: option[name] for name in option if name not in ("gap", "trust")})
    assert (call(merged) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_trust_is_the_share_of_a_merged_change_that_counts(kind: str) -> None:
    """Seen at the first merged block, which all shares give the same tokens."""
    seen: dict[float, list[tuple[Tensor, Tensor]]] = {}
    for trust in (0.0, 0.25, 1.0):
        denoiser, loop = build(kind, trust=trust, anchor_every=5)
        block = family_of(denoiser).blocks(denoiser)[0]
        ports = block.kind.ports
        mine = seen.setdefault(trust, [])

        def watch(module: nn.Module, args: Any, kwargs: Any, output: Any, ports: Any = ports, mine: Any = mine) -> None:
            mine.append((ports.tokens.read(args, kwargs), ports.outgoing(output)[0]))

        block.module.register_forward_hook(watch, with_kwargs=True)
        loop.set_timesteps()
        call(denoiser)
        loop.step()
        call(denoiser, 0.5)
    (first, whole), (tokens, none) = seen[0.0]
    _, (_, some) = seen[0.25]
    _, (_, all_) = seen[1.0]
    # Without trust the change of the anchor is held.
    torch.testing.assert_close(none, tokens + (whole - first), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(some, torch.lerp(none, all_, 0.25), rtol=1e-4, atol=1e-5)
    assert (all_ - none).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_held_blocks_do_not_run_and_change_tokens_as_at_the_anchor(kind: str) -> None:
    denoiser, loop = build(kind, **HELD, gap="last", anchor_every=5)
    blocks = family_of(denoiser).blocks(denoiser)
    ports, ran, seen = blocks[-1].kind.ports, [], []
    for block in blocks:
        first = next(module for module in block.module.modules() if isinstance(module, nn.Linear))
        first.register_forward_hook(lambda *_: ran.append(1))
    loop.set_timesteps()
    call(denoiser)
    loop.step()
    call(denoiser)
    assert len(ran) == len(blocks)
    ran.clear()

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
    assert tokenmerge.summary(denoiser).steps == {"anchor": 2, "merged": 2}
    assert token_maps(denoiser) == []


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
    """The module that runs the blocks has a forward that diffusers did not write, and may do anything."""
    name = next(name for name, module in denoiser.named_modules() if module is block)
    loop = denoiser.get_submodule(".".join(name.split(".")[:-2]))
    loop.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), loop)


def shifted(output: Any) -> Any:
    """What a block gives out, and more in some channels of its image tokens."""
    *text, image = output if isinstance(output, tuple) else (output,)
    image = image + torch.linspace(-0.5, 0.5, image.shape[-1])
    return (*text, image) if isinstance(output, tuple) else image


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [by_hook, by_telling_wrapper, by_hook_of_diffusers, by_loop_of_ones_own])
def test_blocks_in_a_row_share_a_gap_unless_somebody_acts_between_them(kind: str, act: Callable[..., None]) -> None:
    gaps = []
    for acts in (False, True):
        (denoiser, loop), (plain, _) = build(kind, **HELD, anchor_every=4), build(kind)
        for each in (denoiser, plain) if acts else ():
            blocks = family_of(each).blocks(each)
            act(each, next(block.module for block, after in itertools.pairwise(blocks) if block.line == after.line))
        whole = call(plain)
        loop.set_timesteps()
        # The change of the same input is the same, and so is what acts on it.
        for _ in range(5):
            torch.testing.assert_close(call(denoiser), whole, rtol=1e-4, atol=1e-5)
            loop.step()
        told = tokenmerge.summary(denoiser)
        assert told.steps == {"anchor": 2, "merged": 3}
        gaps.append(told.gap_bytes)
    assert gaps[0] < gaps[1]


RESIDUAL = torch.linspace(-0.5, 0.5, 16).expand(2, 64, 16)
BETWEEN = {
    "layers that are skipped": ("sd3", {"skip_layers": [0]}),
    "ControlNet of SD3": ("sd3", {"block_controlnet_hidden_states": [RESIDUAL]}),
    "ControlNet of Flux": ("flux", {"controlnet_block_samples": [RESIDUAL] * 2}),
}


@pytest.mark.parametrize(("kind", "more"), BETWEEN.values(), ids=BETWEEN)
def test_held_blocks_leave_room_for_what_acts_between_them(kind: str, more: dict[str, Any]) -> None:
    denoiser, loop = build(kind, **HELD, anchor_every=5)
    expected, without = call(build(kind)[0], **more), call(build(kind)[0])
    assert (expected - without).abs().max() > 1e-3
    loop.set_timesteps()
    for _ in range(3):
        torch.testing.assert_close(call(denoiser, **more), expected, rtol=1e-4, atol=1e-5)
        # A second call of the step, as for guidance, without it.
        torch.testing.assert_close(call(denoiser), without, rtol=1e-4, atol=1e-5)
        loop.step()
    assert tokenmerge.summary(denoiser).steps == {"anchor": 1, "merged": 2}


@pytest.mark.parametrize(("kind", "way"), [*((kind, HELD) for kind in KINDS), ("sdxl", STAGES)])
def test_a_held_anchor_is_exact_and_makes_the_same_input_exact(kind: str, way: dict[str, Any]) -> None:
    plain, _ = build(kind)
    expected = call(plain)
    denoiser, loop = build(kind, **way, anchor_every=5)
    loop.set_timesteps()
    assert torch.equal(call(denoiser), expected)
    loop.step()
    torch.testing.assert_close(call(denoiser), expected, rtol=1e-4, atol=1e-5)
    tokenmerge.remove(denoiser)
    assert torch.equal(call(denoiser), expected)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_every_call_of_a_step_has_gaps_of_its_own(kind: str, way: dict[str, Any]) -> None:
    plain, _ = build(kind)
    scales = (1.0, 0.3, 2.0)
    expected = [call(plain, scale) for scale in scales]
    denoiser, loop = build(kind, **way, anchor_every=5)
    loop.set_timesteps()
    for _ in range(3):
        for scale, exact in zip(scales, expected, strict=True):
            torch.testing.assert_close(call(denoiser, scale), exact, rtol=1e-4, atol=1e-5)
        loop.step()


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_calls_of_a_step_may_differ_in_size(kind: str, way: dict[str, Any]) -> None:
    """Skip-layer guidance calls with the whole batch and then with half of it."""
    plain, _ = build(kind)
    expected = [call(plain, batch=batch) for batch in (2, 1)]
    denoiser, loop = build(kind, **way, anchor_every=5)
    for _ in range(2):
        loop.set_timesteps()
        for _ in range(3):
            for batch, exact in zip((2, 1), expected, strict=True):
                torch.testing.assert_close(call(denoiser, batch=batch), exact, rtol=1e-4, atol=1e-5)
            loop.step()


def test_a_broken_picture_does_not_break_the_next() -> None:
    denoiser, loop = build("sdxl", anchor_every=2, gap="linear")
    loop.set_timesteps()
    good = [call(denoiser), loop.step(), call(denoiser)][2]
    loop.set_timesteps()
    assert call(denoiser, float("nan")).isnan().any()
    loop.set_timesteps()
    again = [call(denoiser), loop.step(), call(denoiser)][2]
    assert torch.equal(again, good)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_an_anchor_that_fails_does_not_count(kind: str, options: dict[str, Any]) -> None:
    """As one that ran out of memory, when its step is tried again."""
    plain, _ = build(kind)
    denoiser, loop = build(kind, **options, anchor_every=3)
    loop.set_timesteps()
    call(denoiser, 0.5)
    loop.set_timesteps()
    last = denoiser._tokenmerge.plan.merged_sites[-1].block.module

    def fail(*_: Any) -> None:
        raise MemoryError

    failing = next(leaf for leaf in last.modules() if not [*leaf.children()]).register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        call(denoiser)
    failing.remove()
    whole = call(plain)
    for _ in range(3):
        torch.testing.assert_close(call(denoiser), whole, rtol=1e-4, atol=1e-4)
        loop.step()


def test_gaps_hold_no_graph_of_gradients() -> None:
    denoiser, loop = build("sdxl", anchor_every=2)
    loop.set_timesteps()
    arguments = family_of(denoiser).example(denoiser, 2, 16, 16)
    denoiser(**arguments, return_dict=False)
    memories = [memory for _, memory in denoiser._tokenmerge.state.anchors._memories]
    assert memories
    assert not any(memory.current.image.values.requires_grad for memory in memories)


def test_more_calls_than_gaps_are_kept_for_run_whole() -> None:
    plain, _ = build("sdxl")
    denoiser, loop = build("sdxl", anchor_every=3)
    loop.set_timesteps()
    for _ in range(2):
        for number in range(6):
            output = call(denoiser, 1 + number)
            if number >= 4:
                assert torch.equal(output, call(plain, 1 + number))
        loop.step()


@pytest.mark.parametrize(("grows", "exact"), [("with steps", "linear"), ("with noise", "sigma")])
def test_gaps_extrapolate_in_steps_or_in_the_noise_level(grows: str, exact: str) -> None:
    """A gap that grows as is believed is met exactly; held, or believed to grow otherwise, it is not."""
    errors = {}
    for gap in ("last", "linear", "sigma"):
        denoiser, loop = build("sdxl", anchor_every=2, gap=gap, levels=(4,))
        loop.sigmas = torch.linspace(1, 0, 21) ** 3
        _, memory = denoiser._tokenmerge.state.anchors._memories[0]
        levels = [step / 20 for step in range(4)] if grows == "with steps" else loop.sigmas.tolist()
        loop.set_timesteps()
        for step in range(4):
            call(denoiser)
            if step == 0:
                memory.current.image.values.fill_(levels[step])
            if step == 2:
                # As if the anchor had seen how the gap has grown.
                memory.current.image.values.fill_(levels[0])
                memory.current.keep(torch.full_like(memory.current.image.values, levels[step]), None)
            if step == 3:
                errors[gap] = (memory.current.image_now() - levels[step]).abs().max().item()
            loop.step()
    assert errors.pop(exact) < 1e-6
    assert min(errors.values()) > 1e-3


class OnADevice(Tensor):
    """Values that a scheduler keeps elsewhere than on the CPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


@pytest.mark.parametrize("gap", ["last", "linear", "sigma"])
def test_noise_levels_are_read_where_they_are_needed(gap: str) -> None:
    """From a device that waits for it."""
    denoiser, loop = build("sdxl", gap=gap)
    loop.sigmas = loop.sigmas.as_subclass(OnADevice)
    loop.set_timesteps()
    assert denoiser._tokenmerge.state.clock.levels == (loop.sigmas.tolist() if gap == "sigma" else [])


def test_maps_change_at_anchors_alone() -> None:
    pipe = tokenmerge.apply(
        tiny.build("sdxl"), **{**ANCHORED, "anchor_every": 4}, weights_every=1, destinations_every=5
    )
    tiny.draw(pipe, steps=13)
    # Anchors at 0, 4, 8 and 12: weights at each, destinations at 0 and 8.
    for group in tokenmerge.summary(pipe).groups:
        assert (group["selected"], group["weighed"]) == (2, 4)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_anchors_bring_the_picture_back_and_leave_no_trace(kind: str, way: dict[str, Any]) -> None:
    pipe = tiny.build(kind)
    original, before = tiny.draw(pipe, steps=9), attributes(pipe)
    errors = []
    for options in ({**ANCHORED, "anchor_every": 0}, way or ANCHORED):
        merged = tiny.draw(tokenmerge.apply(pipe, **options), steps=9)
        errors.append((merged - original).abs().mean())
        assert torch.equal(tiny.draw(pipe, steps=9), merged)
    # How far a whole UNet may be held, random weights do not say.
    assert 0 < errors[1] < (errors[0] if way is not STAGES else float("inf"))
    tokenmerge.remove(pipe)
    after = attributes(pipe)
    # Every image gives the scheduler timesteps of its own.
    assert all(same(before[name], after[name]) for name in before if name != "scheduler")
    assert torch.equal(tiny.draw(pipe, steps=9), original)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_other_sizes_and_batches(kind: str, way: dict[str, Any]) -> None:
    plain, _ = build(kind)
    denoiser, loop = build(kind, **way, anchor_every=3)
    for height, width in ((16, 16), (16, 24), (18, 14), (16, 16)):
        loop.set_timesteps()
        for _ in range(2):
            result = call(denoiser, height=height, width=width)
            exact = call(plain, height=height, width=width)
            torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-5)
            loop.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", ["last", "linear"])
def test_gaps_of_8_bits_take_a_quarter_of_fp32_and_stay_near(kind: str, gap: str) -> None:
    plain, _ = build(kind)
    expected = call(plain)
    found = {}
    for dtype in ("tokens", "float8"):
        denoiser, loop = build(kind, anchor_every=3, gap=gap, gap_dtype=dtype)
        loop.set_timesteps()
        assert torch.equal(call(denoiser), expected)
        loop.step()
        found[dtype] = (call(denoiser) - expected).norm(), tokenmerge.summary(denoiser).gap_bytes
    merged, _ = build(kind, anchor_every=0)
    assert found["float8"][1] * 4 == found["tokens"][1]
    # Three bits behind the point: a few hundredths of what merging would leave out.
    assert found["float8"][0] < 0.1 * (call(merged) - expected).norm()


def test_maps_of_every_size_of_a_step_last_until_the_next_anchor() -> None:
    # As of tiles, more than a group keeps from one image to the next.
    denoiser, loop = build("sdxl", anchor_every=5, destinations_every=1)
    (group, *_) = denoiser._tokenmerge.state.groups
    for image in range(2):
        loop.set_timesteps()
        for step in range(5):
            for width in (16, 20, 24, 28, 32):
                call(denoiser, width=width)
            # Anchors are steps 0 and 3, and only four calls of a step have maps that last.
            assert group.selections == 8 * image + (4 if step < 3 else 8)
            loop.step()
    assert len(group._slots) == 5
    for width in (40, 44, 48):
        loop.set_timesteps()
        call(denoiser, width=width)
    assert len(group._slots) == 4


def test_gaps_of_sizes_that_are_gone_are_given_up() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), **ANCHORED)
    tiny.draw(pipe)
    one = tokenmerge.summary(pipe).gap_bytes
    # Two sizes may take turns, and keep their gaps.
    for size in ((64, 96), (64, 64)):
        tiny.draw(pipe, size=size)
    both = tokenmerge.summary(pipe).gap_bytes
    assert one < both < 3 * one
    for _ in range(3):
        tiny.draw(pipe)
    assert tokenmerge.summary(pipe).gap_bytes == one


def test_the_memory_of_gaps_is_told_and_does_not_grow() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), **ANCHORED)
    assert tokenmerge.summary(pipe).gap_bytes == 0
    tiny.draw(pipe)
    counted = tokenmerge.summary(pipe).gap_bytes
    # One fp32 gap of every merged block's tokens, for both samples of guidance in one call.
    groups = {group.name: group for group in pipe.unet._tokenmerge.state.groups}
    sites = pipe.unet._tokenmerge.plan.merged_sites
    expected = sum(2 * groups[site.group].slot.map.token_count * site.block.width * 4 for site in sites)
    assert counted == expected
    tiny.draw(pipe)
    assert tokenmerge.summary(pipe).gap_bytes == counted
    assert "MiB of gaps" in str(tokenmerge.summary(pipe))


@pytest.mark.parametrize(("kind", "options"), [*CASES, *((kind, {**ANCHORED, "trust": 0.5}) for kind in KINDS)])
def test_no_graph_is_added_after_the_first_image(kind: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    pipe = tokenmerge.apply(tiny.build(kind), **(options or ANCHORED))
    eager = tiny.draw(pipe, steps=8)
    counter = CompileCounterWithBackend("aot_eager")
    denoiser = denoiser_of(pipe)
    for block in family_of(denoiser).blocks(denoiser):
        block.module.compile(fullgraph=True, backend=counter)
    compiled = tiny.draw(pipe, steps=8)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-4)
    first = counter.frame_count
    assert torch.equal(tiny.draw(pipe, steps=8), compiled)
    assert counter.frame_count == first
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchor_every": 1}, "from 2"),
        ({"anchor_every": -3}, "0 for no anchors"),
        ({"anchor_every": 3, "sites": "component"}, "sites='block'"),
        ({"anchor_every": 3, "sites": "span"}, "sites='block'"),
        ({"gap": "cubic"}, "last, linear, sigma"),
        ({"gap_dtype": "float4"}, "tokens, float8"),
        ({"merge": "max"}, "mean, pick"),
        ({"trust": 1.5}, "in \\[0, 1\\]"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(tokenmerge.TokenMergeError, match=message):
        tokenmerge.MergeConfig().replace(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.5}, "its ratio is 1; use preset='hold'"),
        ({"anchor_every": 0}, "use anchor_every=2"),
        ({"sites": "component"}, "use 'block' or 'stage'"),
        ({"sites": "stage", "levels": (2,)}, "held all together"),
        ({"sites": "stage", "span": 2}, "held all together"),
        ({"sites": "stage", "skip_first": 1}, "held all together"),
        ({"sites": "stage", "method": "toma", "ratio": 0.5}, "stages can only be held"),
        ({"step_ratios": (0.25, 0.5)}, "step_ratios was given"),
        ({"block_ratios": (0.25, 0.5)}, "block_ratios was given"),
    ],
)
def test_what_cannot_be_held_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(tokenmerge.TokenMergeError, match=message):
        tokenmerge.apply(tiny.build("sdxl"), preset="hold", **options)


@pytest.mark.parametrize("size", [(16, 16), (18, 14)])
def test_held_stages_do_not_run_and_change_features_as_at_the_anchor(size: tuple[int, int]) -> None:
    denoiser, loop = build("sdxl", **STAGES, gap="last", anchor_every=5)
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
    assert told.steps == {"anchor": 1, "merged": 2}
    assert "stages" in str(told)
    # One fp32 gap of what enters the first stage.
    assert told.gap_bytes == entered[0].numel() * 4


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
    denoiser, loop = build("sdxl", **STAGES, anchor_every=5)
    loop.set_timesteps()
    for _ in range(3):
        torch.testing.assert_close(call(denoiser, **more), expected, rtol=1e-4, atol=1e-5)
        loop.step()
    assert tokenmerge.summary(denoiser).steps == {"anchor": 1, "merged": 2}


@pytest.mark.parametrize("kind", [kind for kind in tiny.KINDS if kind.partition("-")[0] in ("sd", "sdxl")])
def test_stages_are_held_in_every_pipeline_of_unets(kind: str) -> None:
    pipe = tiny.build(kind)
    whole = tiny.draw(pipe, steps=8)
    pipe.unet.enable_freeu(0.9, 0.2, 1.1, 1.2)
    held = tiny.draw(tokenmerge.apply(pipe, preset="unet-hold", start=0.0), steps=8)
    assert held.isfinite().all()
    assert not torch.equal(held, whole)
    assert tokenmerge.summary(pipe).steps["merged"] > 0
    pipe.unet.disable_freeu()
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, steps=8), whole)


@pytest.mark.parametrize("name", ["down_intrablock_additional_residuals", "down_block_additional_residuals"])
def test_held_stages_take_what_a_t2i_adapter_adds(name: str) -> None:
    plain, _ = build("sdxl")
    # Added in place after the first stage, in the next two, and in place after the middle one.
    shapes = [(2, 8, 8, 8), (2, 8, 8, 8), (2, 16, 4, 4), (2, 16, 4, 4)]
    given = lambda: {name: [torch.linspace(-0.5, 0.5, math.prod(shape)).view(shape) for shape in shapes]}  # noqa: E731
    expected = call(plain, **given())
    assert (expected - call(plain)).abs().max() > 1e-3
    denoiser, loop = build("sdxl", **STAGES, anchor_every=5)
    loop.set_timesteps()
    for _ in range(3):
        more = given()
        torch.testing.assert_close(call(denoiser, **more), expected, rtol=1e-4, atol=1e-5)
        assert not more[name]
        loop.step()
    assert tokenmerge.summary(denoiser).steps == {"anchor": 1, "merged": 2}


def test_what_others_do_between_stages_is_refused() -> None:
    denoiser, loop = build("sdxl", **STAGES)
    loop.set_timesteps()
    by_hook(denoiser, denoiser.mid_block)
    with pytest.raises(tokenmerge.TokenMergeError, match=r"a hook or a forward of others acts .* use preset='hold'"):
        call(denoiser)


@pytest.mark.parametrize("kind", ["sd3", "flux"])
@pytest.mark.parametrize("options", [{"sites": "stage"}, {"preset": "unet-hold"}])
def test_models_without_stages_are_refused(kind: str, options: dict[str, Any]) -> None:
    pipe = tiny.build(kind)
    with pytest.raises(tokenmerge.TokenMergeError, match="has none; use preset='hold', which holds all its blocks"):
        tokenmerge.apply(pipe, **options)
    assert tokenmerge.summary(pipe).plan is None
    assert tokenmerge.summary(tokenmerge.apply(pipe, preset="hold")).plan.config.holds


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
    for options in ({"ratio": 0.5}, {"preset": "hold"}):
        with pytest.raises(tokenmerge.TokenMergeError, match=r"has no transformer blocks\); use preset='unet-hold'"):
            tokenmerge.apply(pipe, **options)
    held = tiny.draw(tokenmerge.apply(pipe), steps=8)
    assert held.isfinite().all()
    assert not torch.equal(held, whole)
    told = tokenmerge.summary(pipe)
    assert told.plan.config == tokenmerge.presets()["unet-hold"]
    assert told.steps["merged"] > 0
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, steps=8), whole)


def test_a_plan_of_held_stages_counts_their_transformer_blocks() -> None:
    pipe = tiny.build("sdxl")
    blocks, stages = (tokenmerge.plan(pipe, height=128, width=128, preset=name) for name in ("hold", "unet-hold"))
    assert stages.saved == blocks.saved > 0
    assert "not counted" in str(stages)
    assert stages.merged_sites[0].name == "down_blocks.0"


@pytest.mark.parametrize(("kind", "preset"), [("sd3", "hold"), ("sdxl", "unet-hold")])
def test_weights_that_come_with_blocks_that_run_are_refused_for_held_ones(kind: str, preset: str) -> None:
    pipe, cpu = tiny.build(kind), torch.device("cpu")
    denoiser_of(pipe).enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=2)
    tokenmerge.apply(pipe, preset=preset)
    with pytest.raises(tokenmerge.TokenMergeError, match="group offload"):
        tiny.draw(pipe)
    tokenmerge.remove(pipe)
    assert tiny.draw(pipe).isfinite().all()


def test_sigmas_of_a_scheduler_that_has_none_are_refused() -> None:
    pipe = tiny.build("sdxl")
    pipe.scheduler = tiny.ddim()
    with pytest.raises(tokenmerge.TokenMergeError, match="DDIMScheduler has none; use gap='linear'"):
        tokenmerge.apply(pipe, **{**ANCHORED, "gap": "sigma"})
    tokenmerge.apply(pipe, tokenmerge.MergeConfig(gap="sigma"))
    euler = tiny.build("sdxl")
    tokenmerge.apply(euler, **{**ANCHORED, "gap": "sigma"})
    before, euler.scheduler = euler.scheduler, pipe.scheduler
    with pytest.raises(tokenmerge.TokenMergeError, match="DDIMScheduler has none; use gap='linear'"):
        tiny.draw(euler)
    euler.scheduler = before
    assert tiny.draw(euler).isfinite().all()


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_an_anchor_that_failed_is_made_again(kind: str, way: dict[str, Any]) -> None:
    results = []
    for fails in (False, True):
        denoiser, loop = build(kind, **way, gap="linear", anchor_every=3)
        loop.set_timesteps()
        outputs = []
        # Anchors are steps 0, 2, 4, 7 and 10.
        for step in range(12):
            if fails and step == 4:
                last = denoiser.conv_out if hasattr(denoiser, "conv_out") else denoiser.proj_out
                handle = last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
                with pytest.raises(RuntimeError, match="no memory"):
                    call(denoiser, -1.0)
                assert denoiser._tokenmerge.state.mode == "anchor"
                handle.remove()
            outputs.append(call(denoiser, 1 / (1 + step)))
            loop.step()
        results.append((outputs, tokenmerge.summary(denoiser).steps))
    (undisturbed, counted), (again, counted_again) = results
    assert counted_again == counted
    assert torch.equal(again[4], undisturbed[4])
    # What was extrapolated over the failed anchor comes to its end at the next one.
    assert all(torch.equal(*pair) for pair in zip(again[7:], undisturbed[7:], strict=True))


def test_held_blocks_take_what_merged_tokens_cannot_follow() -> None:
    pipe = tiny.build("sdxl")
    for module in pipe.unet.modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(16, dim=1)
    plain = tiny.draw(pipe, steps=8)
    held = tiny.draw(tokenmerge.apply(pipe, preset="hold"), steps=8)
    assert 0 < (held - plain).abs().max() < 0.1


def test_gaps_stay_within_fp16() -> None:
    largest = torch.finfo(torch.float16).max
    tokens = torch.tensor([0.9 * largest, -0.9 * largest, 1.0], dtype=torch.float16)
    assert _clipped(tokens + tokens).tolist() == [largest, -largest, 2.0]


@pytest.mark.parametrize(
    ("options", "steps", "told", "way_out"),
    [
        ({"preset": "hold"}, 2, "1 whole, 1 whole (anchors)", "begin at once, with start=0, or merge at every one"),
        ({"preset": "hold"}, 1, "1 whole", "merge at every one"),
        ({"preset": "hold", "start": 0.0}, 1, "1 whole (anchors)", "merge at every one"),
        ({"ratio": 0.5}, 2, "1 whole, 1 whole and merged (anchors)", "merge at every one"),
    ],
)
def test_so_few_steps_that_nothing_is_held_say_so(options: dict[str, Any], steps: int, told: str, way_out: str) -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), **options)
    tiny.draw(pipe, steps=steps)
    expected = f"{told}: nothing was saved. For so few steps, at more drift, {way_out}: start=0, anchor_every=0."
    assert expected in str(tokenmerge.summary(pipe))


@pytest.mark.parametrize("method", ["tomesd", "tofu"])
def test_methods_without_lasting_maps_are_refused(method: str) -> None:
    with pytest.raises(tokenmerge.TokenMergeError, match="another map at every step"):
        tokenmerge.apply(tiny.build("sdxl"), preset=method, sites="block", anchor_every=3)

"""When merging acts: refreshes counted over real denoising loops of every shape."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
)
from torch import Tensor

import tiny
import tokenmerge
from tokenmerge import TokenMergeError

OPTIONS: dict[str, Any] = {"ratio": 0.5, "regions": "tile:4x4", "skip_first": 0}


def counts(model: Any) -> set[tuple[int, int]]:
    """Selections and weighings of each group, as far as groups differ."""
    return {(group["selected"], group["weighed"]) for group in tokenmerge.summary(model).groups}


def every(steps: int, interval: int) -> int:
    return math.ceil(steps / interval)


@pytest.mark.parametrize("kind", tiny.FAMILIES)
@pytest.mark.parametrize("steps", [1, 4, 20, 50])
def test_destinations_every_10_steps_and_weights_every_5(kind: str, steps: int) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), **OPTIONS)
    tiny.draw(pipe, steps=steps)
    assert counts(pipe) == {(every(steps, 10), every(steps, 5))}
    tiny.draw(pipe, steps=steps)
    assert counts(pipe) == {(2 * every(steps, 10), 2 * every(steps, 5))}


@pytest.mark.parametrize(("destinations", "weights"), [(1, 1), (3, 2), (4, 7), (100, 100)])
def test_intervals_are_as_asked(destinations: int, weights: int) -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), **OPTIONS, destinations_every=destinations, weights_every=weights)
    tiny.draw(pipe, steps=12)
    # A selection brings weights with it, so their interval starts there anew.
    weighings = sum(step % destinations == 0 or step % destinations % weights == 0 for step in range(12))
    assert counts(pipe) == {(every(12, destinations), weighings)}


@pytest.mark.parametrize("kind", ["sd-img2img", "sdxl-img2img", "sdxl-inpaint", "sd3-img2img", "flux-img2img"])
def test_an_image_that_begins_in_the_middle_begins_with_a_selection(kind: str) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), **OPTIONS)
    # Half of 40 steps are taken.
    tiny.draw(pipe, steps=20)
    assert counts(pipe) == {(2, 4)}


@pytest.mark.parametrize(
    ("kind", "scheduler", "evaluations"),
    [
        ("sdxl", HeunDiscreteScheduler, 39),
        ("sd3", FlowMatchHeunDiscreteScheduler, 39),
        ("sd", PNDMScheduler, 21),
        ("sd", DDPMScheduler, 20),
    ],
)
def test_every_evaluation_of_a_scheduler_counts_as_a_step(kind: str, scheduler: Any, evaluations: int) -> None:
    options = {"skip_prk_steps": True} if scheduler is PNDMScheduler else {}
    pipe = tokenmerge.apply(tiny.build(kind, scheduler=scheduler(**options)), **OPTIONS)
    tiny.draw(pipe, steps=20)
    assert counts(pipe) == {(every(evaluations, 10), every(evaluations, 5))}


def true_guidance(pipe: Any, steps: int, **options: Any) -> Tensor:
    """Flux with classifier-free guidance: two denoiser calls in every step."""
    arguments = tiny.call_arguments(pipe, steps=steps)
    negative = {f"negative_{name}": -arguments[name] for name in ("prompt_embeds", "pooled_prompt_embeds")}
    return tiny.draw(pipe, steps=steps, true_cfg_scale=3.0, **negative, **options)


def test_each_of_two_calls_in_a_step_has_its_own_maps() -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), **OPTIONS)
    seen: list[tuple[int, list[Tensor]]] = []
    # The single blocks: the first joint block has not seen the prompt yet.
    group = pipe.transformer._tokenmerge.state.groups[-1]

    def remember(*_: Any) -> None:
        seen.append((group._clock.call, [tensor.clone() for tensor in group.slot.map.tensors]))

    handle = pipe.transformer.register_forward_hook(remember)
    true_guidance(pipe, 5)
    handle.remove()
    assert counts(pipe) == {(2, 2)}
    assert [call for call, _ in seen] == [0, 1] * 5
    for call in (0, 1):
        first, *others = [tensors for number, tensors in seen if number == call]
        assert all(torch.equal(a, b) for tensors in others for a, b in zip(first, tensors, strict=True))
    # The two prompts differ, and so do the weights made from their tokens.
    assert not torch.equal(seen[0][1][-1], seen[1][1][-1])


def test_two_calls_of_a_step_do_not_disturb_each_other() -> None:
    """With selection and weights at every step nothing is kept, so keeping for one step only must give the same."""
    fresh = tokenmerge.apply(tiny.build("flux"), **OPTIONS, destinations_every=1, weights_every=1)
    expected = true_guidance(fresh, 1)
    kept = tokenmerge.apply(tiny.build("flux"), **OPTIONS)
    assert torch.equal(true_guidance(kept, 1), expected)


def test_batch_and_resolution_may_change_between_images() -> None:
    options = [{"batch": 1}, {"batch": 2}, {"size": (96, 64)}, {"size": (64, 96)}, {"batch": 1}]
    used = tokenmerge.apply(tiny.build("sdxl"), **OPTIONS)
    for each in options:
        fresh = tokenmerge.apply(tiny.build("sdxl"), **OPTIONS)
        assert torch.equal(tiny.draw(used, steps=3, **each), tiny.draw(fresh, steps=3, **each))


def test_more_sizes_than_are_kept_give_the_same_images() -> None:
    sizes = [(64 + 16 * number, 64) for number in range(6)]
    used = tokenmerge.apply(tiny.build("flux"), **OPTIONS)
    for size in sizes * 2:
        fresh = tokenmerge.apply(tiny.build("flux"), **OPTIONS)
        assert torch.equal(tiny.draw(used, size=size), tiny.draw(fresh, size=size))


def test_a_scheduler_put_into_the_pipeline_later_is_followed() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), **OPTIONS)
    tiny.draw(pipe, steps=7)
    old = pipe.scheduler
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    assert counts(pipe) == {(1, 2)}
    swapped = tiny.draw(pipe, steps=20)
    assert counts(pipe) == {(3, 6)}
    assert "step" not in vars(old), "the scheduler that was taken out is still listened to"
    fresh = tokenmerge.apply(tiny.build("sdxl", scheduler=DDIMScheduler.from_config(old.config)), **OPTIONS)
    assert torch.equal(swapped, tiny.draw(fresh, steps=20))


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_an_image_after_an_interrupted_one_is_as_if_nothing_had_been(kind: str) -> None:
    class Stop(Exception):
        pass

    def stop(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == 3:
            raise Stop
        return values

    unpatched = tiny.draw(tiny.build(kind), steps=6)
    pipe = tokenmerge.apply(tiny.build(kind), **OPTIONS)
    with pytest.raises(Stop):
        tiny.draw(pipe, steps=12, callback_on_step_end=stop)
    fresh = tokenmerge.apply(tiny.build(kind), **OPTIONS)
    assert torch.equal(tiny.draw(pipe, steps=6), tiny.draw(fresh, steps=6))
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, steps=6), unpatched)


def modes(pipe: Any, **options: Any) -> list[str]:
    """Whether each step of an image ran merged or full."""
    state = tiny.denoiser_of(pipe)._tokenmerge.state
    seen: list[str] = []
    handle = tiny.denoiser_of(pipe).register_forward_hook(lambda *_: seen.append(state.mode))
    tiny.draw(pipe, **options)
    handle.remove()
    return seen


@pytest.mark.parametrize(
    ("kind", "window", "first", "last"),
    [
        ("sdxl", (0.2, 1.0), 2, 10),
        ("sdxl", (0.0, 0.5), 0, 5),
        ("flux", (0.3, 0.7), 3, 7),
        ("sd3", (0.25, 1.0), 3, 10),
        ("sd", (0.2, 0.9), 2, 9),
    ],
)
def test_only_steps_inside_the_window_are_merged(kind: str, window: tuple[float, float], first: int, last: int) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), **OPTIONS, start=window[0], stop=window[1])
    expected = ["merged" if first <= step < last else "full" for step in range(10)]
    assert modes(pipe, steps=10) == expected
    assert modes(pipe, steps=10) == expected


@pytest.mark.parametrize("kind", ["sd-img2img", "sdxl-img2img", "flux-img2img"])
def test_the_window_is_a_share_of_the_whole_schedule(kind: str) -> None:
    """Strength 0.5 begins in the middle; DDIM, which does not say where it begins, included."""
    pipe = tokenmerge.apply(tiny.build(kind), **OPTIONS, start=0.7)
    assert modes(pipe, steps=10) == ["full"] * 4 + ["merged"] * 6


def test_steps_outside_the_window_are_exactly_unmerged() -> None:
    unpatched, pipe = tiny.build("sdxl"), tiny.build("sdxl")
    tokenmerge.apply(pipe, **OPTIONS, start=0.5)
    seen: dict[str, list[Tensor]] = {"unpatched": [], "merged": []}
    for name, each in (("unpatched", unpatched), ("merged", pipe)):
        each.unet.register_forward_hook(lambda module, args, output, kept=seen[name]: kept.append(output[0]))
        tiny.draw(each, steps=4)
    equal = [torch.equal(a, b) for a, b in zip(seen["unpatched"], seen["merged"], strict=True)]
    assert equal == [True, True, False, False]


class Bare:
    """A UNet without a pipeline, called at timesteps of one's own."""

    def __init__(self, **options: Any) -> None:
        self.unet = tiny.sdxl_unet()
        tokenmerge.apply(self.unet, **OPTIONS, **options)

    @torch.no_grad()
    def __call__(self, timestep: Any, seed: int = 0) -> Tensor:
        added = {"text_embeds": tiny.noise(1, tiny.POOLED_WIDTH), "time_ids": torch.zeros(1, 6)}
        text = tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH)
        return self.unet(tiny.noise(1, 4, 32, 32, seed=seed), timestep, text, added_cond_kwargs=added).sample


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda value: torch.full((1,), value)])
def test_a_bare_denoiser_tells_steps_by_their_timesteps(kind: Any) -> None:
    bare = Bare()
    for step in range(20):
        bare(kind(990 - 40 * step))
    assert counts(bare.unet) == {(2, 4)}
    # A higher timestep is a new image, an equal one another call of the same step.
    bare(kind(990))
    assert counts(bare.unet) == {(3, 5)}
    bare(kind(990))
    assert counts(bare.unet) == {(4, 6)}


def test_calls_without_end_at_one_timestep_keep_no_maps() -> None:
    bare = Bare()
    outputs = [bare(500.0, seed=seed) for seed in range(12)]
    assert counts(bare.unet) == {(12, 12)}
    history = next(iter(bare.unet._tokenmerge.state.groups[0]._histories.values()))
    assert len(history.saved) <= 5
    assert torch.equal(Bare()(500.0, seed=11), outputs[-1])


def test_a_bare_denoiser_may_be_given_its_scheduler() -> None:
    scheduler = EulerDiscreteScheduler()
    bare = Bare(scheduler=scheduler, start=0.5)
    state = bare.unet._tokenmerge.state
    scheduler.set_timesteps(4)
    sample, seen = torch.zeros(1), []
    for timestep in scheduler.timesteps:
        bare(timestep)
        seen.append(state.mode)
        sample = scheduler.step(torch.zeros(1), timestep, sample).prev_sample
    assert seen == ["full", "full", "merged", "merged"]
    tokenmerge.remove(bare.unet)
    assert not {"step", "set_timesteps", "set_begin_index"} & set(vars(scheduler))


def test_a_window_needs_to_know_the_number_of_steps() -> None:
    unet = tiny.sdxl_unet()
    with pytest.raises(TokenMergeError, match="how many steps"):
        tokenmerge.apply(unet, **OPTIONS, start=0.5)
    assert "_tokenmerge" not in vars(unet)


def test_a_copied_scheduler_is_its_own() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), **OPTIONS)
    pipe.scheduler.set_timesteps(5)
    copied = copy.deepcopy(pipe.scheduler)
    copied.set_timesteps(9)
    assert (len(copied.timesteps), len(pipe.scheduler.timesteps)) == (9, 5)
    copied.step(torch.zeros(1), copied.timesteps[0], torch.zeros(1))
    assert (copied.step_index, pipe.scheduler.step_index) == (1, None)


def test_two_models_may_share_a_scheduler() -> None:
    first, second = tiny.build("sdxl"), tiny.build("sdxl")
    second.scheduler = first.scheduler
    tokenmerge.apply(first, **OPTIONS)
    tokenmerge.apply(second, **OPTIONS)
    tiny.draw(first, steps=6)
    tokenmerge.remove(first)
    tiny.draw(second, steps=6)
    assert counts(second) == {(1, 2)}
    tokenmerge.remove(second)
    assert not {"step", "set_timesteps", "set_begin_index"} & set(vars(second.scheduler))


def test_somebody_elses_wrapper_over_a_scheduler_survives() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), **OPTIONS)
    ours, calls = pipe.scheduler.step, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(*args, **kwargs)

    pipe.scheduler.step = theirs
    tokenmerge.remove(pipe)
    tiny.draw(pipe, steps=3)
    assert len(calls) == 3


@pytest.mark.parametrize("selection", ["random", "stochastic"])
def test_random_selections_are_the_same_for_every_image_and_leave_the_global_generator_alone(selection: str) -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), **OPTIONS, selection=selection)
    before = torch.random.get_rng_state()
    first = pipe(**tiny.call_arguments(pipe, steps=3)).images
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first, tiny.draw(pipe, steps=3))
    other = tokenmerge.apply(tiny.build("sdxl"), **OPTIONS, selection=selection, seed=1)
    assert not torch.equal(first, tiny.draw(other, steps=3))

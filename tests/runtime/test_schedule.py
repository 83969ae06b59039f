"""What every step does and which maps it renews, counted over whole images, for every kind of denoising loop."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionXLImg2ImgPipeline,
)
from torch import Tensor

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families.calls import TokenGrid, grids_of_ids
from tokenmerge.planning.plan import timeline_of
from tokenmerge.runtime.levels import noise_levels

HELD = [
    [Hold(every=3, start=0.2, what="blocks")],
    [Hold(every=3, start=0.2, what="stages")],
    [Merge(), Hold(every=3, start=0.2)],
]


def apply(pipe: Any, *, scheduler: Any = None, **fields: Any) -> Any:
    return tokenmerge.apply(pipe, Merge(**fields), scheduler=scheduler)


def told(techniques: list[Any]) -> str:
    return "+".join(getattr(each, "what", "merge") for each in techniques)


def counts(pipe: Any) -> tuple[int, int]:
    """Selections and weighings of the last image; all groups must agree."""
    found = {(group["selected"], group["weighed"]) for group in tokenmerge.summary(pipe).groups}
    assert len(found) == 1
    return found.pop()


def counted(pipe: Any, **call: Any) -> tuple[int, int]:
    """Selections and weighings of one image, whatever was drawn before."""
    tiny.draw(pipe, **call)
    return counts(pipe)


@pytest.mark.parametrize(("steps", "expected"), [(1, (1, 1)), (25, (3, 5))])
@pytest.mark.parametrize(
    ("kind", "sites"), [("sd", "block"), ("sdxl", "component"), ("sd3", "block"), ("flux", "component")]
)
def test_destinations_every_10_steps_and_weights_every_5(
    kind: str, sites: str, steps: int, expected: tuple[int, int]
) -> None:
    pipe = apply(tiny.build(kind), sites=sites)
    assert counted(pipe, steps=steps) == expected
    assert counted(pipe, steps=steps) == expected


@pytest.mark.parametrize(
    ("every", "expected"),
    [((1, 1), (12, 12)), ((4, 2), (3, 6)), ((3, 5), (4, 4)), ((12, 7), (1, 2)), ((100, 100), (1, 1))],
)
def test_intervals_are_kept(every: tuple[int, int], expected: tuple[int, int]) -> None:
    pipe = apply(tiny.build("flux"), destinations_every=every[0], weights_every=every[1])
    assert counted(pipe, steps=12) == expected


def test_fixed_maps_are_made_once_per_image() -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), "lower-bound")
    assert counted(pipe, steps=20) == (1, 1)


@pytest.mark.parametrize("kind", ["sd-img2img", "sdxl-img2img", "sdxl-inpaint", "sd3-img2img", "flux-img2img"])
def test_img2img_counts_the_steps_it_runs(kind: str) -> None:
    pipe = apply(tiny.build(kind))
    # Strength 0.5 runs the last 20 of 40 steps.
    assert counted(pipe, num_inference_steps=40) == (2, 4)
    assert counted(pipe, num_inference_steps=8) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "scheduler", "evaluations"),
    [
        ("sdxl", HeunDiscreteScheduler(beta_schedule="scaled_linear"), 39),
        ("sd", PNDMScheduler(skip_prk_steps=True), 21),
        ("sd", DPMSolverMultistepScheduler(), 20),
        ("sdxl", EulerAncestralDiscreteScheduler(), 20),
        ("sd3", FlowMatchHeunDiscreteScheduler(), 39),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "config") else str(value),
)
def test_schedulers_count_by_their_evaluations(kind: str, scheduler: Any, evaluations: int) -> None:
    pipe = apply(tiny.build(kind, scheduler=scheduler))
    seen = merged_steps(pipe, steps=20)
    assert len(seen) == evaluations
    assert counts(pipe) == (-(-evaluations // 10), -(-evaluations // 5))


def true_cfg(batch: int = 1) -> dict[str, Any]:
    return {
        "true_cfg_scale": 3.0,
        "negative_prompt_embeds": tiny.noise(batch, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH, seed=50),
        "negative_pooled_prompt_embeds": tiny.noise(batch, tiny.POOLED_WIDTH, seed=51),
    }


def test_true_guidance_makes_maps_for_each_of_its_two_calls() -> None:
    pipe = apply(tiny.build("flux"))
    assert counted(pipe, steps=20, **true_cfg()) == (4, 8)
    assert counted(pipe, steps=20) == (2, 4)
    assert counted(pipe, steps=4, **true_cfg()) == (2, 2)


def flux_inputs(seed: int, timestep: float) -> dict[str, Any]:
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    return {
        "hidden_states": tiny.noise(1, 256, 16, seed=seed),
        "encoder_hidden_states": tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH, seed=seed + 1),
        "pooled_projections": tiny.noise(1, tiny.POOLED_WIDTH, seed=seed + 2),
        "timestep": torch.tensor([timestep]),
        "img_ids": torch.stack([torch.zeros(16, 16), rows, columns], dim=-1).view(256, 3),
        "txt_ids": torch.zeros(tiny.TEXT_TOKENS, 3),
    }


@torch.no_grad()
def test_calls_of_one_step_do_not_see_the_maps_of_each_other() -> None:
    together = apply(tiny.flux_transformer(), sites="block")
    alone = [apply(tiny.flux_transformer(), sites="block") for _ in range(3)]
    for step in range(12):
        for number, model in enumerate(alone):
            inputs = flux_inputs(100 * step + 10 * number, 1.0 - step / 12)
            assert torch.equal(together(**inputs).sample, model(**inputs).sample), (step, number)
    assert counts(together) == (6, 9)
    assert counts(alone[0]) == (2, 3)


@torch.no_grad()
def test_more_calls_per_step_than_are_kept_select_anew() -> None:
    model = apply(tiny.flux_transformer())
    for timestep in (1.0, 0.9):
        for seed in range(6):
            model(**flux_inputs(seed, timestep))
    # Four calls keep their maps; the fifth and sixth do not.
    assert counts(model) == (6 + 2, 6 + 2)


def merged_steps(pipe: Any, **call: Any) -> list[bool]:
    """Whether each denoising step of one image ran on merged tokens, judged by the length of its queries."""
    seen: list[int] = []
    name = next(name for name, _ in tiny.denoiser_of(pipe).named_modules() if name.endswith("to_q"))
    query = tiny.denoiser_of(pipe).get_submodule(name)
    handle = query.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    tiny.draw(pipe, **call)
    handle.remove()
    return [tokens < 256 for tokens in seen]


@pytest.mark.parametrize(
    ("start", "stop", "merged"),
    [
        (0.0, 1.0, range(10)),
        (0.2, 0.6, range(2, 6)),
        (0.0, 0.05, range(1)),
        (0.95, 1.0, range(0)),
        (0.5, 1.0, range(5, 10)),
    ],
)
@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_a_window_merges_exactly_its_share_of_the_steps(kind: str, start: float, stop: float, merged: range) -> None:
    pipe = apply(tiny.build(kind), start=start, stop=stop)
    assert merged_steps(pipe, steps=10) == [step in merged for step in range(10)]
    assert merged_steps(pipe, steps=10) == [step in merged for step in range(10)]


def test_intervals_count_from_the_first_merged_step() -> None:
    pipe = apply(tiny.build("flux"), start=0.35)
    # Of 20 steps 7 to 19 merge: selections at 7 and 17, weights at 7, 12 and 17.
    assert counted(pipe, steps=20) == (2, 3)


@pytest.mark.parametrize(
    "scheduler",
    [tiny.ddim(), tiny.euler(), HeunDiscreteScheduler(beta_schedule="scaled_linear")],
    ids=lambda each: type(each).__name__,
)
def test_a_window_is_a_share_of_the_full_schedule_in_img2img_too(scheduler: Any) -> None:
    pipe = apply(tiny.build("sdxl-img2img", scheduler=scheduler), start=0.6, stop=0.8)
    # Strength 0.5 runs steps 10 to 19 of 20; of those 12 to 15 lie in the window.
    steps = merged_steps(pipe, num_inference_steps=20)
    if isinstance(scheduler, HeunDiscreteScheduler):
        # Of 39 evaluations numbers 20 to 38 run; those with 0.6 <= number / 39 < 0.8 merge.
        assert steps == [0.6 <= place / 39 < 0.8 for place in range(20, 39)]
    else:
        assert steps == [2 <= step < 6 for step in range(10)]


def test_both_calls_of_true_guidance_are_in_or_out_of_the_window() -> None:
    pipe = apply(tiny.build("flux"), stop=0.5)
    assert merged_steps(pipe, steps=4, **true_cfg()) == [True] * 4 + [False] * 4


def test_unmerged_steps_are_bit_equal_to_the_model_without_merging() -> None:
    pipe = tiny.build("sdxl")
    unpatched = tiny.draw(pipe, steps=4)
    # The window opens after the start of the last step.
    apply(pipe, start=0.99)
    assert torch.equal(tiny.draw(pipe, steps=4), unpatched)
    assert counts(pipe) == (0, 0)


WAYS = [
    ("sdxl", [Merge(sites="component")]),
    ("sdxl", [Merge(), Hold(every=3, start=0.2, what="stages")]),
    ("sd3", [Merge(), Hold(every=3, start=0.2, what="blocks")]),
    ("flux", [Merge()]),
    ("flux", [Merge(), Hold(every=3, start=0.2, what="blocks")]),
]


@pytest.mark.parametrize(
    ("kind", "techniques"), WAYS, ids=lambda value: value if isinstance(value, str) else told(value)
)
def test_an_interrupted_image_leaves_no_trace_in_the_next(kind: str, techniques: list[Any]) -> None:
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe, steps=12)
    tokenmerge.apply(pipe, techniques)
    expected = tiny.draw(pipe, steps=12)
    assert not torch.equal(expected, plain)

    def stop_at_6(pipe: Any, step: int, timestep: Tensor, values: dict[str, Any]) -> dict[str, Any]:
        if step == 6:
            raise InterruptedError
        return values

    for size in ((64, 64), (72, 104)):
        with pytest.raises(InterruptedError):
            tiny.draw(pipe, steps=12, size=size, seed=5, callback_on_step_end=stop_at_6)
        assert torch.equal(tiny.draw(pipe, steps=12), expected)
    with pytest.raises(InterruptedError):
        tiny.draw(pipe, steps=12, callback_on_step_end=stop_at_6)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, steps=12), plain)


@pytest.mark.parametrize(
    ("kind", "techniques"), WAYS, ids=lambda value: value if isinstance(value, str) else told(value)
)
def test_an_error_inside_of_a_block_leaves_no_trace_in_the_next_image(kind: str, techniques: list[Any]) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), techniques)
    expected = tiny.draw(pipe, steps=6)
    *_, last = [
        module for module in tiny.denoiser_of(pipe).modules() if type(module).__name__.endswith("TransformerBlock")
    ]
    inner = next(module for module in last.modules() if type(module).__name__ == "Linear")
    handle = inner.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.draw(pipe, steps=6, seed=5)
    handle.remove()
    assert torch.equal(tiny.draw(pipe, steps=6), expected)


BOTH = [("sdxl", "blocks"), ("sdxl", "stages"), ("sd3", "blocks"), ("flux", "blocks")]


@pytest.mark.parametrize(("kind", "what"), BOTH)
def test_both_techniques_serve_sizes_and_batches_in_turn(kind: str, what: str) -> None:
    """Neither a picture nor the kinds of its steps depend on the pictures before it."""
    techniques = [Merge(), Hold(every=3, start=0.2, what=what)]
    pipe, fresh = (tokenmerge.apply(tiny.build(kind), techniques) for _ in range(2))
    calls: list[dict[str, Any]] = [{}, {"size": (72, 104)}, {"batch": 2}, {"guided": False}, {"size": (104, 72)}]
    for call in [*calls, *calls[:2]]:
        tokenmerge.apply(fresh, techniques)
        assert torch.equal(tiny.draw(pipe, steps=8, **call), tiny.draw(fresh, steps=8, **call)), call
        assert tokenmerge.summary(pipe).steps == tokenmerge.summary(fresh).steps
        assert set(tokenmerge.summary(pipe).steps) == {"merged", "held"}


def test_both_techniques_keep_the_calls_of_a_step_apart() -> None:
    """The two calls of guidance behave as if each had its own model."""
    pipe = tokenmerge.apply(tiny.build("flux"), [Merge(), Hold(every=3, start=0.0)])
    tiny.draw(pipe, steps=8, **true_cfg())
    # Steps 0, 2, 5 and 7 run, both calls of each.
    assert tokenmerge.summary(pipe).steps == {"merged": 4, "held": 4}
    assert counts(pipe) == (2, 4)
    together = tokenmerge.apply(tiny.flux_transformer(), [Merge(), Hold(every=3, start=0.0)])
    alone = [tokenmerge.apply(tiny.flux_transformer(), [Merge(), Hold(every=3, start=0.0)]) for _ in range(2)]
    with torch.no_grad():
        for step in range(8):
            for number, model in enumerate(alone):
                inputs = flux_inputs(100 * step + 10 * number, 1.0 - step / 8)
                assert torch.equal(together(**inputs).sample, model(**inputs).sample), (step, number)
    assert tokenmerge.summary(together).steps == tokenmerge.summary(alone[0]).steps
    assert tokenmerge.summary(together).steps["held"] == 5


def test_guidance_switched_off_on_the_way_selects_for_the_smaller_batch() -> None:
    pipe = apply(tiny.build("sdxl"))

    def switch_off(pipe: Any, step: int, timestep: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
        if step == 3:
            pipe._guidance_scale = 0.0
            return {name: value.chunk(2)[-1] for name, value in values.items()}
        return values

    names = ["prompt_embeds", "add_text_embeds", "add_time_ids"]
    options = {"callback_on_step_end": switch_off, "callback_on_step_end_tensor_inputs": names}
    assert counted(pipe, steps=8, **options) == (2, 2)
    assert counted(pipe, steps=8) == (1, 2)


def test_a_swapped_scheduler_is_followed_and_the_old_one_left_alone() -> None:
    pipe = apply(tiny.build("sdxl"))
    tiny.draw(pipe)
    old = pipe.scheduler
    for new in (tiny.ddim(), HeunDiscreteScheduler(beta_schedule="scaled_linear"), old):
        pipe.scheduler = new
        expected = tiny.draw(apply(tiny.build("sdxl", scheduler=type(new).from_config(new.config))), steps=20)
        assert torch.equal(tiny.draw(pipe, steps=20), expected)
        length = len(new.timesteps)
        assert counts(pipe) == (-(-length // 10), -(-length // 5))
        assert "step" in vars(new)
        assert "step" not in vars(old) or new is old
    tokenmerge.remove(pipe)
    assert not {"set_timesteps", "set_begin_index", "step"} & vars(old).keys()


def test_a_scheduler_swapped_in_img2img_keeps_its_window() -> None:
    pipe = apply(tiny.build("sdxl-img2img"), start=0.6, stop=0.8)
    merged_steps(pipe, num_inference_steps=20)
    pipe.scheduler = tiny.euler(timestep_spacing="trailing")
    assert merged_steps(pipe, num_inference_steps=20) == [2 <= step < 6 for step in range(10)]


def test_a_denoiser_that_outlives_its_pipeline_is_still_timed_by_the_scheduler() -> None:
    pipe = apply(tiny.build("sdxl"), start=0.6, stop=0.8)
    tiny.draw(pipe)
    other = StableDiffusionXLImg2ImgPipeline(**pipe.components, add_watermarker=False)
    other.set_progress_bar_config(disable=True)
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
    assert merged_steps(other, num_inference_steps=20) == [2 <= step < 6 for step in range(10)]
    other.scheduler = tiny.ddim()
    gc.collect()
    with pytest.raises(TokenMergeError, match="apply to the pipeline that runs"):
        tiny.draw(other)
    apply(other)
    assert counted(other, num_inference_steps=40) == (2, 4)


def unet_inputs(timestep: float, size: tuple[int, int] = (32, 32), seed: int = 0) -> dict[str, Any]:
    return {
        "sample": tiny.noise(1, 4, *size, seed=seed),
        "timestep": timestep,
        "encoder_hidden_states": tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH, seed=seed + 1),
        "added_cond_kwargs": {
            "text_embeds": tiny.noise(1, tiny.POOLED_WIDTH, seed=seed + 2),
            "time_ids": torch.zeros(1, 6),
        },
    }


@torch.no_grad()
@pytest.mark.parametrize("tensor", [True, False])
def test_a_bare_denoiser_tells_steps_by_their_timesteps(tensor: bool) -> None:
    unet = apply(tiny.sdxl_unet(), destinations_every=2, weights_every=1)
    seen = []
    # Lower: the next step. Equal: the same step, another call. Higher: another image.
    for timestep in (900, 800, 700, 900, 900, 800, 950):
        unet(**unet_inputs(torch.tensor(timestep) if tensor else timestep))
        seen.append(counts(unet))
    assert seen == [(1, 1), (1, 2), (2, 3), (1, 1), (2, 2), (2, 3), (1, 1)]


@torch.no_grad()
def test_a_bare_denoiser_serves_two_sizes_in_turn() -> None:
    both = apply(tiny.sdxl_unet(), sites="block")
    small, large = (apply(tiny.sdxl_unet(), sites="block") for _ in range(2))
    for step in range(12):
        for model, size in ((small, (32, 32)), (large, (40, 48))):
            inputs = unet_inputs(990 - 10 * step, size, seed=10 * step)
            assert torch.equal(both(**inputs).sample, model(**inputs).sample), (step, size)


def test_a_bare_denoiser_can_be_given_its_scheduler() -> None:
    pipe = tiny.build("sdxl")
    apply(pipe.unet, scheduler=pipe.scheduler, start=0.2, stop=0.6)
    assert merged_steps(pipe, steps=10) == [2 <= step < 6 for step in range(10)]
    tokenmerge.remove(pipe.unet)
    assert not {"set_timesteps", "set_begin_index", "step"} & vars(pipe.scheduler).keys()


def test_a_window_on_a_bare_denoiser_is_refused() -> None:
    unet = tiny.sdxl_unet()
    before = {name: dict(vars(module)) for name, module in unet.named_modules()}
    with pytest.raises(TokenMergeError, match=r"scheduler=\.\.\."):
        apply(unet, stop=0.5)
    with pytest.raises(TokenMergeError, match=r"scheduler=\.\.\."):
        tokenmerge.apply(unet, [Merge(), Hold(every=3, start=0.2)])
    assert {name: dict(vars(module)) for name, module in unet.named_modules()} == before


@torch.no_grad()
def test_what_does_nothing_needs_no_scheduler() -> None:
    unet = tiny.short_sdxl_unet()
    plain = unet(**unet_inputs(500)).sample
    tokenmerge.apply(unet, [Merge(ratio=0.0, start=0.5), Hold(every=1)])
    assert torch.equal(unet(**unet_inputs(500)).sample, plain)
    pipe = tokenmerge.apply(tiny.build("sdxl", scheduler=tiny.ddim()), Hold(every=1))
    assert tiny.draw(pipe).isfinite().all()


@pytest.mark.parametrize("build", [tiny.euler, tiny.ddim, FlowMatchEulerDiscreteScheduler])
def test_a_copy_of_a_watched_scheduler_is_its_own(build: Any) -> None:
    kind = "flux" if build is FlowMatchEulerDiscreteScheduler else "sdxl"
    pipe = tiny.build(kind, scheduler=build())
    apply(pipe)
    tiny.draw(pipe, steps=6)
    before, timesteps = counts(pipe), pipe.scheduler.timesteps.clone()
    clone = copy.deepcopy(copy.deepcopy(pipe.scheduler))
    clone.set_timesteps(3)
    noise = tiny.noise(1, 4, 8, 8)
    for timestep in clone.timesteps:
        noise = clone.step(noise, timestep, noise).prev_sample
    assert len(clone.timesteps) == 3
    assert torch.equal(pipe.scheduler.timesteps, timesteps)
    assert counts(pipe) == before
    expected = tiny.draw(apply(tiny.build(kind, scheduler=build())))
    assert torch.equal(tiny.draw(pipe), expected)


def test_pipelines_that_share_a_scheduler_do_not_disturb_each_other() -> None:
    first = tiny.build("sdxl")
    second = tiny.build("sdxl", scheduler=first.scheduler)
    apply(first)
    apply(second)
    assert counted(first, steps=20) == (2, 4)
    assert counts(second) == (0, 0)
    assert counted(second, steps=20) == (2, 4)
    tokenmerge.remove(first)
    assert counted(second, steps=20) == (2, 4)
    tokenmerge.remove(second)
    assert "step" not in vars(first.scheduler)


def test_a_pipeline_that_only_shares_a_scheduler_is_served() -> None:
    """It may add noise or step several times from one timestep, although Hold in its neighbour forbids both. That stays
    true once the neighbour is deleted but not yet collected."""
    from diffusers import StableDiffusionPanoramaPipeline

    alone = tiny.build("sdxl", scheduler=tiny.ddim())
    parts = tiny.build("sd", vae=tiny.vae(4)).components
    views = StableDiffusionPanoramaPipeline(**parts, requires_safety_checker=False)
    views.set_progress_bar_config(disable=True)
    size = {"height": 512, "width": 576}
    noisy, in_views = tiny.draw(alone, steps=4, eta=0.5), tiny.draw(views, steps=1, **size)
    views.scheduler = alone.scheduler
    neighbour = tokenmerge.apply(tiny.build("sdxl", scheduler=alone.scheduler), [Merge(), Hold(every=3, start=0.2)])
    tiny.draw(neighbour, steps=4)
    gc.collect()
    gc.disable()
    try:
        assert torch.equal(tiny.draw(alone, steps=4, eta=0.5), noisy)
        assert torch.equal(tiny.draw(views, steps=1, **size), in_views)
        with pytest.raises(TokenMergeError, match="adds noise"):
            tiny.draw(neighbour, steps=4, eta=0.5)
        del neighbour
        assert torch.equal(tiny.draw(alone, steps=4, eta=0.5), noisy)
        assert torch.equal(tiny.draw(views, steps=1, **size), in_views)
    finally:
        gc.enable()


@torch.no_grad()
@pytest.mark.parametrize("way", ["one tensor", "indexed anew", "int"])
def test_a_batch_may_be_stepped_sample_by_sample(way: str) -> None:
    unet, scheduler = tiny.short_sdxl_unet(), tiny.ddim()
    scheduler.set_timesteps(10)

    def draw(size: int) -> Tensor:
        """Step the batch `size` samples at a time."""
        samples = tiny.noise(4, 4, 32, 32)
        inputs = {name: _repeated(value, 4) for name, value in unet_inputs(0).items() if name != "timestep"}
        for place, timestep in enumerate(scheduler.timesteps):
            noise = unet(**{**inputs, "sample": samples, "timestep": timestep}).sample
            parts = []
            for some, part in zip(noise.split(size), samples.split(size), strict=True):
                given = {"one tensor": timestep, "indexed anew": scheduler.timesteps[place], "int": int(timestep)}[way]
                parts.append(scheduler.step(some, given, part).prev_sample)
            samples = torch.cat(parts)
        return samples

    tokenmerge.apply(unet, [Merge(), Hold(every=3, start=0.2)], scheduler=scheduler)
    together = draw(4)
    steps = dict(tokenmerge.summary(unet).steps)
    assert steps["held"] > 0
    assert torch.equal(draw(1), together)
    assert tokenmerge.summary(unet).steps == steps


def _repeated(value: Any, batch: int) -> Any:
    if isinstance(value, dict):
        return {name: _repeated(each, batch) for name, each in value.items()}
    return value.repeat_interleave(batch, 0)


@torch.no_grad()
@pytest.mark.parametrize("number", [None, int], ids=["tensor", "int"])
def test_parts_that_take_turns_are_refused_however_they_name_their_step(number: Callable[[Tensor], int] | None) -> None:
    unet, scheduler = tiny.short_sdxl_unet(), tiny.ddim()
    tokenmerge.apply(unet, Hold(every=3, start=0.2), scheduler=scheduler)
    scheduler.set_timesteps(10)

    def draw() -> None:
        for place in range(10):
            for part in range(2):
                timestep = number(scheduler.timesteps[place]) if number else scheduler.timesteps[place]
                noise = unet(**unet_inputs(timestep, seed=part)).sample
                scheduler.step(noise, timestep, tiny.noise(1, 4, 32, 32))

    with pytest.raises(TokenMergeError, match="stepped twice from one timestep"):
        draw()


def unsigned(step: Callable[..., Any]) -> Callable[..., Any]:
    """A user's wrapper that hides the signature of `step`."""
    return lambda *args, **kwargs: step(*args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("turns", [False, True], ids=["one", "turns"])
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("CogVideoXDDIM", None),
        ("CogVideoXDPM", None),
        ("DDIM", unsigned),
        ("EulerDiscrete", None),
    ],
)
def test_the_timestep_is_found_among_what_a_step_is_given(
    name: str, wrap: Callable[..., Any] | None, turns: bool
) -> None:
    """Wherever the signature of `step` places it: not all schedulers take it second."""
    unet, scheduler = tiny.short_sdxl_unet(), getattr(diffusers, f"{name}Scheduler")()
    apply(unet, scheduler=scheduler)
    if wrap:
        scheduler.step = wrap(scheduler.step)
    scheduler.set_timesteps(4)
    sample, before = tiny.noise(1, 4, 32, 32), (None, None)

    def draw() -> None:
        nonlocal before
        for timestep in scheduler.timesteps:
            for _ in range(1 + turns):
                noise = unet(**unet_inputs(timestep)).sample
                if name == "CogVideoXDPM":
                    old, back = before
                    _, old = scheduler.step(noise, old, timestep, back, sample)
                    before = (old, timestep)
                else:
                    scheduler.step(noise, timestep, sample)

    if turns:
        with pytest.raises(TokenMergeError, match="stepped twice from one timestep"):
            draw()
    else:
        draw()
        assert tokenmerge.summary(unet).steps == {"merged": 4}


@pytest.mark.parametrize("selection", ["random", "stochastic"])
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_random_selection_repeats_itself_and_leaves_the_global_generator_alone(kind: str, selection: str) -> None:
    pipe = apply(tiny.build(kind), selection=selection, destinations_every=1)
    before = torch.random.get_rng_state()
    first = pipe(**tiny.call_arguments(pipe, steps=3)).images
    assert torch.equal(torch.random.get_rng_state(), before)
    tiny.draw(pipe, seed=7, size=(72, 104))
    assert torch.equal(tiny.draw(pipe, steps=3), first)
    apply(pipe, selection=selection, destinations_every=1, seed=1)
    assert not torch.equal(tiny.draw(pipe, steps=3), first)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_merging_that_is_applied_on_the_way_keeps_its_window(kind: str) -> None:
    pipe = tiny.build(kind)

    def merge(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 1:
            apply(pipe, start=0.5)
        return {}

    tiny.draw(pipe, steps=8, callback_on_step_end=merge)
    assert tokenmerge.summary(pipe).steps == {"full": 2, "merged": 4}
    tiny.draw(pipe, steps=8)
    assert tokenmerge.summary(pipe).steps == {"full": 4, "merged": 4}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_hold_that_is_applied_on_the_way_knows_the_noise(kind: str) -> None:
    pipe = apply(tiny.build(kind))

    def hold(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 1:
            tokenmerge.apply(pipe, Hold(every=2, start=0.0))
        return {}

    def places() -> list[Any]:
        clock = tiny.denoiser_of(pipe)._tokenmerge.state.follower.clock
        return [clock.place(step) for step in range(8)]

    tiny.draw(pipe, steps=8, callback_on_step_end=hold)
    assert sum(tokenmerge.summary(pipe).steps.values()) == 6
    on_the_way = places()
    tiny.draw(pipe, steps=8)
    assert on_the_way == places()
    assert len({place.weight for place in on_the_way}) == 8


def test_timesteps_that_are_set_once_serve_many_images() -> None:
    unet, scheduler = tiny.sdxl_unet(), DDIMScheduler()
    apply(unet, scheduler=scheduler, start=0.5)
    scheduler.set_timesteps(4)
    for image in range(3):
        for timestep in scheduler.timesteps:
            noise = unet(**unet_inputs(timestep, seed=image)).sample
            scheduler.step(noise, timestep, tiny.noise(1, 4, 32, 32))
        assert tokenmerge.summary(unet).steps == {"full": 2, "merged": 2}
        assert counts(unet) == (1, 1)


@torch.no_grad()
@pytest.mark.parametrize("number", [None, int, float], ids=["tensor", "int", "float"])
@pytest.mark.parametrize("broken_after", ["call", "step"])
@pytest.mark.parametrize("techniques", HELD, ids=told)
def test_an_image_after_one_that_was_broken_off_begins_anew(
    techniques: list[Any], broken_after: str, number: Callable[[Tensor], Any] | None
) -> None:
    """Also if the loop passes plain numbers, which do not reveal the tensor they come from."""
    unet, scheduler = tiny.short_sdxl_unet(), tiny.ddim()
    tokenmerge.apply(unet, techniques, scheduler=scheduler)
    scheduler.set_timesteps(20)
    merge, hold = tokenmerge.summary(unet).plan.techniques
    expected = Counter(step.kind for step in timeline_of(merge, hold).steps(20, noise_levels(scheduler))[:8])
    drawn = []
    for seed in (0, 1, 0):
        for step, timestep in enumerate(scheduler.timesteps[:8]):
            noise = unet(**unet_inputs(number(timestep) if number else timestep, seed=seed)).sample
            if broken_after == "step" or step < 7:
                scheduler.step(noise, int(timestep) if number else timestep, tiny.noise(1, 4, 32, 32))
        drawn.append(noise)
        assert tokenmerge.summary(unet).steps == expected
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


@torch.no_grad()
@pytest.mark.parametrize("ran", [1, 2, 5])
@pytest.mark.parametrize("listed", [True, False])
def test_an_image_that_was_broken_off_leaves_no_steps_behind(listed: bool, ran: int) -> None:
    unet, scheduler = tiny.short_sdxl_unet(), tiny.ddim()
    tokenmerge.apply(unet, [Merge(stop=0.5), Hold(every=3, start=0.5)], scheduler=scheduler)
    scheduler.set_timesteps(6)
    # Iterating over a tensor creates new tensors each time; a list yields the same ones again.
    timesteps = list(scheduler.timesteps) if listed else scheduler.timesteps
    for until in (ran, ran, 6):
        for timestep in timesteps[:until]:
            noise = unet(**unet_inputs(timestep)).sample
            scheduler.step(noise, timestep, tiny.noise(1, 4, 32, 32))
        assert sum(tokenmerge.summary(unet).steps.values()) == until
    assert tokenmerge.summary(unet).steps == {"merged": 2, "full": 1, "held": 3}


@pytest.mark.parametrize("kind", ["sdxl", "sd3"])
@pytest.mark.parametrize("steps", [1, 4])
def test_another_scheduler_after_an_image_that_was_broken_off_is_refused(kind: str, steps: int) -> None:
    pipe = tokenmerge.apply(tiny.build(kind))
    other = type(pipe)(**pipe.components)
    other.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    plain = tiny.draw(pipe, steps=8)

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    calls = iter([dict, dict, dict, stop])
    with pytest.raises(KeyboardInterrupt):
        tiny.draw(pipe, steps=8, callback_on_step_end=lambda *_: next(calls)())
    with pytest.raises(TokenMergeError, match="no step of the given scheduler: another loop"):
        tiny.draw(other, steps=steps)
    assert torch.equal(tiny.draw(pipe, steps=8), plain)


@pytest.mark.parametrize("steps", range(2, 6))
def test_few_steps_of_a_scheduler_that_was_not_given_are_refused(steps: int) -> None:
    pipe = tokenmerge.apply(tiny.build("flux"))
    other = type(pipe)(**pipe.components)
    other.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)

    def draw_images() -> None:
        for _ in range(4):
            tiny.draw(other, steps=steps)

    # A second attempt is refused too.
    for _ in range(2):
        with pytest.raises(TokenMergeError, match="another loop drives this denoiser"):
            draw_images()


@torch.no_grad()
def test_calls_of_a_step_may_differ_in_batch() -> None:
    pipe = apply(tiny.build("flux"))
    pipe.scheduler.set_timesteps(4, mu=0.5)
    arguments = flux_inputs(0, 1.0)
    for batch in (2, 2, 2, 2, 1, 2):
        shared = ("txt_ids", "img_ids")
        pipe.transformer(**{k: v if k in shared else v[:1].expand(batch, *v.shape[1:]) for k, v in arguments.items()})


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_scheduler_that_was_not_given_is_refused(kind: str) -> None:
    """A second pipeline around the same denoiser has one; it would merge at the wrong steps unnoticed."""
    pipe = tokenmerge.apply(tiny.build(kind))
    other = type(pipe)(**pipe.components)
    other.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    drawn = tiny.draw(pipe, steps=6)
    with pytest.raises(TokenMergeError, match="another loop drives this denoiser; apply to the pipeline that runs"):
        tiny.draw(other, steps=6)
    assert torch.equal(tiny.draw(pipe, steps=6), drawn)
    tokenmerge.apply(other)
    assert torch.equal(tiny.draw(other, steps=6), drawn)


def test_views_that_take_turns_at_a_scheduler_are_refused() -> None:
    from diffusers import StableDiffusionPanoramaPipeline

    plain = tiny.build("sd", vae=tiny.vae(4))
    pipe = tokenmerge.apply(StableDiffusionPanoramaPipeline(**plain.components, requires_safety_checker=False))
    arguments = {**tiny.call_arguments(plain, steps=2), "height": 512, "width": 576}
    with pytest.raises(TokenMergeError, match=r"stepped twice from one timestep: .* \(view_batch_size\)"):
        pipe(**arguments)
    assert pipe(**arguments, view_batch_size=2).images.isfinite().all()


@torch.no_grad()
def test_a_bare_denoiser_serves_two_shapes_of_as_many_tokens() -> None:
    both, alone = (apply(tiny.flux_transformer(), sites="block") for _ in range(2))
    wide = flux_inputs(0, 1.0)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(32.0), indexing="ij")
    wide["img_ids"] = torch.stack([torch.zeros(8, 32), rows, columns], dim=-1).view(256, 3)
    both(**flux_inputs(0, 1.0))
    assert torch.equal(both(**wide).sample, alone(**wide).sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("height", "width"), [(4, 320), (320, 4), (260, 300), (16, 24)])
def test_grids_are_read_from_ids_that_were_rounded(height: int, width: int, dtype: torch.dtype) -> None:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).to(dtype)
    assert grids_of_ids(ids) == (TokenGrid(height, width),)


def test_attributes_of_a_scheduler_may_be_copied_and_put_back() -> None:
    """Pipelines that step one scheduler through several views do this."""
    pipe = apply(tiny.build("sdxl"))
    kept = copy.deepcopy(vars(pipe.scheduler))
    pipe.scheduler.set_timesteps(3)
    vars(pipe.scheduler).update(kept)
    assert counted(pipe, steps=6) == (1, 2)


def test_leaving_applied_gives_back_the_scheduler_too() -> None:
    pipe = tiny.build("sdxl")
    apply(pipe.unet, scheduler=pipe.scheduler, start=0.5)
    with tokenmerge.applied(pipe.unet, Merge(ratio=0.25)):
        assert tokenmerge.summary(pipe).plan.techniques == (Merge(ratio=0.25), None)
    assert tokenmerge.summary(pipe).plan.techniques == (Merge(start=0.5), None)
    assert merged_steps(pipe, steps=4) == [False, False, True, True]


def test_selection_and_weights_are_fp32_under_autocast() -> None:
    made = []
    for enabled in (False, True):
        unet = apply(tiny.sdxl_unet())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            unet(**unet_inputs(500))
            group = unet._tokenmerge.merging.groups[0]
            # Renew the map from the same tokens in both cases: autocast changes those that reach the block.
            group.done = (0, 0)
            group.refresh(tiny.noise(1, 256, 8), group.slot.map.tensors)
        made.append(group.slot.map.tensors)
    assert all(torch.equal(first, second) for first, second in zip(*made, strict=True))


@pytest.mark.parametrize("ratio", [0.01, 0.03])
def test_a_small_ratio_removes_something(ratio: float) -> None:
    pipe = apply(tiny.build("sdxl"), ratio=ratio)
    tiny.draw(pipe)
    for group in tokenmerge.summary(pipe).groups:
        before, after = group["tokens"].split(" -> ")
        assert int(after) < int(before)


@pytest.mark.parametrize(
    ("options", "hosted"),
    [({}, False), ({"selection": "uniform"}, False), ({"selection": "stochastic"}, True), ({"unmerge": "pinv"}, True)],
)
def test_steps_that_make_maps_are_not_recorded_where_they_need_the_host(options: dict[str, Any], hosted: bool) -> None:
    pipe = apply(tiny.build("sdxl"), destinations_every=4, weights_every=2, **options)
    kept: list[bool] = []
    pipe.unet.register_forward_hook(lambda *_: kept.append(pipe.unet._tokenmerge.state.kind() is not None))
    tiny.draw(pipe, steps=6)
    assert kept == [not hosted, True] * 3


def test_summary_tells_what_the_steps_of_the_last_image_did() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), [Merge(start=0.2), Hold(every=3, start=0.5)])
    tiny.draw(pipe, steps=10)
    summary = tokenmerge.summary(pipe)
    assert summary.steps == {"full": 2, "merged": 3, "held": 5}
    assert "Steps of the last image: 2 full, 3 merged, 5 held." in str(summary)
    tokenmerge.apply(pipe, Hold(every=3, start=0.2))
    assert "Steps of" not in str(tokenmerge.summary(pipe))
    tiny.draw(pipe, steps=2)
    assert "Steps of the last image: 2 full: nothing was saved." in str(tokenmerge.summary(pipe))


def test_two_calls_are_one_step_of_the_summary() -> None:
    pipe = apply(tiny.build("flux"), start=0.5)
    tiny.draw(pipe, steps=4, **true_cfg())
    assert tokenmerge.summary(pipe).steps == {"full": 2, "merged": 2}

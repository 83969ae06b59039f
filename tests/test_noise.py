"""Schedulers that add noise: how they are told from others, and what is held under them."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

import tiny
import tokenmerge
from tokenmerge.api import config_for
from tokenmerge.runtime.noise import adds_noise


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("DDIM", {}, False),
        ("DDPM", {}, True),
        ("DDPM", {"variance_type": "learned_range"}, True),
        ("DEISMultistep", {}, False),
        ("DPMSolverMultistep", {}, False),
        ("DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver++"}, True),
        ("DPMSolverSinglestep", {}, False),
        ("EulerAncestralDiscrete", {}, True),
        ("EulerDiscrete", {"use_karras_sigmas": True}, False),
        ("FlowMatchEulerDiscrete", {}, False),
        ("FlowMatchEulerDiscrete", {"use_dynamic_shifting": True}, False),
        ("FlowMatchEulerDiscrete", {"use_dynamic_shifting": True, "stochastic_sampling": True}, True),
        ("FlowMatchHeunDiscrete", {}, False),
        ("HeunDiscrete", {}, False),
        ("KDPM2AncestralDiscrete", {}, True),
        ("LCM", {}, True),
        ("LMSDiscrete", {}, False),
        ("PNDM", {"skip_prk_steps": True}, False),
        ("SASolver", {}, True),
        ("TCD", {}, True),
        ("UniPCMultistep", {}, False),
    ],
)
def test_schedulers_that_add_noise_are_known_by_trying(name: str, settings: dict[str, Any], expected: bool) -> None:
    scheduler = getattr(diffusers, f"{name}Scheduler")(**settings)
    scheduler.set_timesteps(3, **({"mu": 0.5} if settings.get("use_dynamic_shifting") else {}))
    before, timesteps = torch.get_rng_state(), scheduler.timesteps.clone()
    assert adds_noise(scheduler) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(scheduler.timesteps, timesteps)


def test_trying_leaves_the_seeds_of_all_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(_: int) -> None:
        raise AssertionError("a device was seeded")

    for device in (torch.cuda, torch.mps, torch.xpu):
        monkeypatch.setattr(device, "manual_seed_all" if hasattr(device, "manual_seed_all") else "manual_seed", seeded)
    assert adds_noise(diffusers.DDPMScheduler())


@pytest.mark.parametrize("scheduler", [None, object(), diffusers.RePaintScheduler()])
def test_what_cannot_be_tried_is_taken_to_add_none(scheduler: Any) -> None:
    assert not adds_noise(scheduler)


def test_unets_hold_blocks_under_noise() -> None:
    noisy = tiny.build("sdxl", scheduler=diffusers.EulerAncestralDiscreteScheduler())
    whole = tiny.draw(noisy, steps=12)
    presets = tokenmerge.presets()
    assert config_for(noisy) == presets["hold"]
    assert config_for(noisy.unet) == config_for(tiny.build("sdxl")) == presets["unet-hold"]
    tokenmerge.apply(noisy)
    assert tokenmerge.plan(noisy, height=64, width=64).config == presets["hold"]
    assert tiny.draw(noisy, steps=12).isfinite().all()
    assert tokenmerge.summary(noisy).steps["merged"] > 0
    # What was applied stays.
    with pytest.raises(tokenmerge.TokenMergeError, match=r"EulerAncestral\w+ adds noise .* use preset='hold'"):
        tokenmerge.apply(noisy, preset="unet-hold")
    assert tokenmerge.summary(noisy).plan.config == presets["hold"]
    tokenmerge.remove(noisy)
    assert torch.equal(tiny.draw(noisy, steps=12), whole)


def test_a_scheduler_that_begins_to_add_noise_is_refused_for_stages() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"))
    assert tiny.draw(pipe, steps=8).isfinite().all()
    pipe.scheduler = diffusers.DDPMScheduler()
    for _ in range(2):
        with pytest.raises(tokenmerge.TokenMergeError, match="DDPMScheduler adds noise"):
            tiny.draw(pipe, steps=8)
    tokenmerge.apply(pipe)
    assert tiny.draw(pipe, steps=8).isfinite().all()


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_noise_that_a_call_asks_for_is_refused_for_stages(eta: float) -> None:
    pipe = tiny.build("sdxl", scheduler=tiny.ddim())
    tokenmerge.apply(pipe)
    if not eta:
        assert tiny.draw(pipe, steps=8, eta=eta).isfinite().all()
        return
    with pytest.raises(tokenmerge.TokenMergeError, match="DDIMScheduler adds noise"):
        tiny.draw(pipe, steps=8, eta=eta)
    tokenmerge.apply(pipe, preset="hold")
    assert tiny.draw(pipe, steps=8, eta=eta).isfinite().all()


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_joint_attention_models_have_no_anchors_under_noise(kind: str) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    pipe = tiny.build(kind, scheduler=scheduler)
    for options in ({}, {"ratio": 0.5}):
        with pytest.raises(tokenmerge.TokenMergeError, match=r"adds noise .* start=0 and anchor_every=0"):
            tokenmerge.apply(pipe, **options)
        assert tokenmerge.summary(pipe).plan is None
    tokenmerge.apply(pipe, start=0, anchor_every=0, ratio=0.5)
    assert tiny.draw(pipe).isfinite().all()

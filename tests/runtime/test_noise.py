"""Schedulers that add noise: how they are recognised, and which `what` Hold chooses under them."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import diffusers
import pytest
import torch

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.runtime.noise import adds_noise

FEW = {"original_inference_steps": 4}
NO_SIGNAL = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("CogVideoXDDIM", {}, False),
        ("CogVideoXDPM", {}, True),
        ("DDIM", {}, False),
        ("DDIM", NO_SIGNAL, False),
        ("DDPM", {}, True),
        ("DDPM", {"variance_type": "learned_range"}, True),
        # At zero SNR a noise prediction does not yield a finite picture.
        ("DDPM", NO_SIGNAL, True),
        # Expects one timestep for each sample.
        ("DDPMWuerstchen", {}, True),
        ("DEISMultistep", {}, False),
        ("DPMSolverMultistep", {}, False),
        ("DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver++"}, True),
        ("DPMSolverSDE", {}, True),
        ("DPMSolverSDE", {"noise_sampler_seed": 0}, True),
        ("DPMSolverSinglestep", {}, False),
        ("EulerAncestralDiscrete", {}, True),
        ("EulerDiscrete", {"use_karras_sigmas": True}, False),
        ("FlowMatchEulerDiscrete", {}, False),
        ("FlowMatchEulerDiscrete", {"use_dynamic_shifting": True}, False),
        ("FlowMatchEulerDiscrete", {"use_dynamic_shifting": True, "stochastic_sampling": True}, True),
        ("FlowMatchHeunDiscrete", {}, False),
        ("FlowMatchLCM", {}, True),
        ("HeunDiscrete", {}, False),
        ("KDPM2AncestralDiscrete", {}, True),
        ("LCM", {}, True),
        ("LCM", FEW, True),
        ("LCM", NO_SIGNAL, True),
        ("LMSDiscrete", {}, False),
        ("PNDM", {"skip_prk_steps": True}, False),
        # Requires an original image and a mask, and ends on that image.
        ("RePaint", {}, True),
        ("SASolver", {}, True),
        ("SCM", {}, True),
        ("TCD", {}, True),
        ("TCD", FEW, True),
        ("UniPCMultistep", {}, False),
    ],
)
def test_schedulers_that_add_noise_are_known_by_trying(name: str, settings: dict[str, Any], expected: bool) -> None:
    scheduler = getattr(diffusers, f"{name}Scheduler")(**settings)
    scheduler.set_timesteps(2, **({"mu": 0.5} if settings.get("use_dynamic_shifting") else {}))
    before, timesteps = torch.get_rng_state(), scheduler.timesteps.clone()
    assert adds_noise(scheduler) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(scheduler.timesteps, timesteps)


@pytest.mark.parametrize(
    ("name", "before", "expected"),
    [
        ("DDIM", {"variance_type": "learned_range"}, False),
        ("EulerAncestralDiscrete", {"variance_type": "learned_range"}, True),
        ("FlowMatchHeunDiscrete", {"use_dynamic_shifting": True}, False),
        ("LCM", {"variance_type": "learned"}, True),
        # It delegates its schedule to a flow-matching scheduler, which reads this setting.
        ("LTXEulerAncestralRF", {"use_dynamic_shifting": True}, True),
        ("SCM", {"use_dynamic_shifting": True}, True),
    ],
)
def test_settings_of_the_scheduler_before_mean_nothing(name: str, before: dict[str, Any], expected: bool) -> None:
    """diffusers keeps them in the config, so that one can switch schedulers back and forth."""
    kind = getattr(diffusers, f"{name}Scheduler")
    scheduler = kind.from_config({**kind().config, **before})
    assert before.items() <= scheduler.config.items()
    assert adds_noise(scheduler) == expected


class Inheriting(diffusers.FlowMatchEulerDiscreteScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize("stochastic", [False, True])
def test_settings_that_a_class_passes_on_are_its_own(stochastic: bool) -> None:
    assert adds_noise(Inheriting(use_dynamic_shifting=True, stochastic_sampling=stochastic)) == stochastic


@pytest.mark.skipif(not hasattr(diffusers, "DiscreteDDIMScheduler"), reason="newer than the diffusers here")
def test_tokens_that_are_drawn_are_chance_too() -> None:
    assert adds_noise(diffusers.DiscreteDDIMScheduler())


def test_trying_leaves_the_seeds_of_all_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(_: int) -> None:
        raise AssertionError("a device was seeded")

    for device in (torch.cuda, torch.mps, torch.xpu):
        monkeypatch.setattr(device, "manual_seed_all" if hasattr(device, "manual_seed_all") else "manual_seed", seeded)
    assert adds_noise(diffusers.DDPMScheduler())


@pytest.mark.parametrize("scheduler", [None, object(), diffusers.ScoreSdeVeScheduler()])
def test_what_cannot_be_tried_is_taken_to_add_none(scheduler: Any) -> None:
    assert not adds_noise(scheduler)


def test_trying_warns_of_nothing_that_was_told_before(caplog: pytest.LogCaptureFixture) -> None:
    """diffusers already warned of another scheduler's settings when the scheduler was created from them."""
    log = logging.getLogger("diffusers")
    # Tests of the command line may have silenced this logger.
    caplog.set_level(logging.WARNING, log.name)
    level, propagates = log.level, log.propagate
    log.propagate = True
    try:
        pndm = diffusers.PNDMScheduler(skip_prk_steps=True)
        scheduler = diffusers.LCMScheduler.from_config(pndm.config)
        pipe = tiny.build("sd", scheduler=scheduler)
        # Warns of rounding when it steps.
        sde = diffusers.DPMSolverSDEScheduler()
        assert "skip_prk_steps" in caplog.text
        caplog.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tokenmerge.apply(pipe)
            assert adds_noise(sde)
        assert not caplog.text
        assert log.level == level
    finally:
        log.propagate = propagates


def held(pipe: Any) -> str:
    """The resolved `what` of the applied Hold, or of the default plan if none is applied."""
    plan = tokenmerge.summary(pipe).plan or tokenmerge.plan(pipe, height=64, width=64)
    return plan.techniques.hold.what


def test_unets_hold_blocks_under_noise() -> None:
    noisy = tiny.build("sdxl", scheduler=diffusers.EulerAncestralDiscreteScheduler())
    plain = tiny.draw(noisy, steps=12)
    assert [held(each) for each in (noisy, noisy.unet, tiny.build("sdxl"))] == ["blocks", "stages", "stages"]
    tokenmerge.apply(noisy)
    assert held(noisy) == "blocks"
    assert tiny.draw(noisy, steps=12).isfinite().all()
    assert tokenmerge.summary(noisy).steps["held"] > 0
    # A refused apply leaves the earlier technique in place.
    with pytest.raises(TokenMergeError, match=r"EulerAncestral\w+ adds noise .* use Hold\(what='prediction'\)"):
        tokenmerge.apply(noisy, Hold(every=3, start=0.2, what="stages"))
    assert held(noisy) == "blocks"
    tokenmerge.remove(noisy)
    assert torch.equal(tiny.draw(noisy, steps=12), plain)


@pytest.mark.parametrize(
    "techniques", [[Hold(every=3, start=0.2)], [Merge(), Hold(every=3, start=0.2)]], ids=["hold", "both"]
)
def test_a_scheduler_that_begins_to_add_noise_is_refused_for_stages(techniques: list[Any]) -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), techniques)
    assert tiny.draw(pipe, steps=8).isfinite().all()
    pipe.scheduler = diffusers.DDPMScheduler()
    for _ in range(2):
        with pytest.raises(TokenMergeError, match="DDPMScheduler adds noise"):
            tiny.draw(pipe, steps=8)
    tokenmerge.apply(pipe, techniques)
    assert tiny.draw(pipe, steps=8).isfinite().all()


def test_noise_that_a_call_asks_for_is_refused_for_stages() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl", scheduler=tiny.ddim()))
    assert tiny.draw(pipe, steps=8, eta=0.0).isfinite().all()
    with pytest.raises(TokenMergeError, match="DDIMScheduler adds noise"):
        tiny.draw(pipe, steps=8, eta=0.5)
    for technique in (Hold(every=3, start=0.2, what="blocks"), Merge()):
        tokenmerge.apply(pipe, technique)
        assert tiny.draw(pipe, steps=8, eta=0.5).isfinite().all()


def test_noise_is_seen_however_a_loop_asks_for_it() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl", scheduler=tiny.ddim()), Hold(every=3, start=0.0))
    pipe.scheduler.set_timesteps(4)
    sample, timestep = tiny.noise(1, 4, 32, 32), pipe.scheduler.timesteps[0]
    for eta in ({"eta": 0.5}, (0.5,)):
        args, kwargs = (eta, {}) if isinstance(eta, tuple) else ((), eta)
        pipe.unet(sample, timestep, **prompt())
        with pytest.raises(TokenMergeError, match="DDIMScheduler adds noise"):
            pipe.scheduler.step(sample, timestep, sample, *args, **kwargs)


def prompt() -> dict[str, Any]:
    added = {"text_embeds": tiny.noise(1, tiny.POOLED_WIDTH), "time_ids": torch.zeros(1, 6)}
    return {"encoder_hidden_states": tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH), "added_cond_kwargs": added}


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_joint_attention_models_hold_the_clean_prediction_under_noise(kind: str) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    pipe = tiny.build(kind, scheduler=scheduler)
    for techniques in ([Hold(every=3, start=0.2)], [Merge(), Hold(every=3, start=0.2)]):
        tokenmerge.apply(pipe, techniques)
        assert held(pipe) == "prediction"
        with pytest.raises(TokenMergeError, match=r"adds noise .* use Hold\(what='prediction'\), or another scheduler"):
            tokenmerge.apply(pipe, Hold(every=3, start=0.2, what="blocks"))
        assert held(pipe) == "prediction", "what was applied stays"
    # These hold nothing, so no noise is lost.
    for technique in (Merge(), Hold(every=1)):
        tokenmerge.apply(pipe, technique)
        assert tiny.draw(pipe).isfinite().all()

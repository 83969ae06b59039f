"""Hold of the clean prediction: what the scheduler receives in held steps, for every scheduler and pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

import denoisers
import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.compiling.graphs import GraphedForward
from tokenmerge.runtime.prediction import Form, form_of
from tokenmerge.runtime.state import APPLIED

PREDICTION = Hold(every=3, start=0.0, what="prediction")
V = {"prediction_type": "v_prediction"}
SAMPLE = {"prediction_type": "sample"}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SDE = {"algorithm_type": "sde-dpmsolver++"}
NO_SIGNAL = {**V, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
STOCHASTIC = {"stochastic_sampling": True}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("CogVideoXDPM", NO_SIGNAL, Form("preserved", "v_prediction")),
        ("DDIM", {}, Form("preserved", "epsilon")),
        ("DDPM", SAMPLE, Form("preserved", "sample")),
        ("DDPM", {"variance_type": "learned_range"}, Form("preserved", "epsilon")),
        ("DPMSolverMultistep", SDE, Form("preserved", "epsilon")),
        ("DPMSolverMultistep", {**SDE, **FLOW}, Form("flow", "flow_prediction")),
        ("DPMSolverSDE", V, Form("exploding", "v_prediction")),
        ("EDMDPMSolverMultistep", SDE, Form("exploding", "v_prediction", -0.5)),
        ("EulerAncestralDiscrete", {}, Form("exploding", "epsilon")),
        ("EulerDiscrete", {"use_karras_sigmas": True}, Form("exploding", "epsilon")),
        ("FlowMatchEulerDiscrete", STOCHASTIC, Form("flow", "flow_prediction")),
        ("FlowMatchEulerDiscrete", {"invert_sigmas": True}, Form("flow", "flow_prediction", -1.0)),
        ("FlowMatchHeunDiscrete", {}, Form("flow", "flow_prediction")),
        ("FlowMatchLCM", {}, Form("flow", "flow_prediction")),
        ("HeunDiscrete", {}, Form("exploding", "epsilon")),
        # Half of its samples have a noise level between two of its sigmas.
        ("KDPM2AncestralDiscrete", {}, Form("exploding", "epsilon")),
        ("LCM", NO_SIGNAL, Form("preserved", "v_prediction")),
        ("LTXEulerAncestralRF", {}, Form("flow", "flow_prediction")),
        ("SASolver", FLOW, Form("flow", "flow_prediction")),
        ("SCM", {}, Form("preserved", "v_prediction")),
        ("TCD", {}, Form("preserved", "epsilon")),
        ("UniPCMultistep", {}, Form("preserved", "epsilon")),
        # These report no noise levels, or mix in something other than noise and picture.
        ("CMStochasticIterative", {}, None),
        ("DDIMInverse", {}, None),
        ("DDPMWuerstchen", {}, None),
        ("FlowMatchLCM", {"invert_sigmas": True}, None),
        ("RePaint", {}, None),
        ("UnCLIP", {}, None),
    ],
)
def test_the_form_of_a_scheduler_is_found_by_trying(name: str, settings: dict[str, Any], expected: Form | None) -> None:
    assert form_of(getattr(diffusers, f"{name}Scheduler")(**settings)) == expected


@pytest.mark.parametrize("scheduler", [None, object()])
def test_what_cannot_be_tried_has_no_form(scheduler: Any) -> None:
    assert form_of(scheduler) is None


def recorded(pipe: Any, **call: Any) -> tuple[Tensor, list[Any], list[str]]:
    """A picture, the scheduler's clean prediction at every step, and the kinds of the steps."""
    scheduler, denoiser = pipe.scheduler, tiny.denoiser_of(pipe)
    seen, kinds, step = [], [], scheduler.step

    def heard(*args: Any, **kwargs: Any) -> Any:
        kinds.append(vars(denoiser)[APPLIED].state.step.kind)
        output = step(*args, **{**kwargs, "return_dict": True})
        seen.append(output.pred_original_sample)
        return (output.prev_sample,)

    # Patch `step` first, so that `apply` wraps the patched one.
    tokenmerge.remove(pipe)
    scheduler.step = heard
    try:
        return tiny.draw(tokenmerge.apply(pipe, PREDICTION), **call), seen, kinds
    finally:
        tokenmerge.remove(pipe)
        del scheduler.step


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.EulerAncestralDiscreteScheduler(),
        diffusers.EulerAncestralDiscreteScheduler(**V),
        diffusers.DDPMScheduler(clip_sample=False),
        diffusers.DDPMScheduler(clip_sample=False, **V),
        diffusers.DDIMScheduler(clip_sample=False, **SAMPLE),
        diffusers.KDPM2AncestralDiscreteScheduler(),
    ],
    ids=lambda each: f"{type(each).__name__}, {each.config.prediction_type}",
)
def test_the_scheduler_sees_the_line_through_the_last_two_full_steps(scheduler: Any) -> None:
    """Judged by the clean prediction that the scheduler itself returns."""
    pipe = tiny.build("sdxl", scheduler=scheduler)
    _, seen, kinds = recorded(pipe, steps=9)
    clock = vars(tiny.denoiser_of(tokenmerge.apply(pipe, PREDICTION)))[APPLIED].state.follower.clock
    pipe.scheduler.set_timesteps(9)
    at = [clock.place(number).at for number in range(len(kinds))]
    assert "held" in kinds

    def line(before: int, last: int, now: int) -> Tensor:
        far, apart = at[now] - at[last], at[last] - at[before]
        return (seen[last] - seen[before]) * (far / apart if apart else 0.0)

    for number, kind in enumerate(kinds):
        full = [each for each in range(number) if kinds[each] == "full"]
        if kind != "held":
            continue
        expected = seen[full[-1]]
        if len(full) > 1:
            trust = 1.0
            if len(full) > 2:
                # The slope counts only if the one before it pointed the right way at the last full step.
                trust = float((line(*full[-3:]) * (seen[full[-1]] - seen[full[-2]])).sum() > 0)
            expected = expected + trust * line(full[-2], full[-1], number)
        assert torch.allclose(seen[number], expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


NOISY: dict[str, tuple[str, Callable[[], Any]]] = {
    "flux": ("flux", lambda: diffusers.FlowMatchEulerDiscreteScheduler(**STOCHASTIC)),
    "flux-controlnet": ("flux-controlnet", lambda: diffusers.FlowMatchEulerDiscreteScheduler(**STOCHASTIC)),
    "sd3-img2img": ("sd3-img2img", lambda: diffusers.FlowMatchEulerDiscreteScheduler(**STOCHASTIC)),
    "sd3": ("sd3", lambda: diffusers.DPMSolverMultistepScheduler(**SDE, **FLOW)),
    "sd-inpaint": ("sd-inpaint", lambda: diffusers.LCMScheduler()),
    "sdxl-controlnet": ("sdxl-controlnet", lambda: diffusers.DPMSolverMultistepScheduler(**SDE)),
}


@pytest.mark.parametrize("name", NOISY)
def test_pipelines_hold_under_noise(name: str) -> None:
    kind, scheduler = NOISY[name]
    pipe = tiny.build(kind, scheduler=scheduler())
    plain = tiny.draw(pipe, steps=8, batch=2)
    # With random weights extrapolations are far off, so a tiny tolerance holds nothing.
    for technique, least in ((Hold(tolerance=1e-9, what="prediction"), 0), (PREDICTION, 2)):
        held = tiny.draw(tokenmerge.apply(pipe, technique), steps=8, batch=2)
        steps = tokenmerge.summary(pipe).steps
        assert steps.get("held", 0) >= least
        assert torch.equal(held, plain) == (least == 0)
        assert held.isfinite().all()
    assert "hold every 3, the clean prediction" in str(tokenmerge.summary(pipe))
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, steps=8, batch=2), plain)
    assert "forward" not in vars(tiny.denoiser_of(pipe))
    assert "step" not in vars(pipe.scheduler)


def test_a_denoiser_does_not_run_in_held_steps() -> None:
    pipe = tiny.build("flux", scheduler=NOISY["flux"][1]())
    calls: list[int] = []
    guided = {"true_cfg_scale": 3.0, "negative_prompt_embeds": tiny.noise(1, 5, tiny.TEXT_WIDTH, seed=9)}
    guided["negative_pooled_prompt_embeds"] = tiny.noise(1, tiny.POOLED_WIDTH, seed=8)
    handle = pipe.transformer.x_embedder.register_forward_hook(lambda *_: calls.append(1))
    for call, each in (({}, 1), (guided, 2)):
        calls.clear()
        tiny.draw(tokenmerge.apply(pipe, PREDICTION), steps=9, **call)
        steps = tokenmerge.summary(pipe).steps
        assert len(calls) == each * steps["full"]
        assert steps["held"] >= 3
    handle.remove()


def test_a_batch_goes_by_its_worst_picture() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl", scheduler=diffusers.DDPMScheduler()), PREDICTION)
    tiny.draw(pipe, steps=9, batch=2)
    holding = vars(pipe.unet)[APPLIED].holding
    off, length = holding.runs[0].current.squares
    assert off.shape == (2,), "one for each picture, though guidance has two samples of each"
    assert holding.errors.measured[-1].error == pytest.approx(float((off / length).sqrt().max()))


def test_what_else_an_output_has_is_held_too() -> None:
    """Here a variance that the model predicts."""
    unet = tiny.sd_unet(out_channels=8)
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range")
    tokenmerge.apply(unet, PREDICTION, scheduler=scheduler)
    scheduler.set_timesteps(8)
    sample, text = tiny.noise(1, 4, 16, 16), tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH)
    given, step = [], scheduler.step.__wrapped__
    scheduler.step._original = lambda output, *rest, **named: given.append(output) or step(output, *rest, **named)
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            output = unet(sample, timestep, text).sample
            sample = scheduler.step(output, timestep, sample).prev_sample
    assert tokenmerge.summary(unet).steps["held"] >= 3
    assert all(each.shape == (1, 8, 16, 16) and each[:, 4:].any() for each in given)


def test_with_merge_no_slope_is_taken_across_a_changed_map() -> None:
    techniques = [Merge(regions="tile:2x2", weights_every=1), PREDICTION]
    pipe = tokenmerge.apply(tiny.build("flux", scheduler=NOISY["flux"][1]()), techniques)
    distances = []

    def note(pipe: Any, *_: Any) -> dict[str, Any]:
        distances.append(float(vars(pipe.transformer)[APPLIED].holding.runs[0].current.ahead))
        return {}

    assert tiny.draw(pipe, steps=9, callback_on_step_end=note).isfinite().all()
    assert not any(distances)
    assert {"merged", "held"} <= tokenmerge.summary(pipe).steps.keys()


def test_graphs_stand_around_what_is_left_out() -> None:
    """Graphs and Hold may be applied in either order, and removed in either order."""
    pipe = tiny.build("flux", scheduler=NOISY["flux"][1]())
    plain, held = tiny.draw(pipe, steps=6), tiny.draw(tokenmerge.apply(pipe, PREDICTION), steps=6)
    tokenmerge.remove(pipe)
    for graphs_first, graphs_off_first in itertools.product((True, False), repeat=2):
        if not graphs_first:
            tokenmerge.apply(pipe, PREDICTION)
        graphs = GraphedForward(pipe.transformer, lambda _: None)
        if graphs_first:
            tokenmerge.apply(pipe, PREDICTION)
        assert vars(pipe.transformer)["forward"].__self__ is graphs
        for _ in range(2):
            assert torch.equal(tiny.draw(pipe, steps=6), held)
        if graphs_off_first:
            graphs.undo()
            assert torch.equal(tiny.draw(pipe, steps=6), held)
            tokenmerge.remove(pipe)
        else:
            tokenmerge.remove(pipe)
            assert torch.equal(tiny.draw(pipe, steps=6), plain)
            graphs.undo()
        assert "forward" not in vars(pipe.transformer)
    assert torch.equal(tiny.draw(pipe, steps=6), plain)


def test_only_calls_that_run_are_recorded() -> None:
    pipe = tokenmerge.apply(tiny.build("flux", scheduler=NOISY["flux"][1]()), PREDICTION)
    state, kinds = vars(pipe.transformer)[APPLIED].state, {}

    def note(*_: Any) -> None:
        kinds[state.step.kind] = state.kind()

    handle = pipe.transformer.register_forward_pre_hook(note)
    tiny.draw(pipe, steps=9)
    handle.remove()
    assert kinds["full"] is not None
    assert kinds["held"] is None


def test_an_exchanged_scheduler_is_followed_or_refused() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), PREDICTION)
    for scheduler in (diffusers.DDPMScheduler(), diffusers.UniPCMultistepScheduler(), tiny.ddim()):
        pipe.scheduler = scheduler
        assert tiny.draw(pipe, steps=9).isfinite().all()
        assert tokenmerge.summary(pipe).steps["held"] >= 3
    # Noise that a call asks for (eta) is noticed, too.
    assert tiny.draw(pipe, steps=9, eta=0.5).isfinite().all()
    pipe.scheduler = diffusers.RePaintScheduler()
    with pytest.raises(TokenMergeError, match="RePaintScheduler does not say how samples"):
        tiny.draw(pipe, steps=9)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [(None, "no scheduler is known"), (diffusers.RePaintScheduler(), "RePaintScheduler does not say .* use another")],
)
def test_schedulers_that_tell_nothing_are_refused_at_once(scheduler: Any, message: str) -> None:
    unet = tiny.sd_unet()
    with pytest.raises(TokenMergeError, match=message):
        tokenmerge.apply(unet, Hold(what="prediction"), scheduler=scheduler)
    assert APPLIED not in vars(unet)


def test_a_denoiser_with_two_kinds_of_output_is_refused() -> None:
    """LTX-2 also returns sound, which another scheduler steps."""
    known = denoisers.DENOISERS["LTX2VideoTransformer3DModel"]
    denoiser, scheduler = known.build(), diffusers.FlowMatchEulerDiscreteScheduler()
    tokenmerge.apply(denoiser, PREDICTION, scheduler=scheduler)
    with pytest.raises(TokenMergeError, match="2 tensors of different shapes"):
        known.call(denoiser)


def test_pictures_that_are_stepped_one_by_one_are_refused() -> None:
    unet, scheduler = tiny.sd_unet(), diffusers.DDPMScheduler()
    tokenmerge.apply(unet, PREDICTION, scheduler=scheduler)
    scheduler.set_timesteps(4)
    samples, text = tiny.noise(2, 4, 16, 16), tiny.noise(2, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH)
    timestep = scheduler.timesteps[0]
    output = unet(samples, timestep, text).sample
    scheduler.step(output[:1], timestep, samples[:1])
    with pytest.raises(TokenMergeError, match="stepped twice after one call"):
        scheduler.step(output[1:], timestep, samples[1:])

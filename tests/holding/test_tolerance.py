"""Hold by a tolerance: full steps measure the error of the extrapolation, which decides how long Hold may hold."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import tiny
import tokenmerge
import tokenmerge_models
import zoo
from tokenmerge import Hold, Merge
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.holding.errors import Errors, Measured, Reading
from tokenmerge.planning.drift import was_compared
from tokenmerge.runtime.levels import even_levels, place_at
from tokenmerge.runtime.state import APPLIED
from tokenmerge.runtime.timeline import Kept, Timeline

KINDS = ("sdxl", "sd3", "flux")


def steps_of(pipe: Any, **call: Any) -> tuple[torch.Tensor, list[str]]:
    """A picture, and the kind of each of its denoiser calls."""
    denoiser, kinds = denoiser_of(pipe), []
    handle = denoiser.register_forward_pre_hook(lambda *_: kinds.append(vars(denoiser)[APPLIED].state.step.kind))
    try:
        return tiny.draw(pipe, **call), kinds
    finally:
        handle.remove()


def errors_of(pipe: Any) -> list[Any]:
    return vars(denoiser_of(pipe))[APPLIED].holding.errors.measured


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("merge", [None, Merge(regions="tile:2x2")], ids=["alone", "with merge"])
def test_pictures_and_decisions_repeat(kind: str, merge: Merge | None) -> None:
    techniques = [each for each in (merge, Hold(tolerance=0.5, start=0.0)) if each is not None]
    pipe = tokenmerge.apply(tiny.build(kind), techniques)
    first, kinds = steps_of(pipe, steps=16)
    assert kinds.count("held") >= 2
    assert kinds[0] != "held"
    assert kinds[-1] != "held"
    for _ in range(2):
        again, kinds_again = steps_of(pipe, steps=16)
        assert torch.equal(first, again)
        assert kinds == kinds_again


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_tolerance_holds_less_and_drifts_less(kind: str) -> None:
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe, steps=20)
    held, drifts = [], []
    for tolerance in (1e-6, 0.1, 10.0):
        picture, kinds = steps_of(tokenmerge.apply(pipe, Hold(tolerance=tolerance, start=0.0)), steps=20)
        held.append(kinds.count("held"))
        drifts.append(float((picture - plain).norm()))
    assert held[0] == 0
    assert drifts[0] == 0.0, "where nothing is held, a picture is as plain"
    assert held[0] < held[1] <= held[2]
    assert 0 < drifts[1] <= drifts[2]


def test_an_error_is_what_the_extrapolation_was_off_by() -> None:
    """By hand, from the residuals of the stages at three full steps."""
    pipe = tokenmerge.apply(tiny.build("sdxl"), Hold(every=2, start=0.0, what="stages"))
    holding, residuals = vars(pipe.unet)[APPLIED].holding, {}

    def keep(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        residuals[step] = holding.runs[0].current.streams[0].value.clone()
        return {}

    tiny.draw(pipe, steps=8, callback_on_step_end=keep)
    measured = next(each for each in errors_of(pipe) if each.kept.before is not None)
    kept = measured.kept
    numbers = (kept.before.number, kept.last.number, measured.now.number)
    before, last, now = (residuals[number] for number in numbers)
    slope = (last - before) / (kept.last.at - kept.before.at)
    expected = last + slope * (measured.now.at - kept.last.at)
    by_sample = ((now - expected).flatten(1).norm(dim=1) / now.flatten(1).norm(dim=1)).max().item()
    assert measured.error == pytest.approx(by_sample, rel=1e-4)


def test_drift_is_what_held_steps_were_off_by() -> None:
    """By hand: errors grow with the distances from the two full steps before, and as noise falls. The worst call
    decides what may be held next; the reported drift uses the mean, since guidance adds calls up."""
    levels = [16.0, 9.0, 4.0, 1.0, 0.25]
    place, errors = partial(place_at, total=5, levels=levels), Errors()
    # Square roots of the levels are 4, 3, 2, 1 and 0.5. The line goes through steps 0 and 1; step 4 measures the error.
    calls = [Reading(torch.tensor(error)) for error in (1.0, 3.0)]
    held = (place(2), place(3))
    errors.measured.append(Measured(place(4), Kept(place(1), place(0), held=held), calls))
    at_the_full_step, shares = 2.5 * 3.5 / 0.5, (1 * 2 / 2, 2 * 3 / 1)
    moves = [math.sqrt(5) - math.sqrt(2), math.sqrt(2) - math.sqrt(1.25)]
    expected = sum(2.0 * share / at_the_full_step * move for share, move in zip(shares, moves, strict=True))
    assert errors.drift == pytest.approx(expected)
    assert errors.bend(5) == pytest.approx(3.0 / at_the_full_step)
    errors.measured.append(Measured(place(4), Kept(place(3), place(2)), calls))
    assert errors.drift == pytest.approx(expected), "nothing was held there"


def test_drift_of_steps_that_no_bend_was_found_for() -> None:
    """It uses the bend before, or else the next one. For a residual held without a slope it grows with the distance."""
    levels = [16.0, 9.0, 4.0, 1.0, 0.25]
    place, calls = partial(place_at, total=5, levels=levels), [Reading(torch.tensor(3.0))]
    errors = Errors()
    errors.measured.append(Measured(place(2), Kept(place(0), held=(place(1),)), calls))
    assert errors.drift == pytest.approx(3.0 * (1 / 2) * place(1).weight)
    # Two full steps that are far apart reveal no bend.
    levels = [100.0, 4.0, 3.0, 2.5, 2.0, 1.5]
    place = partial(place_at, total=6, levels=levels)
    silent = Measured(place(3), Kept(place(1), place(0), held=(place(2),)), [Reading(torch.tensor(0.5))])
    told = Measured(place(5), Kept(place(3), place(1), held=(place(4),)), calls)
    assert silent.bend is None
    expected = math.hypot(
        Kept(place(1), place(0), told.bend).drift_to(place(2)) or 0.0,
        Kept(place(3), place(1), told.bend).drift_to(place(4)) or 0.0,
    )
    errors.measured[:] = [silent, told]
    assert errors.drift == pytest.approx(expected)
    errors.measured[:] = [silent]
    assert errors.drift is None, "it cannot be told"


GUIDED = {
    "true_cfg_scale": 3.0,
    "negative_prompt_embeds": tiny.noise(1, 5, tiny.TEXT_WIDTH, seed=9),
    "negative_pooled_prompt_embeds": tiny.noise(1, tiny.POOLED_WIDTH, seed=8),
}


@pytest.mark.parametrize(
    "hold",
    [Hold(every=4, stop=0.6), Hold(every=2, start=0.0), Hold(tolerance=0.5, stop=0.9)],
    ids=str,
)
@pytest.mark.parametrize(("kind", "call"), [("sdxl", {}), ("flux", GUIDED)], ids=["one call", "two calls"])
def test_every_held_step_has_an_error(kind: str, call: dict[str, Any], hold: Hold) -> None:
    """Even the last held steps of the window, and those held without a slope."""
    pipe = tokenmerge.apply(tiny.build(kind), hold)
    _, kinds = steps_of(pipe, steps=24, **call)
    kinds = kinds[:: len(kinds) // 24]
    held = {number for number, kind in enumerate(kinds) if kind == "held"}
    assert held
    between = [range(each.kept.last.number + 1, each.now.number) for each in errors_of(pipe)]
    assert held == {number for numbers in between for number in numbers}
    assert {len(each.calls) for each in errors_of(pipe)} == {2 if call else 1}
    assert tokenmerge.summary(pipe).drift is not None


def test_all_calls_of_a_step_do_the_same() -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), Hold(tolerance=0.5, start=0.0))
    _, kinds = steps_of(pipe, steps=12, **GUIDED)
    assert kinds[::2] == kinds[1::2]
    assert "held" in kinds
    assert all(len(measured.calls) == 2 for measured in errors_of(pipe))


@pytest.mark.parametrize("what", ["auto", "prediction"])
def test_a_scheduler_without_timesteps_is_refused_at_once(what: str) -> None:
    class Stepper:
        def step(self, output: torch.Tensor, timestep: float, sample: torch.Tensor) -> torch.Tensor:
            return sample - output

    denoiser = denoiser_of(tiny.build("sd3"))
    with pytest.raises(tokenmerge.TokenMergeError, match="Stepper has no timesteps"):
        tokenmerge.apply(denoiser, Hold(what=what), scheduler=Stepper())
    assert APPLIED not in vars(denoiser)


def test_a_batch_goes_by_its_worst_picture() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), Hold(every=2, start=0.0))
    tiny.draw(pipe, steps=8, batch=2)
    together = [measured.error for measured in errors_of(pipe)]
    holding = vars(pipe.unet)[APPLIED].holding
    (off, length) = holding.runs[0].current.squares
    by_sample = (off / length).sqrt()
    assert len(by_sample) == 4, "two pictures, each with and without its prompt"
    assert together[-1] == pytest.approx(by_sample.max().item())


@pytest.mark.parametrize(
    ("nonsense", "technique"),
    [
        (math.nan, Hold(tolerance=10.0, start=0.0, what="stages")),
        (math.inf, Hold(tolerance=10.0, start=0.0, what="stages")),
        (math.nan, Hold(every=4, start=0.0, what="stages")),
        (math.nan, Hold(tolerance=10.0, start=0.0, what="prediction")),
        (math.inf, Hold(tolerance=10.0, start=0.0, what="prediction")),
    ],
)
def test_nonsense_runs_the_second_step_after_in_full_and_is_told(nonsense: float, technique: Hold) -> None:
    """Because the error is read only when that step begins."""
    pipe = tokenmerge.apply(tiny.build("sdxl"), technique)
    residual = type(vars(pipe.unet)[APPLIED].holding.runs[0]), 3

    def spoil(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == residual[1]:
            # Simulate an fp16 overflow: the next kept step is compared with this.
            vars(pipe.unet)[APPLIED].holding.runs[0].current.streams[0].value.fill_(nonsense)
        return {}

    _, kinds = steps_of(pipe, steps=12, callback_on_step_end=spoil)
    wrong = next(each.now.number for each in errors_of(pipe) if not math.isfinite(each.error))
    assert "held" not in kinds[wrong + 2 : wrong + 3]
    assert "not finite" in str(tokenmerge.summary(pipe))
    clean, _ = steps_of(pipe, steps=12)
    assert clean.isfinite().all(), "nothing of it is left in the next picture"
    assert "not finite" not in str(tokenmerge.summary(pipe))


@pytest.mark.parametrize("nonsense", [math.nan, math.inf])
@pytest.mark.parametrize("hold", [Hold(tolerance=10.0, start=0.0), Hold(every=8, start=0.0)], ids=str)
@pytest.mark.parametrize(("before", "last"), [(2, 22), (22, 24)], ids=["from afar", "at one place"])
def test_nonsense_is_told_where_an_error_says_nothing_of_bends(
    hold: Hold, before: int, last: int, nonsense: float
) -> None:
    """Two full steps far apart give no line, and a step at the place of the last one has no distance. Finite errors do
    not count in these cases, but nonsense must."""
    place = partial(place_at, total=50, levels=even_levels(50))
    errors = Errors()
    errors.measured.append(Measured(place(8), Kept(place(6), place(4)), [Reading(torch.tensor(0.01))]))
    errors.measured.append(Measured(place(24), Kept(place(last), place(before)), [Reading(torch.tensor(0.5))]))
    timeline = Timeline(None, hold)
    assert errors.bend(25) == errors.bend(9), "the last one that told anything"
    assert timeline.step(place(25), Kept(place(24), place(22), errors.bend(25))).kind == "held"
    errors.measured[-1].calls[:] = [Reading(torch.tensor(nonsense))]
    assert timeline.step(place(25), Kept(place(24), place(22), errors.bend(25))).kind == "full"
    assert errors.nonsense == 1


@pytest.mark.parametrize("what", ["blocks", "prediction"])
def test_a_tolerance_goes_with_parts_of_a_schedule_and_other_schedulers(what: str) -> None:
    pipe = tokenmerge.apply(tiny.build("sd3-img2img"), Hold(tolerance=0.5, start=0.0, what=what))
    for scheduler in (pipe.scheduler, diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)):
        pipe.scheduler = scheduler
        first, kinds = steps_of(pipe, steps=12)
        assert len(kinds) == 12
        assert "held" in kinds[1:-1]
        assert kinds[-1] == "full"
        again, kinds_again = steps_of(pipe, steps=12)
        assert torch.equal(first, again)
        assert kinds == kinds_again


@pytest.mark.parametrize("what", ["blocks", "prediction"])
def test_a_tolerance_goes_with_video(what: str) -> None:
    """With two calls a step."""
    model = zoo.MODELS["wan2.1"]
    pipe = tokenmerge.apply(model.build(), Hold(tolerance=0.5, start=0.0, what=what))
    zoo.draw(pipe, model, steps=12)
    steps = tokenmerge.summary(pipe).steps
    assert steps["held"] >= 2
    assert sum(steps.values()) == 12


def test_a_bare_denoiser_counts_steps() -> None:
    denoiser = denoiser_of(tiny.build("sd3"))
    tokenmerge.apply(denoiser, Hold(tolerance=0.5, start=0.0))
    state, example = vars(denoiser)[APPLIED].state, family_of(denoiser).example(denoiser, 1, 16, 16)
    kinds = []
    with torch.no_grad():
        for step in range(12):
            denoiser(**{**example, "timestep": example["timestep"] * 0 + 900 - 50 * step}, return_dict=False)
            kinds.append(state.step.kind)
    assert "held" in kinds


# On trained models.


@pytest.fixture(scope="module")
def trained() -> Any:
    loaded = diffusers.StableDiffusionXLPipeline.from_pretrained(tokenmerge_models.models()["tiny-sdxl"])
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def trained_flux() -> Any:
    loaded = diffusers.FluxPipeline.from_pretrained(tokenmerge_models.models()["tiny-flux"])
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture
def flux(trained_flux: Any) -> Iterator[Any]:
    yield trained_flux
    tokenmerge.remove(trained_flux)


@pytest.fixture
def pipe(trained: Any) -> Iterator[Any]:
    scheduler = trained.scheduler
    yield trained
    tokenmerge.remove(trained)
    trained.scheduler = scheduler


def draw(pipe: Any, steps: int = 20, **call: Any) -> np.ndarray:
    model = "tiny-flux" if isinstance(pipe, diffusers.FluxPipeline) else "tiny-sdxl"
    known = json.loads((Path(tokenmerge_models.models()[model]) / "tokenmerge.json").read_text())["call"]
    generator = torch.Generator().manual_seed(0)
    size = {"height": 128, "width": 128, "num_inference_steps": steps}
    arguments = {"prompt": "a photo of a sunflower", "generator": generator, "output_type": "np", **size, **known}
    return 255 * pipe(**{**arguments, **call}).images[0]


def mse(one: np.ndarray, other: np.ndarray) -> float:
    return float(((one - other) ** 2).mean())


@pytest.fixture(scope="module")
def weights(trained: Any, trained_flux: Any) -> dict[str, Any]:
    """The denoisers of the bundled models, by name."""
    return {"tiny-flux": trained_flux.transformer, "tiny-sdxl": trained.unet}


SCHEDULES = {
    "euler with karras": (diffusers.EulerDiscreteScheduler, {"use_karras_sigmas": True}),
    "dpm++ with karras": (diffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
    "dpm++": (diffusers.DPMSolverMultistepScheduler, {"rescale_betas_zero_snr": False}),
    "ddim": (diffusers.DDIMScheduler, {}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures_hold_under_every_schedule(pipe: Any, name: str) -> None:
    """Counting steps instead of noise would give an MSE of 2044 and 5114 under Karras sigmas with zero terminal SNR."""
    scheduler, changes = SCHEDULES[name]
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **changes)
    plain = draw(pipe)
    held = draw(tokenmerge.apply(pipe, Hold()))
    assert mse(plain, held) < 15
    assert tokenmerge.summary(pipe).steps["held"] >= 5
    # With `every`, it gave 1323 and 447 there, although only three steps were held.
    assert mse(plain, draw(tokenmerge.apply(pipe, Hold(every=3)))) < 25


def test_a_summary_tells_how_far_a_picture_drifted(pipe: Any) -> None:
    """Estimates need no plain picture, rank the techniques correctly, and lie within 10 dB of the true PSNR."""
    plain, found = draw(pipe, 28), []
    for technique in (Hold(tolerance=0.05), Hold(), Hold(tolerance=0.8)):
        error = mse(plain, draw(tokenmerge.apply(pipe, technique), 28))
        told = tokenmerge.summary(pipe)
        assert told.drift.calibrated
        assert "Estimated PSNR to the plain image" in str(told)
        found.append((told.drift.psnr, 10 * math.log10(255**2 / error)))
    estimates = [estimate for estimate, _ in found]
    assert estimates == sorted(estimates, reverse=True)
    assert all(abs(estimate - true) < 10 for estimate, true in found), found


def test_a_callback_reads_how_far_a_picture_has_drifted_so_far() -> None:
    pipe, told = tokenmerge.apply(tiny.build("sdxl"), Hold(every=2, start=0.0)), []

    def read(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        told.append(tokenmerge.summary(pipe).drift)
        return {}

    picture, kinds = steps_of(pipe, steps=12, callback_on_step_end=read)
    first = kinds.index("held")
    known = [drift.psnr for drift in told[first:] if drift is not None]
    assert known
    assert None in told[first:], "not before a full step has shown it"
    assert known == sorted(known, reverse=True), "it only grows"
    assert tokenmerge.summary(pipe).drift == told[-1]
    unread, _ = steps_of(pipe, steps=12)
    assert torch.equal(picture, unread)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drift_that_was_never_compared_says_so(kind: str) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), Hold(every=2, start=0.0))
    assert tokenmerge.summary(pipe).drift is None
    tiny.draw(pipe, steps=10)
    assert not tokenmerge.summary(pipe).drift.calibrated
    assert "uncalibrated" in str(tokenmerge.summary(pipe))


FLOW = diffusers.FlowMatchEulerDiscreteScheduler
UNIPC = partial(diffusers.UniPCMultistepScheduler, prediction_type="flow_prediction", use_flow_sigmas=True)
KARRAS = partial(diffusers.DPMSolverMultistepScheduler, use_karras_sigmas=True)


@pytest.mark.parametrize(
    ("name", "scheduler", "what", "compared"),
    [
        ("tiny-flux", FLOW, "blocks", True),
        ("tiny-flux", UNIPC, "blocks", True),
        ("tiny-flux", FLOW, "prediction", False),
        ("tiny-flux", partial(FLOW, use_beta_sigmas=True), "blocks", False),
        ("tiny-flux", partial(UNIPC, solver_order=3), "blocks", False),
        ("tiny-sdxl", diffusers.EulerDiscreteScheduler, "stages", True),
        ("tiny-sdxl", KARRAS, "stages", True),
        ("tiny-sdxl", diffusers.EulerDiscreteScheduler, "blocks", False),
        ("tiny-sdxl", partial(diffusers.EulerDiscreteScheduler, use_karras_sigmas=True), "stages", False),
        ("tiny-sdxl", diffusers.DPMSolverMultistepScheduler, "stages", False),
        ("tiny-sdxl", diffusers.LMSDiscreteScheduler, "stages", False),
        ("tiny-sdxl", diffusers.EulerAncestralDiscreteScheduler, "stages", False),
        ("tiny-sdxl", lambda: None, "stages", False),
    ],
)
def test_the_estimate_is_calibrated_for_what_was_compared(
    name: str, scheduler: Any, what: str, compared: bool, weights: dict[str, Any]
) -> None:
    assert was_compared(weights[name], scheduler(), what) == compared


@pytest.mark.parametrize("name", ["tiny-flux", "tiny-sdxl"])
def test_other_weights_are_not_those_that_were_compared(name: str, weights: dict[str, Any]) -> None:
    """The bundled weights count as compared in any dtype; other weights of the same config do not."""
    scheduler, what = (FLOW(), "blocks") if name == "tiny-flux" else (KARRAS(), "stages")
    denoiser = weights[name]
    assert was_compared(copy.deepcopy(denoiser).bfloat16(), scheduler, what)
    assert not was_compared(type(denoiser).from_config(denoiser.config), scheduler, what)
    with torch.device("meta"):
        assert not was_compared(type(denoiser).from_config(denoiser.config), scheduler, what)
    assert not was_compared(torch.nn.Linear(2, 2), scheduler, what)


def test_it_goes_by_the_scheduler_of_the_last_image(pipe: Any) -> None:
    tokenmerge.apply(pipe, Hold(every=2))
    other = diffusers.LMSDiscreteScheduler.from_config(pipe.scheduler.config)
    for scheduler, compared in ((pipe.scheduler, True), (other, False)):
        pipe.scheduler = scheduler
        draw(pipe, 10)
        assert tokenmerge.summary(pipe).drift.calibrated == compared


def test_no_drift_is_told_where_merge_acts_too() -> None:
    """The errors that Hold measures do not include what merging changes."""
    pipe = tokenmerge.apply(tiny.build("flux"), [Merge(regions="tile:2x2"), Hold(every=2, start=0.0)])
    tiny.draw(pipe, steps=10)
    assert errors_of(pipe)
    assert tokenmerge.summary(pipe).drift is None


@pytest.mark.parametrize("steps", [8, 12, 16, 20, 24, 28, 60])
def test_more_full_steps_do_not_drift_more(pipe: Any, steps: int) -> None:
    """Among pictures that hardly drift (MSE below 1), the order does not matter."""
    check_that_more_full_steps_do_not_drift_more(pipe, steps, (2, 3, 5, 8))


@pytest.mark.parametrize("steps", [16, 24])
def test_more_full_steps_do_not_drift_more_on_a_transformer(flux: Any, steps: int) -> None:
    check_that_more_full_steps_do_not_drift_more(flux, steps, (2, 5), height=64, width=64)


def check_that_more_full_steps_do_not_drift_more(pipe: Any, steps: int, every: tuple[int, ...], **size: int) -> None:
    plain = draw(pipe, steps, **size)
    found = []
    for technique in (*(Hold(every=each) for each in every), Hold(tolerance=0.05), Hold()):
        picture = draw(tokenmerge.apply(pipe, technique), steps, **size)
        found.append((tokenmerge.summary(pipe).steps["full"], max(mse(plain, picture), 1.0)))
    for kinds in (found[:-2], found[-2:]):
        for (more, one), (fewer, other) in itertools.pairwise(kinds):
            assert more >= fewer
            assert one <= 1.25 * other, found


def test_more_steps_drift_hardly_more_by_the_same_tolerance(flux: Any) -> None:
    """Some more drift is expected: with many steps holding begins at higher noise, and early errors grow."""
    drifts = {16: 1.0, 50: 1.0}
    for steps, seed in itertools.product(drifts, range(3)):
        plain, held = (
            draw(
                tokenmerge.apply(flux, hold), steps, height=64, width=64, generator=torch.Generator().manual_seed(seed)
            )
            for hold in (Hold(every=1), Hold())
        )
        drifts[steps] *= mse(plain, held) ** (1 / 3)
        assert tokenmerge.summary(flux).steps["held"] >= 5
    assert drifts[50] < 3 * drifts[16]

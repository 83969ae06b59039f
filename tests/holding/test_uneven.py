"""Holding under uneven schedules: steps are measured by the model's own time, not counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionXLPipeline,
)

import tokenmerge
import tokenmerge_models
from tokenmerge import Hold
from tokenmerge.families.calls import DenoiserCall
from tokenmerge.holding.controller import Holding
from tokenmerge.runtime.clock import Clock
from tokenmerge.runtime.scheduler import uneven_places
from tokenmerge.runtime.timeline import Timeline

KARRAS = {"use_karras_sigmas": True}
# The first timesteps of Karras sigmas lie in one place: sigma begins at 4096.
ZERO_SNR = {**KARRAS, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


@pytest.fixture(scope="module")
def pipe() -> Any:
    loaded = StableDiffusionXLPipeline.from_pretrained(tokenmerge_models.models()["tiny-sdxl"])
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(pipe: Any, **call: Any) -> np.ndarray:
    known = json.loads((Path(tokenmerge_models.models()["tiny-sdxl"]) / "tokenmerge.json").read_text())["call"]
    generator = torch.Generator().manual_seed(0)
    size = {"height": 128, "width": 128, "num_inference_steps": 20}
    arguments = {"prompt": "a photo of a sunflower", "generator": generator, "output_type": "np", **size, **known}
    return 255 * pipe(**{**arguments, **call}).images[0]


@pytest.mark.parametrize("guidance", [{}, {"guidance_scale": 5.0}], ids=["own guidance", "guidance of 5"])
@pytest.mark.parametrize("scheduler", [EulerDiscreteScheduler, DPMSolverMultistepScheduler])
def test_pictures_hold_under_karras_sigmas(pipe: Any, scheduler: Any, guidance: dict[str, Any]) -> None:
    """Counted steps would give an MSE of 2044 and 5114 at a guidance of 5."""
    before = pipe.scheduler
    try:
        pipe.scheduler = scheduler.from_config(before.config, **KARRAS)
        plain = draw(pipe, **guidance)
        held = draw(tokenmerge.apply(pipe, Hold()), **guidance)
        steps = tokenmerge.summary(pipe).steps
    finally:
        tokenmerge.remove(pipe)
        pipe.scheduler = before
    assert ((plain - held) ** 2).mean() < 15
    assert steps["held"] >= 8


@pytest.mark.parametrize(
    "scheduler",
    [
        EulerDiscreteScheduler(),
        EulerDiscreteScheduler(timestep_spacing="trailing"),
        DDIMScheduler(),
        PNDMScheduler(),
        PNDMScheduler(skip_prk_steps=True),
        HeunDiscreteScheduler(),
        DPMSolverMultistepScheduler(),
        FlowMatchEulerDiscreteScheduler(shift=3.0),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
@pytest.mark.parametrize("steps", [4, 20, 50])
def test_even_schedules_and_those_of_flows_are_counted(scheduler: Any, steps: int) -> None:
    scheduler.set_timesteps(steps)
    assert uneven_places(scheduler) is None


@pytest.mark.parametrize("settings", [KARRAS, ZERO_SNR, {"use_exponential_sigmas": True}, {"use_beta_sigmas": True}])
def test_uneven_schedules_are_measured_in_the_models_time(settings: dict[str, Any]) -> None:
    scheduler = EulerDiscreteScheduler(**settings)
    scheduler.set_timesteps(20)
    places = uneven_places(scheduler)
    assert places is not None
    assert len(places) == 20
    assert places[0] == 0.0
    assert places == sorted(places)
    assert places[-1] <= 20


def test_steps_in_one_place_are_held_where_a_picture_begins_and_others_are_not() -> None:
    clock, timeline = Clock(), Timeline(None, Hold(start=0.5))
    # Three in one place, one of second order, two far apart; then the window begins.
    clock.start_image(8, [0.0, 0.05, 0.1, 0.3, 0.3, 1.0, 4.0, 7.0])
    kinds, kept = [], None
    for number in range(8):
        step = timeline.step(clock.place(number), None if kept is None else clock.place(kept))
        kept = number if step.keeps else kept
        kinds.append(str(step))
    assert kinds == ["full, kept", "held", "held", "full", "full", "full", "full, kept", "full, kept"]


def test_no_slope_is_taken_across_steps_that_ran_and_were_not_kept() -> None:
    """Near steps are kept where a picture begins, and those after them are not."""
    clock = Clock()
    holding, timeline = Holding(clock), Timeline(None, Hold(start=0.5))
    clock.start_image(6, [0.0, 0.05, 1.0, 2.0, 3.0, 4.0])
    call = DenoiserCall(1, torch.float32, torch.device("cpu"), torch.zeros(()), 8, 8)
    lengths = []
    for number in range(6):
        clock.step, clock.call = number, 0
        kept = holding.last_kept(call)
        step = timeline.step(clock.place(), None if kept is None else clock.place(kept))
        holding.enter(call, step)
        holding.leave(restart=False)
        if step.keeps:
            lengths.append(len(holding._kept[0, call.size].steps))
    # Step 0 is kept; 2 runs and is not; from the window's first kept step on slopes are taken anew.
    assert lengths[:2] == [1, 1]

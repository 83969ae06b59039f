"""Noise levels of steps under every diffusers scheduler, and the places derived from them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import diffusers
import pytest
import torch

from tokenmerge.runtime.levels import error_gain, even_levels, noise_levels, output_length, place_at, planned_levels

KARRAS = {"use_karras_sigmas": True}
# The first sigma is 4096.
ZERO_SNR = {**KARRAS, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SCHEDULERS: list[tuple[Any, dict[str, Any]]] = [
    *((diffusers.EulerDiscreteScheduler, changes) for changes in ({}, KARRAS, ZERO_SNR, {"use_beta_sigmas": True})),
    *((diffusers.DPMSolverMultistepScheduler, changes) for changes in ({}, KARRAS, FLOW)),
    *((diffusers.UniPCMultistepScheduler, changes) for changes in ({}, FLOW)),
    *((diffusers.FlowMatchEulerDiscreteScheduler, {"shift": shift}) for shift in (1.0, 3.0, 7.0)),
    (diffusers.FlowMatchHeunDiscreteScheduler, {}),
    (diffusers.HeunDiscreteScheduler, {}),
    (diffusers.LMSDiscreteScheduler, {}),
    (diffusers.DDIMScheduler, {}),
    (diffusers.DDIMScheduler, {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}),
    (diffusers.PNDMScheduler, {}),
    (diffusers.CogVideoXDDIMScheduler, {}),
    (diffusers.EDMEulerScheduler, {}),
]


@pytest.mark.parametrize(("scheduler", "changes"), SCHEDULERS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("steps", [4, 20])
def test_noise_falls_along_a_picture(scheduler: Any, changes: dict[str, Any], steps: int) -> None:
    made = scheduler(**changes)
    made.set_timesteps(steps)
    levels = noise_levels(made)
    assert levels is not None
    assert len(levels) == len(made.timesteps)
    assert all(one >= other > 0 for one, other in itertools.pairwise(levels))
    places = [place_at(number, len(levels), levels) for number in range(len(levels))]
    for name in ("at", "share", "cleared"):
        values = [getattr(place, name) for place in places]
        assert values == sorted(values)
    assert all(0 <= place.cleared <= 1 and place.weight >= 0 and place.curvature > 0 for place in places)
    assert [place.last for place in places] == [False] * (len(places) - 1) + [True]


def test_one_noise_is_one_level_whoever_tells_it() -> None:
    """Half noise and half signal, as each kind of scheduler expresses it."""
    euler = diffusers.EulerDiscreteScheduler()
    euler.timesteps, euler.sigmas = torch.tensor([500.0]), torch.tensor([1.0, 0.0])
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    flow.timesteps, flow.sigmas = torch.tensor([500.0]), torch.tensor([0.5, 0.0])
    ddim = diffusers.DDIMScheduler()
    ddim.timesteps, ddim.alphas_cumprod = torch.tensor([0]), torch.tensor([0.5])
    inverted = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    inverted.timesteps, inverted.sigmas = torch.tensor([500.0]), torch.tensor([0.5, 1.0])
    for scheduler in (euler, flow, ddim, inverted):
        assert noise_levels(scheduler) == pytest.approx([1.0])


def test_what_tells_no_noise_has_its_steps_counted() -> None:
    class Loop:
        timesteps = (3, 2, 1)

    assert noise_levels(Loop()) is None
    assert noise_levels(object()) is None
    places = [place_at(number, 4, []) for number in range(4)]
    assert [place.at for place in places] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [place.cleared for place in places] == [place.share for place in places] == [0.0, 0.25, 0.5, 0.75]
    assert place_at(3, None, []).cleared is None


def test_a_picture_goes_its_way_once() -> None:
    """The total does not depend on the number of steps: twice as many steps are half as far apart."""
    ways = []
    for total in (20, 40):
        levels = even_levels(total)
        ways.append(sum(place_at(number, total, levels).weight for number in range(1, total) if levels[number] < 4.01))
    assert ways == [pytest.approx(math.sqrt(5) - 1)] * 2
    # In pure noise the picture does not move: its way begins with the step that leaves it. Second-order solvers
    # evaluate every level twice, so each evaluation has half the weight.
    levels = [9000.0, 400.0, 200.0, 3.0]
    assert place_at(2, 4, levels).weight == pytest.approx(math.sqrt(101) - 2)
    twice = [level for level in levels for _ in range(2)]
    assert place_at(5, 8, twice).weight == place_at(6, 8, twice).weight == pytest.approx((math.sqrt(101) - 2) / 2)


def test_solvers_of_higher_order_magnify_errors() -> None:
    """The gain is the newest Adams-Bashforth coefficient; LMS has the same over even steps."""
    solver = diffusers.DPMSolverMultistepScheduler
    assert [error_gain(solver(solver_order=order)) for order in (1, 2, 3)] == [1.0, 1.5, 23 / 12]
    lms = diffusers.LMSDiscreteScheduler()
    # LMS integrates polynomials over its sigmas, here in even steps of -1, hence the minus sign below.
    lms.sigmas = torch.arange(8, 0, -1.0)
    assert -lms.get_lms_coefficient(4, 5, 0) == pytest.approx(error_gain(lms))
    assert error_gain(diffusers.PNDMScheduler()) == error_gain(diffusers.IPNDMScheduler()) == error_gain(lms) == 55 / 24
    assert error_gain(diffusers.EulerDiscreteScheduler()) == error_gain(object()) == 1.0
    levels = even_levels(20)
    assert place_at(9, 20, levels, 1.5).weight == pytest.approx(1.5 * place_at(9, 20, levels).weight)


def test_levels_are_planned_as_they_will_be() -> None:
    for scheduler, changes in ((diffusers.EulerDiscreteScheduler, KARRAS), (diffusers.DDIMScheduler, {})):
        made = scheduler(**changes)
        planned = planned_levels(made, 12)
        made.set_timesteps(12)
        assert planned == noise_levels(made)
    dynamic = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    assert planned_levels(dynamic, 12) is None, "its shift follows from the size of an image"
    assert planned_levels(diffusers.HeunDiscreteScheduler(), 12) is None
    assert planned_levels(None, 12) is None


@pytest.mark.parametrize(
    ("scheduler", "changes", "squared"),
    [
        (diffusers.FlowMatchEulerDiscreteScheduler, {}, 2.0),
        (diffusers.UniPCMultistepScheduler, FLOW, 2.0),
        (diffusers.EulerDiscreteScheduler, {"prediction_type": "v_prediction"}, 1.0),
        (diffusers.DDIMScheduler, {}, 1.0),
    ],
)
def test_the_output_of_a_flow_is_noise_and_picture(scheduler: Any, changes: dict[str, Any], squared: float) -> None:
    made = scheduler(**changes)
    made.set_timesteps(10)
    assert output_length(made) ** 2 == pytest.approx(squared)

"""The nodes' trial of samplers, checked on all of ComfyUI's own."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import TREE
from server import NODES

sys.path[:0] = [str(TREE), str(NODES.parent)]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True

import comfy.model_sampling  # noqa: E402
import comfy.samplers  # noqa: E402

samplers = importlib.import_module("comfyui.samplers")
NOISY = ("ancestral", "sde", "seeds", "lcm", "ddpm", "sa_solver")
STEPS = 10


class _Flow(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
    pass


class _Discrete(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):
    pass


def guider(flow: bool) -> Any:
    sampling = _Flow() if flow else _Discrete()
    patcher = SimpleNamespace(get_model_object=lambda name: sampling)
    return SimpleNamespace(inner_model=SimpleNamespace(model_sampling=sampling), model_patcher=patcher)


def trial(name: str, flow: bool) -> Any:
    given = guider(flow)
    sigmas = comfy.samplers.calculate_sigmas(given.inner_model.model_sampling, "simple", STEPS)
    extra = {"model_options": {"transformer_options": {}}, "seed": 1}
    return sigmas, samplers.try_sampler(comfy.samplers.sampler_object(name), given, sigmas, extra)


@pytest.mark.parametrize("flow", [False, True], ids=["eps", "flow"])
@pytest.mark.parametrize("name", comfy.samplers.SAMPLER_NAMES)
def test_a_trial_sees_noise_and_every_evaluation(name: str, flow: bool) -> None:
    state = torch.get_rng_state()
    sigmas, tried = trial(name, flow)
    assert tried.noisy == any(word in name for word in NOISY)
    assert tried.reads_guidance == name.endswith("cfg_pp")
    assert len(tried.sigmas) >= STEPS - 2
    assert tried.gain >= 1.0
    assert torch.equal(torch.get_rng_state(), state)
    if name in ("euler", "dpmpp_2m", "euler_ancestral"):
        assert tried.sigmas == pytest.approx(sigmas[:-1].tolist())


@pytest.mark.parametrize(
    ("name", "count", "gain"), [("euler", STEPS, False), ("dpmpp_2m", STEPS, True), ("heun", 2 * STEPS - 1, None)]
)
def test_what_a_trial_tells(name: str, count: int, gain: bool | None) -> None:
    _, tried = trial(name, True)
    assert len(tried.sigmas) == count
    assert gain is None or (tried.gain > 1.05) == gain

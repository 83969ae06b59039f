"""Tries a sampler on four numbers, to see where it evaluates the model and whether it adds noise."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import create_model_options_clone
from comfy.model_sampling import CONST
from torch import Tensor

from tokenmerge.runtime.levels import levels_of
from tokenmerge.runtime.noise import depends_on_chance, drawn_as

# Errors of samplers that need more than the trial gives them.
_UNFIT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_POST = "sampler_post_cfg_function"
# Added to one answer, to see how far the sampler carries the change.
_SHIFT = 1e-2


@dataclass(frozen=True)
class Trial:
    """What a sampler did in its trial."""

    sigmas: list[float]  # one for each evaluation
    noisy: bool = False
    gain: float = 1.0  # the factor by which it magnifies errors of the model
    reads_guidance: bool = False  # whether it reads the two parts of guidance


class _Model:
    """Stands in for the model and records its inputs. If asked, it shifts its answer to one evaluation."""

    def __init__(self, guider: Any, known: int, shifted: int | None = None, shift: float = 0.0) -> None:
        self.inner_model = guider
        self.sigmas: list[float] = []
        self.inputs: list[Tensor] = []
        self.reads_guidance = False
        self._known = known  # functions that other nodes, not the sampler, run after guidance
        self._shifted = shifted
        self._shift = shift

    def __call__(self, x: Tensor, sigma: Tensor, **extra: Any) -> Tensor:
        options = extra.get("model_options") or {}
        denoised = 0.5 * x + (self._shift if len(self.sigmas) == self._shifted else 0.0)
        self.sigmas.append(float(sigma.flatten()[0]))
        self.inputs.append(x.clone())
        parts = {
            **dict.fromkeys(("denoised", "cond_denoised", "uncond_denoised"), denoised),
            **{"input": x, "sigma": sigma, "cond": [], "uncond": [], "cond_scale": 1.0},
            **{"model": self.inner_model, "model_options": options},
        }
        for function in options.get(_POST, [])[self._known :]:
            denoised = function(parts)
            self.reads_guidance = True
        return denoised


def try_sampler(sampler: Any, guider: Any, sigmas: Tensor, extra: dict[str, Any]) -> Trial:
    """Try a sampler. If that fails, assume that it adds no noise and evaluates every sigma once."""
    schedule = sigmas.detach().float().cpu()
    options = extra.get("model_options") or {}

    def run(model: _Model) -> Tensor:
        arguments = {**extra, "model_options": create_model_options_clone(options), "denoise_mask": None}
        start = torch.ones(1, 1, 2, 2) * schedule[0]
        samples = sampler.sampler_function(
            model, start, schedule.clone(), extra_args=arguments, callback=None, disable=True, **sampler.extra_options
        )
        return torch.cat([each.flatten() for each in (*model.inputs, samples)]).nan_to_num(0.0, 0.0, 0.0)

    known = len(options.get(_POST, []))
    try:
        noisy = depends_on_chance(lambda: run(_Model(guider, known)))
        plain, shifted = _Model(guider, known), _Model(guider, known, len(schedule) // 2, _SHIFT)
        for each in (plain, shifted):
            drawn_as(0, partial(run, each))
    except _UNFIT as error:
        logging.debug("tokenmerge: %s cannot be tried (%s)", sampler_name(sampler), error)
        return Trial(schedule[:-1].tolist())
    gain = 1.0 if noisy else _gain(plain, shifted, len(schedule) // 2)
    return Trial(plain.sigmas, noisy, gain, plain.reads_guidance)


def _gain(plain: _Model, shifted: _Model, number: int) -> float:
    """How much farther than Euler's method the sampler carries a change of the model's answer."""
    if number + 1 >= min(len(plain.inputs), len(shifted.inputs)) or not plain.sigmas[number]:
        return 1.0
    moved = float((shifted.inputs[number + 1] - plain.inputs[number + 1]).abs().max())
    euler = abs(_SHIFT * (1.0 - plain.sigmas[number + 1] / plain.sigmas[number]))
    return max(1.0, moved / euler) if euler else 1.0


def noise_levels(sigmas: list[float], sampling: Any) -> list[float]:
    """Ratios of noise to signal, from ComfyUI's sigmas."""
    return levels_of(sigmas, flows=isinstance(sampling, CONST), data=float(getattr(sampling, "sigma_data", 1.0)))


def sampler_name(sampler: Any) -> str:
    """The sampler's name, as users choose it."""
    name = getattr(getattr(sampler, "sampler_function", sampler), "__name__", type(sampler).__name__)
    return name.removeprefix("sample_")

"""What a sampler will do, seen by a trial on four numbers: where it evaluates the model, and whether it adds noise."""

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

# What a sampler fails with that wants more than the trial gives it.
_UNFIT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_POST = "sampler_post_cfg_function"
_SHIFT = 1e-2


@dataclass(frozen=True)
class Trial:
    """What a sampler did with a schedule."""

    sigmas: list[float]  # of every evaluation
    noisy: bool = False
    gain: float = 1.0  # by which it magnifies errors of the model
    reads_guidance: bool = False  # whether it looks at what guidance is made of


class _Model:
    """Stands in for the model: notes what it is given. It shifts the answer to one evaluation, if asked."""

    def __init__(self, guider: Any, known: int, shifted: int | None = None, shift: float = 0.0) -> None:
        self.inner_model = guider
        self.sigmas: list[float] = []
        self.given: list[Tensor] = []
        self.reads_guidance = False
        self._known = known  # functions of others that are called after guidance, which are not of the sampler
        self._shifted = shifted
        self._shift = shift

    def __call__(self, x: Tensor, sigma: Tensor, **extra: Any) -> Tensor:
        options = extra.get("model_options") or {}
        denoised = 0.5 * x + (self._shift if len(self.sigmas) == self._shifted else 0.0)
        self.sigmas.append(float(sigma.flatten()[0]))
        self.given.append(x.clone())
        told = {
            **dict.fromkeys(("denoised", "cond_denoised", "uncond_denoised"), denoised),
            **{"input": x, "sigma": sigma, "cond": [], "uncond": [], "cond_scale": 1.0},
            **{"model": self.inner_model, "model_options": options},
        }
        for function in options.get(_POST, [])[self._known :]:
            denoised = function(told)
            self.reads_guidance = True
        return denoised


def try_sampler(sampler: Any, guider: Any, sigmas: Tensor, extra: dict[str, Any]) -> Trial:
    """What a sampler will do. One that cannot be tried is taken to add no noise, and to evaluate every sigma once."""
    told = sigmas.detach().float().cpu()
    options = extra.get("model_options") or {}

    def run(model: _Model) -> Tensor:
        given = {**extra, "model_options": create_model_options_clone(options), "denoise_mask": None}
        start = torch.ones(1, 1, 2, 2) * told[0]
        samples = sampler.sampler_function(
            model, start, told.clone(), extra_args=given, callback=None, disable=True, **sampler.extra_options
        )
        return torch.cat([each.flatten() for each in (*model.given, samples)]).nan_to_num(0.0, 0.0, 0.0)

    known = len(options.get(_POST, []))
    try:
        noisy = depends_on_chance(lambda: run(_Model(guider, known)))
        plain, shifted = _Model(guider, known), _Model(guider, known, len(told) // 2, _SHIFT)
        for each in (plain, shifted):
            drawn_as(0, partial(run, each))
    except _UNFIT as error:
        logging.debug("tokenmerge: %s cannot be tried (%s)", sampler_name(sampler), error)
        return Trial(told[:-1].tolist())
    gain = 1.0 if noisy else _gain(plain, shifted, len(told) // 2)
    return Trial(plain.sigmas, noisy, gain, plain.reads_guidance)


def _gain(plain: _Model, shifted: _Model, number: int) -> float:
    """How much farther than Euler's method a solver goes with a change of the model's answer."""
    if number + 1 >= min(len(plain.given), len(shifted.given)) or not plain.sigmas[number]:
        return 1.0
    moved = float((shifted.given[number + 1] - plain.given[number + 1]).abs().max())
    euler = abs(_SHIFT * (1.0 - plain.sigmas[number + 1] / plain.sigmas[number]))
    return max(1.0, moved / euler) if euler else 1.0


def noise_levels(sigmas: list[float], sampling: Any) -> list[float]:
    """Of noise to signal, from ComfyUI's sigmas."""
    return levels_of(sigmas, flows=isinstance(sampling, CONST), data=float(getattr(sampling, "sigma_data", 1.0)))


def sampler_name(sampler: Any) -> str:
    """As people choose it."""
    name = getattr(getattr(sampler, "sampler_function", sampler), "__name__", type(sampler).__name__)
    return name.removeprefix("sample_")

"""The clean prediction: the picture without noise that a denoiser's output stands for, by what its scheduler expects.

A scheduler is given a sample, `signal * clean + noise * chance`, and an output that is linear in both. Which mix of the
two it takes for the clean picture is known for every kind of output; whether a scheduler does so is tried. With outputs
that all stand for one picture, and chance that is always 0, every step must keep that picture, and no step may add to
the noise that was there at first. None may be left in the end.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..families.calls import DenoiserCall
from .levels import sample_levels
from .noise import tried

# Signal and noise of a sample, by the noise to signal `r` of its step: they make 1 together as a flow's do, or as their
# squares do, or signal is 1 throughout.
_SHARES = {
    "flow": lambda r: 1.0 / (1.0 + r),
    "preserved": lambda r: 1.0 / math.hypot(1.0, r),
    "exploding": lambda r: 1.0,
}
_KINDS = ("epsilon", "v_prediction", "sample", "flow_prediction")
_CLEAN = 0.5  # of the picture on trial
# Levels are bounded, so that a trial is off by little.
_CLOSE = 0.02
# Some schedules end just above no noise, of which a picture of one value keeps that much.
_LEFT = 0.1


class Mix(NamedTuple):
    """The clean picture, as so much of a sample and so much of an output."""

    sample: float
    output: float

    def clean(self, sample: Tensor, output: Tensor) -> Tensor:
        return self.sample * sample.float() + self.output * output.float()

    def output_for(self, clean: Tensor, sample: Tensor) -> Tensor:
        """The output that stands for a clean picture."""
        return (clean - self.sample * sample.float()) / self.output


class Form(NamedTuple):
    """How a scheduler's samples and outputs are made."""

    shares: str
    kind: str
    scale: float = 1.0  # of outputs

    def signal(self, level: float) -> float:
        return _SHARES[self.shares](level)

    def mix(self, level: float) -> Mix:
        """At a step of a level of noise to signal."""
        signal = self.signal(level)
        whole = 1.0 / math.hypot(1.0, level)
        if self.kind == "epsilon":
            return Mix(1.0 / signal, -level)
        if self.kind == "v_prediction":
            return Mix(whole**2 / signal, -self.scale * level * whole)
        if self.kind == "sample":
            return Mix(0.0, 1.0)
        return Mix(1.0, -self.scale * level * signal)


# Of a host that is given clean pictures.
PICTURES = Form("exploding", "sample")


class Predictor(Protocol):
    """Keeps what full steps give to a scheduler, and gives it that of held ones."""

    def follow(self, scheduler: Any) -> None:
        """See how samples of a scheduler are made; raises where that cannot be told."""

    def begin(self, form: Form, whole: DenoiserCall) -> None:
        """A host that tells of whole steps begins one: the form of its outputs, and what stands for all its calls."""

    def step(self, output: Tensor, sample: Tensor, level: float) -> Tensor:
        """The output to step with."""


def form_of(scheduler: Any) -> Form | None:
    """How a scheduler's samples and outputs are made; None if no form that is known fits it."""
    config = getattr(scheduler, "config", None) or {}
    kind = config.get("prediction_type", "flow_prediction")
    scale, shares = 1.0, ["preserved", "exploding"]
    if hasattr(scheduler, "precondition_outputs"):
        scale = config["sigma_data"] * (-1.0 if kind == "epsilon" else 1.0)
        kind = "v_prediction"
    elif kind == "flow_prediction":
        shares = ["flow"]
        # Times and noise rise together, and outputs lead to the picture.
        scale = -1.0 if config.get("invert_sigmas") else 1.0
    elif kind == "trigflow":
        kind = "v_prediction"
    forms = (Form(each, kind, scale) for each in shares if kind in _KINDS)
    return next((form for form in forms if _fits(form, scheduler)), None)


def _fits(form: Form, scheduler: Any) -> bool:
    """Whether a picture in two pixels comes out of a short run as it should: one of signal alone, and one of noise."""
    levels: list[float] = []

    def start(copied: Any) -> Tensor:
        levels[:] = sample_levels(copied) or []
        if not levels:
            raise ValueError("no levels of noise")
        signal = form.signal(levels[0])
        return torch.tensor([_CLEAN * signal, levels[0] * signal], device="cpu").view(1, 1, 1, 2)

    def model(copied: Any, number: int, sample: Tensor) -> Tensor:
        return form.mix(levels[number]).output_for(clean, sample)

    clean = torch.tensor([_CLEAN, 0.0], device="cpu").view(1, 1, 1, 2)
    trail = tried(scheduler, start, model, 0)
    if trail is None:
        return False
    left = 1.0
    for level, sample in zip(levels[1:], trail[1:], strict=False):
        signal = form.signal(level)
        picture, noise = sample.flatten().tolist()
        if abs(picture - signal * _CLEAN) > _CLOSE or not -_CLOSE <= noise / (level * signal) <= left + _CLOSE:
            return False
        left = noise / (level * signal)
    # Solvers of second order have more steps than those of the trial.
    picture, noise = trail[-1].flatten().tolist()
    return len(trail) <= len(levels) or (abs(picture - _CLEAN) <= _LEFT and abs(noise) <= _LEFT)

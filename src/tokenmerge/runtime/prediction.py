"""The clean prediction: the picture without noise that a denoiser's output implies under its scheduler.

A sample is `signal * clean + noise * random`, and outputs are linear in sample and clean picture. So the clean picture
is a mix of sample and output; each kind of output has a known one. Whether a scheduler follows such a form is tried on
a copy of it: with outputs that always imply the same picture, and random numbers of 0, every step must keep that
picture. No step may add to the noise of the first sample, and none may be left at the end.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..families.calls import DenoiserCall
from .levels import sample_levels
from .noise import tried

# The signal in a sample by its noise-to-signal ratio `r`. Noise is `r * signal`. Signal and noise add up to 1 (flow),
# their squares do (variance preserved), or signal is always 1 (variance exploding).
_SHARES = {
    "flow": lambda r: 1.0 / (1.0 + r),
    "preserved": lambda r: 1.0 / math.hypot(1.0, r),
    "exploding": lambda r: 1.0,
}
_KINDS = ("epsilon", "v_prediction", "sample", "flow_prediction")
_CLEAN = 0.5  # the value of the trial's picture
# Tolerated error of a trial: levels are bounded, which costs a little accuracy.
_CLOSE = 0.02
# Tolerated error at the end: some schedules stop just above no noise.
_LEFT = 0.1


class Mix(NamedTuple):
    """The clean picture as a mix: sample * (the sample) + output * (the output)."""

    sample: float
    output: float

    def clean(self, sample: Tensor, output: Tensor) -> Tensor:
        return self.sample * sample.float() + self.output * output.float()

    def output_for(self, clean: Tensor, sample: Tensor) -> Tensor:
        """The output that implies a clean picture: the inverse of `clean`."""
        return (clean - self.sample * sample.float()) / self.output


class Form(NamedTuple):
    """How a scheduler's samples and outputs are made of picture and noise."""

    shares: str  # key of _SHARES
    kind: str  # of outputs, one of _KINDS
    scale: float = 1.0  # factor of outputs

    def signal(self, level: float) -> float:
        return _SHARES[self.shares](level)

    def mix(self, level: float) -> Mix:
        """The clean picture at a step. level: noise to signal."""
        signal = self.signal(level)
        if self.kind == "epsilon":
            return Mix(1.0 / signal, -level)
        if self.kind == "v_prediction":
            # v is defined for samples of preserved variance, with this signal.
            preserved = _SHARES["preserved"](level)
            return Mix(preserved**2 / signal, -self.scale * level * preserved)
        if self.kind == "sample":
            return Mix(0.0, 1.0)
        return Mix(1.0, -self.scale * level * signal)


# The form of a host whose model returns clean pictures.
PICTURES = Form("exploding", "sample")


class Predictor(Protocol):
    """Keeps the clean prediction of full steps, and makes the scheduler's input of held steps from it."""

    def follow(self, scheduler: Any) -> None:
        """Find the form of a scheduler; raises if there is none."""

    def begin(self, form: Form, whole: DenoiserCall) -> None:
        """A host without scheduler begins an evaluation. form: of its outputs. whole: stands for all of its calls."""

    def step(self, output: Tensor, sample: Tensor, level: float) -> Tensor:
        """The output to step with. level: noise to signal of `sample`."""


def form_of(scheduler: Any) -> Form | None:
    """The form of a scheduler's samples and outputs, found by trial; None if no known form fits."""
    config = getattr(scheduler, "config", None) or {}
    kind = config.get("prediction_type", "flow_prediction")
    scale, shares = 1.0, ["preserved", "exploding"]
    if hasattr(scheduler, "precondition_outputs"):
        scale = config["sigma_data"] * (-1.0 if kind == "epsilon" else 1.0)
        kind = "v_prediction"
    elif kind == "flow_prediction":
        shares = ["flow"]
        # With inverted sigmas, outputs point from noise to the picture.
        scale = -1.0 if config.get("invert_sigmas") else 1.0
    elif kind == "trigflow":
        kind = "v_prediction"
    forms = (Form(each, kind, scale) for each in shares if kind in _KINDS)
    return next((form for form in forms if _fits(form, scheduler)), None)


def _fits(form: Form, scheduler: Any) -> bool:
    """Whether a short run of the scheduler treats two pixels by the form, one of pure signal, one of pure noise."""
    levels: list[float] = []

    def start(copied: Any) -> Tensor:
        levels[:] = sample_levels(copied) or []
        if not levels:
            raise ValueError("no noise levels")
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
    # A trial of a second-order solver stops before its last timestep, and says nothing about the end.
    picture, noise = trail[-1].flatten().tolist()
    return len(trail) <= len(levels) or (abs(picture - _CLEAN) <= _LEFT and abs(noise) <= _LEFT)

"""Whether a scheduler adds noise at its steps. What is held knows nothing of it.

A list of names would miss those that do so by a setting, such as DPM-Solver's SDE form, and those of others. So a copy
of the scheduler is tried: it adds noise if other random numbers lead to another end.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Some add noise in the middle of a schedule only; consistency models may refuse more than two steps.
_STEPS = (6, 2)
# What a scheduler fails with that lacks a part of diffusers' interface, or refuses so many steps.
_UNFIT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def adds_noise(scheduler: Any) -> bool:
    """Whether steps of a scheduler depend on chance. One that cannot be tried is taken to add none."""
    for steps in _STEPS:
        try:
            first, second = (_end_of_run(scheduler, steps, drawn) for drawn in (0.0, 1.0))
        except _UNFIT:
            continue
        return not torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    return False


class _Drawing(TorchDispatchMode):
    """Every random number is the same, also from a generator that the scheduler itself has seeded."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor) and result.is_floating_point():
            result.fill_(self._number)
        return result


def _end_of_run(scheduler: Any, steps: int, drawn: float) -> Tensor:
    settings = scheduler.config
    sample = torch.ones(1, 1, 2, 2, device="cpu")
    # Where a model also predicts the variance it gives out twice as many channels.
    channels = 2 if str(settings.get("variance_type")).startswith("learned") else 1
    # Seeds are the user's, and must not be touched.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _quiet(), _Drawing(drawn):
        copied = type(scheduler).from_config(settings)
        copied.set_timesteps(steps, **({"mu": 1.0} if settings.get("use_dynamic_shifting") else {}))
        # There may be one more, after the last step.
        for timestep in copied.timesteps[:steps]:
            predicted = copied.scale_model_input(sample, timestep) if hasattr(copied, "scale_model_input") else sample
            given = {"model_output": predicted.repeat(1, channels, 1, 1), "timestep": timestep, "sample": sample}
            sample = copied.step(**{**_required(copied), **given}, return_dict=False)[0]
    return sample


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings: the user has seen them already, or will."""
    log = logging.getLogger("diffusers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _required(scheduler: Any) -> dict[str, None]:
    """What a step must be given, such as what the step before gave out: nothing, as at the first step."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    return dict.fromkeys(each.name for each in parameters if each.default is each.empty)

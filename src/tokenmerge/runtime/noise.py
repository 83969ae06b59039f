"""Tries of a scheduler: whether it adds noise at its steps, of which held blocks know nothing.

A list of names would miss those that do so by a setting, such as DPM-Solver's SDE form, and those of others. So a copy
of the scheduler is tried: it adds noise if other random numbers lead elsewhere.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Some add noise in the middle of a schedule only; consistency models may refuse more than two steps.
_STEPS = (6, 2)
# What a scheduler fails with that lacks a part of diffusers' interface, or refuses so many steps.
_UNFIT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


# What a scheduler is told for the one on trial, its timesteps set, at the step of a number, from a sample.
Model = Callable[[Any, int, Tensor], Tensor]


def adds_noise(scheduler: Any) -> bool:
    """Whether steps of a scheduler depend on chance. One that cannot be tried is taken to add none."""
    start = torch.ones(1, 1, 2, 2, device="cpu")
    one, other = (tried(scheduler, lambda _: start, _scaled, drawn) for drawn in (0, 1))
    return one is not None and other is not None and not torch.equal(torch.cat(one), torch.cat(other))


def tried(scheduler: Any, start: Callable[[Any], Tensor], model: Model, drawn: int) -> list[Tensor] | None:
    """The samples of a short run of a copy of a scheduler, from the first; None if it cannot be tried.

    start: the first sample, by the copy with its timesteps set. drawn: what every random number is.
    """
    for steps, filled in product(_STEPS, (False, True)):
        try:
            return _trail(scheduler, steps, filled, start, model, drawn)
        except _UNFIT:
            continue
    return None


def _scaled(scheduler: Any, number: int, sample: Tensor) -> Tensor:
    """The sample itself, as a model is given it."""
    scales = hasattr(scheduler, "scale_model_input")
    return scheduler.scale_model_input(sample, scheduler.timesteps[number]) if scales else sample


def depends_on_chance(trail: Callable[[], Tensor]) -> bool:
    """Whether a run of steps leads elsewhere with other random numbers."""
    one, other = (drawn_as(number, trail) for number in (0, 1))
    return not torch.equal(one, other)


def drawn_as(number: int, trail: Callable[[], Tensor]) -> Tensor:
    """Where steps lead when every random number is this one."""
    # Seeds are the user's, and must not be touched.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _quiet(), _Drawing(number):
        return trail()


class _Drawing(TorchDispatchMode):
    """Every random number is the same, also from a generator that the scheduler itself has seeded."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor):
            result.fill_(self._number)
        return result


def _trail(
    scheduler: Any, steps: int, filled: bool, start: Callable[[Any], Tensor], model: Model, drawn: int
) -> list[Tensor]:
    """The samples of a run, and not its end alone: a scheduler may put a picture in place of what it had noised.

    filled: whether steps are given a picture for all they must be given, and a time for each sample: few ask for that.
    """
    settings = _own_settings(scheduler)
    # Where a model also predicts the variance it gives out twice as many channels.
    channels = 2 if str(settings.get("variance_type")).startswith("learned") else 1
    # Seeds are the user's, and must not be touched.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _quiet():
        copied = type(scheduler).from_config(scheduler.config)
        # Not by its own settings alone: one may make its schedule with another scheduler.
        takes = inspect.signature(copied.set_timesteps).parameters
        shifts = scheduler.config.get("use_dynamic_shifting") and "mu" in takes
        copied.set_timesteps(steps, **({"mu": 1.0} if shifts else {}))
        needed = _required(copied.step)
        trail = [start(copied)]
        with _Drawing(drawn):
            # There may be one more, after the last step.
            for number, timestep in enumerate(copied.timesteps[:steps]):
                sample = trail[-1]
                predicted = model(copied, number, sample)
                given = {
                    # Nothing, as at the first step, in place of what the step before gave out.
                    **dict.fromkeys(needed, torch.ones_like(sample) if filled else None),
                    "model_output": predicted.repeat(1, channels, 1, 1),
                    "timestep": timestep.expand(1) if filled else timestep,
                    "sample": sample,
                }
                # Where all is noise, no picture can be told from a prediction of it; later steps have to show.
                trail.append(copied.step(**given, return_dict=False)[0].nan_to_num(0.0, 0.0, 0.0))
    return trail


def _own_settings(scheduler: Any) -> dict[str, Any]:
    """Without those of the scheduler it was made from, which are kept with its own and mean nothing to it."""
    # Of all its classes: one of somebody's own may only pass its settings on.
    own = {name for each in type(scheduler).__mro__ for name in inspect.signature(each).parameters}
    return {name: value for name, value in scheduler.config.items() if name in own}


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


def _required(method: Any) -> list[str]:
    parameters = inspect.signature(method).parameters.values()
    return [each.name for each in parameters if each.default is each.empty]

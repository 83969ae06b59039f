"""Try a scheduler on a few numbers: whether it adds noise at its steps, which held blocks would not see.

A list of names would miss settings, such as DPM-Solver's SDE form, and third-party schedulers. So we run a copy of the
scheduler twice, with different random numbers. If the results differ, it adds noise.
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

# Six, as some schedulers add noise in the middle of a schedule only; two, the most that some consistency models take.
_STEPS = (6, 2)
# What a scheduler raises that lacks a part of diffusers' interface, or refuses this number of steps.
_UNFIT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


# Stands for the model: the output for the copied scheduler (timesteps set), the number of the step, and the sample.
Model = Callable[[Any, int, Tensor], Tensor]


def adds_noise(scheduler: Any) -> bool:
    """Whether the steps of a scheduler depend on random numbers. One that cannot be tried counts as adding none."""
    start = torch.ones(1, 1, 2, 2, device="cpu")
    one, other = (tried(scheduler, lambda _: start, _scaled, drawn) for drawn in (0, 1))
    return one is not None and other is not None and not torch.equal(torch.cat(one), torch.cat(other))


def tried(scheduler: Any, start: Callable[[Any], Tensor], model: Model, drawn: int) -> list[Tensor] | None:
    """All samples of a short run of a copy of a scheduler; None if it cannot be tried.

    start: makes the first sample, given the copy with its timesteps set. drawn: the value of every random number.
    """
    for steps, filled in product(_STEPS, (False, True)):
        try:
            return _trail(scheduler, steps, filled, start, model, drawn)
        except _UNFIT:
            continue
    return None


def _scaled(scheduler: Any, number: int, sample: Tensor) -> Tensor:
    """A model that returns its input: the sample, scaled for the model."""
    scales = hasattr(scheduler, "scale_model_input")
    return scheduler.scale_model_input(sample, scheduler.timesteps[number]) if scales else sample


def depends_on_chance(trail: Callable[[], Tensor]) -> bool:
    """Whether a run of steps ends elsewhere with other random numbers."""
    one, other = (drawn_as(number, trail) for number in (0, 1))
    return not torch.equal(one, other)


def drawn_as(number: int, trail: Callable[[], Tensor]) -> Tensor:
    """The result of `trail` when every random number is `number`."""
    # The global random state belongs to the user.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _quiet(), _Drawing(number):
        return trail()


class _Drawing(TorchDispatchMode):
    """Makes every random number the same, even if the scheduler draws it from a generator of its own."""

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
    """All samples of a run. The last alone would not do: a scheduler may replace what it has noised by a picture.

    filled: whether to fill further required arguments of `step` with ones, and to give a timestep per sample; few
    schedulers need that.
    """
    settings = _own_settings(scheduler)
    # A model that also predicts the variance has twice as many output channels.
    channels = 2 if str(settings.get("variance_type")).startswith("learned") else 1
    # The global random state belongs to the user.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _quiet():
        copied = type(scheduler).from_config(scheduler.config)
        # `scheduler.config` and not `settings`: a scheduler may build its schedule with another scheduler.
        takes = inspect.signature(copied.set_timesteps).parameters
        shifts = scheduler.config.get("use_dynamic_shifting") and "mu" in takes
        copied.set_timesteps(steps, **({"mu": 1.0} if shifts else {}))
        needed = _required(copied.step)
        trail = [start(copied)]
        with _Drawing(drawn):
            # One more timestep may follow the last step.
            for number, timestep in enumerate(copied.timesteps[:steps]):
                sample = trail[-1]
                predicted = model(copied, number, sample)
                given = {
                    # None, as at a first step, for arguments that continue from the step before.
                    **dict.fromkeys(needed, torch.ones_like(sample) if filled else None),
                    "model_output": predicted.repeat(1, channels, 1, 1),
                    "timestep": timestep.expand(1) if filled else timestep,
                    "sample": sample,
                }
                # In pure noise, a noise prediction implies no finite picture; later steps decide.
                trail.append(copied.step(**given, return_dict=False)[0].nan_to_num(0.0, 0.0, 0.0))
    return trail


def _own_settings(scheduler: Any) -> dict[str, Any]:
    """The settings that a scheduler reads. Its config also keeps those of the scheduler that it was made from."""
    # Base classes count, too: a subclass may just pass settings on.
    own = {name for each in type(scheduler).__mro__ for name in inspect.signature(each).parameters}
    return {name: value for name, value in scheduler.config.items() if name in own}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings: the user has seen them already, or will when the pipeline runs."""
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

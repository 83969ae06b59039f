"""Whether a scheduler adds noise at its steps. What is held or remembered from an anchor knows nothing of it.

A list of names would miss those that do so by a setting, such as DPM-Solver's SDE form, and those of others. So a copy
of the scheduler is tried: it adds noise if two runs from the same sample end differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Some add noise in the middle of a schedule only.
_STEPS = 6


def adds_noise(scheduler: Any) -> bool:
    """Whether steps of a scheduler depend on chance. One that cannot be tried is taken to add none."""
    try:
        # Seeds are the user's, and must not be touched.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return not torch.equal(_end_of_run(scheduler, seed=0), _end_of_run(scheduler, seed=1))
    except Exception:
        # Whatever a scheduler that is none of diffusers' fails with.
        return False


def _end_of_run(scheduler: Any, seed: int) -> Tensor:
    # Not `torch.manual_seed`, which seeds every device.
    torch.default_generator.manual_seed(seed)
    settings = scheduler.config
    copied = type(scheduler).from_config(settings)
    copied.set_timesteps(_STEPS, **({"mu": 1.0} if settings.get("use_dynamic_shifting") else {}))
    sample = torch.ones(1, 1, 2, 2, device="cpu")
    # Where a model also predicts the variance it gives out twice as many channels.
    channels = 2 if str(settings.get("variance_type")).startswith("learned") else 1
    for timestep in copied.timesteps:
        predicted = copied.scale_model_input(sample, timestep) if hasattr(copied, "scale_model_input") else sample
        sample = copied.step(predicted.repeat(1, channels, 1, 1), timestep, sample).prev_sample
    return sample

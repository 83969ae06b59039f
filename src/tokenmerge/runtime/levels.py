"""Noise levels: the noise-to-signal ratio at every step of a schedule, and where it places the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Bounds of noise to signal. A schedule may begin without signal (zero terminal SNR, flows) and end without noise.
_LEAST, _MOST = 1e-4, 1e4
# Below the first level a picture becomes visible. Above the second, where some schedules begin, all is noise.
_VISIBLE, _PURE_NOISE = 15.0, 100.0
# Defaults for an unknown schedule: the number of steps, and the distance between two.
_USUAL_STEPS, _USUAL_DISTANCE = 30, 0.1
# Coefficient of the newest output in an Adams-Bashforth step, by order.
_GAINS = {1: 1.0, 2: 3 / 2, 3: 23 / 12, 4: 55 / 24}


class Place(NamedTuple):
    """Where a step lies in its schedule. `r` is its noise-to-signal ratio, `way` the function `_way` of it."""

    number: int
    at: float  # -sqrt(r), the coordinate in which residuals are extrapolated; it rises along a picture
    share: float | None = None  # of the steps, how many are done: number / total, if the total is known
    cleared: float | None = None  # of the noise, how much is gone: 1 - way(r) / way(15), at least 0
    weight: float = 1.0 / _USUAL_STEPS  # how far the step moves the picture: gain * (way(r) - way(r of the next step))
    curvature: float = 1.0  # how much residuals are expected to bend, relative to their size: 1 / sqrt(r)
    last: bool = False


def place_at(number: int, total: int | None, levels: Sequence[float], gain: float = 1.0) -> Place:
    """Where a step lies.

    levels: noise to signal of every step; if unknown, empty: then steps lie at even distances and weigh the same.
    gain: how much the solver magnifies errors (`error_gain`).

    Residuals run straightest over the square root of the level, and bend more as it falls (docs/holding.md).
    """
    share = number / total if total else None
    last = total is not None and number >= total - 1
    if number >= len(levels):
        return Place(number, _USUAL_DISTANCE * number, share, share, last=last)
    before, now, after = (_way(levels, max(0, each)) for each in (number - 1, number, number + 1))
    # Second-order solvers visit every level twice, but move the picture once.
    twice = number > 0 and levels[number] in (levels[number - 1], *levels[number + 1 : number + 2])
    weight = gain * abs((before - after) / 2 if twice else now - after)
    cleared = 1.0 - min(now / _way([_VISIBLE], 0), 1.0)
    root = math.sqrt(levels[number])
    return Place(number, -root, share, cleared, weight, 1.0 / root, last)


def _way(levels: Sequence[float], number: int) -> float:
    """How far the picture still has to go at a step: sqrt(1 + r) - 1, with r bounded; 0 after the last step.

    That is proportional to the noise in the end, and to its root at first.
    """
    return math.sqrt(1.0 + min(levels[number], _PURE_NOISE)) - 1.0 if number < len(levels) else 0.0


def even_levels(total: int) -> list[float]:
    """Levels of a flow whose noise falls evenly from step to step."""
    return [share / max(1.0 - share, _LEAST) for share in (1.0 - number / total for number in range(total))]


def noise_levels(scheduler: Any) -> list[float] | None:
    """Noise to signal at every timestep; None if unknown."""
    timesteps, sigmas = getattr(scheduler, "timesteps", None), getattr(scheduler, "sigmas", None)
    if timesteps is None or not len(timesteps):
        return None
    config = _config(scheduler)
    if config.get("prediction_type") == "trigflow":
        # Its timesteps are angles between signal and noise. The last one ends the schedule and is no step.
        return _bounded(math.tan(min(angle, math.atan(_MOST))) for angle in timesteps.tolist())
    if not isinstance(sigmas, Tensor) or len(sigmas) < len(timesteps):
        return _of_alphas(scheduler)
    # One more sigma may follow, which ends the schedule and is no step.
    known = sigmas.tolist()[: len(timesteps)]
    flows = _flows(known, config)
    noise = [1.0 - sigma for sigma in known] if flows and config.get("invert_sigmas") else known
    return levels_of(noise, flows=flows, data=config.get("sigma_data", 1.0))


def sample_levels(scheduler: Any) -> list[float] | None:
    """Noise to signal of the sample that the model sees at every timestep; None if unknown.

    These need not fall: some second-order solvers evaluate the model between two sigmas, or beyond the next one.
    """
    if hasattr(scheduler, "sigmas_interpol") or hasattr(scheduler, "mid_point_sigma"):
        return _of_alphas(scheduler)
    return noise_levels(scheduler)


def planned_levels(scheduler: Any, steps: int) -> list[float] | None:
    """Noise to signal of a schedule that is not set yet; None if setting it takes more than the number of steps."""
    if not hasattr(scheduler, "from_config"):
        return None
    trial = type(scheduler).from_config(scheduler.config)
    try:
        trial.set_timesteps(steps)
    except (TypeError, ValueError):
        return None
    # Second-order solvers have more timesteps than steps.
    return noise_levels(trial) if len(trial.timesteps) == steps else None


def levels_of(sigmas: Sequence[float], *, flows: bool, data: float = 1.0) -> list[float]:
    """Noise to signal of sigmas. A flow mixes `sigma` of noise with `1 - sigma` of signal; other models add `sigma` of
    noise to a signal of standard deviation `data`."""
    return _bounded(sigma / max(1.0 - sigma, _LEAST) if flows else sigma / data for sigma in sigmas)


def error_gain(scheduler: Any) -> float:
    """How much a solver magnifies the error of an output. Higher orders step by several outputs, mostly the newest."""
    step = inspect.signature(type(scheduler).step).parameters if hasattr(scheduler, "step") else {}
    order = _config(scheduler).get("solver_order") or (step["order"].default if "order" in step else 1)
    if hasattr(scheduler, "ets"):
        # PNDM and its kin store the outputs that they step by, and do not name their order.
        order = max(_GAINS)
    return _GAINS[min(max(order, 1), max(_GAINS))]


def output_length(scheduler: Any) -> float:
    """The norm of a model's output over that of noise: sqrt(2) for a flow: noise minus a picture of like norm."""
    sigmas = getattr(scheduler, "sigmas", None)
    if not isinstance(sigmas, Tensor) or not len(sigmas):
        return 1.0
    return math.sqrt(2.0) if _flows(sigmas.tolist(), _config(scheduler)) else 1.0


def clips(scheduler: Any) -> bool:
    """Whether a solver clips clean predictions, as pixel models need."""
    config = _config(scheduler)
    return bool(config.get("clip_sample") or config.get("thresholding"))


def _flows(sigmas: list[float], config: Any) -> bool:
    return bool(config.get("prediction_type", "flow_prediction") == "flow_prediction" and max(sigmas) <= 1.0)


def _of_alphas(scheduler: Any) -> list[float] | None:
    """The training noise of every timestep. Between two whole timesteps its logarithm is linear, as in schedulers."""
    timesteps, alphas = scheduler.timesteps, getattr(scheduler, "alphas_cumprod", None)
    if not isinstance(alphas, Tensor) or not isinstance(timesteps, Tensor):
        return None
    places = timesteps.double().cpu()
    if float(places.min()) < 0 or float(places.max()) > len(alphas) - 1:
        return None
    signal = alphas.cpu().double().clamp(min=_MOST**-2)
    logarithm = ((1.0 - signal) / signal).log() / 2
    below, above = logarithm[places.floor().long()], logarithm[places.ceil().long()]
    return _bounded(below.lerp(above, places.frac()).exp().tolist())


def _bounded(ratios: Iterable[float]) -> list[float]:
    return [min(max(ratio, _LEAST), _MOST) for ratio in ratios]


def _config(scheduler: Any) -> Any:
    return getattr(scheduler, "config", None) or {}

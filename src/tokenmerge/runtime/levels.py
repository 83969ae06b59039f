"""How noisy every step of a schedule is, and where that places it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Of noise to signal: at first there may be no signal (zero terminal SNR, flows), and in the end no noise.
_LEAST, _MOST = 1e-4, 1e4
# Below the first a picture shows; above the second there is noise alone, where some schedules begin.
_SHOWS, _ALONE = 15.0, 100.0
# Of a schedule that is not known: its steps, and how far they lie apart.
_USUAL_STEPS, _USUAL_DISTANCE = 30, 0.1
# What an Adams-Bashforth step makes of the newest output, by its order.
_GAINS = {1: 1.0, 2: 3 / 2, 3: 23 / 12, 4: 55 / 24}


class Place(NamedTuple):
    """Where a step lies in its schedule."""

    number: int
    at: float  # what residuals are extrapolated in; it rises along a picture
    share: float | None = None  # of steps that lie behind, if it is known how many there are
    cleared: float | None = None  # the same of noise
    weight: float = 1.0 / _USUAL_STEPS  # how far the step moves the picture
    bends: float = 1.0  # how much residuals bend here, as a rule
    last: bool = False


def place_at(number: int, total: int | None, levels: Sequence[float], gain: float = 1.0) -> Place:
    """Where a step lies. levels: of noise to signal, of every step; where they are not known, steps are counted. gain:
    by which a solver magnifies errors.

    Residuals run straightest over the square root of the level, and bend more as that falls (docs/holding.md).
    """
    share = number / total if total else None
    last = total is not None and number >= total - 1
    if number >= len(levels):
        return Place(number, _USUAL_DISTANCE * number, share, share, last=last)
    before, now, after = (_way(levels, max(0, each)) for each in (number - 1, number, number + 1))
    # Solvers of second order have every level twice, and move once for both.
    twice = number > 0 and levels[number] in (levels[number - 1], *levels[number + 1 : number + 2])
    weight = gain * abs((before - after) / 2 if twice else now - after)
    cleared = 1.0 - min(now / _way([_SHOWS], 0), 1.0)
    root = math.sqrt(levels[number])
    return Place(number, -root, share, cleared, weight, 1.0 / root, last)


def _way(levels: Sequence[float], number: int) -> float:
    """How far the picture at a step still has to go: by its noise in the end, by less while there is much of it."""
    return math.sqrt(1.0 + min(levels[number], _ALONE)) - 1.0 if number < len(levels) else 0.0


def even_levels(total: int) -> list[float]:
    """Of a flow whose noise falls by as much at every step."""
    return [share / max(1.0 - share, _LEAST) for share in (1.0 - number / total for number in range(total))]


def noise_levels(scheduler: Any) -> list[float] | None:
    """The ratio of noise to signal at every timestep; None where a scheduler does not tell."""
    timesteps, sigmas = getattr(scheduler, "timesteps", None), getattr(scheduler, "sigmas", None)
    ratios: list[float] | None
    if timesteps is None or not len(timesteps):
        return None
    if _config(scheduler).get("prediction_type") == "trigflow":
        # Its times are angles between signal and noise. The last is an end, and no step.
        return [max(math.tan(min(angle, math.atan(_MOST))), _LEAST) for angle in timesteps.tolist()]
    if isinstance(sigmas, Tensor) and len(sigmas) >= len(timesteps):
        known = sigmas.tolist()[: len(timesteps)]
        ratios = _of_sigmas(known, _config(scheduler))
    else:
        ratios = _of_alphas(timesteps, getattr(scheduler, "alphas_cumprod", None))
    return None if ratios is None else [min(max(ratio, _LEAST), _MOST) for ratio in ratios]


def sample_levels(scheduler: Any) -> list[float] | None:
    """The same of the samples that a model is given, which need not fall: some solvers of second order look ahead, to
    between two of their sigmas, and beyond the next one."""
    if hasattr(scheduler, "sigmas_interpol") or hasattr(scheduler, "mid_point_sigma"):
        ratios = _of_alphas(scheduler.timesteps, scheduler.alphas_cumprod)
        return None if ratios is None else [min(max(ratio, _LEAST), _MOST) for ratio in ratios]
    return noise_levels(scheduler)


def error_gain(scheduler: Any) -> float:
    """By how much a solver magnifies errors. One of higher order steps by its last outputs: most by the newest."""
    step = inspect.signature(type(scheduler).step).parameters if hasattr(scheduler, "step") else {}
    order = _config(scheduler).get("solver_order") or (step["order"].default if "order" in step else 1)
    if hasattr(scheduler, "ets"):
        # PNDM and its kin, which keep the outputs that they step by, and do not name their order.
        order = max(_GAINS)
    return _GAINS[min(max(order, 1), max(_GAINS))]


def output_length(scheduler: Any) -> float:
    """How long a model's output is, over noise alone: that of a flow is noise without the picture, which are alike."""
    sigmas, config = getattr(scheduler, "sigmas", None), getattr(scheduler, "config", None) or {}
    if not isinstance(sigmas, Tensor) or not len(sigmas):
        return 1.0
    return math.sqrt(2.0) if _flows(sigmas.tolist(), config) else 1.0


def clips(scheduler: Any) -> bool:
    """Whether a solver clips clean predictions, as for models of pixels."""
    config = _config(scheduler)
    return bool(config.get("clip_sample") or config.get("thresholding"))


def planned_levels(scheduler: Any, steps: int) -> list[float] | None:
    """The same of a schedule that is yet to be set; None where that takes more than the number of steps."""
    if not hasattr(scheduler, "from_config"):
        return None
    trial = type(scheduler).from_config(scheduler.config)
    try:
        trial.set_timesteps(steps)
    except (TypeError, ValueError):
        return None
    # Solvers of second order have more timesteps than steps.
    return noise_levels(trial) if len(trial.timesteps) == steps else None


def _of_sigmas(sigmas: list[float], config: Any) -> list[float]:
    """A flow mixes `sigma` of noise with the rest of signal; others add `sigma` of noise to a signal of 1."""
    flows = _flows(sigmas, config)
    noise = [1.0 - sigma for sigma in sigmas] if flows and config.get("invert_sigmas") else sigmas
    return levels_of(noise, flows=flows, data=config.get("sigma_data", 1.0))


def levels_of(sigmas: Sequence[float], *, flows: bool, data: float = 1.0) -> list[float]:
    """The same of the sigmas of any host."""
    ratios = [sigma / max(1.0 - sigma, _LEAST) if flows else sigma / data for sigma in sigmas]
    return [min(max(ratio, _LEAST), _MOST) for ratio in ratios]


def _flows(sigmas: list[float], config: Any) -> bool:
    return bool(config.get("prediction_type", "flow_prediction") == "flow_prediction" and max(sigmas) <= 1.0)


def _of_alphas(timesteps: Any, alphas: Any) -> list[float] | None:
    """The noise that a model was trained with at each of its timesteps. Between two of them its logarithm is even, as
    schedulers take it."""
    if not isinstance(alphas, Tensor) or not isinstance(timesteps, Tensor):
        return None
    places = timesteps.double().cpu()
    if float(places.min()) < 0 or float(places.max()) > len(alphas) - 1:
        return None
    signal = alphas.cpu().double().clamp(min=_MOST**-2)
    logarithm = ((1.0 - signal) / signal).log() / 2
    return logarithm[places.floor().long()].lerp(logarithm[places.ceil().long()], places.frac()).exp().tolist()


def _config(scheduler: Any) -> Any:
    return getattr(scheduler, "config", None) or {}

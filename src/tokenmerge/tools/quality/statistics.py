"""Means with confidence intervals, and the worst values that means hide."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95
# Intervals of Simpson's rule.
_PIECES = 400
# A delete-group jackknife leaves out so many parts of a set in turn.
_PARTS = 10


@dataclass(frozen=True)
class Estimate:
    """A mean, and half the width of its 95 % confidence interval; None if there are too few values for one."""

    mean: float
    interval: float | None = None


def grouped(keys: Sequence[Hashable], values: Sequence[float]) -> list[list[float]]:
    """The values of each key."""
    found: dict[Hashable, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return list(found.values())


def estimate(values: Sequence[Sequence[float]]) -> Estimate:
    """The mean of `values`: one sequence per prompt, with one value per seed.

    Pictures of one prompt resemble each other, so they are not independent samples. The interval is that of the means
    per prompt, whose scatter includes that of the seeds. With a single prompt, it is that of the seeds.
    """
    groups = [sum(group) / len(group) for group in values] if len(values) > 1 else list(values[0])
    mean = sum(groups) / len(groups)
    if len(groups) < 2 or not math.isfinite(mean):
        return Estimate(mean)
    variance = sum((value - mean) ** 2 for value in groups) / (len(groups) - 1)
    return Estimate(mean, student_quantile(len(groups) - 1) * math.sqrt(variance / len(groups)))


@dataclass(frozen=True)
class Worst:
    """The value that one picture in twenty reaches or is worse than, and the worst value of all."""

    one_in_twenty: float
    worst: float


def worst(values: Sequence[float], *, higher_is_better: bool) -> Worst:
    """The worst of `values`, one per picture."""
    ranked = sorted(values, reverse=not higher_is_better)
    return Worst(ranked[math.ceil(len(ranked) / 20) - 1], ranked[0])


def without_parts(keys: Sequence[Hashable]) -> list[list[int]]:
    """Split a set into up to ten parts, with equal keys in the same part. For each part, return the places of all
    other parts. Returns nothing if fewer than two places would remain."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    parts = min(_PARTS, len(numbers))
    left = [[place for place, key in enumerate(keys) if numbers[key] % parts != part] for part in range(parts)]
    return left if min(map(len, left), default=0) >= 2 else []


def jackknife(value: float, without: Sequence[float]) -> Estimate:
    """The figure `value` of a whole set. Its interval comes from the figures without each of some equal parts
    (delete-group jackknife)."""
    if len(without) < 2:
        return Estimate(value)
    mean, freedom = sum(without) / len(without), len(without) - 1
    variance = freedom / len(without) * sum((each - mean) ** 2 for each in without)
    return Estimate(value, student_quantile(freedom) * math.sqrt(variance))


def student_quantile(freedom: int) -> float:
    """The half width of the confidence interval in standard errors, by Student's t with `freedom` degrees."""
    # With t = sqrt(freedom) tan(angle) the density is proportional to cos(angle)^(freedom - 1), which is smooth.
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def share(angle: float) -> float:
        """The probability between -angle and angle, by Simpson's rule."""
        width = angle / _PIECES
        weights = (1 if place in (0, _PIECES) else 4 if place % 2 else 2 for place in range(_PIECES + 1))
        total = sum(weight * math.cos(place * width) ** (freedom - 1) for place, weight in enumerate(weights))
        return 2 * scale * total * width / 3

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < _CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)

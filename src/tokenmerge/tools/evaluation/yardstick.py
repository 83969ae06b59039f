"""The second yardstick: the plain picture with more steps of the same scheduler.

Its distance to the usual plain picture is the error of the schedule. Drift can be given as a share of that error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..quality.metrics import BY_NAME, Metric
from ..rivals.reading import read_rival
from ..typed import PLAIN, Configuration

# How many times the steps of all other pictures, by default.
FINER = 4
_ENDING = "_fine"
# Metrics that are zero for equal pictures, so that shares have a meaning. The nearest to human judgement comes first.
_DISTANCES = ("lpips", "dino", "mse")


def fine_pictures(steps: int) -> Configuration:
    """The plain model with this number of steps."""
    text = f"steps:count={steps}"
    return Configuration(f"{PLAIN} + {text}", schedule=read_rival(text))


def fine_metrics(metrics: Iterable[Metric], steps: int) -> tuple[Metric, ...]:
    """The distances among `metrics`, to the plain picture with this number of steps."""
    return tuple(
        replace(
            metric,
            name=f"{metric.name}{_ENDING}",
            title=f"{metric.title} to {steps} steps",
            meaning=f"{metric.meaning}; to the plain picture with {steps} steps",
        )
        for metric in metrics
        if metric.name in _DISTANCES
    )


def measured_by(metric: Metric) -> Metric:
    """The metric behind a distance to either yardstick."""
    return BY_NAME[metric.name.removesuffix(_ENDING)]


def fine_name(name: str) -> str:
    """The name of a metric in its form for the second yardstick."""
    return f"{name}{_ENDING}"


def best_distance(names: Iterable[str]) -> str | None:
    """The metric by which tables give shares."""
    there = set(names)
    return next((name for name in _DISTANCES if name in there), None)

"""The second yardstick: the plain picture with more steps of the same scheduler.

Fewer steps are an error of their own. How far the plain picture is from one with many steps says how large that is, and
drift can be told as a share of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..quality.metrics import METRICS, Metric
from ..rivals.reading import read_rival
from ..typed import PLAIN, Configuration

# Times the steps of all other pictures.
FINER = 4
_ENDING = "_fine"
# Zero between equal pictures, so that shares of them mean something; the one that people see best first.
_DISTANCES = ("lpips", "dino", "mse")


def fine_pictures(steps: int) -> Configuration:
    """The plain model in so many steps."""
    text = f"steps:count={steps}"
    return Configuration(f"{PLAIN} + {text}", schedule=read_rival(text))


def fine_metrics(metrics: Iterable[Metric], steps: int) -> tuple[Metric, ...]:
    """Distances to the picture with so many steps, in place of those to the plain one."""
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
    """The metric that measures, of one in either form."""
    return next(each for each in METRICS if each.name == metric.name.removesuffix(_ENDING))


def fine_name(name: str) -> str:
    """Of the same metric to the picture with more steps."""
    return f"{name}{_ENDING}"


def best_distance(names: Iterable[str]) -> str | None:
    """The metric by which shares are told in tables."""
    there = set(names)
    return next((name for name in _DISTANCES if name in there), None)

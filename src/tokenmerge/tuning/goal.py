"""What a search is for: a drift that is not to be passed, or a speed-up that is wished."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import TokenMergeError
from ..evaluation.configurations import Configuration
from ..evaluation.table import figure
from ..quality.metrics import BY_NAME, METRICS, Metric
from ..quality.networks import Missing, Sources, find_network
from ..quality.statistics import Estimate

DEFAULT_METRIC = "lpips"
# Distances of a pair of pictures: 0 for equal ones.
DRIFTS = tuple(metric.name for metric in METRICS if metric.kind == "pair" and not metric.higher_is_better)


@dataclass(frozen=True)
class Point:
    """A configuration as it was measured: seconds per picture, speed-up over the unmerged model, and drift from it."""

    configuration: Configuration
    seconds: float
    speed_up: float
    drift: Estimate

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.configuration.label,
            "config": self.configuration.config.to_dict(),
            "seconds": self.seconds,
            "speed_up": self.speed_up,
            "drift": {"mean": self.drift.mean, "interval": self.drift.interval},
        }


@dataclass(frozen=True)
class Goal:
    """The most drift by `metric`, or the least speed-up: one of both is given."""

    metric: Metric
    budget: float | None = None
    speed_up: float | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.speed_up is None):
            given = "neither" if self.budget is None else "both"
            raise TokenMergeError(
                f"{given} of --budget and --speed-up were given; give one, as in --budget lpips=0.1 or --speed-up 1.5"
            )
        # NaN fails the comparisons too.
        if self.budget is not None and not 0.0 < self.budget < math.inf:
            raise TokenMergeError(f"--budget is {self.budget:g}; it is the most drift and must be positive and finite")
        if self.speed_up is not None and not 1.0 < self.speed_up < math.inf:
            raise TokenMergeError(f"--speed-up is {self.speed_up:g}; it must be above 1, as in 1.5, and finite")

    def __str__(self) -> str:
        return f"the {'fastest' if self.speed_up is None else f'least {self.metric.title}'} with {self.bound}"

    @property
    def bound(self) -> str:
        """What meets the goal, for people."""
        if self.speed_up is not None:
            return f"a speed-up of {self.speed_up:g}x or more"
        return f"{self.metric.title} of {self.budget:g} or less and a speed-up above 1x"

    def met_by(self, point: Point) -> bool:
        """Within a budget a setting must also be worth it: faster than the unmerged model, which has no drift."""
        if self.speed_up is not None:
            return point.speed_up >= self.speed_up
        return point.speed_up > 1.0 and point.drift.mean <= (self.budget or 0.0)

    def best_first(self, points: Sequence[Point]) -> list[Point]:
        """Those that meet the goal: the fastest first within a budget, the least drift first at a speed-up."""
        met = [point for point in points if self.met_by(point)]
        return sorted(met, key=lambda point: point.seconds if self.speed_up is None else point.drift.mean)

    def nearest(self, points: Sequence[Point]) -> Point:
        """The first of those that meet the goal; if none does, the one that misses it by least."""
        met = self.best_first(points)
        if met:
            return met[0]
        if self.speed_up is not None:
            return max(points, key=lambda point: point.speed_up)
        return min(points, key=lambda point: (point.speed_up <= 1.0, point.drift.mean))

    def distance(self, point: Point) -> float:
        """How far a point lies from the goal's line, on either side, as the logarithm of a factor."""
        value, wished = (point.drift.mean, self.budget) if self.speed_up is None else (point.speed_up, self.speed_up)
        return abs(math.log(value / (wished or 1.0))) if value > 0.0 else math.inf

    def told(self, point: Point) -> str:
        """A point's drift and speed-up, for people."""
        return f"{self.metric.title} {figure(self.metric, point.drift)} at {point.speed_up:.2f}x"


def read_goal(budget: str | None, speed_up: float | None, metric: str | None, sources: Sources) -> Goal:
    """A goal as typed: a budget as in `lpips=0.1`, or `0.1` with the metric apart. The metric must be there."""
    amount = None
    if budget is not None:
        named, _, text = budget.rpartition("=")
        if named and metric and named != metric:
            raise TokenMergeError(f"--budget is about {named} and --metric about {metric}; leave one out")
        metric = named or metric
        try:
            amount = float(text)
        except ValueError as error:
            raise TokenMergeError(f"--budget {budget!r} is not understood; write it as in lpips=0.1") from error
    name = metric or DEFAULT_METRIC
    if name not in DRIFTS:
        raise TokenMergeError(f"drift cannot be measured by {name!r}; choose from {', '.join(DRIFTS)}")
    goal = Goal(BY_NAME[name], amount, speed_up)
    network = goal.metric.network
    found = find_network(network, sources) if network else None
    if isinstance(found, Missing):
        way_out = "--metric mse" if budget is None else "--budget mse=100"
        raise TokenMergeError(f"{goal.metric.title} cannot be measured: {found.reason}; or use {way_out}")
    return goal

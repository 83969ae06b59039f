"""The goal of a search: a budget of drift, or a target speed-up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ...errors import TokenMergeError
from ..evaluation.table import figure
from ..quality.metrics import BY_NAME, METRICS, Metric
from ..quality.networks import Missing, Sources, find_network
from ..quality.statistics import Estimate
from ..typed import Configuration

DEFAULT_METRIC = "lpips"
# Metrics of pairs that are 0 for equal pictures.
DRIFTS = tuple(metric.name for metric in METRICS if metric.kind == "pair" and not metric.higher_is_better)


@dataclass(frozen=True)
class Point:
    """A measured configuration: seconds per picture, speed-up over the plain model, and drift from it."""

    configuration: Configuration
    seconds: float
    speed_up: float
    drift: Estimate

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.configuration.to_dict(),
            "seconds": self.seconds,
            "speed_up": self.speed_up,
            "drift": asdict(self.drift),
        }


@dataclass(frozen=True)
class Goal(ABC):
    """A bound that settings must meet, and a cost by which those that meet it are ranked."""

    metric: Metric
    value: float

    # The option that sets its value, and advice to make the goal easier.
    option: ClassVar[str]
    easier: ClassVar[str]

    @property
    @abstractmethod
    def bound(self) -> str:
        """The bound in words."""

    @abstractmethod
    def met_by(self, point: Point) -> bool: ...

    @abstractmethod
    def cost(self, point: Point) -> float:
        """The figure to minimise among settings that meet the bound."""

    @abstractmethod
    def miss(self, point: Point) -> tuple[float, ...]:
        """How far a setting misses the bound; compare only with other misses."""

    @abstractmethod
    def bounded(self, point: Point) -> float:
        """The figure that the bound limits."""

    def best_first(self, points: Sequence[Point]) -> list[Point]:
        """The points that meet the goal, best first."""
        return sorted(filter(self.met_by, points), key=self.cost)

    def nearest(self, points: Sequence[Point]) -> Point:
        """The best point that meets the goal, or else the one that misses it least."""
        met = self.best_first(points)
        return met[0] if met else min(points, key=self.miss)

    def distance(self, point: Point) -> float:
        """The distance of a point from the bound, on either side: the logarithm of their ratio."""
        value = self.bounded(point)
        return abs(math.log(value / self.value)) if value > 0.0 else math.inf

    def describe(self, point: Point) -> str:
        """The drift and speed-up of a point in words."""
        return f"{self.metric.title} {figure(self.metric, point.drift)} at {point.speed_up:.2f}x"

    def to_dict(self) -> dict[str, Any]:
        return {"metric": self.metric.name, self.option: self.value}


@dataclass(frozen=True)
class Budget(Goal):
    """The fastest settings within a budget of drift. They must beat the plain model, which has no drift."""

    option: ClassVar[str] = "budget"
    easier: ClassVar[str] = "a larger --budget"

    def __str__(self) -> str:
        return f"the fastest with {self.bound}"

    @property
    def bound(self) -> str:
        return f"{self.metric.title} of {self.value:g} or less and a speed-up above 1x"

    def met_by(self, point: Point) -> bool:
        return point.speed_up > 1.0 and point.drift.mean <= self.value

    def cost(self, point: Point) -> float:
        return -point.speed_up

    def miss(self, point: Point) -> tuple[float, ...]:
        return float(point.speed_up <= 1.0), point.drift.mean

    def bounded(self, point: Point) -> float:
        return point.drift.mean


@dataclass(frozen=True)
class SpeedUp(Goal):
    """The least drift at a target speed-up or above."""

    option: ClassVar[str] = "speed_up"
    easier: ClassVar[str] = "a smaller --speed-up"

    def __str__(self) -> str:
        return f"the least {self.metric.title} with {self.bound}"

    @property
    def bound(self) -> str:
        return f"a speed-up of {self.value:g}x or more"

    def met_by(self, point: Point) -> bool:
        return point.speed_up >= self.value

    def cost(self, point: Point) -> float:
        return point.drift.mean

    def miss(self, point: Point) -> tuple[float, ...]:
        return (-point.speed_up,)

    def bounded(self, point: Point) -> float:
        return point.speed_up


def read_goal(
    budget: tuple[str | None, float] | None, speed_up: float | None, metric: str | None, sources: Sources
) -> Goal:
    """The goal from the options, which give either a budget or a speed-up. The network of its metric must be there."""
    goal: Goal
    if budget is not None:
        named, most = budget
        if named and metric and named != metric:
            raise TokenMergeError(f"--budget names {named}, but --metric {metric}; leave one out")
        goal = Budget(_drift(named or metric), most)
    else:
        assert speed_up is not None
        goal = SpeedUp(_drift(metric), speed_up)
    network = goal.metric.network
    found = find_network(network, sources) if network else None
    if isinstance(found, Missing):
        way_out = "--metric mse" if budget is None else "--budget mse=100"
        raise TokenMergeError(f"{goal.metric.title} cannot be measured: {found.reason}; or use {way_out}")
    return goal


def _drift(name: str | None) -> Metric:
    name = name or DEFAULT_METRIC
    if name not in DRIFTS:
        raise TokenMergeError(f"{name!r} does not measure drift; choose from {', '.join(DRIFTS)}")
    return BY_NAME[name]

"""Successive halving: fronts of speed-up and drift, and the points that go on."""

from __future__ import annotations

from collections.abc import Sequence

from .goal import Goal, Point


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other dominates, fastest first. A point dominates another if it is at least as good in both
    speed-up and drift, and better in one."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (*_place(point), point.configuration.label)):
        if not kept or point.drift.mean < kept[-1].drift.mean or _place(point) == _place(kept[-1]):
            kept.append(point)
    return kept


def _place(point: Point) -> tuple[float, float]:
    return -point.speed_up, point.drift.mean


def layers(points: Sequence[Point]) -> list[list[Point]]:
    """The front, then the front of all other points, and so on."""
    left, found = list(points), []
    while left:
        found.append(front(left))
        left = [point for point in left if point not in found[-1]]
    return found


def rung_sizes(candidates: int, rungs: int) -> list[int]:
    """The number of candidates in each rung: half of those in the one before, rounded up."""
    sizes = [candidates]
    while len(sizes) < rungs:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def survivors(points: Sequence[Point], plain: Point, goal: Goal, count: int) -> list[Point]:
    """The `count` points that go on: the one that would be chosen now, then layer by layer, and in each layer those
    nearest to the bound.

    plain: the plain model, without drift. It keeps slower points out of the first layer.
    """
    best = goal.nearest(points)
    ordered = [
        point
        for layer in layers([plain, *points])
        for point in sorted(layer, key=lambda point: (goal.distance(point), point.configuration.label))
        if point not in (plain, best)
    ]
    return [best, *ordered][:count]

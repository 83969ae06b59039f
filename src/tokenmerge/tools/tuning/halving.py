"""Successive halving by non-domination in seconds and drift."""

from __future__ import annotations

from collections.abc import Sequence

from .goal import Goal, Point


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other dominates, fastest first: none is nowhere worse than such a point and somewhere
    better."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (*_place(point), point.configuration.label)):
        if not kept or point.drift.mean < kept[-1].drift.mean or _place(point) == _place(kept[-1]):
            kept.append(point)
    return kept


def _place(point: Point) -> tuple[float, float]:
    return -point.speed_up, point.drift.mean


def layers(points: Sequence[Point]) -> list[list[Point]]:
    """The front, the front of what is left without it, and so on."""
    left, found = list(points), []
    while left:
        found.append(front(left))
        left = [point for point in left if point not in found[-1]]
    return found


def rung_sizes(candidates: int, rungs: int) -> list[int]:
    """How many candidates each rung has: half of the one before, rounded up."""
    sizes = [candidates]
    while len(sizes) < rungs:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def survivors(points: Sequence[Point], plain: Point, goal: Goal, count: int) -> list[Point]:
    """The `count` points that go on: the one that would be chosen now, then layer by layer, and within a layer those
    nearest to the goal's line.

    plain: the plain model, without drift; what is slower than it is in no first layer.
    """
    best = goal.nearest(points)
    ordered = [
        point
        for layer in layers([plain, *points])
        for point in sorted(layer, key=lambda point: (goal.distance(point), point.configuration.label))
        if point not in (plain, best)
    ]
    return [best, *ordered][:count]

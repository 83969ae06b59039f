"""Successive halving by non-domination in seconds and drift."""

from __future__ import annotations

from collections.abc import Sequence

from .goal import Goal, Point


def dominates(first: Point, second: Point) -> bool:
    """Whether `first` is nowhere worse and somewhere better."""
    ours, theirs = (first.seconds, first.drift.mean), (second.seconds, second.drift.mean)
    return ours != theirs and all(one <= two for one, two in zip(ours, theirs, strict=True))


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other dominates, fastest first."""
    kept = [point for point in points if not any(dominates(other, point) for other in points)]
    return sorted(kept, key=lambda point: (point.seconds, point.configuration.label))


def layers(points: Sequence[Point]) -> list[list[Point]]:
    """The front, the front of what is left without it, and so on."""
    left, found = list(points), []
    while left:
        first = front(left)
        found.append(first)
        left = [point for point in left if point not in first]
    return found


def rung_sizes(candidates: int, rungs: int) -> list[int]:
    """How many candidates each rung has: half of the one before, rounded up."""
    sizes = [candidates]
    while len(sizes) < rungs:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def survivors(points: Sequence[Point], baseline: Point, goal: Goal, count: int) -> list[Point]:
    """The `count` points that go on: the one that would be chosen now, then layer by layer, and within a layer those
    nearest to the goal's line.

    baseline: the unmerged model, without drift; what is slower than it is in no first layer.
    """
    best = goal.nearest(points)
    ordered = [
        point
        for layer in layers([baseline, *points])
        for point in sorted(layer, key=lambda point: (goal.distance(point), point.configuration.label))
        if point not in (baseline, best)
    ]
    return [best, *ordered][:count]

"""Prompts and seeds for every rung; no pair of them is used twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from ...planning.tables import counted


@dataclass(frozen=True)
class Share:
    """The prompts and seeds of one rung. fresh: no rung before has these prompts; otherwise only the seeds are new."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    fresh: bool

    @property
    def count(self) -> int:
        return len(self.prompts) * len(self.seeds)

    def __str__(self) -> str:
        prompts, seeds = counted(len(self.prompts), "prompt"), len(self.seeds)
        return f"{prompts} x {seeds} seeds" if seeds > 1 else prompts


def shares(prompts: Sequence[str], counts: Sequence[int], seed: int) -> Iterator[Share]:
    """For each of `counts`, a share with at least that many samples. Prompts come in a random order, over and over.
    Seeds are new in every share, so that no picture is drawn twice."""
    order = list(dict.fromkeys(prompts))
    Random(seed).shuffle(order)
    used = 0
    for count in counts:
        repeats = -(-count // len(order))
        taken = min(count, len(order))
        places = [(used + place) % len(order) for place in range(taken)]
        fresh = used + taken <= len(order)
        yield Share(tuple(order[place] for place in places), tuple(range(seed, seed + repeats)), fresh)
        used += taken
        seed += repeats

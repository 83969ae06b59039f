"""Prompts and seeds for every rung, none of them used twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from ...planning.tables import counted


@dataclass(frozen=True)
class Share:
    """The prompts and seeds of one rung. fresh: whether its prompts, and not only its seeds, are in no rung before."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    fresh: bool

    @property
    def count(self) -> int:
        return len(self.prompts) * len(self.seeds)

    def __str__(self) -> str:
        told, seeds = counted(len(self.prompts), "prompt"), len(self.seeds)
        return f"{told} x {seeds} seeds" if seeds > 1 else told


def shares(prompts: Sequence[str], counts: Sequence[int], seed: int) -> Iterator[Share]:
    """A share of at least each of `counts` samples. Prompts come in a random order and start anew when all were used;
    seeds are new in every share, so that no picture is made twice."""
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

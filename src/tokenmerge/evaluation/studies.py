"""`tokenmerge reproduce`: tables of the paper (arXiv 2509.10918) as lists of configurations for `eval`."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import SELECTIONS, UNMERGES, TokenMergeError

# The paper's ablations renew everything at every step, but for the one about that.
_EVERY_STEP = "destinations_every=1,weights_every=1"
_SCHEDULES = ((1, 1), (5, 1), (5, 5), (10, 1), (10, 5), (10, 10), (50, 50))


@dataclass(frozen=True)
class Scale:
    """How much is made, where nothing else is asked for."""

    prompts: int
    seeds: tuple[int, ...]
    repeats: int
    steps: int | None = None


# The paper's ablations; and enough to see that everything runs.
FULL = Scale(prompts=50, seeds=(0, 1, 2), repeats=20)
QUICK = Scale(prompts=2, seeds=(0,), repeats=1, steps=4)


@dataclass(frozen=True)
class Study:
    """One table: what it is about, and the configurations that are its rows."""

    about: str
    configurations: tuple[str, ...]


def _regions(text: str) -> str:
    """For people: `tile:64` is 64 tiles."""
    kind, _, count = text.partition(":")
    return f"{count} {kind}s" if count else kind


STUDIES = {
    "table2": Study(
        "methods of selection, in the whole image and in tiles",
        tuple(
            f"{selection} in {_regions(regions)}@toma:ratio=0.5,selection={selection},regions={regions},{_EVERY_STEP}"
            for regions in ("whole", "tile:64")
            for selection in SELECTIONS
        ),
    ),
    "table3": Study(
        "kinds and sizes of the regions of selection",
        tuple(
            f"{_regions(regions)}@toma:ratio=0.5,regions={regions},{_EVERY_STEP}"
            for regions in ("whole", *(f"{kind}:{count}" for kind in ("tile", "stripe") for count in (4, 16, 64, 256)))
        ),
    ),
    "table6": Study(
        "unmerging by the transpose and by the pseudo-inverse, over the whole image and in tiles",
        tuple(
            f"{preset} {unmerge}@{preset}:ratio=0.5,unmerge={unmerge},{_EVERY_STEP}"
            for preset in ("toma", "toma-tile")
            for unmerge in UNMERGES
        ),
    ),
    "table7": Study(
        "how often destinations and weights are renewed",
        tuple(
            f"destinations {destinations} weights {weights}"
            f"@toma:ratio=0.5,destinations_every={destinations},weights_every={weights}"
            for destinations, weights in _SCHEDULES
        ),
    ),
}


def study(name: str) -> Study:
    if name not in STUDIES:
        raise TokenMergeError(f"{name!r} is not to be had; choose from {', '.join(STUDIES)}")
    return STUDIES[name]

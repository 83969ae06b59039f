"""`tokenmerge reproduce`: the tables and figures of the paper (arXiv 2509.10918), most of them as runs of `eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import SELECTIONS, UNMERGES
from ...errors import TokenMergeError, did_you_mean

# All ablations in the paper renew everything at every step, except the one about renewing.
_EVERY_STEP = "destinations_every=1,weights_every=1"
_SCHEDULES = ((1, 1), (5, 1), (5, 5), (10, 1), (10, 5), (10, 10), (50, 50))
RATIOS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Scale:
    """The default numbers of prompts, seeds and the like."""

    prompts: int
    seeds: tuple[int, ...]
    repeats: int
    steps: int | None = None
    ratios: tuple[float, ...] = RATIOS


# The scale of the paper's ablations, one that suffices for a figure, and one that only shows that everything runs.
FULL = Scale(prompts=50, seeds=(0, 1, 2), repeats=20)
FIGURE = Scale(prompts=8, seeds=(0,), repeats=100)
QUICK = Scale(prompts=2, seeds=(0,), repeats=1, steps=4, ratios=(0.5,))


@dataclass(frozen=True)
class _Item:
    """Tables and figures that are made together."""

    names: tuple[str, ...]
    about: str
    model: str = field(default="tiny-sdxl", kw_only=True)

    @property
    def folder(self) -> str:
        return "-".join(self.names)


@dataclass(frozen=True)
class Inquiry(_Item):
    """Tables and figures that compare no pictures: `inquiries.py` makes them.

    lacks: what it does not do, as `_OPTIONS` calls it.
    """

    lacks: tuple[str, ...]

    def useless(self) -> dict[str, str]:
        """The options without effect, each with the reason."""
        return {option: reason for reason in self.lacks for option in _OPTIONS[reason]}


@dataclass(frozen=True)
class Study(_Item):
    """Tables and figures that show one evaluation, whose rows are configurations."""

    configurations: tuple[str, ...]


def _regions(text: str) -> str:
    """Regions in words: `tile:64` is "64 tiles"."""
    kind, _, count = text.partition(":")
    return f"{count} {kind}s" if count else kind


# The methods in the paper, and controls. The default of a model's family is left out: it changes with measurements, and
# these tables should not. ToDo and pooling have the ratio of their cells.
_METHODS = (
    *(
        f"{preset}:ratio={ratio:g}"
        for preset in ("toma", "toma-once", "toma-stripe", "toma-tile", "tomesd", "tofu", "lower-bound")
        for ratio in RATIOS
    ),
    "todo",
    "pool",
    "random:ratio=0.5",
    "uniform:ratio=0.5",
)

STUDIES = (
    Study(("table1", "table8", "table9", "fig5"), "time and quality of every method at every ratio", _METHODS),
    Study(
        ("table10",),
        "time and quality of every method at every ratio, on a diffusion transformer",
        _METHODS,
        model="tiny-flux",
    ),
    Study(
        ("table2",),
        "methods of selection, in the whole image and in tiles",
        tuple(
            f"{selection} in {_regions(regions)}@toma:ratio=0.5,selection={selection},regions={regions},{_EVERY_STEP}"
            for regions in ("whole", "tile:64")
            for selection in SELECTIONS
            # Half a minute per picture even on an H200: 2048 rounds per step, each of which draws candidates.
            if (regions, selection) != ("whole", "stochastic")
        ),
    ),
    Study(
        ("table3",),
        "kinds and sizes of the regions of selection",
        tuple(
            f"{_regions(regions)}@toma:ratio=0.5,regions={regions},{_EVERY_STEP}"
            for regions in ("whole", *(f"{kind}:{count}" for kind in ("tile", "stripe") for count in (4, 16, 64, 256)))
        ),
    ),
    Study(
        ("table6",),
        "unmerging by the transpose and by the pseudo-inverse, over the whole image and in tiles",
        tuple(
            f"{preset} {unmerge}@{preset}:ratio=0.5,unmerge={unmerge},{_EVERY_STEP}"
            for preset in ("toma", "toma-tile")
            for unmerge in UNMERGES
        ),
    ),
    Study(
        ("table7",),
        "how often destinations and weights are renewed",
        tuple(
            f"destinations {destinations} weights {weights}"
            f"@toma:ratio=0.5,destinations_every={destinations},weights_every={weights}"
            for destinations, weights in _SCHEDULES
        ),
    ),
)
# What an inquiry may lack, and the options that would then have no effect.
_COMPARES_NOTHING, _DRAWS_NOTHING, _TIMES_NOTHING = "compares no pictures", "draws no pictures", "times nothing"
_OPTIONS = {
    _COMPARES_NOTHING: ("resume", "compile", "reference", "metrics", "networks", "clip", "dino"),
    _DRAWS_NOTHING: ("model", "prompts", "column", "template", "number", "seeds", "steps", "guidance", "size"),
    _TIMES_NOTHING: ("batch", "repeats"),
}
_ON_MAPS, _ON_MODELS = (_COMPARES_NOTHING, _DRAWS_NOTHING), (_COMPARES_NOTHING, _TIMES_NOTHING)
INQUIRIES = (
    Inquiry(("table4",), "time of merging and unmerging 4096 tokens, by method and ratio", _ON_MAPS),
    Inquiry(("table5",), "time of merging and unmerging 1024 tokens, by method and ratio", _ON_MAPS),
    Inquiry(("fig3", "fig9"), "clusters of hidden states over blocks and steps: are neighbours alike?", _ON_MODELS),
    Inquiry(("fig4",), "destinations at every step, compared with the first step of their interval", _ON_MODELS),
)
NAMES: dict[str, Study | Inquiry] = {name: item for item in (*STUDIES, *INQUIRIES) for name in item.names}


@dataclass(frozen=True)
class Finding:
    """A table, its records, and the file to look at."""

    text: str
    records: Sequence[dict[str, Any]]
    path: Path

    def __str__(self) -> str:
        return f"{self.text}\n\n{self.path}"


def find_study(name: str) -> Study | Inquiry:
    """The study or inquiry behind a table or figure."""
    if name not in NAMES:
        raise TokenMergeError(f"{name!r} is unknown{did_you_mean(name, NAMES)}; choose from {', '.join(NAMES)}")
    return NAMES[name]

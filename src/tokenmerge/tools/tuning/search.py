"""The search: rung by rung, each an evaluation in its own folder, and a last one on held-out samples.

The evaluations keep the only state. A resumed search goes through the same rungs again, finds what was drawn and timed,
and so repeats every decision.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from ...errors import TokenMergeError
from ..drawing.studio import Setup, Studio
from ..evaluation.folder import Folder, interrupted, tell_new
from ..evaluation.plots import check_plots
from ..evaluation.results import Results
from ..evaluation.run import Task, evaluate
from ..fields import check_seeds
from ..files import check_folder
from ..quality.networks import Sources
from ..quality.statistics import Estimate
from ..typed import Configuration, default_techniques, read_typed
from .goal import Goal, Point
from .halving import front, rung_sizes, survivors
from .report import Outcome, Rung, write_outcome
from .rivals import read_rivals
from .samples import Share, shares
from .space import draw_candidates

# The most candidates to try on held-out samples. The samples that a candidate was chosen by flatter it, so it may fail.
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Search(Setup):
    """What to search. number: pictures per candidate in the first rung; every further rung has twice as many."""

    prompts: Sequence[str]
    goal: Goal
    techniques: Sequence[str] | None = None  # as typed; other fields are searched; None: those of the model's family
    rivals: Sequence[str] | None = None  # as typed, to show beside the front; None: all that fit
    candidates: int = 24
    rungs: int = 3
    number: int = 2
    seed: int = 0
    sources: Sources = field(default_factory=Sources)
    batch: int = 1
    repeats: int = 3
    threads: int = 1

    def task(self, configurations: Sequence[Configuration], share: Share) -> Task:
        """The evaluation of configurations on a share of the samples."""
        given: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(Setup)}
        return Task(
            techniques=configurations,
            prompts=share.prompts,
            seeds=share.seeds,
            metrics=(self.goal.metric.name,),
            sources=self.sources,
            batch=self.batch,
            repeats=self.repeats,
            # The search space serves all models: leave out what this one cannot do at this size.
            tell_refused=True,
            **given,
        )


def tune(search: Search, out: Path, *, resume: bool = False, command: str = "") -> Outcome:
    """Search in the folder `out`, and write the front, its plot and the preset to it."""
    try:
        return _tune(search, out, resume=resume, command=command)
    except KeyboardInterrupt as interrupt:
        # The evaluation of a rung would name its own folder.
        raise interrupted(out) from interrupt


def _tune(search: Search, out: Path, *, resume: bool, command: str) -> Outcome:
    check_plots()
    check_folder(out)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise TokenMergeError("tune measures time all along, so it runs in one process; start it without a launcher")
    typed = None if search.techniques is None else [read_typed(text) for text in search.techniques]
    # Checks the options that all rungs share, without loading weights.
    studio = Studio(search)
    family = studio.outline.family
    typed = typed or [read_typed(text) for text in default_techniques(family)]
    candidates = draw_candidates(typed, family, search.candidates, search.seed)
    rivals, left_out = read_rivals(search.rivals, studio)
    if 2 ** (search.rungs - 1) > search.candidates:
        raise TokenMergeError(
            f"--rungs is {search.rungs}, but {search.candidates} candidates can be halved only "
            f"{search.candidates.bit_length() - 1} times; use fewer rungs or more --candidates"
        )
    counts = [search.number * 2**place for place in range(search.rungs)]
    drawn = list(shares(search.prompts, [*counts, *[2 * counts[-1]] * _TRIES], search.seed))
    check_seeds(*(seed for share in drawn for seed in share.seeds))
    samples, held_out = drawn[: search.rungs], drawn[search.rungs :]
    if resume:
        _check_begun(search, samples[0].count, out)
    _check_some_left(studio, candidates)
    sizes = rung_sizes(search.candidates, search.rungs)
    pictures = sum((size + 1) * share.count for size, share in zip(sizes, samples, strict=True))
    pictures += (len(rivals) + 1) * samples[-1].count if rivals else 0
    # One bar over all rungs, above the bars of the evaluations.
    with tqdm(total=pictures + 2 * held_out[0].count, unit="picture", leave=False) as bar:
        race = _Race(search, out / "rungs", resume, bar)
        rungs = race.climb(candidates, samples, sizes)
        beside = race.measure("rivals", rivals, samples[-1]) if rivals else None
        tried = race.try_held_out(rungs[-1], held_out)
    left_out |= beside.refused if beside else {}
    outcome = Outcome(search.goal, tuple(rungs), tuple(tried), command, beside.points if beside else (), left_out)
    write_outcome(outcome, out)
    return outcome


@dataclass(frozen=True)
class _Race:
    """A search under way in a folder."""

    search: Search
    folder: Path
    resume: bool
    bar: Any

    def climb(self, candidates: Sequence[Configuration], samples: Sequence[Share], sizes: Sequence[int]) -> list[Rung]:
        """Measure rung by rung. The better half of each goes on."""
        rungs: list[Rung] = []
        for place, (share, size) in enumerate(zip(samples, sizes, strict=True)):
            if rungs:
                kept = survivors(rungs[-1].points, rungs[-1].plain, self.search.goal, size)
                candidates = [point.configuration for point in kept]
                # If the model refused many, fewer than planned are left.
                self.bar.total -= (size - len(candidates)) * share.count
            rungs.append(self.measure(str(place + 1), candidates, share, f"rung {place + 1} of {len(sizes)}"))
            if not rungs[-1].points:
                raise _nothing_left(rungs[-1].refused)
        return rungs

    def try_held_out(self, last: Rung, held_out: Sequence[Share]) -> list[Rung]:
        """Measure the best candidates of the last rung on new samples, until one meets the goal."""
        # A dominated candidate would hardly succeed where the one that dominates it fails.
        best = front(last.points)
        tried: list[Rung] = []
        choices = self.search.goal.best_first(best) or [self.search.goal.nearest(best)]
        for place, (point, share) in enumerate(zip(choices, held_out, strict=False)):
            tried.append(self.measure(f"held-out-{place + 1}", [point.configuration], share))
            if self.search.goal.met_by(tried[-1].points[0]):
                break
        return tried

    def measure(self, name: str, configurations: Sequence[Configuration], share: Share, label: str = "") -> Rung:
        """Evaluate configurations, and the plain model with them. name: of the folder. label: for the bar."""
        self.bar.set_description(label or name)
        folder = self.folder / name
        # A resumed search may not have begun this rung.
        goes_on = self.resume and Folder(folder).begun() is not None
        results = evaluate(self.search.task(configurations, share), folder, resume=goes_on)
        assert results is not None
        pictures = (len(configurations) + 1) * share.count
        # The number of tries on held-out samples was not known before.
        self.bar.total = max(self.bar.total, self.bar.n + pictures)
        self.bar.update(pictures)
        plain, *points = _points(results, self.search.goal)
        return Rung(share, plain, tuple(points), results, results.settings["refused"])


def _check_begun(search: Search, pictures: int, out: Path) -> None:
    """Refuse to resume a search that had other options, by their names: the evaluations would name what follows from
    the options. pictures: those of a candidate in the first rung."""
    before = Folder(out / "rungs" / "1").begun()
    if before is None:
        tell_new(out)
        return
    # The plain model is not a candidate.
    candidates = len(before["configurations"]) - 1 + len(before["refused"])
    for name, old, new in (
        ("candidates", candidates, search.candidates),
        ("seed", before["seeds"][0], search.seed),
        ("number", len(before["prompts"]) * len(before["seeds"]), pictures),
    ):
        if old != new:
            raise TokenMergeError(
                f"{out} was begun with --{name} {old}, not {new}; ask for the same, or give another --out"
            )


def _check_some_left(studio: Studio, candidates: Sequence[Configuration]) -> None:
    """Refuse a search if no candidate fits the model."""
    refused: dict[str, str] = {}
    for each in candidates:
        try:
            studio.check(each)
        except TokenMergeError as error:
            refused[each.label] = str(error)
    if len(refused) == len(candidates):
        raise _nothing_left(refused)


def _nothing_left(refused: dict[str, str]) -> TokenMergeError:
    label, reason = next(iter(refused.items()))
    return TokenMergeError(f"the model refuses every candidate, first {label!r}: {reason}")


def _points(results: Results, goal: Goal) -> Iterator[Point]:
    for row in results.rows:
        speed_up = results.speed_up(row)
        assert row.seconds is not None
        assert speed_up is not None
        # The plain model has no figure: others are compared with it.
        drift = row.estimates.get(goal.metric.name, Estimate(0.0))
        yield Point(row.configuration, row.seconds, speed_up, drift)

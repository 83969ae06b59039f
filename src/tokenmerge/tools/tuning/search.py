"""The search: rung by rung, each an evaluation in a folder of its own, and a last one on samples nobody chose by.

Nothing is remembered but what the evaluations keep: to go on is to walk through the same rungs again, where all that
was made and timed is found, and so every decision comes out as before.
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

# The last rung chooses by what it saw, which flatters; a choice that fails on new samples gives way to the next.
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Search(Setup):
    """What was asked for. number: pictures of every candidate in the first rung; each further one has twice as many."""

    prompts: Sequence[str]
    goal: Goal
    techniques: Sequence[str] | None = None  # as typed, fields left out are searched; without, the family's
    rivals: Sequence[str] | None = None  # as typed, to be shown beside the front; without, all there are
    candidates: int = 24
    rungs: int = 3
    number: int = 2
    seed: int = 0
    sources: Sources = field(default_factory=Sources)
    batch: int = 1
    repeats: int = 3
    threads: int = 1

    def task(self, configurations: Sequence[Configuration], share: Share) -> Task:
        """The evaluation of candidates on a share of the samples."""
        given: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(Setup)}
        return Task(
            techniques=configurations,
            prompts=share.prompts,
            seeds=share.seeds,
            metrics=(self.goal.metric.name,),
            sources=self.sources,
            batch=self.batch,
            repeats=self.repeats,
            # The space is that of all models; what this one cannot do at this size is left out.
            tell_refused=True,
            **given,
        )


def tune(search: Search, out: Path, *, resume: bool = False, command: str = "") -> Outcome:
    """Search in the folder `out`, and write there the front, its plot and the preset that was found."""
    try:
        return _tune(search, out, resume=resume, command=command)
    except KeyboardInterrupt as interrupt:
        # In place of what the evaluation of a rung says, which names its own folder.
        raise interrupted(out) from interrupt


def _tune(search: Search, out: Path, *, resume: bool, command: str) -> Outcome:
    check_plots()
    check_folder(out)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise TokenMergeError("tune works in one process, since time is measured in all of it; start it by itself")
    typed = None if search.techniques is None else [read_typed(text) for text in search.techniques]
    # Checks what all rungs share, without weights.
    studio = Studio(search)
    family = studio.outline.family
    typed = typed or [read_typed(text) for text in default_techniques(family)]
    candidates = draw_candidates(typed, family, search.candidates, search.seed)
    rivals, left_out = read_rivals(search.rivals, studio)
    if 2 ** (search.rungs - 1) > search.candidates:
        raise TokenMergeError(
            f"--rungs is {search.rungs}, and {search.candidates} candidates can be halved "
            f"{search.candidates.bit_length() - 1} times; use fewer rungs or more --candidates"
        )
    counts = [search.number * 2**place for place in range(search.rungs)]
    drawn = list(shares(search.prompts, [*counts, *[2 * counts[-1]] * _TRIES], search.seed))
    check_seeds(*(seed for share in drawn for seed in share.seeds))
    samples, held_out = drawn[: search.rungs], drawn[search.rungs :]
    begun = Folder(out / "rungs" / "1").begun() if resume else None
    if begun is not None:
        _check_begun(search, samples[0].count, begun, out)
    elif resume:
        tell_new(out)
    _check_some_left(studio, candidates)
    sizes = rung_sizes(search.candidates, search.rungs)
    pictures = sum((size + 1) * share.count for size, share in zip(sizes, samples, strict=True))
    if rivals:
        pictures += (len(rivals) + 1) * samples[-1].count
    # Over all rungs, above the bars of the evaluations.
    with tqdm(total=pictures + 2 * held_out[0].count, unit="picture", leave=False) as bar:
        rungs = _climb(search, candidates, samples, sizes, out / "rungs", resume, bar)
        beside = None
        if rivals:
            bar.set_description("rivals")
            beside = _measure(search, rivals, samples[-1], out / "rungs" / "rivals", resume)
            bar.update((len(rivals) + 1) * samples[-1].count)
        tried = _try_held_out(search, rungs[-1], held_out, out / "rungs", resume, bar)
    left_out |= beside.refused if beside else {}
    outcome = Outcome(search.goal, tuple(rungs), tuple(tried), command, beside.points if beside else (), left_out)
    write_outcome(outcome, out)
    return outcome


def _climb(
    search: Search,
    configurations: Sequence[Configuration],
    samples: Sequence[Share],
    sizes: Sequence[int],
    folder: Path,
    resume: bool,
    bar: Any,
) -> list[Rung]:
    """Rung by rung; from each the better half goes on."""
    rungs: list[Rung] = []
    for place, share in enumerate(samples):
        bar.set_description(f"rung {place + 1} of {search.rungs}")
        rung = _measure(search, configurations, share, folder / str(place + 1), resume)
        if not rung.points:
            raise _nothing_left(rung.refused)
        rungs.append(rung)
        bar.update((sizes[place] + 1) * share.count)
        if place + 1 < search.rungs:
            kept = survivors(rung.points, rung.plain, search.goal, sizes[place + 1])
            configurations = [point.configuration for point in kept]
    return rungs


def _try_held_out(
    search: Search, last: Rung, held_out: Sequence[Share], folder: Path, resume: bool, bar: Any
) -> list[Rung]:
    """The best of the last rung on new samples, until one meets the goal there."""
    bar.set_description("held out")
    # What another of the last rung dominates cannot succeed where that fails.
    best = front(last.points)
    tried: list[Rung] = []
    choices = search.goal.best_first(best) or [search.goal.nearest(best)]
    for place, (point, share) in enumerate(zip(choices, held_out, strict=False)):
        tried.append(_measure(search, [point.configuration], share, folder / f"held-out-{place + 1}", resume))
        # How many there will be is not known before.
        bar.total = max(bar.total, bar.n + 2 * share.count)
        bar.update(2 * share.count)
        if search.goal.met_by(tried[-1].points[0]):
            break
    return tried


def _check_begun(search: Search, pictures: int, before: dict[str, Any], out: Path) -> None:
    """Refuse to go on with a search of other options, by their names; the evaluations would name what follows from
    them. pictures: of a candidate in the first rung. before: what its evaluation was asked for."""
    # The plain model is no candidate.
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
    """Refuse a search in which the model cannot have any candidate."""
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


def _measure(search: Search, configurations: Sequence[Configuration], share: Share, folder: Path, resume: bool) -> Rung:
    """One evaluation, the plain model with it."""
    # The rungs of a search that goes on need not be there yet.
    goes_on = resume and Folder(folder).begun() is not None
    results = evaluate(search.task(configurations, share), folder, resume=goes_on)
    if results is None:
        raise RuntimeError("one process has no other to leave the results to")
    plain, *points = _points(results, search.goal)
    return Rung(share, plain, tuple(points), results, results.settings["refused"])


def _points(results: Results, goal: Goal) -> Iterator[Point]:
    for row in results.rows:
        speed_up = results.speed_up(row)
        if row.seconds is None or speed_up is None:
            raise TokenMergeError(f"{results.folder.root} holds no time of {row.configuration.label!r}; use --resume")
        # The plain model is what pictures are compared with, and has no figure.
        drift = row.estimates.get(goal.metric.name, Estimate(0.0))
        yield Point(row.configuration, row.seconds, speed_up, drift)

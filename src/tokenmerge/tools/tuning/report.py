"""Writes the results of a search: the front as a table, JSON and a plot, and the preset.

rungs/N/, rungs/held-out-N/    the evaluations, each with its own pictures and report
front.md, front.json, front.png
preset.yaml                    the best settings; nearest.yaml if none meet the goal; .json without PyYAML
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...config import Techniques
from ...planning.tables import counted, markdown, table
from ..evaluation.plots import label_plot, new_plot, save_plot, series_style
from ..evaluation.results import Results
from ..evaluation.table import conditions, figure
from ..files import finite, to_json, write_text
from .goal import Budget, Goal, Point
from .halving import front
from .samples import Share

# Endings of the file with the settings.
YAML, JSON = ".yaml", ".json"
# Settings of an evaluation that are also those of the search.
_SETTINGS = ("model", "size", "steps", "guidance", "dtype", "compile", "batch", "repeats", "networks", "environment")


@dataclass(frozen=True)
class Rung:
    """Candidates, and the plain model, measured on the same samples."""

    share: Share
    plain: Point
    points: tuple[Point, ...]
    results: Results
    refused: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompts": list(self.share.prompts),
            "seeds": list(self.share.seeds),
            "plain": {"seconds": self.plain.seconds},
            "points": [point.to_dict() for point in self.points],
            "refused": self.refused,
        }


@dataclass(frozen=True)
class Outcome:
    """The rungs of a search. Those in `tried` have one candidate each, measured on held-out samples."""

    goal: Goal
    rungs: tuple[Rung, ...]
    tried: tuple[Rung, ...]
    command: str
    rivals: tuple[Point, ...] = ()  # measured on the samples of the last rung; never chosen
    left_out: Mapping[str, str] = field(default_factory=dict)  # rivals that were not measured, and why

    @property
    def final(self) -> Rung:
        """The held-out rung of the chosen candidate, or of the nearest one."""
        points = [rung.points[0] for rung in self.tried]
        return self.tried[points.index(self.goal.nearest(points))]

    @property
    def chosen(self) -> Point:
        return self.final.points[0]

    @property
    def reached(self) -> bool:
        return self.goal.met_by(self.chosen)

    @property
    def file(self) -> str:
        """The name of the file with the settings."""
        return f"{'preset' if self.reached else 'nearest'}{YAML if find_spec('yaml') else JSON}"

    @property
    def front(self) -> list[Point]:
        """The front of the last rung and the plain model, measured on the same samples."""
        return front([self.rungs[-1].plain, *self.rungs[-1].points])

    @property
    def ahead(self) -> list[Point]:
        """Rivals that meet the goal better than the chosen candidate, on the same samples; best first."""
        mine = next(each for each in self.rungs[-1].points if each.configuration == self.chosen.configuration)
        met = self.goal.best_first(self.rivals)
        return [each for each in met if self.goal.cost(each) < self.goal.cost(mine)] if self.goal.met_by(mine) else met

    def shortfall(self) -> str | None:
        """If the goal was not reached: the nearest candidate, and the way out."""
        if self.reached:
            return None
        return (
            f"no candidate has {self.goal.bound}; on held-out samples, {self.chosen.configuration.label} comes nearest "
            f"with {self.goal.describe(self.chosen)} and is kept in {self.file}; try {self.goal.easier}, more "
            "--candidates, or a larger --size or --batch, where techniques save more"
        )

    def to_dict(self) -> Any:
        settings = {name: value for name, value in self.final.results.settings.items() if name in _SETTINGS}
        return finite(
            {
                "goal": self.goal.to_dict(),
                "settings": settings,
                "reached": self.reached,
                "chosen": self.chosen.to_dict(),
                "held_out": [rung.to_dict() for rung in self.tried],
                "front": [point.to_dict() for point in self.front],
                "rivals": [point.to_dict() for point in self.rivals],
                "left_out": dict(self.left_out),
                "rungs": [rung.to_dict() for rung in self.rungs],
                "command": self.command,
            }
        )

    def __str__(self) -> str:
        return "\n".join([self._heading(), "", table(*self._cells()), "", *self._notes()])

    def to_markdown(self) -> str:
        lines = [self._heading(), "", markdown(*self._cells()), "", *(f"{note}  " for note in self._notes())]
        return "\n".join(line.replace(" +- ", " ± ") for line in [*lines, "", "![The front](front.png)", ""])

    def _heading(self) -> str:
        last = self.rungs[-1]
        beside = f" and of {counted(len(self.rivals), 'rival')}" if self.rivals else ""
        return f"Front of the {len(last.points)} candidates of rung {len(self.rungs)}{beside}, on {last.share}:"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        # The longest column comes last, where it may wrap.
        header = ["", "speed-up", "s / picture", self.goal.metric.title, "configuration"]
        rows = []
        shown = [*self.front, *front(self.rivals)]
        for point in sorted(shown, key=lambda point: -point.speed_up):
            mark = "*" if point.configuration == self.chosen.configuration else ""
            mark = "rival" if point.configuration.rivals else mark
            drift = figure(self.goal.metric, point.drift)
            speed = [f"{point.speed_up:.2f}x", f"{point.seconds:.4g}"]
            rows.append([mark, *speed, drift, point.configuration.label])
        return header, rows

    def _notes(self) -> list[str]:
        verdict = "* Chosen" if self.reached else "* Nearest; the goal was not reached"
        lines = [f"{verdict}: {self.chosen.configuration.label}", *self.findings()]
        missed = len(self.tried) - 1
        if missed:
            lines.append(
                f"{counted(missed, 'candidate')} met the goal in the last rung, but missed it on held-out samples."
            )
        lines += self.rival_notes()
        refused = self.rungs[0].refused
        if refused:
            name, reason = next(iter(refused.items()))
            lines.append(f"The model refuses {counted(len(refused), 'candidate')}, first {name}: {reason}.")
        return lines

    def rival_notes(self) -> list[str]:
        """Whether a rival is ahead, and which rivals were not measured."""
        lines = []
        if self.rivals:
            best = next(iter(self.ahead), None)
            lines.append(
                f"A rival is ahead: {best.configuration.label}, {self.goal.describe(best)}."
                if best
                else "No measured rival meets the goal better."
            )
        for reason in dict.fromkeys(self.left_out.values()):
            names = ", ".join(name for name, why in self.left_out.items() if why == reason)
            lines.append(f"Rivals left out: {names}: {reason}.")
        return lines

    def findings(self) -> list[str]:
        """The held-out measurement of the chosen candidate, and its conditions."""
        chosen, plain, share = self.chosen, self.final.plain, self.final.share
        unseen = "that the search had not seen" if share.fresh else "with seeds that the search had not seen"
        against = f"{chosen.seconds:.4g} s per picture against {plain.seconds:.4g} s plain"
        return [
            f"Asked for: {self.goal}.",
            f"On {share} {unseen}: {self.goal.describe(chosen)}, {against}.",
            f"{conditions(self.final.results)}; batches of {self.final.results.settings['batch']}.",
        ]


def write_outcome(outcome: Outcome, out: Path) -> None:
    """Write, or rewrite, every file that depends on all rungs."""
    write_text(out / "front.json", to_json(outcome.to_dict(), indent=2))
    write_text(out / "front.md", outcome.to_markdown())
    _write_plot(outcome, out / "front.png")
    for name in (f"{stem}{ending}" for stem in ("preset", "nearest") for ending in (YAML, JSON)):
        if name != outcome.file:
            (out / name).unlink(missing_ok=True)
    write_text(out / outcome.file, preset_text(outcome))


def preset_text(outcome: Outcome) -> str:
    """The techniques as `apply(pipe, "preset.yaml")` reads them. In YAML, comments say how they were found."""
    techniques: Techniques = outcome.chosen.configuration.techniques
    listed = techniques.to_list()
    data = listed[0] if len(listed) == 1 else listed
    if outcome.file.endswith(JSON):
        return to_json(data, indent=2)
    import yaml

    notes = [*outcome.findings(), *([outcome.command] if outcome.command else [])]
    if not outcome.reached:
        notes.insert(1, "Not reached; this came nearest.")
    # The command may hold line breaks, which would end the comment.
    comments = "".join(f"# {' '.join(note.split())}\n" for note in notes)
    written: str = yaml.safe_dump(data, sort_keys=False)
    return comments + written


def _write_plot(outcome: Outcome, path: Path) -> None:
    """Plot drift over speed-up: candidates as last measured, the front, rivals, the goal and the chosen candidate."""
    goal, last, chosen = outcome.goal, outcome.rungs[-1], outcome.chosen
    drawn, axes = new_plot(8.6)
    seen = {point.configuration: point for rung in outcome.rungs for point in rung.points}
    dropped = [point for point in seen.values() if point not in last.points]
    axes.plot(*_places(dropped), "o", color="#BBBBBB", markersize=4, label="dropped in earlier rungs")
    _draw_bars(axes, last.points, fmt="o", color="#0072B2", elinewidth=0.8, label=f"last rung, {last.share}")
    axes.plot(*_places(outcome.front), "-", color="#0072B2", linewidth=1.2, label="front")
    axes.plot(1.0, 0.0, "x", color="#777777", label="plain")
    heads = dict.fromkeys(point.configuration.rivals[0].name for point in outcome.rivals)
    for place, name in enumerate(heads):
        mine = [point for point in outcome.rivals if point.configuration.rivals[0].name == name]
        # The first two styles have the colours of the search itself.
        style = {**series_style(place + 2), "linestyle": "none", "markerfacecolor": "white", "markersize": 5}
        axes.plot(*_places(mine), **style, label=f"rival: {name}")
    verdict = "chosen" if outcome.reached else "nearest"
    _draw_bars(axes, [chosen], fmt="*", color="#D55E00", markersize=13, label=f"{verdict}, held out")
    line = {"color": "#009E73", "linestyle": "--", "linewidth": 1}
    draw_line = axes.axhline if isinstance(goal, Budget) else axes.axvline
    draw_line(goal.value, label="asked for", **line)
    # Wide intervals may leave the plot: they would squeeze the points together.
    axes.set_ylim(0.0, 1.15 * max(point.drift.mean for point in (*seen.values(), *outcome.rivals, chosen)) or 1.0)
    axes.set_xlabel("speed-up over the plain model")
    axes.set_ylabel(f"{goal.metric.title}, lower is better")
    label_plot(drawn, axes, last.results, goal.metric, beside=True)
    save_plot(drawn, path)


def _draw_bars(axes: Any, points: Sequence[Point], **style: Any) -> None:
    """Draw points with their intervals."""
    axes.errorbar(*_places(points), yerr=[point.drift.interval or 0.0 for point in points], capsize=3, **style)


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.speed_up for point in points], [point.drift.mean for point in points]

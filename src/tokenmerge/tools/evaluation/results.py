"""Gathers the kept measurements of all pictures into figures per configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from ...planning.drift import SPREAD, Drift
from ..files import finite
from ..quality.metrics import METRICS, Choice, Metric
from ..quality.statistics import Estimate, Worst, estimate, grouped, jackknife, worst
from ..typed import Configuration
from .folder import Folder, Sample, read_if_there, read_json
from .yardstick import best_distance, fine_metrics, fine_name

# The name, in all files, of the PSNR to the plain picture that Hold estimates by its own errors.
ESTIMATED = "estimated_psnr"
# Whether such estimates were compared with true figures.
CALIBRATED = "estimate_calibrated"


@dataclass(frozen=True)
class Row:
    """The figures of one configuration, by metric, and its costs."""

    configuration: Configuration
    estimates: dict[str, Estimate]
    timing: dict[str, Any] | None
    kinds: dict[str, int]  # how many steps of a picture were full, merged, held or skipped; empty for the plain model
    operations: float | None = None  # of the denoiser, per picture; None if they could not be counted
    estimated: Drift | None = None  # Hold's estimate of its own drift, averaged over pictures
    worst: dict[str, Worst] = field(default_factory=dict)  # the worst pictures, by metric of pairs
    sets: dict[str, list[float]] = field(default_factory=dict)  # of the whole set, then without each part, by metric

    @property
    def seconds(self) -> float | None:
        return self.timing["median"] if self.timing else None

    @property
    def denoiser_seconds(self) -> float | None:
        return self.timing["denoiser_seconds"] if self.timing else None

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.configuration.to_dict(),
            "metrics": {name: asdict(value) for name, value in self.estimates.items()},
            "worst": {name: asdict(value) for name, value in self.worst.items()},
            "timing": self.timing,
            "kinds": self.kinds,
            "operations": self.operations,
            ESTIMATED: None if self.estimated is None else self.estimated.psnr,
            CALIBRATED: None if self.estimated is None else self.estimated.calibrated,
        }


@dataclass(frozen=True)
class Results:
    """Everything that a report shows. The first row is the plain model."""

    folder: Folder
    settings: dict[str, Any]
    choice: Choice
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]
    values: dict[tuple[str, Sample], dict[str, float]]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All metrics with a figure in some row. Each comes before its form for the second yardstick."""
        there = {name for row in self.rows for name in row.estimates}
        known = [each for metric in METRICS for each in (metric, *fine_metrics([metric], self.reference_steps))]
        return tuple(metric for metric in known if metric.name in there)

    @property
    def drift(self) -> Metric | None:
        """The metric of pairs whose worst values tables show, if one was measured."""
        pairs = {metric.name: metric for metric in self.metrics if metric in METRICS and metric.kind == "pair"}
        return pairs.get(best_distance(pairs) or next(iter(pairs), ""))

    @property
    def reference_steps(self) -> int:
        """The steps of the second yardstick, or 0."""
        return int(self.settings["reference_steps"])

    @property
    def distance(self) -> str | None:
        """The metric by which tables give drift as a share of the schedule's error, if both were measured."""
        there = self.rows[0].estimates
        return best_distance(metric.name for metric in self.metrics if fine_name(metric.name) in there)

    def shares(self, row: Row) -> dict[str, float]:
        """Drift as a share of the schedule's error, by metric. That error is the distance of the plain picture to the
        one with more steps."""
        errors = self.rows[0].estimates
        return {
            name: value.mean / errors[fine_name(name)].mean
            for name, value in row.estimates.items()
            if fine_name(name) in errors and errors[fine_name(name)].mean
        }

    def work(self, row: Row) -> float | None:
        """Operations of the denoiser as a share of the plain model's."""
        return _over(row.operations, self.rows[0].operations)

    def to_dict(self) -> Any:
        rows = [self.line(row) for row in self.rows]
        return finite({"settings": self.settings, "results": rows, "missing": self.choice.missing_lines()})

    def line(self, row: Row) -> dict[str, Any]:
        """A row, compared with the plain model."""
        speed = {"speed_up": self.speed_up(row), "denoiser_speed_up": self.denoiser_speed_up(row)}
        return {**row.to_dict(), **speed, "work": self.work(row), "shares": self.shares(row)}

    def speed_up(self, row: Row) -> float | None:
        return _over(self.rows[0].seconds, row.seconds)

    def denoiser_speed_up(self, row: Row) -> float | None:
        return _over(self.rows[0].denoiser_seconds, row.denoiser_seconds)


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def gather(
    folder: Folder,
    settings: dict[str, Any],
    choice: Choice,
    metrics: Sequence[Metric],
    configurations: Sequence[Configuration],
    samples: Sequence[Sample],
) -> Results:
    """Read everything that was measured. metrics: the chosen ones, and those for the second yardstick."""
    values: dict[tuple[str, Sample], dict[str, float]] = {}
    rows = []
    for configuration in configurations:
        for sample in samples:
            kept = read_if_there(folder.values(configuration, sample))
            work = read_if_there(folder.work(configuration, sample))
            kept |= {name: value for name, value in work.items() if name == ESTIMATED}
            values[configuration.label, sample] = {name: float(value) for name, value in kept.items()}
        rows.append(_row(folder, settings["repeats"], metrics, configuration, samples, values))
    return Results(folder, settings, choice, tuple(rows), tuple(samples), values)


def _row(
    folder: Folder,
    repeats: int,
    metrics: Sequence[Metric],
    configuration: Configuration,
    samples: Sequence[Sample],
    values: dict[tuple[str, Sample], dict[str, float]],
) -> Row:
    estimates, worst_of = {}, {}
    for metric in metrics:
        is_drift = metric in METRICS and metric.kind == "pair"
        if metric.kind == "set" or (is_drift and configuration.is_plain):
            continue
        found = [values[configuration.label, sample][metric.name] for sample in samples]
        estimates[metric.name] = estimate(grouped([sample.place for sample in samples], found))
        if is_drift:
            worst_of[metric.name] = worst(found, higher_is_better=metric.higher_is_better)
    known = read_if_there(folder.sets(configuration))
    # An earlier run may have measured other metrics.
    sets = {m.name: [float(each) for each in known[m.name]] for m in metrics if m.kind == "set" and m.name in known}
    estimates |= {name: jackknife(figures[0], figures[1:]) for name, figures in sets.items()}
    kinds = read_if_there(folder.kinds(configuration))
    timing = _timing(folder, configuration, repeats)
    work = [read_if_there(folder.work(configuration, sample)) for sample in samples]
    operations, estimated = (
        fmean(each[name] for each in work) if all(name in each for each in work) else None
        for name in ("operations", ESTIMATED)
    )
    drift = None if estimated is None else Drift(estimated, SPREAD, all(each[CALIBRATED] for each in work))
    return Row(configuration, estimates, timing, kinds, operations, drift, worst_of, sets)


def _timing(folder: Folder, configuration: Configuration, repeats: int) -> dict[str, Any] | None:
    """All laps of a configuration, and their medians."""
    if not repeats:
        return None
    laps = [read_json(folder.timing(configuration, lap)) for lap in range(repeats)]
    seconds, denoiser = ([lap[name] for lap in laps] for name in ("seconds", "denoiser_seconds"))
    memory = [lap["peak_memory"] for lap in laps if lap["peak_memory"] is not None]
    return {
        "seconds": seconds,
        "median": median(seconds),
        "denoiser": denoiser,
        "denoiser_seconds": median(denoiser),
        "batch": laps[0]["batch"],
        "peak_memory": max(memory, default=None),
        "graphs": laps[-1]["graphs"],
        "tokens": laps[0]["tokens"],
    }

"""From what is kept of every picture to figures of every configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from ...planning.drift import SPREAD, Drift
from ..files import finite
from ..quality.metrics import METRICS, Choice, Metric
from ..quality.statistics import Estimate, Worst, estimate, jackknife, worst
from ..typed import Configuration
from .folder import Folder, Sample, read_json
from .yardstick import best_distance, fine_metrics, fine_name

# The PSNR to the plain picture that Hold's own errors tell, in all files.
ESTIMATED = "estimated_psnr"
# Whether that was compared with true ones.
CALIBRATED = "estimate_calibrated"


@dataclass(frozen=True)
class Row:
    """One configuration: its figures by metric, where it has them, and what it cost."""

    configuration: Configuration
    estimates: dict[str, Estimate]
    timing: dict[str, Any] | None
    kinds: dict[str, int]  # of the steps of a picture: full, merged, held, skipped; empty of plain pictures
    operations: float | None = None  # of the denoiser in a picture, where they could be counted
    estimated: Drift | None = None  # what Hold's own errors tell of its pictures: the mean
    worst: dict[str, Worst] = field(default_factory=dict)  # of single pictures, by metric of pairs
    sets: dict[str, list[float]] = field(default_factory=dict)  # figures of the set, first whole, then without parts

    @property
    def seconds(self) -> float | None:
        return self.timing["median"] if self.timing else None

    @property
    def denoiser_seconds(self) -> float | None:
        return self.timing["denoiser_seconds"] if self.timing else None

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.configuration.to_dict(),
            "metrics": {
                name: {"mean": value.mean, "interval": value.interval} for name, value in self.estimates.items()
            },
            "worst": {name: asdict(value) for name, value in self.worst.items()},
            "timing": self.timing,
            "kinds": self.kinds,
            "operations": self.operations,
            ESTIMATED: None if self.estimated is None else self.estimated.psnr,
            CALIBRATED: None if self.estimated is None else self.estimated.calibrated,
        }


@dataclass(frozen=True)
class Results:
    """Everything that a report shows."""

    folder: Folder
    settings: dict[str, Any]
    choice: Choice
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]
    values: dict[tuple[str, Sample], dict[str, float]]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Those that some configuration has a figure of, each before the same to the picture with more steps."""
        there = {name for row in self.rows for name in row.estimates}
        all_of_them = [each for metric in METRICS for each in (metric, *fine_metrics([metric], self.reference_steps))]
        return tuple(metric for metric in all_of_them if metric.name in there)

    @property
    def drift(self) -> Metric | None:
        """The metric of pairs by which the worst pictures are told in tables, if one was measured."""
        pairs = {metric.name: metric for metric in self.metrics if metric in METRICS and metric.kind == "pair"}
        return pairs.get(best_distance(pairs) or next(iter(pairs), ""))

    @property
    def reference_steps(self) -> int:
        """Of the second yardstick, or 0."""
        return int(self.settings["reference_steps"])

    @property
    def distance(self) -> str | None:
        """The metric by which drift is told as a share of the schedule's own error, if both were measured."""
        there = self.rows[0].estimates
        return best_distance(metric.name for metric in self.metrics if fine_name(metric.name) in there)

    def shares(self, row: Row) -> dict[str, float]:
        """Drift to the plain picture, as a share of how far that is from the picture with more steps: the error of the
        schedule itself. By metric."""
        errors = self.rows[0].estimates
        return {
            name: value.mean / errors[fine_name(name)].mean
            for name, value in row.estimates.items()
            if fine_name(name) in errors and errors[fine_name(name)].mean
        }

    def work(self, row: Row) -> float | None:
        """Operations of the denoiser as a share of the plain model's."""
        plain = self.rows[0].operations
        return row.operations / plain if plain and row.operations else None

    def to_dict(self) -> Any:
        rows = [self.line(row) for row in self.rows]
        return finite({"settings": self.settings, "results": rows, "missing": self.choice.missing_lines()})

    def line(self, row: Row) -> dict[str, Any]:
        """A row, and how it compares with the first."""
        speed = {"speed_up": self.speed_up(row), "denoiser_speed_up": self.denoiser_speed_up(row)}
        return {**row.to_dict(), **speed, "work": self.work(row), "shares": self.shares(row)}

    def speed_up(self, row: Row) -> float | None:
        plain = self.rows[0].seconds
        return plain / row.seconds if plain and row.seconds else None

    def denoiser_speed_up(self, row: Row) -> float | None:
        plain = self.rows[0].denoiser_seconds
        return plain / row.denoiser_seconds if plain and row.denoiser_seconds else None


def gather(
    folder: Folder,
    settings: dict[str, Any],
    choice: Choice,
    metrics: Sequence[Metric],
    configurations: Sequence[Configuration],
    samples: Sequence[Sample],
) -> Results:
    """Read everything that was measured. metrics: those of the choice, and those to the pictures with more steps."""
    values: dict[tuple[str, Sample], dict[str, float]] = {}
    rows = []
    for configuration in configurations:
        for sample in samples:
            path = folder.values(configuration, sample)
            kept = read_json(path) if path.is_file() else {}
            work = _work(folder, configuration, sample)
            kept |= {name: value for name, value in work.items() if name == ESTIMATED}
            values[configuration.label, sample] = {name: float(value) for name, value in kept.items()}
        rows.append(_row(folder, settings, metrics, configuration, samples, values))
    return Results(folder, settings, choice, tuple(rows), tuple(samples), values)


def _row(
    folder: Folder,
    settings: dict[str, Any],
    metrics: Sequence[Metric],
    configuration: Configuration,
    samples: Sequence[Sample],
    values: dict[tuple[str, Sample], dict[str, float]],
) -> Row:
    estimates, worst_of = {}, {}
    for metric in metrics:
        if metric.kind == "set" or (metric in METRICS and metric.kind == "pair" and configuration.is_plain):
            continue
        by_prompt: dict[int, list[float]] = {}
        for sample in samples:
            by_prompt.setdefault(sample.place, []).append(values[configuration.label, sample][metric.name])
        estimates[metric.name] = estimate(list(by_prompt.values()))
        if metric in METRICS and metric.kind == "pair":
            every = [value for each in by_prompt.values() for value in each]
            worst_of[metric.name] = worst(every, higher_is_better=metric.higher_is_better)
    sets: dict[str, list[float]] = {}
    if folder.sets(configuration).is_file():
        known = read_json(folder.sets(configuration))
        # Another run may have asked for others.
        sets = {m.name: [float(each) for each in known[m.name]] for m in metrics if m.kind == "set" and m.name in known}
    estimates |= {name: jackknife(values[0], values[1:]) for name, values in sets.items()}
    kinds = read_json(folder.kinds(configuration)) if folder.kinds(configuration).is_file() else {}
    timing = _timing(folder, configuration, settings["repeats"])
    work = [_work(folder, configuration, sample) for sample in samples]
    operations, estimated = (
        fmean(each[name] for each in work) if all(name in each for each in work) else None
        for name in ("operations", ESTIMATED)
    )
    drift = None if estimated is None else Drift(estimated, SPREAD, all(each[CALIBRATED] for each in work))
    return Row(configuration, estimates, timing, kinds, operations, drift, worst_of, sets)


def _work(folder: Folder, configuration: Configuration, sample: Sample) -> dict[str, Any]:
    """What a picture told while it was made."""
    path = folder.work(configuration, sample)
    return read_json(path) if path.is_file() else {}


def _timing(folder: Folder, configuration: Configuration, repeats: int) -> dict[str, Any] | None:
    """All laps of a configuration together, and the medians that count."""
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

"""The table of an evaluation as text, Markdown and CSV, with notes on how its figures were made."""

from __future__ import annotations

import csv
import io

from ...planning.drift import UNCALIBRATED
from ...planning.tables import counted, table
from ..compiling import warm_ups
from ..drawing.comparison import saves_nothing
from ..quality.metrics import BY_NAME, Metric
from ..quality.statistics import Estimate, Worst
from .results import CALIBRATED, ESTIMATED, Results, Row

# What each way of --compile does.
_COMPILED = {"both": "compiled blocks and CUDA graphs", "blocks": "compiled blocks", "graphs": "CUDA graphs"}
_SHARE = "share of schedule's error"


def figure(metric: Metric, value: Estimate | None) -> str:
    """A mean with its interval, in the digits of the metric; empty without a value."""
    if value is None:
        return ""
    mean = f"{value.mean:.{metric.digits}f}"
    return mean if value.interval is None else f"{mean} +- {value.interval:.{metric.digits}f}"


def plain(results: Results) -> str:
    """For the terminal, which showed the missing metrics when the evaluation began."""
    return "\n".join(
        [table(*cells(results)), "", *_circumstances(results), "", str(results.folder.root / "report.html")]
    )


def markdown(results: Results) -> str:
    """The table, with notes below."""
    header, rows = cells(results, arrows=True)
    aligned = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(_marked_down(cell) for cell in row)} |" for row in [header, aligned, *rows]]
    return "\n".join([*lines, "", *(f"{note}  " for note in notes(results))]) + "\n"


def _marked_down(cell: str) -> str:
    return cell.replace("|", "\\|").replace(" +- ", " ± ")


def conditions(results: Results) -> str:
    """The conditions of all figures, in one line."""
    settings = results.settings
    width, height = settings["size"]
    scheduler, way = settings["scheduler"], settings["compile"]
    prompts, seeds = len(settings["prompts"]), len(settings["seeds"])
    times = ", a seed for each" if settings["paired"] else f" x {counted(seeds, 'seed')}"
    return (
        f"{settings['model']}, {width}x{height} pixels, {counted(settings['steps'], 'step')}"
        f"{f' of {scheduler}' if scheduler else ''}, {settings['dtype']}"
        f"{f', {_COMPILED[way]}' if way else ''}; {counted(prompts, 'prompt')}{times}; "
        f"{settings['environment']['device']}, torch {settings['environment']['torch']}"
    )


def notes(results: Results) -> list[str]:
    """How the figures were made, and which metrics are missing."""
    return _circumstances(results) + [f"{line}." for line in results.choice.missing_lines()]


def _circumstances(results: Results) -> list[str]:
    """How the figures were made."""
    timing, pictures = results.rows[0].timing, len(results.samples)
    lines = [
        f"{conditions(results)}.",
        "Means with 95 % confidence intervals, for which all pictures of a prompt count as one sample.",
    ]
    if timing:
        untimed = warm_ups(results.settings["compile"])
        lines.append(
            "Seconds per picture, for whole pipeline calls and for the denoiser alone, are medians over "
            f"{counted(len(timing['seconds']), 'timed batch', 'timed batches')} of {timing['batch']}. Configurations "
            f"take turns, with {counted(untimed, 'warm-up batch', 'warm-up batches')} before each timed batch."
        )
    unrecorded = [row.configuration.label for row in results.rows if row.timing and row.timing["graphs"] == 0]
    if unrecorded:
        lines.append(
            f"No CUDA graph could be recorded with {', '.join(unrecorded)}, so calls ran without graphs: a cache "
            "decides, or maps are drawn, on the host."
        )
    if any(metric.kind == "set" for metric in results.metrics):
        count = len(results.settings["reference"])
        against = f"the {counted(count, 'picture')} of the reference folder" if count else "the plain pictures"
        lines.append(
            f"FID and KID compare {pictures} pictures of each configuration with {against}. Their intervals come from "
            "leaving out a tenth of the prompts at a time. FID grows as pictures become fewer: compare it only at "
            "equal numbers."
        )
    if results.drift:
        lines.append(
            f"{results.drift.title} of the worst: the value that one picture in twenty reaches or is worse than, and "
            "the worst value of all."
        )
    if any(row.operations for row in results.rows):
        lines.append(
            "Work is the denoiser's operations per picture, as a share of the plain model's: products, convolutions "
            "and attention. Maps of merging are not counted."
        )
    if any(row.estimated for row in results.rows):
        lines.append("The estimated PSNR comes from Hold's own errors, without the plain pictures.")
    if any(row.estimated and not row.estimated.calibrated for row in results.rows):
        lines.append(UNCALIBRATED)
    if results.distance:
        lines.append(
            f"The second yardstick is the plain picture with {results.reference_steps} steps. The plain picture's own "
            f"distance to it is the schedule's error. Drift ({BY_NAME[results.distance].title}) is also given as a "
            "share of that error."
        )
    idle = [saves_nothing(row.configuration.label, row.kinds) for row in results.rows]
    lines += [note for note in idle if note]
    return lines + [f"{label} is refused: {reason}." for label, reason in results.settings["refused"].items()]


def cells(results: Results, arrows: bool = False) -> tuple[list[str], list[list[str]]]:
    """The header and the rows, without empty columns. arrows: mark each metric's better direction, with characters that
    not every terminal can show."""
    rows, drift = results.rows, results.drift
    columns = {
        "configuration": [row.configuration.label for row in rows],
        "s / picture": [_seconds(row.seconds) for row in rows],
        "speed-up": [_times(results.speed_up(row)) for row in rows],
        "denoiser s": [_seconds(row.denoiser_seconds) for row in rows],
        "denoiser speed-up": [_times(results.denoiser_speed_up(row)) for row in rows],
        "work": [percent(results.work(row)) for row in rows],
        "memory, GiB": [_gibibytes(row.timing["peak_memory"]) if row.timing else "" for row in rows],
    }
    for metric in results.metrics:
        arrow = " ↑" if metric.higher_is_better else " ↓"
        columns[metric.title + (arrow if arrows else "")] = [
            figure(metric, row.estimates.get(metric.name)) for row in rows
        ]
    if drift:
        columns[f"{drift.title} of the worst"] = [_worst(drift, row.worst.get(drift.name)) for row in rows]
    if results.distance:
        columns[_SHARE] = [percent(results.shares(row).get(results.distance)) for row in rows]
    columns["estimated PSNR"] = [row.estimated.short if row.estimated else "" for row in rows]
    shown = {title: column for title, column in columns.items() if any(column)}
    return [*shown], [list(line) for line in zip(*shown.values(), strict=True)]


def _worst(metric: Metric, value: Worst | None) -> str:
    return "" if value is None else f"{value.one_in_twenty:.{metric.digits}f}, {value.worst:.{metric.digits}f}"


def percent(share: float | None) -> str:
    """A share in percent: three digits below 100 %, else a whole number."""
    return "" if share is None else f"{100 * share:.3g} %" if share < 1 else f"{100 * share:.0f} %"


def _seconds(seconds: float | None) -> str:
    return f"{seconds:.4g}" if seconds else ""


def _times(speed_up: float | None) -> str:
    return f"{speed_up:.2f}x" if speed_up else ""


def _gibibytes(count: int | None) -> str:
    return f"{count / 2**30:.2f}" if count else ""


def comma_separated(results: Results) -> str:
    """CSV with plain numbers, and a column for every interval."""
    lines = [_numbers(results, row) for row in results.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(name for line in lines for name in line), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _numbers(results: Results, row: Row) -> dict[str, object]:
    """A row by the columns of the CSV file; None leaves a cell empty."""
    timing, estimated = row.timing or {}, row.estimated
    line: dict[str, object] = {
        "configuration": row.configuration.label,
        "seconds": row.seconds,
        "speed_up": results.speed_up(row),
        "denoiser_seconds": row.denoiser_seconds,
        "denoiser_speed_up": results.denoiser_speed_up(row),
        "batch": timing.get("batch"),
        "peak_memory": timing.get("peak_memory"),
        "work": results.work(row),
        ESTIMATED: estimated.psnr if estimated else None,
        CALIBRATED: estimated.calibrated if estimated else None,
    }
    for metric in results.metrics:
        value = row.estimates.get(metric.name)
        line[metric.name] = value.mean if value else None
        line[f"{metric.name}_interval"] = value.interval if value else None
    for name, last in row.worst.items():
        line |= {f"{name}_one_in_twenty": last.one_in_twenty, f"{name}_worst": last.worst}
    return line | {f"{name}_share": share for name, share in results.shares(row).items()}

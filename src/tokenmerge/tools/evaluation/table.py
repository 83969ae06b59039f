"""The table of an evaluation: as text, Markdown and CSV, with notes on how its figures were made."""

from __future__ import annotations

import csv
import io

from ...planning.drift import UNCALIBRATED
from ...planning.tables import counted, table
from ..compiling import warm_ups
from ..drawing.comparison import saves_nothing
from ..quality.metrics import BY_NAME, Metric
from ..quality.statistics import Estimate, Worst
from .results import CALIBRATED, ESTIMATED, Results

# By what --compile came to.
_COMPILED = {"both": "compiled blocks and CUDA graphs", "blocks": "compiled blocks", "graphs": "CUDA graphs"}
_SHARE = "share of schedule's error"
_TIMES = ["s / picture", "speed-up", "denoiser s", "denoiser speed-up"]


def figure(metric: Metric, value: Estimate | None) -> str:
    """A mean with its interval, in the digits of its metric; empty where there is none."""
    if value is None:
        return ""
    mean = f"{value.mean:.{metric.digits}f}"
    return mean if value.interval is None else f"{mean} +- {value.interval:.{metric.digits}f}"


def plain(results: Results) -> str:
    """For the terminal, which was told what is missing when the evaluation began."""
    return "\n".join(
        [table(*cells(results)), "", *_circumstances(results), "", str(results.folder.root / "report.html")]
    )


def markdown(results: Results) -> str:
    """The table, the conditions under it, and what is missing."""
    header, rows = cells(results, arrows=True)
    aligned = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(_marked_down(cell) for cell in row)} |" for row in [header, aligned, *rows]]
    return "\n".join([*lines, "", *(f"{note}  " for note in notes(results))]) + "\n"


def _marked_down(cell: str) -> str:
    return cell.replace("|", "\\|").replace(" +- ", " ± ")


def conditions(results: Results) -> str:
    """What the figures hold for."""
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
    """How the figures were made, and which are missing."""
    return _circumstances(results) + [f"{line}." for line in results.choice.missing_lines()]


def _circumstances(results: Results) -> list[str]:
    """How the figures were made."""
    timing, pictures = results.rows[0].timing, len(results.samples)
    lines = [
        f"{conditions(results)}.",
        "Means with 95 % intervals of confidence, which take the pictures of a prompt together.",
    ]
    if timing:
        untimed = warm_ups(results.settings["compile"])
        lines.append(
            "Seconds per picture, of whole calls and of the denoiser in them: medians over "
            f"{counted(len(timing['seconds']), 'timed batch', 'timed batches')} of {timing['batch']}, all "
            f"configurations in turn, each batch after {'one that does' if untimed == 1 else f'{untimed} that do'} not "
            "count."
        )
    launched = [row.configuration.label for row in results.rows if row.timing and row.timing["graphs"] == 0]
    if launched:
        lines.append(
            f"No call could be recorded as a CUDA graph, and all ran as they are, with {', '.join(launched)}: a cache "
            "decides, or maps are drawn, with the help of the host."
        )
    if any(metric.kind == "set" for metric in results.metrics):
        count = len(results.settings["reference"])
        against = f"the {counted(count, 'picture')} of the reference folder" if count else "the plain pictures"
        lines.append(
            f"FID and KID are against {against}, with {pictures} pictures of each configuration; intervals are by "
            "leaving out a tenth of the prompts at a time. FID grows as pictures become fewer, so compare it only at "
            "the same number."
        )
    if results.drift:
        lines.append("Of the worst pictures: what one in twenty is as far off as or further, and the furthest.")
    if any(row.operations for row in results.rows):
        lines.append(
            "Work is the operations of the denoiser in a picture, beside the plain model's: products, convolutions "
            "and attention. Maps of merging are not counted."
        )
    if any(row.estimated for row in results.rows):
        lines.append("The estimated PSNR is what Hold tells of its own errors, without the plain pictures.")
    if any(row.estimated and not row.estimated.calibrated for row in results.rows):
        lines.append(UNCALIBRATED)
    if results.distance:
        lines.append(
            f"The second yardstick is the plain picture with {results.reference_steps} steps. The plain picture's own "
            f"distance to it is the error of the schedule, and drift ({BY_NAME[results.distance].title}) is also told "
            "as a share of that."
        )
    idle = [saves_nothing(row.configuration.label, row.kinds) for row in results.rows]
    lines += [note for note in idle if note]
    return lines + [f"{label} is refused: {reason}." for label, reason in results.settings["refused"].items()]


def cells(results: Results, arrows: bool = False) -> tuple[list[str], list[list[str]]]:
    """The header and the rows. arrows: point towards better; not every terminal can show them."""
    timed = any(row.timing for row in results.rows)
    memory = any(row.timing and row.timing["peak_memory"] for row in results.rows)
    worked = any(row.operations for row in results.rows)
    header = ["configuration", *(_TIMES if timed else []), *(["work"] if worked else [])]
    header += ["memory, GiB"] if memory else []
    for metric in results.metrics:
        arrow = "↑" if metric.higher_is_better else "↓"
        header.append(f"{metric.title} {arrow}" if arrows else metric.title)
    drift = results.drift
    header += [f"{drift.title} of the worst"] if drift else []
    header += [_SHARE] if results.distance else []
    estimated = any(row.estimated for row in results.rows)
    header += ["estimated PSNR"] if estimated else []
    rows = []
    for row in results.rows:
        line = [row.configuration.label]
        if timed:
            line += _times(row.seconds, results.speed_up(row))
            line += _times(row.denoiser_seconds, results.denoiser_speed_up(row))
        if worked:
            line.append(percent(results.work(row)))
        if memory:
            line.append(f"{row.timing['peak_memory'] / 2**30:.2f}" if row.timing else "")
        line += [figure(metric, row.estimates.get(metric.name)) for metric in results.metrics]
        line += [_worst(drift, row.worst.get(drift.name))] if drift else []
        line += [percent(results.shares(row).get(results.distance))] if results.distance else []
        rows.append(line + ([row.estimated.told if row.estimated else ""] if estimated else []))
    return header, rows


def _worst(metric: Metric, value: Worst | None) -> str:
    return "" if value is None else f"{value.one_in_twenty:.{metric.digits}f}, {value.worst:.{metric.digits}f}"


def percent(share: float | None) -> str:
    """With three digits, or as a whole number."""
    return "" if share is None else f"{100 * share:.3g} %" if share < 1 else f"{100 * share:.0f} %"


def _times(seconds: float | None, speed_up: float | None) -> list[str]:
    return [f"{seconds:.4g}" if seconds else "", f"{speed_up:.2f}x" if speed_up else ""]


def comma_separated(results: Results) -> str:
    """Plain numbers, an interval in a column of its own."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [name for metric in results.metrics for name in (metric.name, f"{metric.name}_interval")]
    times = ["seconds", "speed_up", "denoiser_seconds", "denoiser_speed_up"]
    distances = list(dict.fromkeys(name for row in results.rows for name in results.shares(row)))
    shares = [f"{name}_share" for name in distances]
    pairs = list(dict.fromkeys(name for row in results.rows for name in row.worst))
    lasts = [f"{name}_{which}" for name in pairs for which in ("one_in_twenty", "worst")]
    costs = [*times, "batch", "peak_memory", "work"]
    writer.writerow(["configuration", *costs, ESTIMATED, CALIBRATED, *names, *lasts, *shares])
    for row in results.rows:
        timing = row.timing or {}
        line = [row.configuration.label, row.seconds, results.speed_up(row)]
        line += [row.denoiser_seconds, results.denoiser_speed_up(row), timing.get("batch"), timing.get("peak_memory")]
        told = row.estimated
        line += [results.work(row), *((told.psnr, told.calibrated) if told else (None, None))]
        for metric in results.metrics:
            value = row.estimates.get(metric.name)
            line += [value.mean, value.interval] if value else [None, None]
        for name in pairs:
            last = row.worst.get(name)
            line += [last.one_in_twenty, last.worst] if last else [None, None]
        line += [results.shares(row).get(name) for name in distances]
        writer.writerow(["" if cell is None else cell for cell in line])
    return text.getvalue()

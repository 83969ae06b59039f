"""The table of an evaluation: as text, Markdown and CSV, with notes on how its figures were made."""

from __future__ import annotations

import csv
import io

from ..quality.metrics import Metric
from ..quality.statistics import Estimate
from ..tables import table
from .results import Results


def figure(metric: Metric, value: Estimate | None) -> str:
    """A mean with its interval, in the digits of its metric; empty where there is none."""
    if value is None:
        return ""
    mean = f"{value.mean:.{metric.digits}f}"
    return mean if value.interval is None else f"{mean} +- {value.interval:.{metric.digits}f}"


def heading(metric: Metric) -> str:
    """A metric's title, with an arrow towards better."""
    return f"{metric.title} {'↑' if metric.higher_is_better else '↓'}"


def plain(results: Results) -> str:
    """For the terminal."""
    return "\n".join([table(*cells(results)), "", *notes(results), "", str(results.folder.root / "report.html")])


def markdown(results: Results) -> str:
    """The table, the conditions under it, and what is missing."""
    header, rows = cells(results)
    aligned = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in [header, aligned, *rows]]
    return "\n".join([*lines, "", *(f"{note}  " for note in notes(results))]) + "\n"


def notes(results: Results) -> list[str]:
    """How the figures were made, and which are missing."""
    settings, timed = results.settings, results.rows[0].timing
    width, height = settings["size"]
    prompts, seeds = len(settings["prompts"]), len(settings["seeds"])
    conditions = (
        f"{settings['model']}, {width}x{height} pixels, {settings['steps']} steps, {settings['dtype']}"
        f"{', compiled' if settings['compile'] else ''}; {prompts} prompts x {seeds} seeds; "
        f"{settings['environment']['device']}, torch {settings['environment']['torch']}."
    )
    lines = [
        conditions,
        "Means with 95 % intervals of confidence, which take the pictures of a prompt together.",
    ]
    if timed:
        lines.append(
            f"Seconds per picture: median of {len(timed['seconds'])} batches of {timed['batch']} after a warm-up."
        )
    if any(metric.kind == "set" for metric in results.metrics):
        count = len(settings["reference"])
        against = f"the {count} pictures of the reference folder" if count else "the unmerged pictures"
        lines.append(f"FID and KID are against {against}, with {len(results.samples)} pictures of each configuration.")
    return lines + [f"{line}." for line in results.choice.missing_lines()]


def cells(results: Results) -> tuple[list[str], list[list[str]]]:
    """The header and the rows."""
    timed = any(row.timing for row in results.rows)
    memory = any(row.timing and row.timing["peak_memory"] for row in results.rows)
    header = ["configuration", *(["s / picture", "speed-up"] if timed else []), *(["memory, GiB"] if memory else [])]
    header += [heading(metric) for metric in results.metrics]
    rows = []
    for row in results.rows:
        line = [row.configuration.label]
        if timed:
            speed_up = results.speed_up(row)
            line += [f"{row.seconds:.4g}" if row.seconds else "", f"{speed_up:.2f}x" if speed_up else ""]
        if memory:
            line.append(f"{row.timing['peak_memory'] / 2**30:.2f}" if row.timing else "")
        rows.append(line + [figure(metric, row.estimates.get(metric.name)) for metric in results.metrics])
    return header, rows


def comma_separated(results: Results) -> str:
    """Plain numbers, an interval in a column of its own."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [name for metric in results.metrics for name in (metric.name, f"{metric.name}_interval")]
    writer.writerow(["configuration", "seconds", "speed_up", "batch", "peak_memory", *names])
    for row in results.rows:
        timing = row.timing or {}
        line = [row.configuration.label, row.seconds, results.speed_up(row), timing.get("batch")]
        line.append(timing.get("peak_memory"))
        for metric in results.metrics:
            value = row.estimates.get(metric.name)
            line += [value.mean, value.interval] if value else [None, None]
        writer.writerow(["" if cell is None else cell for cell in line])
    return text.getvalue()

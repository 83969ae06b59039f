"""Plots quality against denoiser time, as in the paper's Figure 5: a line per series of configurations, with a point
for each ratio, `every` or threshold."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import TokenMergeError
from ..files import write_file
from ..quality.metrics import Metric
from ..typed import PLAIN, Configuration
from .results import Results, Row
from .table import conditions

# The first eight follow Okabe and Ito, for all kinds of colour vision. The others differ clearly from all before them.
_FIRST = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#B8A600")
_COLOURS = (*_FIRST, "#80001A", "#5A49F2", "#658026", "#C200F2", "#CCA770", "#0032A6", "#800073", "#004D40")
# For print: half as many markers as colours, filled for the first half and hollow for the second.
_MARKERS = "osD^vPX*"
_LINES = ("-", "--", ":")
# Places for a number beside its point, the best first: points across, points up, alignment.
_PLACES = ((6, 5, "left"), (6, -12, "left"), (-6, 5, "right"), (-6, -12, "right"))
# The place of a legend beside its plot.
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
# With more series, the legend goes beside the plot, where it hides no points.
_MOST_INSIDE = 5
# More or longer entries would leave no room for the plot.
_MOST_BESIDE = 24
_LONGEST_ENTRY = 60


def check_plots() -> None:
    """Refuse early, before hours of work, if plots could not be drawn."""
    if find_spec("matplotlib") is None:
        raise TokenMergeError("plots need matplotlib: pip install tokenmerge[eval]")


def write_plots(results: Results, folder: Path) -> list[Path]:
    """One plot per metric that was measured beside the plain model; none if nothing was timed."""
    if not all(row.denoiser_seconds for row in results.rows):
        return []
    series = dict.fromkeys(row.configuration.series for row in results.rows[1:])
    styles = {name: series_style(place) for place, name in enumerate(series)}
    paths = []
    for metric in results.metrics:
        if any(_has_point(row, metric) for row in results.rows[1:]):
            path = folder / f"{metric.name}.png"
            save_plot(_draw(results, metric, styles), path)
            paths.append(path)
    return paths


def series_style(place: int) -> dict[str, Any]:
    """The style of the series at a place; no two of 128 are the same."""
    colour, turn = _COLOURS[place % len(_COLOURS)], place // len(_MARKERS)
    # Every round of colours begins with another marker.
    marker = _MARKERS[(place + place // len(_COLOURS)) % len(_MARKERS)]
    filled = colour if turn % 2 == 0 else "white"
    return {"color": colour, "marker": marker, "markerfacecolor": filled, "linestyle": _LINES[turn % len(_LINES)]}


def new_plot(width: float = 6.4) -> tuple[Any, Any]:
    """An empty figure of this width in inches, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return drawn, axes


def save_plot(drawn: Any, path: Path) -> None:
    """Write a figure as a PNG with few colours, a third of the size."""
    drawn.canvas.draw()
    picture = Image.fromarray(np.asarray(drawn.canvas.buffer_rgba())).convert("RGB").quantize(96)
    write_file(path, lambda file: picture.save(file, format="PNG", optimize=True))


def _draw(results: Results, metric: Metric, styles: dict[str, dict[str, Any]]) -> Any:
    """The plot of a metric."""
    crowded = len(styles) > _MOST_INSIDE
    drawn, axes = new_plot(8.6 if crowded else 6.4)
    entries = dict(zip(styles, _entries(list(styles)), strict=True))
    numbers = []
    for name, style in styles.items():
        rows = [row for row in results.rows[1:] if row.configuration.series == name and _has_point(row, metric)]
        if rows:
            numbers += _draw_series(axes, rows, metric, {**style, "label": entries[name]})
    _mark_plain(axes, results, metric)
    axes.set_ylim(*_limits(results, metric))
    batch = results.rows[0].timing["batch"] if results.rows[0].timing else 0
    axes.set_xlabel(f"denoiser seconds per picture, in batches of {batch}")
    better = "higher" if metric.higher_is_better else "lower"
    axes.set_ylabel(f"{metric.title}, {better} is better")
    merges = any("ratio" in row.configuration.knobs for row in results.rows)
    legend = label_plot(drawn, axes, results, metric, "; numbers are ratios" if merges else "", beside=crowded)
    spread_numbers(drawn, axes, numbers, legend)
    return drawn


def label_plot(drawn: Any, axes: Any, results: Results, metric: Metric, hint: str = "", *, beside: bool) -> Any:
    """Add the headings of a plot, and the legend, which is returned. hint: how to read the plot. beside: put the legend
    beside the plot."""
    drawn.suptitle(f"{metric.title}: {metric.meaning}{hint}", fontsize=10, x=0.01, ha="left")
    axes.set_title(conditions(results), fontsize=8, color="#555555", loc="left")
    return axes.legend(fontsize=8, frameon=False, **(BESIDE if beside else {}))


def _draw_series(axes: Any, rows: list[Row], metric: Metric, style: dict[str, Any]) -> list[Any]:
    """Draw one series, and return the numbers beside its points."""
    rows = sorted(rows, key=lambda row: tuple(row.configuration.knobs.values()))
    across = [row.denoiser_seconds for row in rows]
    up = [row.estimates[metric.name].mean for row in rows]
    spread = [row.estimates[metric.name].interval or 0.0 for row in rows]
    axes.errorbar(across, up, yerr=spread, capsize=3, elinewidth=0.8, markersize=6, **style)
    place = {"textcoords": "offset points", "xytext": _PLACES[0][:2], "fontsize": 8, "color": style["color"]}
    return [
        axes.annotate(text, (x, y), **place)
        for row, x, y in zip(rows, across, up, strict=True)
        if (text := point_text(row.configuration))
    ]


def point_text(configuration: Configuration) -> str:
    """The label of a point: its ratio, its `every`, its threshold."""
    knobs = configuration.knobs.items()
    return ", ".join(f"{value:g}" if name == "ratio" else f"{name} {value:g}" for name, value in knobs)


def spread_numbers(drawn: Any, axes: Any, numbers: list[Any], legend: Any) -> None:
    """Move numbers away from points, the legend and each other, and hide those without a free place."""
    from matplotlib.transforms import Bbox

    # Positions are known once the plot is laid out.
    drawn.draw_without_rendering()
    points = axes.transData.transform([number.xy for number in numbers]) if numbers else []
    # Half the size of a marker, so that a number may touch its own point.
    taken = [Bbox.from_bounds(x - 3, y - 3, 6, 6) for x, y in points]
    taken.append(legend.get_window_extent())
    for number in numbers:
        for across, up, alignment in _PLACES:
            number.set(position=(across, up), horizontalalignment=alignment)
            box = number.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            number.set_visible(False)


def _entries(names: list[str]) -> list[str]:
    """Legend entries for `names`. Long names are cut. If there are too many, the last entry counts the rest."""
    entries = [name if len(name) <= _LONGEST_ENTRY else f"{name[: _LONGEST_ENTRY - 4]} ..." for name in names]
    left = len(names) - _MOST_BESIDE
    if left > 0:
        # matplotlib leaves out entries that begin with an underscore.
        entries[_MOST_BESIDE - 1 :] = [f"and {left + 1} more", *["_"] * left]
    return entries


def _mark_plain(axes: Any, results: Results, metric: Metric) -> None:
    """Mark the plain model: a point and a line at its figure, or else a line at its time."""
    plain = results.rows[0]
    style = {"color": "#777777", "linestyle": "--", "linewidth": 1, "label": f"{PLAIN} (plain)"}
    if (value := plain.estimates.get(metric.name)) is not None:
        axes.axhline(value.mean, **style)
        axes.plot(plain.denoiser_seconds, value.mean, marker="x", color="#777777", linestyle="none")
    else:
        axes.axvline(plain.denoiser_seconds, **style)


def _limits(results: Results, metric: Metric) -> tuple[float, float]:
    """The range of means, with a margin. Wide intervals may leave the plot: they would squeeze the points together."""
    means = [row.estimates[metric.name].mean for row in results.rows if _has_point(row, metric)]
    low, high = min(means), max(means)
    margin = 0.25 * (high - low) or 0.1 * abs(high) or 1.0
    # If no mean is negative, the plot does not go below zero.
    return low - margin if low < 0 else max(0.0, low - margin), high + margin


def _has_point(row: Row, metric: Metric) -> bool:
    value = row.estimates.get(metric.name)
    return value is not None and math.isfinite(value.mean)

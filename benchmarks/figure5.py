"""Draws the paper's figure 5, drift over the time of the denoiser, from the results of tables 1 and 10.

    python benchmarks/figure5.py                # to docs/reproduction, or --to FOLDER

`tokenmerge reproduce fig5` draws the same from one run. Here pictures and times come from separate runs: pictures were
drawn one by one without CUDA graphs, and times were measured on batches with them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fronts

from tokenmerge.tools.evaluation.plots import new_plot, save_plot, series_style, spread_numbers

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "reproduction"
PLOTS = ROOT / "docs" / "reproduction"
STUDIES = {"tiny-sdxl": "table1", "tiny-flux": "table10"}
# Its maps are random, so its pictures mean nothing.
LEFT_OUT = "lower-bound"


def read(name: str) -> dict[str, dict[str, Any]]:
    return {record["label"]: record for record in fronts.read(RESULTS / f"{name}.jsonl")}


def draw(pictures: dict[str, dict[str, Any]], times: dict[str, dict[str, Any]]) -> Any:
    """A line for each method, a point for each of its ratios."""
    drawn, axes = new_plot(8.6)
    numbers = []
    series: dict[str, list[dict[str, Any]]] = {}
    for label, record in pictures.items():
        method = label.partition(":")[0]
        if method not in ("none", LEFT_OUT):
            series.setdefault(method, []).append(record)
    for place, (method, records) in enumerate(series.items()):
        timings = [times[record["label"]]["timing"] for record in records]
        across = [timing["denoiser_seconds"] for timing in timings]
        up, spread = ([record["metrics"]["lpips"][part] for record in records] for part in ("mean", "interval"))
        replayed = all(timing["graphs"] for timing in timings)
        style = series_style(place)
        axes.errorbar(
            across,
            up,
            yerr=spread,
            label=method if replayed else f"{method}, without graphs",
            capsize=3,
            elinewidth=0.8,
            markersize=6,
            **style,
        )
        for record, x, y in zip(records, across, up, strict=True):
            beside = {"textcoords": "offset points", "xytext": (6, 5), "fontsize": 8, "color": style["color"]}
            numbers.append(axes.annotate(f"{record['techniques'][0]['ratio']:g}", (x, y), **beside))
    first, timed = pictures["none"], times["none"]
    axes.axvline(
        timed["timing"]["denoiser_seconds"], color="#777777", linestyle="--", linewidth=1, label="none (plain)"
    )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"denoiser seconds per picture, in batches of {timed['timing']['batch']}")
    axes.set_ylabel("LPIPS to the plain picture, lower is better")
    pictures_made = f"{first['prompts']} prompts x {first['seeds']} seeds"
    title = f"{fronts.conditions(timed)};\n{pictures_made}; numbers are ratios of tokens removed"
    axes.set_title(title, fontsize=7, color="#555555", loc="left")
    legend = axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    spread_numbers(drawn, axes, numbers, legend)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=PLOTS, metavar="FOLDER", help="(default: docs/reproduction)")
    folder = parser.parse_args().to
    for model, study in STUDIES.items():
        path = folder / f"fig5-{model}.png"
        save_plot(draw(read(f"{study}-{model}"), read(f"{study}-time-{model}")), path)
        print(path)


if __name__ == "__main__":
    main()

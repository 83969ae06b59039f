"""Draws the fronts of the result files in benchmarks/results/fronts.

    python benchmarks/fronts.py           # one plot for each file, to docs/fronts

A front is what no other configuration beats in both: how fast the denoiser is, and how far pictures drift. Lists of
configurations that `tokenmerge eval` takes are in benchmarks/fronts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmerge.evaluation.plots import new_plot, save_plot

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fronts"
PLOTS = ROOT / "docs" / "fronts"
DRIFT = "lpips"
# What others are measured by, the time of which the plots mark.
YARDSTICK = "toma:ratio=0.5"
# Kinds of configuration, as they are drawn and told: colour, marker.
KINDS = {
    "ToMA as in the paper": ("#D55E00", "s"),
    "rivals and controls": ("#999999", "v"),
    "small tiles, no anchors": ("#E69F00", "D"),
    "anchored": ("#0072B2", "o"),
    "step cache": ("#009E73", "^"),
    "anchored, with a step cache": ("#CC79A7", "P"),
}


def kind_of(record: dict[str, Any]) -> str:
    """Which of `KINDS` a configuration is."""
    config, cached = record["config"], record["cache"] is not None
    if config["method"] == "none":
        return "step cache"
    if cached:
        return "anchored, with a step cache"
    if config["method"] != "toma":
        return "rivals and controls"
    if record["label"].startswith("toma"):
        return "ToMA as in the paper"
    return "anchored" if config["schedule"]["anchor_every"] else "small tiles, no anchors"


def speed(record: dict[str, Any]) -> float:
    return float(record["denoiser_speed_up"])


def drift(record: dict[str, Any]) -> float:
    return float(record["metrics"][DRIFT]["mean"])


def measured(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but the unmerged model, which drifts by nothing."""
    return [record for record in records if DRIFT in record["metrics"]]


def front(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What no other is faster than with as little drift, fastest first."""
    kept: list[dict[str, Any]] = []
    for record in sorted(records, key=lambda record: (-speed(record), drift(record))):
        if not kept or drift(record) < drift(kept[-1]):
            kept.append(record)
    return kept


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Drift over speed-up: every configuration, and the front of each kind."""
    drawn, axes = new_plot(8.6)
    for kind, (colour, marker) in KINDS.items():
        mine = [record for record in measured(records) if kind_of(record) == kind]
        if not mine:
            continue
        axes.plot([*map(speed, mine)], [*map(drift, mine)], marker, color=colour, markersize=6, alpha=0.55, label=kind)
        best = front(mine)
        axes.plot([*map(speed, best)], [*map(drift, best)], "-", color=colour, linewidth=1.4)
    yardstick = next((record for record in records if record["label"] == YARDSTICK), None)
    if yardstick is not None:
        axes.axvline(speed(yardstick), color="#777777", linestyle="--", linewidth=1, label=f"time of {YARDSTICK}")
    axes.axvline(1.0, color="#BBBBBB", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("speed-up of the denoiser over the unmerged model")
    axes.set_ylabel("LPIPS to the unmerged picture, lower is better")
    first = records[0]
    width, height = first["size"]
    conditions = (
        f"{first['model']}, {width}x{height} pixels, {first['steps']} steps, {first['prompts']} prompts x "
        f"{first['seeds']} seeds; {first['environment']['device']}"
    )
    axes.set_title(conditions, fontsize=8, color="#555555", loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    save_plot(drawn, path)


def main() -> None:
    PLOTS.mkdir(parents=True, exist_ok=True)
    for path in sorted(RESULTS.glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        draw(records, PLOTS / f"{path.stem}.png")
        print(PLOTS / f"{path.stem}.png")


if __name__ == "__main__":
    main()

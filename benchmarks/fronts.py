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
from tokenmerge.tables import markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fronts"
PLOTS = ROOT / "docs" / "fronts"
DRIFT = "lpips"
# What others are measured by, the time of which the plots mark.
YARDSTICK = "toma:ratio=0.5"
SPEED_UPS = (1.25, 1.5, 2.0)
# Kinds of configuration, as they are drawn and told: colour, marker.
KINDS = {
    "ToMA as in the paper": ("#D55E00", "s"),
    "rivals and controls": ("#999999", "v"),
    "small tiles, no anchors": ("#E69F00", "D"),
    "anchored": ("#0072B2", "o"),
    "step cache of diffusers": ("#009E73", "^"),
    "anchored, with a step cache": ("#CC79A7", "P"),
    "held": ("#000000", "*"),
}


def kind_of(record: dict[str, Any]) -> str:
    """Which of `KINDS` a configuration is."""
    config, cached = record["config"], record["cache"] is not None
    if config["method"] == "none":
        return "step cache of diffusers"
    if config["method"] == "hold":
        return "held"
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


def best_at(least: float, records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of every kind, what drifts least among those that are at least so fast."""
    best: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        fast = [record for record in measured(records) if kind_of(record) == kind and speed(record) >= least]
        if fast:
            best[kind] = min(fast, key=drift)
    return best


def front_table(records: Sequence[dict[str, Any]]) -> str:
    """The front of every kind, fastest first."""
    fronts = {kind: front([each for each in measured(records) if kind_of(each) == kind]) for kind in KINDS}
    rows = [[kind, *_cells(record)] for kind, found in fronts.items() for record in found]
    return f"{markdown(['kind', *_HEADER], rows)}\n\n{_told(records)}"


def equal_time_table(records: Sequence[dict[str, Any]]) -> str:
    """What drifts least of every kind, at the time of the yardstick and at round speed-ups."""
    yardstick = next(record for record in records if record["label"] == YARDSTICK)
    wishes = {f"the time of `{YARDSTICK}`, {speed(yardstick):.2f}x": speed(yardstick)}
    wishes |= {f"{wish:g}x": wish for wish in SPEED_UPS}
    rows = [
        [name, kind, *_cells(record)]
        for name, least in wishes.items()
        for kind, record in best_at(least, records).items()
    ]
    return f"{markdown(['at least', 'kind', *_HEADER], rows)}\n\n{_told(records)}"


_HEADER = ["configuration", "denoiser speed-up", "LPIPS ↓", "MSE ↓", "FID ↓"]


def _cells(record: dict[str, Any]) -> list[str]:
    found = record["metrics"]
    interval = found[DRIFT]["interval"]
    drifted = f"{drift(record):.3f}" + ("" if interval is None else f" ± {interval:.3f}")
    others = [f"{found[name]['mean']:.1f}" if name in found else "" for name in ("mse", "fid")]
    return [f"`{record['label']}`", f"{speed(record):.2f}x", drifted, *others]


def conditions(record: dict[str, Any]) -> str:
    """Under which an evaluation was made."""
    width, height = record["size"]
    mode = f", compiled: {record['compile']}" if record["compile"] else ""
    where = record["environment"]
    return (
        f"{record['model']}, {width}x{height} pixels, {record['steps']} steps, {record['dtype']}{mode}, "
        f"{where['device']}, torch {where['torch']}"
    )


def _told(records: Sequence[dict[str, Any]]) -> str:
    first = records[0]
    fid = first["metrics"].get("fid")
    return (
        f"{conditions(first)}; {first['prompts']} prompts x {first['seeds']} seeds, time in batches of "
        f"{first['timing']['batch']}." + (f" FID to photographs; unmerged it is {fid['mean']:.1f}." if fid else "")
    )


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
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("speed-up of the denoiser over the unmerged model")
    axes.set_ylabel("LPIPS to the unmerged picture, lower is better")
    axes.set_title(_told(records), fontsize=7, color="#555555", loc="left")
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

"""Draws the fronts of the result files in benchmarks/results/fronts.

    python benchmarks/fronts.py                            # one plot for each file, to docs/fronts or --to FOLDER
    python benchmarks/fronts.py --strip FOLDER --at 1.5    # pictures of an evaluation at that speed-up

A front has the configurations that no other beats in both speed of the denoiser and drift. Where time was not measured,
the denoiser's work stands in for it. benchmarks/fronts has the lists of configurations for `tokenmerge eval`.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tokenmerge.config import Techniques
from tokenmerge.planning.tables import markdown
from tokenmerge.presets import from_data, preset
from tokenmerge.tools.drawing.pictures import Panel, save_picture, strip
from tokenmerge.tools.evaluation.plots import new_plot, save_plot
from tokenmerge.tools.evaluation.table import percent
from tokenmerge.tools.typed import Configuration

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fronts"
PLOTS = ROOT / "docs" / "fronts"
DRIFT = "lpips"
# Drift from the second yardstick, the plain picture with more steps.
FINE = f"{DRIFT}_fine"
# The configuration that others are compared with. Plots mark its time.
YARDSTICK = "toma:ratio=0.5"
SPEED_UPS = (1.25, 1.5, 2.0)
# Rows of a strip, and the side of its pictures in pixels.
SAMPLES, SIDE = 4, 160
# Kinds of configuration, with colour and marker.
KINDS = {
    "Merge: paper's ToMA": ("#D55E00", "s"),
    "Merge: rivals, controls": ("#999999", "v"),
    "Merge: small tiles": ("#E69F00", "D"),
    "Hold": ("#0072B2", "o"),
    "Hold: blocks alone": ("#56B4E9", "X"),
    "Merge and Hold": ("#000000", "*"),
    "step cache of diffusers": ("#009E73", "^"),
    "with a step cache": ("#CC79A7", "P"),
    "cache-dit": ("#5A49F2", "<"),
    "cache-dit with TaylorSeer": ("#C200F2", ">"),
    "DeepCache": ("#80001A", "p"),
    "fewer steps": ("#B8A600", "d"),
    "UniPC": ("#004D40", "h"),
    "DPM++": ("#658026", "H"),
    "with another schedule": ("#CCA770", "8"),
}
# Kinds of schedules, by the names that are typed.
_SCHEDULES = {"steps": "fewer steps", "unipc": "UniPC", "dpm++": "DPM++"}


def kind_of(record: dict[str, Any]) -> str:
    """Which of `KINDS` a configuration is."""
    there = {each["technique"]: each for each in record["techniques"]}
    cache, schedule = record["cache"], record.get("schedule")
    if schedule is not None:
        return "with another schedule" if there or cache else _SCHEDULES[schedule["name"]]
    if cache is not None:
        return "with a step cache" if there else _kind_of_cache(cache)
    if len(there) == 2:
        return "Merge and Hold"
    if "hold" in there:
        return "Hold: blocks alone" if there["hold"]["what"] == "blocks" else "Hold"
    if there["merge"]["method"] != "toma":
        return "Merge: rivals, controls"
    return "Merge: paper's ToMA" if record["label"].startswith("toma") else "Merge: small tiles"


def _kind_of_cache(cache: dict[str, Any]) -> str:
    if cache["name"] == "cache-dit":
        return "cache-dit with TaylorSeer" if cache["taylorseer"] else "cache-dit"
    return "DeepCache" if cache["name"] == "deepcache" else "step cache of diffusers"


def is_timed(record: dict[str, Any]) -> bool:
    return record["denoiser_speed_up"] is not None


def speed(record: dict[str, Any]) -> float:
    """Speed-up over the plain model, by time or else by work."""
    return float(record["denoiser_speed_up"] if is_timed(record) else 1 / record["work"])


def drift(record: dict[str, Any]) -> float:
    return float(record["metrics"][DRIFT]["mean"])


def measured(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All records but the plain model's, which has no drift."""
    return [record for record in records if DRIFT in record["metrics"]]


def front(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records that no other beats in both speed and drift, fastest first."""
    kept: list[dict[str, Any]] = []
    for record in sorted(records, key=lambda record: (-speed(record), drift(record))):
        if not kept or drift(record) < drift(kept[-1]):
            kept.append(record)
    return kept


def best_at(least: float, records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For every kind, the record with the least drift among those with at least this speed-up."""
    best: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        fast = [record for record in measured(records) if kind_of(record) == kind and speed(record) >= least]
        if fast:
            best[kind] = min(fast, key=drift)
    return best


def nearest_to(wish: float, records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """As `best_at`, but with the fastest record of a kind that is never as fast."""
    kinds = {kind: [each for each in measured(records) if kind_of(each) == kind] for kind in KINDS}
    best = best_at(wish, records)
    return {kind: best.get(kind) or max(mine, key=speed) for kind, mine in kinds.items() if mine}


def front_table(records: Sequence[dict[str, Any]]) -> str:
    """The front of every kind, fastest first."""
    fronts = {kind: front([each for each in measured(records) if kind_of(each) == kind]) for kind in KINDS}
    rows = [[kind, *_cells(record)] for kind, found in fronts.items() for record in found]
    return f"{markdown(['kind', *_HEADER], rows)}\n\n{_note(records)}"


def rivals_table(records: Sequence[dict[str, Any]]) -> str:
    """Every configuration on both yardsticks, the least work of a kind first."""
    steps, error = records[0]["reference_steps"], records[0]["metrics"][FINE]["mean"]
    header = ["kind", "configuration", "work", "LPIPS ↓", "share of the schedule's error", f"LPIPS to {steps} steps ↓"]
    rows = [["plain", f"`{records[0]['label']}`", "100 %", "", "", f"{error:.4f}"]]
    for kind in KINDS:
        mine = [record for record in measured(records) if kind_of(record) == kind]
        for record in sorted(mine, key=lambda record: record["work"]):
            share, fine = record["shares"][DRIFT], record["metrics"][FINE]["mean"]
            figures = [f"{100 * record['work']:.0f} %", f"{drift(record):.4f}", percent(share), f"{fine:.4f}"]
            rows.append([kind, f"`{record['label']}`", *figures])
    return f"{markdown(header, rows)}\n\n{_sample(records[0])}."


def equal_time_table(records: Sequence[dict[str, Any]]) -> str:
    """The least drift of every kind, at the time of the yardstick and at round speed-ups."""
    yardstick = next(record for record in records if record["label"] == YARDSTICK)
    wishes = {f"the time of `{YARDSTICK}`, {speed(yardstick):.2f}x": speed(yardstick)}
    wishes |= {f"{wish:g}x": wish for wish in SPEED_UPS}
    rows = [
        [name, kind, *_cells(record)]
        for name, least in wishes.items()
        for kind, record in best_at(least, records).items()
    ]
    return f"{markdown(['at least', 'kind', *_HEADER], rows)}\n\n{_note(records)}"


def losses_table(models: Sequence[Sequence[dict[str, Any]]]) -> str:
    """The choices that a user has, and what each costs on every model."""
    header, rows = ["", *(f"`{records[0]['model']}`" for records in models)], []
    for choice, wanted in _CHOICES.items():
        found = [next((each for each in measured(records) if wanted(each)), None) for records in models]
        cells = [f"{speed(each):.2f}x, LPIPS {drift(each):.4f}" if each else "" for each in found]
        if not any(cells):
            raise LookupError(f"{choice} was not measured; measure it, or take it out of the table")
        rows.append([choice, *cells])
    return markdown(header, rows)


def _is(name: str, **changes: Any) -> Callable[[dict[str, Any]], bool]:
    techniques = Techniques.of(preset(name).replace(**changes))

    def matches(record: dict[str, Any]) -> bool:
        alone = record["cache"] is None and record.get("schedule") is None
        return alone and bool(record["techniques"]) and from_data(record["techniques"]) == techniques

    return matches


def _is_cache(name: str, **values: Any) -> Callable[[dict[str, Any]], bool]:
    def matches(record: dict[str, Any]) -> bool:
        cache = record["cache"]
        return not record["techniques"] and cache is not None and {"name": name, **values}.items() <= cache.items()

    return matches


def _any(*wanted: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], bool]:
    return lambda record: any(each(record) for each in wanted)


_CHOICES = {
    "the paper's `toma` at ratio 0.5": _is("toma", ratio=0.5),
    "the paper's `toma-tile` at ratio 0.5": _is("toma-tile", ratio=0.5),
    "the `tomesd` package's method at ratio 0.5": _is("tomesd", ratio=0.5),
    "small tiles (`unet`, `dit`) at ratio 0.5": _any(_is("unet", ratio=0.5), _is("dit", ratio=0.5)),
    "MagCache of diffusers, at most one skip": _is_cache("mag", max_skip_steps=1),
    "MagCache of diffusers, at most three skips": _is_cache("mag", max_skip_steps=3),
    "`Hold(every=2)`": _is("hold", every=2),
    "`Hold(every=3)`": _is("hold", every=3),
    "`Hold(every=5)`": _is("hold", every=5),
}
_HEADER = ["configuration", "denoiser speed-up", "LPIPS ↓", "MSE ↓", "FID ↓"]


def _cells(record: dict[str, Any]) -> list[str]:
    found = record["metrics"]
    interval = found[DRIFT]["interval"]
    drifted = f"{drift(record):.4f}" + ("" if interval is None else f" ± {interval:.4f}")
    others = [f"{found[name]['mean']:.1f}" if name in found else "" for name in ("mse", "fid")]
    return [f"`{record['label']}`", f"{speed(record):.2f}x", drifted, *others]


def conditions(record: dict[str, Any]) -> str:
    """The conditions of an evaluation."""
    width, height = record["size"]
    mode = f", compiled: {record['compile']}" if record["compile"] else ""
    where = record["environment"]
    return (
        f"{record['model']}, {width}x{height} pixels, {record['steps']} steps, {record['dtype']}{mode}, "
        f"{where['device']}, torch {where['torch']}"
    )


def _sample(record: dict[str, Any]) -> str:
    """The conditions of an evaluation, with the number of pictures."""
    time = f", time in batches of {record['timing']['batch']}" if record["timing"] else ""
    return f"{conditions(record)}; {record['prompts']} prompts x {record['seeds']} seeds{time}"


def _note(records: Sequence[dict[str, Any]]) -> str:
    fid = records[0]["metrics"].get("fid")
    return f"{_sample(records[0])}." + (f" FID to photographs; plain it is {fid['mean']:.1f}." if fid else "")


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
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # Nine labels per decade would overlap.
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    timed = is_timed(records[0])
    axes.set_xlabel(
        "speed-up of the denoiser over the plain model" if timed else "times less work than the plain model"
    )
    error = records[0]["metrics"].get(FINE)
    if error is not None:
        label = f"error of the {records[0]['steps']} steps themselves"
        axes.axhline(error["mean"], color="#777777", linestyle=":", linewidth=1, label=label)
    axes.set_ylabel("LPIPS to the plain picture, lower is better")
    axes.set_title(textwrap.fill(_sample(records[0]), 110), fontsize=7, color="#555555", loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    save_plot(drawn, path)


def draw_strip(evaluation: Path, wish: float, folder: Path) -> Path:
    """A strip of pictures from an evaluation: plain, and the least drift of every kind at a speed-up."""
    records = read(evaluation / "results.jsonl")
    plain, (width, _) = records[0], records[0]["size"]
    columns = {"plain": plain, **nearest_to(wish, records)}
    folders = {kind: evaluation / "images" / Configuration(each["label"]).folder for kind, each in columns.items()}
    names = sorted(path.name for path in folders["plain"].iterdir())
    rows = []
    for place, name in enumerate(names[:: max(1, len(names) // SAMPLES)][:SAMPLES]):
        titles = [_title(kind, record) if place == 0 else ("", "") for kind, record in columns.items()]
        pictures = [Image.open(folder / name) for folder in folders.values()]
        rows.append([Panel(picture, *title) for picture, title in zip(pictures, titles, strict=True)])
    path = folder / f"strip-{plain['model']}-{width}.jpg"
    save_picture(strip(rows, side=SIDE), path)
    return path


def _title(kind: str, record: dict[str, Any]) -> tuple[str, str]:
    return kind, f"{speed(record):.2f}x, LPIPS {drift(record):.4f}" if DRIFT in record["metrics"] else ""


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strip", type=Path, metavar="FOLDER", help="folder of an evaluation")
    parser.add_argument("--at", type=float, default=1.5, metavar="N", help="speed-up (default: %(default)s)")
    parser.add_argument("--to", type=Path, default=PLOTS, metavar="FOLDER", help="(default: docs/fronts)")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    if options.strip:
        print(draw_strip(options.strip, options.at, options.to))
        return
    for path in sorted(RESULTS.glob("*.jsonl")):
        draw(read(path), options.to / f"{path.stem}.png")
        print(options.to / f"{path.stem}.png")


if __name__ == "__main__":
    main()

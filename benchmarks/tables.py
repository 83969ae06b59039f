"""Fills the tables of README.md and docs/ from the result files in benchmarks/results.

    python benchmarks/tables.py           # rewrite what is out of date
    python benchmarks/tables.py --check   # list what is out of date, and fail

In a document, a table lies between the comments `<!-- table: KIND FILE ... -->` and `<!-- end of table -->`. The kinds
are in `OF_RECORDS` and `OF_FILES` below.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import drift
import fronts
import ops
import serve

import comfyui
from tokenmerge.planning.tables import markdown
from tokenmerge.presets import preset
from tokenmerge.tools import bench
from tokenmerge.tools.paper.inquiries import OVERLAP_PRESET
from tokenmerge.tools.paper.locality import locality_cells
from tokenmerge.tools.paper.maptimes import map_table
from tokenmerge.tools.paper.overlap import overlap_cells
from tokenmerge.tools.quality.metrics import METRICS, Metric
from tokenmerge.tools.typed import read_typed

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# What could be recovered from the paper's own tables.
PAPER = "reproduction/paper.jsonl"
MARK = re.compile(r"(<!-- table: (?P<request>[^>]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def read(names: Iterable[str]) -> list[dict[str, Any]]:
    return [record for name in names for record in fronts.read(RESULTS / name)]


def bench_tables(names: list[str]) -> str:
    """Every comparison, below its commands."""
    records = [record for name in names for record in bench.read(RESULTS / name)]
    commands = "\n".join(dict.fromkeys(record["command"] for record in records))
    return f"```\n{commands}\n```\n\n{bench.report(records)}"


def speed_table(names: list[str]) -> str:
    """Speed-ups by ratio, each over the plain denoiser of the same comparison."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for file in names:
        for record in read([file]):
            # By file, because each run has its own plain denoiser.
            key = (file, *(record[name] for name in ("model", "width", "height", "batch", "mode")))
            groups.setdefault(key, []).append(record)
    cells: dict[tuple[str, ...], dict[float | None, str]] = {}
    for (_, model, width, height, batch, mode), records in groups.items():
        rows = bench.pool(records)
        for row in rows:
            merge = next((each for each in row.record["techniques"] if each["technique"] == "merge"), None)
            if not row.record["techniques"] or (merge and merge["method"] == "lower-bound"):
                continue
            where = (model, f"{width}x{height}", str(batch), mode, _without_ratio(row.record["label"], merge))
            ratio = merge["ratio"] if merge else None
            cells.setdefault(where, {})[ratio] = f"{bench.speed_up(row, rows):.2f}x"
    ratios = sorted({ratio for found in cells.values() for ratio in found}, key=lambda ratio: ratio or 0.0)
    # Hold has no ratio.
    columns = ["speed-up" if ratio is None else f"ratio {ratio:g}" for ratio in ratios]
    header = ["model", "size", "batch", "mode", "technique", *columns]
    return markdown(header, [[*where, *(found.get(ratio, "") for ratio in ratios)] for where, found in cells.items()])


def _without_ratio(label: str, merge: dict[str, Any] | None) -> str:
    """A technique as typed, without its ratio, and where it merges."""
    parts = []
    for part in read_typed(label).parts:
        fields = {name: value for name, value in part.fields.items() if name != "ratio"}
        parts.append(str(replace(part, fields=fields)))
    typed = f"`{' + '.join(parts)}`"
    return f"{typed}, {'per component' if merge['sites'] == 'component' else 'once per block'}" if merge else typed


def eval_table(names: list[str]) -> str:
    """Drift in one of the paper's studies, beside times from a second file and the paper's own figures where known.

    Files are named by study and model. The second may come from a run with other conditions.
    """
    pictures, times = names
    records, timed = read([pictures]), {record["label"]: record for record in read([times])}
    study = Path(pictures).stem.split("-")[0]
    paper = {record["label"]: record for record in read([PAPER]) if record["study"] == study}
    columns = {"configuration": [f"`{record['label']}`" for record in records]}
    columns["s / picture"] = [f"{timed[record['label']]['timing']['median']:.4g}" for record in records]
    for title, name in (("speed-up", "speed_up"), ("denoiser speed-up", "denoiser_speed_up")):
        columns[title] = [f"{timed[record['label']][name]:.2f}x" for record in records]
    conditions = (
        f"Pictures: {fronts.conditions(records[0])}, {records[0]['prompts']} prompts x {records[0]['seeds']} seeds. "
        f"Time: {fronts.conditions(timed['none'])}, in batches of {timed['none']['timing']['batch']}."
    )
    unreplayed = [f"`{label}`" for label, each in timed.items() if each["compile"] and not each["timing"]["graphs"]]
    if unreplayed:
        conditions += (
            f" No CUDA graph replays {', '.join(unreplayed)}: the host takes part in their maps, and its launches are "
            "in their times."
        )
    for metric in METRICS:
        if any(metric.name in record["metrics"] for record in records):
            title = f"{metric.title} {'↑' if metric.higher_is_better else '↓'}"
            columns[title] = [_figure(metric, record["metrics"].get(metric.name)) for record in records]
    if paper:
        whole = paper["none"]["seconds"]
        theirs = [paper.get(record["label"]) for record in records]
        columns["paper: speed-up"] = [f"{whole / known['seconds']:.2f}x" if known else "" for known in theirs]
        for metric in METRICS:
            figures = [known["metrics"].get(metric.name) if known else None for known in theirs]
            if any(figure is not None for figure in figures):
                columns[f"paper: {metric.title}"] = ["" if figure is None else f"{figure:g}" for figure in figures]
    return f"{markdown([*columns], [*map(list, zip(*columns.values(), strict=True))])}\n\n{conditions}"


def _figure(metric: Metric, value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    interval = "" if value["interval"] is None else f" ± {value['interval']:.{metric.digits}f}"
    return f"{value['mean']:.{metric.digits}f}{interval}"


def overlap_table(records: list[dict[str, Any]]) -> str:
    return markdown(*overlap_cells(records, preset(OVERLAP_PRESET).destinations_every))


def held_maps_table(records: list[dict[str, Any]]) -> str:
    """Drift with maps renewed as due, beside drift with maps kept once Hold begins."""
    rows: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for record in records:
        where = (record["model"], f"{record['ratio']:g}", str(record["every"]))
        rows.setdefault(where, {})[record["maps"]] = record
    header = ["model", "ratio", "every", "renewed: MSE to plain", "to merged", "kept: MSE to plain", "to merged"]
    kinds = [(rule, to) for rule in ("renewed", "kept") for to in ("mse_to_plain", "mse_to_merged")]
    return markdown(
        header, [[*where, *(f"{found[rule][to]:.0f}" for rule, to in kinds)] for where, found in rows.items()]
    )


def generic_table(records: list[dict[str, Any]]) -> str:
    """What is held of every class without a table, and why some classes are not held."""
    held = [record for record in records if record["outcome"] == "held"]
    checked = [record for record in held if all(record["checks"].values())]
    equal = [record for record in held if "table" in record["checks"]]
    version = records[0]["environment"]["diffusers"]
    others = [record for record in records if record["outcome"] != "held" and not record["table"]]
    parts = [
        (
            f"diffusers {version}, {len(records)} classes and forms of them: {len(held)} are held, "
            f"{sum(record['outcome'] == 'refused' for record in records)} are refused, "
            f"{sum(record['outcome'] == 'not tried' for record in records)} were not tried. "
            f"Of those held, {len(checked)} passed every check. {len(equal)} have a table that holds the same blocks "
            "in one run, and give the same output bit for bit with it."
        ),
        markdown(
            ["class without a table", "held", "runs"],
            [_generic_row(record) for record in held if not record["table"]],
        ),
        markdown(
            ["class", "outcome", "why"],
            [[f"`{record['class']}`", record["outcome"], record["reason"]] for record in others],
        ),
    ]
    return "\n\n".join(parts)


def _generic_row(record: dict[str, Any]) -> list[str]:
    name, *form = record["class"].split(" ", 1)
    runs = ", ".join(f"`{first}` to `{last}`" for first, last in record["runs"])
    return [" ".join([f"`{name}`", *form]), f"{record['held']} of {record['blocks']}", runs]


# Tiles of `video.py` to choose between, in the words of `regions`; and its tokens, by kind and shared noise.
VIDEO_TILES = {
    "1x4x4": "`tile:4x4`",
    "1x4x4 map": "`tile:4x4`, one map for all frames",
    "1x4x8": "`tile:4x8`",
    "2x4x4": "`tile:2x4x4`",
    "4x4x4": "`tile:4x4x4`",
}
VIDEO_TOKENS = {
    ("latent", None): "latents without noise",
    ("latent", False): "noisy latents",
    ("tiny-flux", False): "tokens of `tiny-flux`",
    ("tiny-flux", True): "the same, one noise for all frames",
}


def video_table(records: list[dict[str, Any]]) -> str:
    """What tiles lose of moving clips at ratio 0.5: means over motions, blocks and levels of noise."""
    rows = []
    for (features, shared), title in VIDEO_TOKENS.items():
        kind = [each for each in records if each["ratio"] == 0.5 and each["features"].split()[0] == features]
        clips = [each for each in kind if each["frames_share_noise"] is shared]
        for tile, regions in VIDEO_TILES.items():
            found = [clip["tiles"][tile] for clip in clips if clip["motion"] != "still"]
            still = [clip["tiles"][tile]["target_flicker"] for clip in clips if clip["motion"] == "still"]
            keys = ("similarity", "target_error", "target_flicker", "target_rest")
            means = [sum(each[key] for each in found) / len(found) for key in keys]
            values = (*means[:3], sum(still) / len(still), means[3], max(each["target_rest"] for each in found))
            # Measured on latents only.
            largest = max((each["target_step"] for each in found if "target_step" in each), default=None)
            row = [f"{value:.2f}" for value in values]
            rows.append([title, regions, *row, "" if largest is None else f"{largest:.2f}"])
    header = ["similarity", "error", "flicker", "flicker of a still", "frame change", "at most", "largest step"]
    return markdown(["tokens", "regions", *header], rows)


def locality_table(records: list[dict[str, Any]]) -> str:
    return markdown(*locality_cells(records))


def losses_table(names: list[str]) -> str:
    return fronts.losses_table([read([name]) for name in names])


def coordinates_table(records: list[dict[str, Any]]) -> str:
    """Errors over each coordinate, relative to the best coordinate of the same record: means and maximum."""
    coordinates = list(records[0]["errors"])
    rows = []
    for model, schedule in dict.fromkeys((record["model"], record["schedule"]) for record in records):
        mine = [each["errors"] for each in records if (each["model"], each["schedule"]) == (model, schedule)]
        ratios = [[errors[name] / min(errors.values()) for errors in mine] for name in coordinates]
        rows.append([model, schedule, *(f"{sum(each) / len(each):.2f}" for each in ratios)])
    every = [[each["errors"][name] / min(each["errors"].values()) for each in records] for name in coordinates]
    rows.append(["all", "mean", *(f"{sum(each) / len(each):.2f}" for each in every)])
    rows.append(["all", "worst", *(f"{max(each):.2f}" for each in every)])
    return markdown(["model", "schedule", *coordinates], rows)


def making_up_table(records: list[dict[str, Any]]) -> str:
    """Squared errors with and without making up."""
    rows = []
    for record in records:
        with_it, without = (sum(record["mse"][name]) / len(record["mse"][name]) for name in ("made_up", "not_made_up"))
        share = f"{with_it / without:.2f}" if without else ""
        left = "" if record["left"] is None else f"{100 * record['left']:.0f} %"
        full = f"{record['full']['made_up']} of {record['steps']}"
        figures = [full, f"{without:.1f}", f"{with_it:.1f}", share, left]
        rows.append([f"`{record['model']}`", record["schedule"], _how(record["hold"]), *figures])
    header = ["model", "schedule", "how", "full steps", "MSE without", "MSE", "share", "what is left of misses"]
    return markdown(header, rows)


def _how(hold: dict[str, Any]) -> str:
    return f"every {hold['every']}" if hold["every"] else f"within {hold['tolerance']:g}"


def drift_table(records: list[dict[str, Any]]) -> str:
    """How well estimates of drift agree with the truth."""
    rows = []
    for model, found in drift.judged(records).items():
        within = sorted(found["within"])
        middle = within[len(within) // 2]
        cells = [
            found["pictures"],
            found["rank"],
            middle,
            within[0],
            f"{found['off_50']:.1f}",
            f"{found['off_90']:.1f}",
        ]
        rows.append([model if model == "all" else f"`{model}`", *map(str, cells)])
    header = ["rank correlation", "within a setting, median", "least", "median error, dB", "of nine in ten, dB"]
    return markdown(["model", "pictures", *header], rows)


def goals_table(records: list[dict[str, Any]]) -> str:
    """The figures that judge Hold's goals: work, which bounds the speed-up, and drift, also of the worst pictures."""
    rows = []
    for record in records:
        if not record["techniques"]:
            continue
        metrics, worst = record["metrics"], record["worst"]["lpips"]
        figures = [f"{metrics['psnr']['mean']:.1f}", f"{metrics['mse']['mean']:.1f}", f"{metrics['lpips']['mean']:.4f}"]
        bound = f"{1 / record['work']:.2f}x"
        where = [f"`{record['model']}`", str(record["steps"]), f"`{record['label']}`"]
        rows.append([*where, f"{100 * record['work']:.0f} %", bound, *figures, f"{worst['worst']:.4f}"])
    header = ["model", "steps", "configuration", "work", "speed-up at most", "PSNR", "MSE", "LPIPS", "worst LPIPS"]
    return markdown(header, rows)


def whole_table(records: list[dict[str, Any]]) -> str:
    """Work and drift of merging by its settings, the models side by side."""
    header, rows = ["settings"], {}
    for model in dict.fromkeys(record["model"] for record in records):
        header += [f"{model}, work", "MSE", "LPIPS"]
    for record in records:
        if record["techniques"]:
            mse, lpips = (record["metrics"][name]["mean"] for name in ("mse", "lpips"))
            cells = rows.setdefault(record["label"], [f"`{record['label'].partition(':')[2]}`"])
            cells += [f"{record['work']:.0%}".replace("%", " %"), f"{mse:.0f}", f"{lpips:.3f}"]
    return markdown(header, list(rows.values()))


def noise_table(records: list[dict[str, Any]]) -> str:
    """Drift of Hold, beside the same scheduler with as many steps as Hold ran in full."""
    rows = []
    for record in records:
        hold = record["hold"]
        figures = [record[name][figure] for name in ("held", "fewer_steps") for figure in ("mse", "grain")]
        means = [sum(each) / len(each) for each in figures]
        cells = [f"{means[0]:.0f}", f"{means[1]:.2f}", f"{means[2]:.0f}", f"{means[3]:.2f}"]
        what = [record["scheduler"], hold["what"], _how(hold), f"{record['kinds']['full']} of {record['steps']}"]
        rows.append([f"`{record['model']}`", *what, *cells])
    header = ["model", "scheduler", "held", "how", "full steps", "MSE", "grain", "fewer steps: MSE", "grain"]
    return markdown(header, rows)


# Tables of all records of the files together, and tables that read the files themselves.
OF_RECORDS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "ops": ops.table,
    "maps": map_table,
    "overlap": overlap_table,
    "locality": locality_table,
    "heldmaps": held_maps_table,
    "generic": generic_table,
    "video": video_table,
    "front": fronts.front_table,
    "equal-time": fronts.equal_time_table,
    "rivals": fronts.rivals_table,
    "serve": serve.table,
    "coordinates": coordinates_table,
    "making-up": making_up_table,
    "drift": drift_table,
    "goals": goals_table,
    "whole": whole_table,
    "comfyui": comfyui.table,
    "noise": noise_table,
}
OF_FILES: dict[str, Callable[[list[str]], str]] = {
    "bench": bench_tables,
    "speed": speed_table,
    "eval": eval_table,
    "losses": losses_table,
}


def filled(text: str) -> str:
    """A document with all its tables made anew."""

    def fill(found: re.Match[str]) -> str:
        kind, *names = found["request"].split()
        made = OF_FILES[kind](names) if kind in OF_FILES else OF_RECORDS[kind](read(names))
        return f"{found[1]}{made}\n{found[3]}"

    return MARK.sub(fill, text)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something is out of date")
    arguments = parser.parse_args(argv)
    stale = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            stale.append(path.relative_to(ROOT))
            if not arguments.check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'out of date' if arguments.check else 'rewritten'}")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

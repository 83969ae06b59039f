"""Fills the tables of README.md and docs/ from the result files in benchmarks/results.

    python benchmarks/tables.py           # rewrite what is out of date
    python benchmarks/tables.py --check   # say what is out of date, and fail

A document asks for a table between two comments, `<!-- table: KIND FILE ... -->` and `<!-- end of table -->`. Kinds:
`bench` (every comparison of the files, each with its command), `speed` (one line for each comparison: the speed-up at
every ratio), `ops` (single operations), `eval` (the pictures of an evaluation, with the times of a second one, if it is
named, which may have been timed otherwise; where the paper's figures of the same rows are known, they stand beside it),
`maps`, `overlap` and `locality` (what `tokenmerge reproduce` finds without comparing pictures), `front` (the fronts of
an evaluation), `heldmaps` (what becomes of maps under Hold), `generic` (what can be held without a table), `video`
(which regions suit frames that move), `equal-time` (what drifts least at equal speed-up), `rivals` (every configuration
on both yardsticks, by work), `losses` (what a user would choose between), `serve` (load on the server), `coordinates`
(what residuals run straightest over), `making-up` (what full steps gain by making up for held ones), `drift` (how well
Hold knows its drift), `goals` (what bounds Hold's speed, and its worst pictures), `noise` (what it drifts under
schedulers that add noise) and `comfyui` (the nodes beside ComfyUI's own cache).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
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
# What could be recovered of the paper's own tables.
PAPER = "reproduction/paper.jsonl"
MARK = re.compile(r"(<!-- table: (?P<request>[^>]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def read(names: Iterable[str]) -> list[dict[str, Any]]:
    lines = [line for name in names for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines if line]


def bench_tables(names: list[str]) -> str:
    records = [record for name in names for record in bench.read(RESULTS / name)]
    commands = dict.fromkeys(record["command"] for record in records)
    shown = "\n".join(commands)
    return f"```\n{shown}\n```\n\n{bench.report(records)}"


def speed_table(names: list[str]) -> str:
    """Speed-up over the plain denoiser of the same comparison, by ratio."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for file in names:
        for record in read([file]):
            # Not with the plain denoiser of another run.
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
    # Holding has no ratio.
    columns = ["speed-up" if ratio is None else f"ratio {ratio:g}" for ratio in ratios]
    header = ["model", "size", "batch", "mode", "technique", *columns]
    return markdown(header, [[*where, *(found.get(ratio, "") for ratio in ratios)] for where, found in cells.items()])


def _without_ratio(label: str, merge: dict[str, Any] | None) -> str:
    """A technique as typed, its ratio left out, and where it merges."""
    parts = []
    for part in read_typed(label).parts:
        fields = {name: value for name, value in part.fields.items() if name != "ratio"}
        parts.append(str(replace(part, fields=fields)))
    told = f"`{' + '.join(parts)}`"
    return f"{told}, {'per component' if merge['sites'] == 'component' else 'once per block'}" if merge else told


def ops_table(names: list[str]) -> str:
    return ops.table(read(names))


def eval_table(names: list[str]) -> str:
    """The results of an evaluation of one of the paper's studies; files are named by study and model."""
    pictures, *times = names
    records = read([pictures])
    study = Path(pictures).stem.split("-")[0]
    paper = {record["label"]: record for record in read([PAPER]) if record["study"] == study}
    columns = {"configuration": [f"`{record['label']}`" for record in records]}
    conditions = (
        f"Pictures: {fronts.conditions(records[0])}, {records[0]['prompts']} prompts x {records[0]['seeds']} seeds."
    )
    if times:
        timed = {record["label"]: record for record in read(times)}
        columns["s / picture"] = [f"{timed[record['label']]['timing']['median']:.4g}" for record in records]
        for title, name in (("speed-up", "speed_up"), ("denoiser speed-up", "denoiser_speed_up")):
            columns[title] = [f"{timed[record['label']][name]:.2f}x" for record in records]
        first = timed["none"]
        conditions += f" Time: {fronts.conditions(first)}, in batches of {first['timing']['batch']}."
        unreplayed = [f"`{label}`" for label, each in timed.items() if each["compile"] and not each["timing"]["graphs"]]
        if unreplayed:
            conditions += (
                f" No CUDA graph replays {', '.join(unreplayed)}: the host takes part in their maps, and its launches "
                "are in their times."
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


def maps_table(names: list[str]) -> str:
    return map_table(read(names))


def overlap_table(names: list[str]) -> str:
    interval = preset(OVERLAP_PRESET).destinations_every
    return markdown(*overlap_cells(read(names), interval))


def held_maps_table(names: list[str]) -> str:
    """Drift with maps that are renewed as due, and kept once Hold begins, side by side."""
    rows: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for record in read(names):
        where = (record["model"], f"{record['ratio']:g}", str(record["every"]))
        rows.setdefault(where, {})[record["maps"]] = record
    header = ["model", "ratio", "every", "renewed: MSE to plain", "to merged", "kept: MSE to plain", "to merged"]
    kinds = [(rule, to) for rule in ("renewed", "kept") for to in ("mse_to_plain", "mse_to_merged")]
    return markdown(
        header, [[*where, *(f"{found[rule][to]:.0f}" for rule, to in kinds)] for where, found in rows.items()]
    )


def generic_table(names: list[str]) -> str:
    """What is held of every class without a table, and why of some nothing is."""
    records = read(names)
    held = [record for record in records if record["outcome"] == "held"]
    checked = [record for record in held if all(record["checks"].values())]
    equal = [record for record in held if "table" in record["checks"]]
    version = records[0]["environment"]["diffusers"]
    others = [record for record in records if record["outcome"] != "held" and not record["table"]]
    told = [
        (
            f"diffusers {version}, {len(records)} classes and forms of them: {len(held)} are held, "
            f"{sum(record['outcome'] == 'refused' for record in records)} are refused, "
            f"{sum(record['outcome'] == 'not tried' for record in records)} were not tried. "
            f"Of those held, {len(checked)} passed every check. {len(equal)} have a table that holds the same blocks, "
            "and give the same output bit for bit with it."
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
    return "\n\n".join(told)


def _generic_row(record: dict[str, Any]) -> list[str]:
    name, *form = record["class"].split(" ", 1)
    runs = ", ".join(f"`{first}` to `{last}`" for first, last in record["runs"])
    return [" ".join([f"`{name}`", *form]), f"{record['held']} of {record['blocks']}", runs]


# Of `video.py`: tiles that one chooses between, by the words of `regions`, and tokens by kind and noise.
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


def video_table(names: list[str]) -> str:
    """What tiles lose of clips that move, at half of the tokens: means over motions, blocks and levels of noise."""
    records = [record for record in read(names) if record["ratio"] == 0.5]
    rows = []
    for (features, shared), told in VIDEO_TOKENS.items():
        kind = [each for each in records if each["features"].split()[0] == features]
        clips = [each for each in kind if each["frames_share_noise"] is shared]
        for tile, regions in VIDEO_TILES.items():
            found = [clip["tiles"][tile] for clip in clips if clip["motion"] != "still"]
            still = [clip["tiles"][tile]["target_flicker"] for clip in clips if clip["motion"] == "still"]
            keys = ("similarity", "target_error", "target_flicker", "target_rest")
            means = [sum(each[key] for each in found) / len(found) for key in keys]
            values = (*means[:3], sum(still) / len(still), means[3], max(each["target_rest"] for each in found))
            # Measured of latents only.
            largest = max((each["target_step"] for each in found if "target_step" in each), default=None)
            row = [f"{value:.2f}" for value in values]
            rows.append([told, regions, *row, "" if largest is None else f"{largest:.2f}"])
    header = ["similarity", "error", "flicker", "flicker of a still", "frame change", "at most", "largest step"]
    return markdown(["tokens", "regions", *header], rows)


def locality_table(names: list[str]) -> str:
    return markdown(*locality_cells(read(names)))


def front_table(names: list[str]) -> str:
    return fronts.front_table(read(names))


def equal_time_table(names: list[str]) -> str:
    return fronts.equal_time_table(read(names))


def rivals_table(names: list[str]) -> str:
    return fronts.rivals_table(read(names))


def losses_table(names: list[str]) -> str:
    return fronts.losses_table([read([name]) for name in names])


def serve_table(names: list[str]) -> str:
    return serve.table(read(names))


def coordinates_table(names: list[str]) -> str:
    """How much larger errors are than by the best coordinate of the same rows, on average and at most."""
    records = read(names)
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


def making_up_table(names: list[str]) -> str:
    """Squared errors with making up and without it."""
    rows = []
    for record in read(names):
        hold = record["hold"]
        how = f"every {hold['every']}" if hold["every"] else f"within {hold['tolerance']:g}"
        with_it, without = (sum(record["mse"][name]) / len(record["mse"][name]) for name in ("made_up", "not_made_up"))
        share = f"{with_it / without:.2f}" if without else ""
        left = "" if record["left"] is None else f"{100 * record['left']:.0f} %"
        full = f"{record['full']['made_up']} of {record['steps']}"
        rows.append(
            [f"`{record['model']}`", record["schedule"], how, full, f"{without:.1f}", f"{with_it:.1f}", share, left]
        )
    header = ["model", "schedule", "how", "full steps", "MSE without", "MSE", "share", "what is left of misses"]
    return markdown(header, rows)


def drift_table(names: list[str]) -> str:
    """How well estimates of drift agree with the truth."""
    rows = []
    for model, told in drift.judged(read(names)).items():
        within = sorted(told["within"])
        middle = within[len(within) // 2]
        cells = [told["pictures"], told["rank"], middle, within[0], f"{told['off_50']:.1f}", f"{told['off_90']:.1f}"]
        rows.append([model if model == "all" else f"`{model}`", *map(str, cells)])
    header = ["rank correlation", "within a setting, median", "least", "median error, dB", "of nine in ten, dB"]
    return markdown(["model", "pictures", *header], rows)


def goals_table(names: list[str]) -> str:
    """What Hold's goals are judged by: the work that bounds the speed-up, and drift, also of the worst pictures."""
    rows = []
    for record in read(names):
        if not record["techniques"]:
            continue
        metrics, worst = record["metrics"], record["worst"]["lpips"]
        figures = [f"{metrics['psnr']['mean']:.1f}", f"{metrics['mse']['mean']:.1f}", f"{metrics['lpips']['mean']:.4f}"]
        bound = f"{1 / record['work']:.2f}x"
        where = [f"`{record['model']}`", str(record["steps"]), f"`{record['label']}`"]
        rows.append([*where, f"{100 * record['work']:.0f} %", bound, *figures, f"{worst['worst']:.4f}"])
    header = ["model", "steps", "configuration", "work", "speed-up at most", "PSNR", "MSE", "LPIPS", "worst LPIPS"]
    return markdown(header, rows)


def comfyui_table(names: list[str]) -> str:
    return comfyui.table(read(names))


def noise_table(names: list[str]) -> str:
    """What Hold drifts, beside as many steps of the same scheduler as it ran in full."""
    rows = []
    for record in read(names):
        hold = record["hold"]
        how = f"every {hold['every']}" if hold["every"] else f"within {hold['tolerance']:g}"
        figures = [record[name][figure] for name in ("held", "fewer_steps") for figure in ("mse", "grain")]
        means = [sum(each) / len(each) for each in figures]
        cells = [f"{means[0]:.0f}", f"{means[1]:.2f}", f"{means[2]:.0f}", f"{means[3]:.2f}"]
        what = [record["scheduler"], hold["what"], how, f"{record['kinds']['full']} of {record['steps']}"]
        rows.append([f"`{record['model']}`", *what, *cells])
    header = ["model", "scheduler", "held", "how", "full steps", "MSE", "grain", "fewer steps: MSE", "grain"]
    return markdown(header, rows)


KINDS = {
    "bench": bench_tables,
    "speed": speed_table,
    "ops": ops_table,
    "eval": eval_table,
    "maps": maps_table,
    "overlap": overlap_table,
    "locality": locality_table,
    "heldmaps": held_maps_table,
    "generic": generic_table,
    "video": video_table,
    "front": front_table,
    "equal-time": equal_time_table,
    "rivals": rivals_table,
    "losses": losses_table,
    "serve": serve_table,
    "coordinates": coordinates_table,
    "making-up": making_up_table,
    "drift": drift_table,
    "goals": goals_table,
    "comfyui": comfyui_table,
    "noise": noise_table,
}


def filled(text: str) -> str:
    """A document with all of its tables made anew."""

    def fill(found: re.Match[str]) -> str:
        kind, *names = found["request"].split()
        return f"{found[1]}{KINDS[kind](names)}\n{found[3]}"

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

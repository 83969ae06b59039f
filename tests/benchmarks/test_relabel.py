"""Result files of version 0.1 keep their figures under today's labels, and lose the rows of what went."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tokenmerge.presets import from_data
from tokenmerge.tools.typed import read_typed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "relabel.py"
_spec = importlib.util.spec_from_file_location("relabel", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
relabel = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(relabel)

SCHEDULE = {"destinations_every": 10, "weights_every": 5, "start": 0.0, "stop": 1.0, "anchor_every": 0}
CONFIG = {
    "ratio": 0.5,
    "coverage": None,
    "step_ratios": None,
    "block_ratios": None,
    "method": "toma",
    "regions": "tile:4x4",
    "merge_regions": None,
    "selection": "facility-location",
    "similarity": "cosine",
    "temperature": 0.001,
    "merge": "mean",
    "unmerge": "transpose",
    "gap": "last",
    "trust": 1.0,
    "gap_dtype": "tokens",
    "sites": "block",
    "span": 0,
    "components": ["self_attention", "cross_attention", "mlp"],
    "levels": None,
    "skip_first": 0,
    "skip_last": 0,
    "seed": 0,
    "backend": "auto",
    "schedule": SCHEDULE,
}
HELD = {"ratio": 1.0, "method": "hold", "gap": "linear", "start": 0.2, "anchor_every": 3}
ANCHORED = {"ratio": 0.75, "merge": "pick", "start": 0.2, "anchor_every": 5}
PAPER = {"sites": "component", "regions": "stripe:256", "merge_regions": "whole"}


def config(**changes: Any) -> dict[str, Any]:
    """A config as version 0.1 wrote it."""
    schedule = {name: changes.pop(name, value) for name, value in SCHEDULE.items()}
    return {**CONFIG, **changes, "schedule": schedule}


def evaluated(label: str, model: str = "tiny-flux", **changes: Any) -> dict[str, Any]:
    """A row of an evaluation."""
    timing = {"median": 0.07, "tokens": "4096 -> 0" if changes.get("method") == "hold" else "4096 -> 2048"}
    cache = {"name": "mag"} if "mag" in label else None
    return {
        "label": label,
        "config": config(**changes),
        "cache": cache,
        "timing": timing,
        "modes": {"full": 6, "anchor": 8, "merged": 14} if changes.get("method") == "hold" else {"merged": 28},
        "model": model,
    }


def timed(label: str, phases: dict[str, int], model: str = "sdxl-random", **changes: Any) -> dict[str, Any]:
    """A row of a benchmark."""
    old = None if label == "unpatched" else config(**changes)
    laps = {phase: [float(count)] for phase, count in phases.items()}
    command = (
        "tokenmerge bench --model sdxl-random --batches 2 --presets unet --ratios 0.5,0.75 --modes graph --loops 3"
    )
    return {
        "label": label,
        "model": model,
        "command": command,
        "config": old,
        "steps_by_phase": phases,
        "laps_ms": laps,
    }


MERGED = {"first select": 1, "reuse": 40, "reweigh": 5, "select": 4}
HELD_PHASES = {"first full": 1, "full": 9, "anchor, select": 13, "reuse": 27}

STAY = [
    (evaluated("none", method="none", ratio=0.0), "none"),
    (evaluated("toma:ratio=0.5", **PAPER), "toma:ratio=0.5"),
    (evaluated("dit:ratio=0.5,start=0.2", skip_first=0.25, start=0.2), "dit:ratio=0.5,start=0.2"),
    (evaluated("none + mag:threshold=0.06", method="none", ratio=0.0), "none + mag:threshold=0.06"),
    (evaluated("hold:anchor_every=2", **{**HELD, "anchor_every": 2}), "hold:every=2"),
    (evaluated("hold:anchor_every=3,start=0.1", **{**HELD, "start": 0.1}), "hold:every=3,start=0.1"),
    (evaluated("hold:anchor_every=3,gap=sigma", **{**HELD, "gap": "sigma"}), "hold:every=3,extrapolate=sigma"),
    (evaluated("hold:anchor_every=5 + mag", **{**HELD, "anchor_every": 5}), "hold:every=5 + mag"),
    # On UNets `hold` was of blocks, and is of stages now.
    (evaluated("hold:anchor_every=3", "tiny-sdxl", **HELD), "hold:what=blocks,every=3"),
    (evaluated("hold:sites=stage,anchor_every=3", "tiny-sdxl", **HELD, sites="stage"), "hold:every=3"),
    (timed("unpatched", {"full": 50}), "none"),
    (timed("unet 0.5", MERGED), "unet:ratio=0.5"),
    (timed("lower-bound of unet 0.5", {"reuse": 50}, method="lower-bound"), "lower-bound of unet:ratio=0.5"),
    (timed("dit 0.75", MERGED, "flux-random", ratio=0.75, skip_first=5), "dit:skip_first=5,ratio=0.75"),
    # Without a ratio it meant holding.
    (timed("default", HELD_PHASES, **HELD, sites="stage"), "hold"),
    (timed("default", HELD_PHASES, "flux-random", **HELD), "hold"),
    (timed("unet-hold", HELD_PHASES, **HELD, sites="stage"), "hold"),
    (timed("hold", HELD_PHASES, **HELD), "hold:what=blocks"),
]
GO = [
    # With a ratio it meant anchored merging.
    (evaluated("default:ratio=0.75", **ANCHORED), "anchored merging"),
    (evaluated("unet-anchored:ratio=0.75", "tiny-sdxl", **ANCHORED), "anchored merging"),
    (evaluated("dit-anchored:ratio=0.75,anchor_every=4 + mag", **ANCHORED), "anchored merging"),
    (timed("lower-bound of unet-anchored 0.75", {"full": 10, "reuse": 40}, method="lower-bound"), "anchored merging"),
    (timed("dit 0.5", MERGED, trust=0.5), "trust"),
    (timed("unet 0.5", MERGED, coverage=0.9), "coverage"),
    (timed("unet 0.5/0.75", MERGED, step_ratios=[0.5, 0.75]), "step_ratios"),
    (timed("unet 0.5/0.75", MERGED, block_ratios=[0.5, 0.75]), "block_ratios"),
    (timed("unet 0.5", MERGED, sites="span"), "sites=span"),
    (evaluated("hold:anchor_every=3,gap=last", **{**HELD, "gap": "last"}), "gap=last"),
    (evaluated("hold:anchor_every=3,gap_dtype=float8", **HELD, gap_dtype="float8"), "gap_dtype"),
]


@pytest.mark.parametrize(("row", "label"), STAY, ids=[f"{row['model']} {row['label']}" for row, _ in STAY])
def test_a_row_stays_under_the_label_of_what_it_is(row: dict[str, Any], label: str) -> None:
    new = relabel.relabel(row)
    assert new["label"] == label
    _, bound, typed = label.rpartition("lower-bound of ")
    meant = read_typed(typed).configuration.techniques
    if bound:
        assert meant.merge is not None
        meant = meant._replace(merge=meant.merge.replace(method="lower-bound"))
    assert new["techniques"] == meant.to_list()
    assert not new["techniques"] or from_data(new["techniques"]) == meant
    # Only what it is of is written anew.
    same = row.keys() - {"label", "config", "modes", "timing", "command", "steps_by_phase", "laps_ms"}
    assert {name: new[name] for name in same} == {name: row[name] for name in same}
    assert new.keys() >= same | ({"kinds", "timing"} if "modes" in row else {"steps_by_phase", "laps_ms"})


@pytest.mark.parametrize(("row", "why"), GO, ids=[row["label"] for row, _ in GO])
def test_a_row_of_what_went_goes(row: dict[str, Any], why: str) -> None:
    assert relabel.why_gone(row) == why
    assert relabel.relabel(row) is None


def test_a_gap_that_did_nothing_keeps_no_row_out() -> None:
    """Merging without anchors has no gaps; the field told the default of its day."""
    for gap in ("hold", "last", "linear"):
        assert relabel.why_gone(timed("unet 0.5", MERGED, gap=gap)) is None


def test_steps_have_the_timeline_s_names() -> None:
    merged = relabel.relabel(timed("unet 0.5", MERGED))
    assert merged["steps_by_phase"] == {
        "first merged, select": 1,
        "merged, reuse": 40,
        "merged, reweigh": 5,
        "merged, select": 4,
    }
    assert merged["laps_ms"] == {phase: [float(count)] for phase, count in merged["steps_by_phase"].items()}
    held = relabel.relabel(timed("hold", HELD_PHASES, **HELD))
    assert held["steps_by_phase"] == {"first full": 1, "full": 9, "full, kept": 13, "held": 27}
    drawn = relabel.relabel(evaluated("hold", **HELD))
    assert (drawn["kinds"], drawn["timing"]) == ({"full": 14, "held": 14}, {"median": 0.07, "tokens": ""})
    assert relabel.relabel(evaluated("toma:ratio=0.5", **PAPER))["kinds"] == {"merged": 28}


@pytest.mark.parametrize(
    ("ran", "today"),
    [
        (
            "sdxl-random --batches 2 --presets unet,toma-tile --ratios 0.5",
            "sdxl-random --batches 2 --techniques unet toma-tile --ratios 0.5",
        ),
        (
            "flux-random --presets dit --skip-first 5 --ratios 0.5",
            "flux-random --techniques dit:skip_first=5 --ratios 0.5",
        ),
        (
            "sdxl-random --presets unet-hold,hold,unet-anchored --ratios 0.75",
            "sdxl-random --techniques hold hold:what=blocks",
        ),
        ("flux-random --presets hold,dit-anchored --ratios 0.75", "flux-random --techniques hold"),
        ("sd35-random --presets default --modes eager", "sd35-random --techniques hold --modes eager"),
    ],
)
def test_a_command_measures_the_same_today(ran: str, today: str) -> None:
    row = {**timed("unpatched", {"full": 50}), "command": f"tokenmerge bench --model {ran}"}
    new = relabel.relabel(row)
    assert (new["command"], new["ran"]) == (f"tokenmerge bench --model {today}", row["command"])


def test_a_file_is_written_anew_once(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    rows = [row for row, _ in STAY + GO]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert relabel.rewrite(path) == (len(STAY), len(GO))
    assert [json.loads(line)["label"] for line in path.read_text().splitlines()] == [label for _, label in STAY]
    with pytest.raises(SystemExit, match="is written anew already"):
        relabel.rewrite(path)
    others = tmp_path / "ops.jsonl"
    others.write_text('{"operation": "merge",  "ms": 0.005}\n')
    assert relabel.rewrite(others) == (1, 0)
    assert others.read_text() == '{"operation": "merge",  "ms": 0.005}\n'

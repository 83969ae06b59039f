"""Markdown tables of measured records."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import TokenMergeError
from ...planning.tables import markdown
from .candidates import BOUND
from .records import conditions


def report(records: Iterable[dict[str, Any]]) -> str:
    """A Markdown table per comparison, with advice where a technique costs more than it saves."""
    parts = []
    for found in comparisons(records):
        first, rows = found[0], pool(found)
        where, frames = first["environment"], first["frames"]
        over = f", {frames} frames" if frames > 1 else ""
        commits = dict.fromkeys(each["environment"].get("commit", "") for each in found)
        at = f", commits {', '.join(commits)}" if len(commits) > 1 else ""
        parts.append(
            f"**{first['model']}, {first['width']}x{first['height']}{over}, batch {first['batch']}, {first['mode']}**: "
            f"{first['steps']} steps on {where['device']}, torch {where['torch']}{at}\n\n{_table(rows)}"
        )
        if any(speed_up(row, rows) < 1 for row in rows):
            parts.append(_advice(first["mode"]))
    return "\n\n".join(parts)


def comparisons(records: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Records, grouped by comparison. A resumed run does not time the plain denoiser again: its records join the
    latest group with a plain one that was measured under the same conditions at another commit."""
    by_commit: dict[str, tuple[str, list[dict[str, Any]]]] = {}
    for record in records:
        fields = [record[name] for name in ("model", "width", "height", "frames", "batch", "mode", "steps")]
        setting = json.dumps([*fields, conditions(record["environment"])])
        key = f"{setting} {record['environment'].get('commit')}"
        by_commit.setdefault(key, (setting, []))[1].append(record)
    found: dict[str, list[dict[str, Any]]] = {}
    plain: dict[str, list[dict[str, Any]]] = {}
    for key, (setting, rows) in by_commit.items():
        if any(not row["techniques"] for row in rows):
            found[key] = plain[setting] = rows
        elif setting in plain:
            plain[setting] += rows
        else:
            found[key] = rows
    return list(found.values())


@dataclass(frozen=True)
class Row:
    """A candidate in a comparison, with the laps of all rounds."""

    record: dict[str, Any]  # the first round's
    laps: dict[str, list[float]]
    loops: list[float]  # milliseconds of whole schedules, run from end to end

    @property
    def techniques(self) -> list[dict[str, Any]]:
        techniques: list[dict[str, Any]] = self.record["techniques"]
        return techniques

    @property
    def schedule_ms(self) -> float:
        """Milliseconds of all steps: the median of each phase, times its number of steps."""
        steps: dict[str, int] = self.record["steps_by_phase"]
        return sum(statistics.median(self.laps[phase]) * count for phase, count in steps.items())


def pool(records: Sequence[dict[str, Any]]) -> list[Row]:
    """One row per candidate."""
    rows: dict[str, Row] = {}
    for record in records:
        key = json.dumps([record["label"], record["techniques"]])
        row = rows.setdefault(key, Row(record, {phase: [] for phase in record["laps_ms"]}, []))
        row.loops.extend(record["loop_ms"])
        for phase, laps in record["laps_ms"].items():
            row.laps[phase] += laps
    return list(rows.values())


def speed_up(row: Row, rows: Sequence[Row]) -> float:
    """How many times faster a row is than the plain row of its comparison."""
    plain = next((each for each in rows if not each.techniques), None)
    if plain is None:
        raise TokenMergeError(
            f"{row.record['label']!r} has no plain row to be compared with; keep all rows of a run in one file"
        )
    return plain.schedule_ms / row.schedule_ms


def _advice(mode: str) -> str:
    lead = "Below 1.00x a technique costs more than it saves: "
    if "graph" in mode:
        return lead + "there are too few tokens. Use a larger batch or a larger image, or leave it off."
    return lead + (
        "the device waits for launches, or there are too few tokens. Use `tokenmerge.compile(pipe)`, which replays "
        "CUDA graphs, or a larger batch or image."
    )


def _table(rows: Sequence[Row]) -> str:
    header = ["", "schedule ms", "speed-up", "over its bound", "ms by phase (10-90 %)", "launches", "peak GiB"]
    header += ["end to end ms", "first call s"]
    lines = list(_lines(rows))
    # Columns without a figure are left out.
    shown = [place for place in range(len(header)) if any(line[place] for line in lines)]
    return markdown([header[place] for place in shown], [[line[place] for place in shown] for line in lines])


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    bounds = {_bound_of(row): row for row in rows if _method(row) == "lower-bound"}
    for row in rows:
        bound = _bound_ms(row, rows, bounds.get(_bound_of(row)))
        peak = row.record["peak_bytes"]
        yield [
            row.record["label"],
            f"{row.schedule_ms:.0f}",
            f"{speed_up(row, rows):.2f}x",
            "" if bound is None else f"{100 * (row.schedule_ms / bound - 1):+.1f} %",
            ", ".join(f"{phase} {_spread(laps)}" for phase, laps in row.laps.items()),
            str(row.record["launches"] or ""),
            f"{peak / 2**30:.2f}" if peak else "",
            f"{statistics.median(row.loops):.0f}" if row.loops else "",
            f"{row.record['first_call_s']:.1f}" if "compiled" in row.record["mode"] else "",
        ]


def _bound_ms(row: Row, rows: Sequence[Row], linear: Row | None) -> float | None:
    """The fastest schedule possible for a row that only merges (its maps are free) or only holds (its held steps are
    free, and its full steps take as long as plain ones)."""
    if linear is not None:
        return None if linear is row else linear.schedule_ms
    if [each["technique"] for each in row.techniques] != ["hold"]:
        return None
    plain = next(each for each in rows if not each.techniques)
    steps: dict[str, int] = row.record["steps_by_phase"]
    full = sum(count for phase, count in steps.items() if phase != "held")
    return plain.schedule_ms * full / sum(steps.values())


def _spread(laps: list[float]) -> str:
    ordered = sorted(laps)
    tail = len(ordered) // 10
    return f"{statistics.median(ordered):.2f} ({ordered[tail]:.2f}-{ordered[-1 - tail]:.2f})"


def _method(row: Row) -> str | None:
    """The method of a row that only merges."""
    return row.techniques[0].get("method") if len(row.techniques) == 1 else None


def _bound_of(row: Row) -> str | None:
    """The lower bound of a row that only merges, as a record writes it. A bound's own bound is itself."""
    if _method(row) is None:
        return None
    return json.dumps({name: BOUND.get(name, value) for name, value in row.techniques[0].items()}, sort_keys=True)

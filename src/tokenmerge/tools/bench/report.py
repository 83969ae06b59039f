"""Tables of what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import TokenMergeError
from ...planning.tables import markdown
from .candidates import BOUND


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file that `run` has written."""
    way_out = "give a file that bench --out has written"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TokenMergeError(f"{path} cannot be read ({error.strerror or error}); {way_out}") from error
    except UnicodeDecodeError as error:
        raise TokenMergeError(f"{path} is no text; {way_out}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TokenMergeError(f"line {number} of {path} is no JSON ({error}); {way_out}") from error
        if not isinstance(record, dict) or "laps_ms" not in record:
            raise TokenMergeError(f"line {number} of {path} is no record of times; {way_out}")
        if "techniques" not in record:
            raise TokenMergeError(
                f"line {number} of {path} is of tokenmerge 0.1, which had other techniques; {way_out}"
            )
        records.append(record)
    if not records:
        raise TokenMergeError(f"{path} holds no record; {way_out}")
    return records


def report(records: Iterable[dict[str, Any]]) -> str:
    """A Markdown table of each comparison, with advice where a technique did not pay."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        key = tuple(record[name] for name in ("model", "width", "height", "batch", "mode", "steps"))
        # Of pictures, older files do not say that there is one frame.
        key += (record.get("frames", 1), json.dumps(record["environment"]))
        groups.setdefault(key, []).append(record)
    parts = []
    for (model, width, height, batch, mode, steps, frames, _), found in groups.items():
        rows = pool(found)
        where = rows[0].record["environment"]
        over = f", {frames} frames" if frames > 1 else ""
        parts.append(
            f"**{model}, {width}x{height}{over}, batch {batch}, {mode}**: {steps} steps on {where['device']}, "
            f"torch {where['torch']}\n\n{_table(rows)}"
        )
        if any(speed_up(row, rows) < 1 for row in rows):
            parts.append(_advice(mode))
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Row:
    """A candidate of a comparison, with the laps of all rounds."""

    record: dict[str, Any]  # of the first round
    laps: dict[str, list[float]]
    loops: list[float]  # milliseconds of whole schedules, run from end to end

    @property
    def techniques(self) -> list[dict[str, Any]]:
        techniques: list[dict[str, Any]] = self.record["techniques"]
        return techniques

    @property
    def schedule_ms(self) -> float:
        """Of all steps: the median of each phase, as often as a schedule has it."""
        steps: dict[str, int] = self.record["steps_by_phase"]
        return sum(statistics.median(self.laps[phase]) * count for phase, count in steps.items())


def pool(records: Sequence[dict[str, Any]]) -> list[Row]:
    """One row for each candidate."""
    rows: dict[str, Row] = {}
    for record in records:
        key = json.dumps([record["label"], record["techniques"]])
        row = rows.setdefault(key, Row(record, {phase: [] for phase in record["laps_ms"]}, []))
        row.loops.extend(record["loop_ms"])
        for phase, laps in record["laps_ms"].items():
            row.laps[phase] += laps
    return list(rows.values())


def speed_up(row: Row, rows: Sequence[Row]) -> float:
    """Of a row over the plain one of the same comparison."""
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
    # What was not measured has no column.
    shown = [place for place in range(len(header)) if any(line[place] for line in lines)]
    return markdown([header[place] for place in shown], [[line[place] for place in shown] for line in lines])


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    bounds = {_bound_of(row): row for row in rows if _method(row) == "lower-bound"}
    for row in rows:
        bound = bounds.get(_bound_of(row))
        peak = row.record["peak_bytes"]
        yield [
            row.record["label"],
            f"{row.schedule_ms:.0f}",
            f"{speed_up(row, rows):.2f}x",
            "" if bound in (None, row) else f"{100 * (row.schedule_ms / bound.schedule_ms - 1):+.1f} %",
            ", ".join(f"{phase} {_spread(laps)}" for phase, laps in row.laps.items()),
            str(row.record["launches"] or ""),
            f"{peak / 2**30:.2f}" if peak else "",
            f"{statistics.median(row.loops):.0f}" if row.loops else "",
            f"{row.record['first_call_s']:.1f}" if "compiled" in row.record["mode"] else "",
        ]


def _spread(laps: list[float]) -> str:
    ordered = sorted(laps)
    tail = len(ordered) // 10
    return f"{statistics.median(ordered):.2f} ({ordered[tail]:.2f}-{ordered[-1 - tail]:.2f})"


def _method(row: Row) -> str | None:
    """The method of a row that merges alone."""
    return row.techniques[0].get("method") if len(row.techniques) == 1 else None


def _bound_of(row: Row) -> str | None:
    """The bound of what merges alone, as it is recorded; a bound has itself."""
    if _method(row) is None:
        return None
    return json.dumps({name: BOUND.get(name, value) for name, value in row.techniques[0].items()}, sort_keys=True)

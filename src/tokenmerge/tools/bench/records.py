"""The file of a comparison: one JSON line a row, read by whoever shows it, and by a run that goes on with it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from ...errors import TokenMergeError
from ..files import write_text

# What makes a row another one, beside the conditions it was measured under.
_SAME = ("label", "techniques", "model", "width", "height", "frames", "batch", "mode", "steps", "repeats")
_WAY_OUT = "give a file that bench --out has written"
# How a row begins.
_BEGIN = '{"label": '


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file that `run` has written."""
    records = _parsed(_text(path), path)
    if not records:
        raise TokenMergeError(f"{path} holds no record; {_WAY_OUT}")
    return records


def conditions(environment: dict[str, str]) -> dict[str, str]:
    """What rows must share to be compared: machine and versions, but not the commit. A table that takes more than one
    run may see several."""
    return {name: value for name, value in environment.items() if name != "commit"}


class Measured:
    """The rows that a file holds of the same machine and versions, each to be taken once; none without a file."""

    def __init__(self, path: Path | None, environment: dict[str, str]) -> None:
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in _mended(path) if path is not None and path.is_file() else ():
            if conditions(row["environment"]) == conditions(environment):
                self._rows[_key(row)].append(row)

    def take(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """A row of these techniques and this setting, if there is one left."""
        rows = self._rows[_key(asked)]
        return rows.pop(0) if rows else None


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row[name] for name in _SAME], sort_keys=True)


def _mended(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a last line that a killed run began: it is cut off, so that others can follow."""
    text = _text(path)
    whole, line_end, last = text.rpartition("\n")
    if last.startswith(_BEGIN):
        try:
            json.loads(last)
        except json.JSONDecodeError:
            text = whole + line_end
            write_text(path, text)
    return _parsed(text, path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenMergeError(f"{path} cannot be read ({error.strerror or error}); {_WAY_OUT}") from error
    except UnicodeDecodeError as error:
        raise TokenMergeError(f"{path} is no text; {_WAY_OUT}") from error


def _parsed(text: str, path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TokenMergeError(f"line {number} of {path} is no JSON ({error}); {_WAY_OUT}") from error
        if not isinstance(record, dict) or "laps_ms" not in record:
            raise TokenMergeError(f"line {number} of {path} is no record of times; {_WAY_OUT}")
        if "techniques" not in record:
            raise TokenMergeError(
                f"line {number} of {path} is of tokenmerge 0.1, which had other techniques; {_WAY_OUT}"
            )
        # Of pictures, older files do not say that there is one frame.
        records.append({"frames": 1, **record})
    return records

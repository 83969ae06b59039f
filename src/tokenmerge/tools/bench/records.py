"""The file of a comparison, one JSON line per row: to print its tables, or to resume an interrupted run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from ...errors import TokenMergeError
from ..files import write_text

# Fields that two rows share if one can stand for the other, given the same conditions.
_SAME = ("label", "techniques", "model", "width", "height", "frames", "batch", "mode", "steps", "repeats")
_WAY_OUT = "give a file that bench --out has written"
# The first characters of every row.
_BEGIN = '{"label": '


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file that `run` wrote."""
    records = _parsed(_text(path), path)
    if not records:
        raise TokenMergeError(f"{path} holds no record; {_WAY_OUT}")
    return records


def conditions(environment: dict[str, str]) -> dict[str, str]:
    """What comparable rows share: machine and versions, but not the commit, which may differ between runs."""
    return {name: value for name, value in environment.items() if name != "commit"}


class Measured:
    """Rows of a file from the same machine and versions, each to be taken once. Empty if there is no file."""

    def __init__(self, path: Path | None, environment: dict[str, str]) -> None:
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in _mended(path) if path is not None and path.is_file() else ():
            if conditions(row["environment"]) == conditions(environment):
                self._rows[_key(row)].append(row)

    def take(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """A row with these techniques and this setting, if one is left."""
        rows = self._rows[_key(asked)]
        return rows.pop(0) if rows else None


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row[name] for name in _SAME], sort_keys=True)


def _mended(path: Path) -> list[dict[str, Any]]:
    """The records of a file. A last line that a killed run left unfinished is cut off, so that new lines can follow."""
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
        raise TokenMergeError(f"{path} is not text; {_WAY_OUT}") from error


def _parsed(text: str, path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TokenMergeError(f"line {number} of {path} is not JSON ({error}); {_WAY_OUT}") from error
        if not isinstance(record, dict) or "laps_ms" not in record:
            raise TokenMergeError(f"line {number} of {path} is not a record of times; {_WAY_OUT}")
        if "techniques" not in record:
            raise TokenMergeError(
                f"line {number} of {path} is from tokenmerge 0.1, which had other techniques; {_WAY_OUT}"
            )
        # Older files of pictures leave out the number of frames.
        records.append({"frames": 1, **record})
    return records

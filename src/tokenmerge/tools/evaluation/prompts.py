"""Prompts from the built-in list of flowers, or from any text, CSV, TSV, JSON or JSON-lines file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import TokenMergeError

FLOWERS = "flowers"
_FLOWER_FILE = Path(__file__).parent / "flowers.txt"
_FLOWER_TEMPLATE = "a photo of a {}"
_COLUMN = "prompt"
_READERS = (".txt", ".csv", ".tsv", ".json", ".jsonl")


def read_prompts(
    source: str = FLOWERS, *, column: str | None = None, template: str | None = None, limit: int | None = None
) -> tuple[str, ...]:
    """The first `limit` prompts of `source`, each put in place of `{}` in `template`.

    source: "flowers", or a file: text with a prompt per line; CSV or TSV with a header; JSON with a list or mapping of
    texts or records, or such values line by line. column: of CSV, TSV and records; by default "prompt", in any case.
    """
    if template is None:
        template = _FLOWER_TEMPLATE if source == FLOWERS else "{}"
    if template.count("{}") != 1:
        raise TokenMergeError(f"the template {template!r} needs exactly one {{}}, where the prompt goes")
    path = _FLOWER_FILE if source == FLOWERS else Path(source)
    if path.suffix.lower() not in _READERS:
        raise TokenMergeError(
            f"prompts {source!r} are neither '{FLOWERS}' nor a file that ends in {', '.join(_READERS)}"
        )
    try:
        texts = [text.strip() for text in _texts(path, column)]
    except OSError as error:
        raise TokenMergeError(f"{source} cannot be read ({error.strerror or error}); check the path") from error
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise TokenMergeError(
            f"{source} is not {path.suffix[1:].upper()} in UTF-8 ({error}); repair the file"
        ) from error
    prompts = [template.replace("{}", text) for text in texts if text][:limit]
    if not prompts:
        raise TokenMergeError(f"{source} holds no prompt; give a file with at least one")
    return tuple(prompts)


def _texts(path: Path, column: str | None) -> Iterable[str]:
    # Spreadsheets begin a file with a byte order mark.
    text = path.read_text(encoding="utf-8-sig")
    kind = path.suffix.lower()
    if kind == ".txt":
        return text.splitlines()
    if kind == ".json":
        values = json.loads(text)
        if not isinstance(values, list | dict):
            raise TokenMergeError(f"{path} holds a {type(values).__name__}; give prompts as a list or a mapping")
        return _from_records(path, values.values() if isinstance(values, dict) else values, column)
    if kind == ".jsonl":
        return _from_records(path, (json.loads(line) for line in text.splitlines() if line.strip()), column)
    # Quotation marks in TSV files belong to the prompts.
    lines = io.StringIO(text, newline="")
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if kind == ".tsv" else csv.DictReader(lines)
    return _from_records(path, rows, column)


def _from_records(path: Path, values: Iterable[Any], column: str | None) -> list[str]:
    texts = []
    for place, value in enumerate(values, 1):
        found = value
        if isinstance(value, dict):
            wanted = (column or _COLUMN).lower()
            names = [name for name in value if isinstance(name, str) and name.lower() == wanted]
            if not names:
                known = ", ".join(str(name) for name in value)
                raise TokenMergeError(f"{path} has no column {wanted!r}; choose one with --column: {known}")
            found = value[names[0]]
        if not isinstance(found, str):
            raise TokenMergeError(f"prompt {place} of {path} is a {type(found).__name__}; prompts must be texts")
        texts.append(found)
    return texts

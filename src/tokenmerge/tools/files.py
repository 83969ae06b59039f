"""Files that are written whole or not at all, even if the process or the machine dies; and JSON for every reader."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import TokenMergeError

# The ending of unfinished files. A killed process may leave some; nobody reads them.
PARTIAL = ".partial"


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write `path` through `write`, under a temporary name until everything is on the disk."""
    # The process id separates two processes that write the same file.
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise _refusal(path, error) from error
    finally:
        if partial.is_file():
            partial.unlink()


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before there is anything to write. Its content stays."""
    if path.is_dir():
        raise _refusal(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    probe = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _refusal(path, error) from error


def check_folder(path: Path) -> None:
    """Refuse an output folder whose path is a file."""
    if path.exists() and not path.is_dir():
        raise TokenMergeError(f"{path} is a file, not a folder; give another --out")


def append_line(path: Path, line: str) -> None:
    """Add a line to the end of a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: OSError) -> TokenMergeError:
    way_out = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give another --out"
    return TokenMergeError(f"{path} cannot be written ({error.strerror or error}); {way_out}")


def write_text(path: Path, text: str) -> None:
    write_file(path, lambda file: file.write(text.encode()))


def digest_of(path: Path) -> str:
    """A short hash of a file's content."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise TokenMergeError(f"{path} cannot be read ({error.strerror or error}); fix it, or leave it out") from error
    return digest.hexdigest()[:16]


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader accepts: infinities and NaN, which standard JSON lacks, are strings."""
    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """`value` with infinities and NaN as strings: "inf", "-inf", "nan"."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Files that are there whole or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .config import TokenMergeError

# Leftovers of a killed process end so; they are never read.
PARTIAL = ".partial"


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write `path` through `write`, under another name until all of it is on the disk."""
    # The number of the process keeps two that write the same file apart.
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        way_out = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give another --out"
        raise TokenMergeError(f"{path} cannot be written ({error.strerror or error}); {way_out}") from error
    finally:
        if partial.is_file():
            partial.unlink()


def write_text(path: Path, text: str) -> None:
    write_file(path, lambda file: file.write(text.encode()))

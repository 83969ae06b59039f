"""What a measurement that is no evaluation found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A table for people, the records it was made from, and the file to look at."""

    text: str
    records: Sequence[dict[str, Any]]
    path: Path

    def __str__(self) -> str:
        return f"{self.text}\n\n{self.path}"

"""Tables as plain text or Markdown, and nouns with counts."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def counted(count: int, noun: str, several: str = "") -> str:
    """A count and its noun: `1 step`, `2 steps`. several: the plural, if it does not just add an s."""
    return f"{count} {noun if count == 1 else several or f'{noun}s'}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])

"""The walks in docs/design.md follow real calls, and functions and modules stay readable."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
import tokenmerge
from tokenmerge import Hold, Merge
from tokenmerge.families import denoiser_of

SOURCE = Path(tokenmerge.__file__).parent
PAGE = (Path(__file__).parent.parent / "docs" / "design.md").read_text(encoding="utf-8")
# Files that a walk may leave out, as the page lists them.
LOOK_UPS = re.findall(r"`([\w/]+\.py)`", PAGE[PAGE.index("Beside these a call only looks") :].split("\n\n")[0])
WALKS = {
    "merged": ("**A merged call", Merge(regions="tile:2x2"), 3, 10),
    "held": ("**A held call", Hold(every=3, start=0.0), 2, 8),
}


def walk(begins: str) -> list[tuple[str, str]]:
    """File and function of every hop that the page lists."""
    _, _, rest = PAGE.partition(begins)
    steps = re.findall(r"^\d+\. (.*?):", rest[: rest.index("\n\n", rest.index("\n1. ") + 2)], re.MULTILINE)
    return [hop for step in steps for hop in re.findall(r"`([\w/]+\.py)` `([\w.]+)`", step)]


def followed(technique: Merge | Hold, number: int) -> list[tuple[str, str]]:
    """File and function of all our code that runs in one call of a denoiser, in order."""
    pipe = tokenmerge.apply(tiny.build("flux"), technique)
    denoiser, hops, calls = denoiser_of(pipe), [], 0

    def see(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            hops.append((str(path.relative_to(SOURCE)), frame.f_code.co_qualname))

    whole = denoiser._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        sys.setprofile(see if calls == number else None)
        try:
            return whole(*args, **kwargs)
        finally:
            sys.setprofile(None)

    denoiser._call_impl = call
    tiny.draw(pipe, steps=8)
    return hops


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs qualified names of code")
@pytest.mark.parametrize(("begins", "technique", "number", "most"), WALKS.values(), ids=WALKS)
def test_the_walk_through_the_files_is_what_a_call_does(
    begins: str, technique: Merge | Hold, number: int, most: int
) -> None:
    told, done = walk(begins), followed(technique, number)
    assert told
    place = 0
    for hop in told:
        assert hop in done[place:], hop
        place = done.index(hop, place)
    files = {file for file, _ in told} - {"runtime/installing.py"}
    assert len(files) <= most
    assert {file for file, _ in done} - files <= set(LOOK_UPS)


def test_no_function_is_longer_than_60_lines() -> None:
    long = []
    for path in SOURCE.rglob("*.py"):
        if "kernels" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60:
                long.append(f"{path.relative_to(SOURCE)}: {node.name}")
    assert not long


def test_library_errors_name_no_options_of_the_command_line() -> None:
    named = [
        f"{path.relative_to(SOURCE)}: {found}"
        for path in SOURCE.rglob("*.py")
        if "tools" not in path.relative_to(SOURCE).parts
        for found in re.findall(r"[\s'\"(]--[a-z][\w-]*", path.read_text(encoding="utf-8"))
    ]
    assert not named

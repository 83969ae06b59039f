"""`tokenmerge presets`: the named techniques."""

from __future__ import annotations

import argparse
from typing import Any

from ...presets import presets
from ..fields import differing
from . import options as shared


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "presets",
        help="list the presets and the fields that each one sets",
        description=shared.described(
            "List the presets, which are techniques by name, and the fields that each one sets."
        ),
    )
    shared.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.json:
        shared.print_json({name: technique.to_dict() for name, technique in presets().items()})
        return
    from ...planning.tables import table

    rows = []
    for name, technique in presets().items():
        typed = [f"{field}={value}" for field, value in differing(technique, type(technique)()).items()]
        rows.append([name, type(technique).__name__, ", ".join(typed)])
    print(table(["preset", "technique", "fields that it sets"], rows))

"""`tokenmerge metrics`: measure two folders of pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import options as shared


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "metrics",
        help="compare two folders of pictures",
        description=shared.described("Measure the pictures in a folder against those of the same names in another."),
    )
    parser.add_argument("reference", type=Path, help="folder of reference pictures")
    parser.add_argument("test", type=Path, help="folder of pictures to measure, with the same file names")
    shared.add_prompt_options(
        parser, about="prompts of the test pictures in the order of names, for clip and intervals"
    )
    shared.add_metrics(parser)
    shared.add_machine_options(parser, threads=1)
    shared.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from ..evaluation.pairs import compare_folders

    comparison = compare_folders(
        options.reference,
        options.test,
        metrics=options.metrics,
        sources=shared.sources_of(options),
        prompts=shared.prompts_of(options) if options.prompts is not None else None,
        device=options.device,
        threads=options.threads,
    )
    shared.print_json(comparison.to_dict()) if options.json else print(comparison)

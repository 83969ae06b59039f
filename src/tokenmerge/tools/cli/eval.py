"""`tokenmerge eval`: compare techniques over many prompts and seeds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..fields import parse_seeds, whole
from . import options as shared


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="compare the time and quality of techniques over many prompts and seeds",
        description=shared.described(
            "Draw pictures with each technique, measure and time them, and report. The plain model, none, is always "
            "included. Results are saved as they are made; --resume continues after an interruption.",
            "`accelerate launch -m tokenmerge eval ...` splits the work over processes, with the same results. @FILE "
            "reads arguments from a file, one per line.",
        ),
        fromfile_prefix_chars="@",
    )
    parser.convert_arg_line_to_args = arguments_in
    shared.add_model(parser, "tiny-flux")
    shared.add_techniques(parser)
    shared.add_ratios(parser)
    add_options(parser, number="all", seeds="0", repeats="5", out="evaluation")
    parser.add_argument(
        "--reference-steps",
        type=whole(0),
        metavar="N",
        help="steps of the second yardstick, the plain picture with more steps; 0 leaves it out (default: four times "
        "--steps)",
    )
    parser.set_defaults(run=run, seeds=(0,), repeats=5, out=Path("evaluation"))


def arguments_in(line: str) -> list[str]:
    """The argument in a line of an argument file; none in empty lines and comments."""
    text = line.strip()
    return [text] if text and not text.startswith("#") else []


def add_options(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """The options that `reproduce` shares. defaults: help for the options whose default differs there."""
    add_, count = parser.add_argument, whole()
    shared.add_prompt_options(parser, default="flowers")
    add_("--number", type=count, metavar="N", help=f"use the first N prompts (default: {defaults['number']})")
    add_("--seeds", type=parse_seeds, metavar="A,B,...", help=f"seeds for each prompt (default: {defaults['seeds']})")
    shared.add_picture_options(parser)
    photographs = "folder of photographs for FID and KID (default: the plain pictures)"
    add_("--reference", type=Path, metavar="FOLDER", help=photographs)
    add_("--batch", type=count, default=1, metavar="N", help="pictures in a timed batch (default: 1)")
    add_(
        "--repeats", type=whole(0), metavar="N", help=f"timed batches; 0 times nothing (default: {defaults['repeats']})"
    )
    add_("--out", type=Path, metavar="FOLDER", help=f"folder for all files (default: {defaults['out']})")
    add_("--resume", action="store_true", help="continue the run in --out")
    shared.add_machine_options(parser, threads=1)
    shared.add_dtype(parser)
    shared.add_compile(parser)
    shared.add_metrics(parser)
    shared.add_json(parser)


def run(options: argparse.Namespace, **task: Any) -> None:
    from ..evaluation.run import Task, evaluate
    from ..evaluation.table import plain

    given = {**shared.given(options, Task), **task}
    given |= {"prompts": shared.prompts_of(options, limit=options.number), "sources": shared.sources_of(options)}
    results = evaluate(Task(**given), options.out, resume=options.resume)
    if results is not None:
        shared.print_json(results.to_dict()) if options.json else print(plain(results))

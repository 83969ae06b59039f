"""`tokenmerge generate`: one picture, plain and with techniques."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..fields import parse_seed, whole
from . import options as shared


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="draw a picture plain and with techniques, and compare them",
        description=shared.described(
            "Draw a prompt with the plain model and, from the same seed, with each technique. Write the pictures side "
            "by side into one file, and print the time and drift of each."
        ),
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        default="a photo of a sunflower",
        help="what to draw; write it before --techniques (default: %(default)s)",
    )
    shared.add_model(parser, "tiny-flux")
    shared.add_techniques(parser)
    shared.add_ratios(parser)
    shared.add_picture_options(parser)
    add_ = parser.add_argument
    add_("--seed", type=parse_seed, default=0, metavar="N", help="seed of the first picture (default: 0)")
    number = "pictures to draw with each technique, each with the next seed (default: 1)"
    add_("--number", type=whole(), default=1, metavar="N", help=number)
    add_("--show-destinations", action="store_true", help="also show regions, destinations and which tokens merged")
    add_("--out", type=Path, metavar="FILE", help="picture file to write (default: named after prompt and seed)")
    shared.add_machine_options(parser)
    shared.add_dtype(parser)
    shared.add_compile(parser)
    shared.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from ..drawing.comparison import Comparison, compare_pictures

    result = compare_pictures(Comparison(**shared.given(options, Comparison)))
    shared.print_json(result.to_dict()) if options.json else print(result)

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
        help="draw a picture plain and with techniques, and compare",
        description=shared.described(
            "Draw a picture from a prompt with the plain model, and with each technique from the same seed. Write them "
            "side by side into one picture, and print what each took and how far it drifted."
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
    parser.add_argument(
        "--seed",
        type=parse_seed,
        default=0,
        metavar="N",
        help="seed of the first picture (default: %(default)s)",
    )
    parser.add_argument(
        "--number",
        type=whole(),
        default=1,
        metavar="N",
        help="pictures to draw, each with the next seed (default: 1)",
    )
    parser.add_argument("--show-destinations", action="store_true", help="show regions, destinations and what merged")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="picture to write (default: named after prompt and seed)"
    )
    shared.add_machine_options(parser)
    shared.add_dtype(parser)
    shared.add_compile(parser)
    shared.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from ..drawing.comparison import Comparison, compare_pictures

    result = compare_pictures(Comparison(**shared.given(options, Comparison)))
    shared.print_json(result.to_dict()) if options.json else print(result)

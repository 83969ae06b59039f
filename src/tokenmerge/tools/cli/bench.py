"""`tokenmerge bench`: time a denoiser, plain and with techniques."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..fields import parse_as, parse_counts, parse_sizes, real, whole
from . import options as shared


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time a denoiser, plain and with techniques",
        description=shared.described(
            "Time a denoiser, plain and with each technique, by kind of step and over a whole schedule. Count its "
            "launches and measure its memory. Linear merging is timed beside its lower bound. Prints Markdown tables."
        ),
    )
    add_, count = parser.add_argument, whole()
    shared.add_model(parser, "tiny-flux", random=True)
    shared.add_techniques(parser, rivals=False)
    shared.add_ratios(parser)
    add_("--sizes", type=parse_sizes, metavar="WxH,...", help="width x height in pixels (default: the model's)")
    shared.add_frames(parser)
    add_("--batches", type=parse_counts, default=(1,), metavar="A,B,...", help="batch sizes (default: 1)")
    add_(
        "--modes",
        type=parse_as(tuple[str, ...]),
        default=("eager",),
        metavar="A,B,...",
        help="any of eager, graph, compiled, compiled+graph (default: eager)",
    )
    add_("--steps", type=count, default=50, metavar="N", help="steps of the schedule (default: %(default)s)")
    runs = "untimed runs of each kind of step; at least 2 with graphs (default: 5 on a GPU, else 1)"
    add_("--warmups", type=whole(0), metavar="N", help=runs)
    add_("--settle", type=real(least=0), metavar="N", help="minimum seconds of warm-up (default: 2 on a GPU, else 0)")
    add_("--repeats", type=count, metavar="N", help="timed runs of each kind of step (default: 20 on a GPU, else 5)")
    add_("--loops", type=whole(0), default=0, metavar="N", help="whole schedules to time as well (default: 0)")
    add_("--rounds", type=count, default=1, metavar="N", help="how often to measure everything (default: 1)")
    shared.add_machine_options(parser)
    shared.add_dtype(parser, "the model's usual")
    add_("--out", type=Path, metavar="FILE", help="file to append JSON lines to (default: none)")
    add_(
        "--resume", action="store_true", help="skip rows that --out already has from this machine, device and versions"
    )
    add_(
        "--table",
        type=Path,
        metavar="FILE",
        help="print the tables of a file that --out wrote, and stop (default: none)",
    )
    shared.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from .. import bench

    if options.table:
        records = bench.read(options.table)
    else:
        options.command = shared.typed_command([word for word in options.words if word != "--resume"], without="--out")
        records = bench.run(bench.Task(**shared.given(options, bench.Task)))
    shared.print_json(records) if options.json else print(bench.report(records))

"""`tokenmerge tune`: search settings for one model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...errors import TokenMergeError
from ..fields import parse_budget, parse_seed, real, whole
from . import options as shared


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="search settings that keep a drift budget or reach a speed-up, and write them to a file",
        description=shared.described(
            "Sample candidates from the settings of both techniques, and measure their time and drift in rungs, on "
            "ever more prompts; the better half of each rung goes on. Write the candidate that meets the goal on "
            "held-out prompts to preset.yaml, for apply(pipe, 'preset.yaml'). Results are saved as they are made; "
            "--resume continues after an interruption.",
            "Fields that you type in --techniques stay fixed.",
        ),
    )
    add_, count = parser.add_argument, whole()
    _add_goal(parser)
    shared.add_model(parser, "tiny-flux")
    shared.add_techniques(parser, about="to search", rivals=False)
    add_(
        "--rivals",
        nargs="+",
        action="extend",
        metavar="RIVAL",
        help="step caches and schedules to measure beside the last rung, as in cache-dit or unipc:steps=14, or none "
        "(default: all that are installed and fit the model)",
    )
    shared.add_prompt_options(parser, default="flowers")
    add_("--candidates", type=count, default=24, metavar="N", help="candidates in the first rung (default: 24)")
    add_("--rungs", type=count, default=3, metavar="N", help="rungs, which are rounds of measuring (default: 3)")
    number = "pictures in the first rung; each further rung doubles them (default: 2)"
    add_("--number", type=count, default=2, metavar="N", help=number)
    add_("--seed", type=parse_seed, default=0, metavar="N", help="seed of candidates and pictures (default: 0)")
    shared.add_picture_options(parser)
    add_("--batch", type=count, default=1, metavar="N", help="pictures in a timed batch (default: %(default)s)")
    add_("--repeats", type=count, default=3, metavar="N", help="timed batches in each rung (default: %(default)s)")
    # No CLIP: it compares a picture with its prompt, which does not measure drift.
    shared.add_network_options(parser, "dino")
    shared.add_machine_options(parser, threads=1)
    shared.add_dtype(parser)
    shared.add_compile(parser)
    add_("--out", type=Path, default=Path("tuning"), metavar="FOLDER", help="folder for all files (default: tuning)")
    add_("--resume", action="store_true", help="continue the run in --out")
    shared.add_json(parser)
    parser.set_defaults(run=run)


def _add_goal(parser: argparse.ArgumentParser) -> None:
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument(
        "--budget",
        type=parse_budget,
        metavar="NAME=N",
        help="maximum drift, as in lpips=0.1 or mse=100: find the fastest settings (default: none)",
    )
    goal.add_argument(
        "--speed-up",
        type=real(above=1),
        metavar="N",
        help="speed-up to reach, as in 1.5: find the settings with the least drift (default: none)",
    )
    parser.add_argument("--metric", metavar="NAME", help="metric of drift: lpips, mse or dino (default: lpips)")


def run(options: argparse.Namespace) -> None:
    from ..tuning.goal import read_goal
    from ..tuning.search import Search, tune

    sources = shared.sources_of(options)
    goal = read_goal(options.budget, options.speed_up, options.metric, sources)
    given = {**shared.given(options, Search), "prompts": shared.prompts_of(options)}
    search = Search(**{**given, "goal": goal, "sources": sources})
    outcome = tune(search, options.out, resume=options.resume, command=shared.typed_command(options.words))
    shared.print_json(outcome.to_dict()) if options.json else print(f"{outcome}\n\n{options.out / outcome.file}")
    if (shortfall := outcome.shortfall()) is not None:
        raise TokenMergeError(shortfall)

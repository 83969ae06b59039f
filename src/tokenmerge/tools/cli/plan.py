"""`tokenmerge plan`: what techniques would do to a model, from its config files alone."""

from __future__ import annotations

import argparse
from typing import Any

from ..fields import whole
from . import options as shared


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="show what techniques would do to a model, without its weights",
        description=shared.described(
            "Print which sites merge, which blocks are held, how many steps of each kind there are, and how much that "
            "saves by the paper's cost model. Only the model's config files are read."
        ),
    )
    shared.add_model(parser, "tiny-flux", random=True)
    shared.add_techniques(parser, "hold, as in apply(pipe)", "to plan", rivals=False)
    shared.add_size(parser)
    shared.add_frames(parser)
    parser.add_argument("--steps", type=whole(), metavar="N", help="denoising steps (default: the model's)")
    parser.add_argument("--sites-list", action="store_true", help="also list every site and held block by name")
    shared.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from ...errors import TokenMergeError
    from ...presets import RECOMMENDED
    from ..loading import outline
    from ..typed import read_typed

    typed = [read_typed(text).configuration for text in options.techniques or (RECOMMENDED,)]
    for each in typed:
        for rival in each.rivals:
            raise TokenMergeError(f"{each.label!r}: plan covers Merge and Hold only; leave out {rival.name}")
    model = outline(options.model)
    width, height = options.size or model.own_size
    plans = [
        model.plan(each.techniques, width, height, steps=options.steps or model.defaults.steps, frames=options.frames)
        for each in typed
    ]
    if options.json:
        labels = [each.label for each in typed]
        shared.print_json([{"label": label, **plan.to_dict()} for label, plan in zip(labels, plans, strict=True)])
    else:
        print("\n\n".join(_described(plan, options.sites_list) for plan in plans))


def _described(plan: Any, listed: bool) -> str:
    lines = [str(plan)]
    if listed:
        lines += ["", "Sites:", *(f"  {site.name}  [{site.group}]  {site.skipped or 'merged'}" for site in plan.sites)]
        lines += [f"  {block.name}  [{block.group}]  held" for run_ in plan.runs for block in run_.blocks]
    return "\n".join(lines)

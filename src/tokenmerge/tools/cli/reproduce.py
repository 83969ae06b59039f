"""`tokenmerge reproduce`: the paper's tables and figures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import TokenMergeError
from ..paper.studies import FIGURE, FULL, INQUIRIES, NAMES, QUICK, STUDIES, Inquiry, find_study
from . import eval
from . import options as shared


def add(commands: Any) -> None:
    listed = [f"  {', '.join(item.names):28}  {item.about}" for item in (*STUDIES, *INQUIRIES)]
    parser = commands.add_parser(
        "reproduce",
        help="reproduce a table or figure of the paper",
        description=shared.described(
            f"Reproduce one of the paper's tables or figures, by default with {FULL.prompts} prompts x "
            f"{len(FULL.seeds)} seeds, as in the paper's ablations."
        )
        + "\n\n"
        + "\n".join(listed),
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(NAMES))
    quick = f"check that everything runs, with {QUICK.prompts} prompts and {QUICK.steps} steps"
    parser.add_argument("--quick", action="store_true", help=quick)
    shared.add_model(parser, None, shown="tiny-sdxl; for table10 tiny-flux")
    eval.add_options(
        parser,
        number=f"{FULL.prompts}, quick {QUICK.prompts}",
        seeds=f"{','.join(map(str, FULL.seeds))}, quick {','.join(map(str, QUICK.seeds))}",
        repeats=f"{FULL.repeats}, quick {QUICK.repeats}",
        out="reproduction/NAME-MODEL",
    )
    # Not every study uses these options, so we must know whether they were given.
    usual = {name: parser.get_default(name) for name in ("prompts", "batch", "resume")}
    parser.set_defaults(run=run, usual=usual, **dict.fromkeys(usual))


def run(options: argparse.Namespace) -> None:
    item = find_study(options.name)
    if isinstance(item, Inquiry):
        for name, reason in item.useless().items():
            if getattr(options, name) is not None:
                raise TokenMergeError(f"--{name} is not for {options.name}, which {reason}; leave it out")
    scale = QUICK if options.quick else FIGURE if isinstance(item, Inquiry) else FULL
    options.model = options.model or item.model
    defaults = {"number": scale.prompts, "seeds": scale.seeds, "repeats": scale.repeats, "steps": scale.steps}
    defaults |= {**options.usual, "out": Path("reproduction", f"{item.folder}-{Path(options.model).name}")}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if isinstance(item, Inquiry):
        _inquire(options, item, scale.ratios)
    else:
        eval.run(options, techniques=item.configurations, tell_refused=True)


def _inquire(options: argparse.Namespace, inquiry: Inquiry, ratios: Sequence[float]) -> None:
    from ..drawing.studio import Setup
    from ..paper.inquiries import inquire

    finding = inquire(
        inquiry,
        Setup(**shared.given(options, Setup)),
        shared.prompts_of(options, limit=options.number),
        options.seeds,
        batch=options.batch,
        repeats=options.repeats,
        ratios=ratios,
        out=options.out,
    )
    shared.print_json(finding.records) if options.json else print(finding)

"""`tokenmerge heal`: train a LoRA that makes the merged model draw what the plain one draws."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..fields import parse_seed, real, whole
from . import options as shared


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "heal",
        help="train a LoRA that makes the merged model draw what the plain one draws",
        description=shared.described(
            "Train a LoRA so that the merged model's output is the plain model's on noised pictures. Then draw "
            "pictures of held-out captions plain, merged and healed, and report. Merge(lora=FILE) applies the LoRA. "
            "Checkpoints are kept; --resume goes on after an interruption.",
            "`accelerate launch -m tokenmerge heal ...` trains on several devices.",
        ),
    )
    add_, count = parser.add_argument, whole()
    shared.add_model(parser, "tiny-flux")
    told = "unet or dit, by the model's family"
    add_("--merge", metavar="TECHNIQUE", help=f"merging to heal, as in dit:ratio=0.5 (default: {told})")
    add_(
        "--data",
        type=Path,
        metavar="PATH",
        help="folder of pictures, or a text file with their paths; NAME.txt beside NAME.png is its caption (default: "
        "pictures that the plain model draws of --prompts)",
    )
    shared.add_prompt_options(parser, default="flowers")
    add_("--number", type=count, default=64, metavar="N", help="pictures to draw without --data (default: 64)")
    add_("--held-out", type=count, default=8, metavar="N", help="pictures that training does not see (default: 8)")
    add_("--rank", type=count, default=32, metavar="N", help="rank of the LoRA (default: 32)")
    add_("--steps", type=count, default=1000, metavar="N", help="training steps (default: 1000)")
    add_("--batch", type=count, default=4, metavar="N", help="pictures in a step, on each device (default: 4)")
    add_(
        "--at-once",
        type=count,
        metavar="N",
        help="pictures in one call of the denoiser; more are faster on a GPU and take more memory (default: all, or "
        "one where the pictures of a batch share destinations, as on Flux)",
    )
    add_("--lr", type=real(above=0), default=5e-4, metavar="N", help="highest learning rate (default: 0.0005)")
    add_("--seed", type=parse_seed, default=0, metavar="N", help="seed of everything (default: 0)")
    add_("--every", type=count, default=100, metavar="N", help="steps from one checkpoint to the next (default: 100)")
    add_(
        "--denoising-steps",
        type=count,
        metavar="N",
        help="steps of the schedule whose noise levels are trained (default: the model's)",
    )
    add_("--guidance", type=real(), metavar="N", help="strength of guidance (default: the model's)")
    shared.add_size(parser)
    shared.add_machine_options(parser, threads=1)
    shared.add_dtype(parser)
    add_(
        "--reference",
        type=Path,
        metavar="FOLDER",
        help="photographs for FID and KID of the report (default: the plain pictures)",
    )
    shared.add_network_options(parser)
    add_("--out", type=Path, default=Path("healed"), metavar="FOLDER", help="folder for all files (default: healed)")
    add_("--resume", action="store_true", help="go on with what is in --out")
    shared.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from ..drawing.studio import Setup
    from ..healing.run import Healing, heal

    setup = Setup(**{**shared.given(options, Setup), "steps": options.denoising_steps})
    given = {**shared.given(options, Healing), "setup": setup, "sources": shared.sources_of(options)}
    given["prompts"] = () if options.data is not None else shared.prompts_of(options)
    outcome = heal(Healing(**given), options.out, resume=options.resume)
    if outcome is not None:
        shared.print_json(outcome.to_dict()) if options.json else print(f"{outcome}\n\n{options.out / 'README.md'}")

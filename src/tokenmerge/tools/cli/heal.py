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
            "Train a LoRA so that, on noised pictures, the merged model's output matches the plain model's. Then draw "
            "held-out captions plain, merged and healed, and report. Merge(lora=FILE) applies the LoRA. Checkpoints "
            "are saved; --resume continues after an interruption.",
            "`accelerate launch -m tokenmerge heal ...` trains on several devices.",
        ),
    )
    add_, count = parser.add_argument, whole()
    shared.add_model(parser, "tiny-flux")
    merging = "Merge to heal, as in dit:ratio=0.5 (default: the preset of the model's family, unet or dit)"
    add_("--merge", metavar="TECHNIQUE", help=merging)
    add_(
        "--data",
        type=Path,
        metavar="PATH",
        help="folder of pictures, or a text file with their paths; NAME.txt beside NAME.png is its caption (default: "
        "the plain model draws pictures from --prompts)",
    )
    shared.add_prompt_options(parser, default="flowers")
    add_("--number", type=count, default=64, metavar="N", help="pictures to draw if there is no --data (default: 64)")
    add_("--held-out", type=count, default=8, metavar="N", help="pictures kept out of training (default: 8)")
    add_("--rank", type=count, default=32, metavar="N", help="rank of the LoRA (default: 32)")
    add_("--steps", type=count, default=1000, metavar="N", help="training steps (default: 1000)")
    add_("--batch", type=count, default=4, metavar="N", help="pictures per step, on each device (default: 4)")
    add_(
        "--at-once",
        type=count,
        metavar="N",
        help="pictures per denoiser call; more are faster on a GPU and need more memory (default: all, or one where "
        "the pictures of a batch share destinations, as on Flux)",
    )
    add_("--lr", type=real(above=0), default=5e-4, metavar="N", help="highest learning rate (default: 0.0005)")
    add_("--seed", type=parse_seed, default=0, metavar="N", help="seed of the whole run (default: 0)")
    add_("--every", type=count, default=100, metavar="N", help="steps from one checkpoint to the next (default: 100)")
    add_(
        "--denoising-steps",
        type=count,
        metavar="N",
        help="steps of the schedule whose noise levels are trained (default: the model's)",
    )
    add_("--guidance", type=real(), metavar="N", help="guidance strength (default: the model's)")
    shared.add_size(parser)
    shared.add_machine_options(parser, threads=1)
    shared.add_dtype(parser)
    photographs = "folder of photographs for FID and KID in the report (default: the plain pictures)"
    add_("--reference", type=Path, metavar="FOLDER", help=photographs)
    shared.add_network_options(parser)
    add_("--out", type=Path, default=Path("healed"), metavar="FOLDER", help="folder for all files (default: healed)")
    add_("--resume", action="store_true", help="continue the run in --out")
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

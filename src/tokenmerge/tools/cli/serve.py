"""`tokenmerge serve`: pictures over HTTP, by OpenAI's image API."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ..fields import real, whole
from ..serving.offer import Serving
from ..speeds import BATCHED_SPEEDS
from . import options as shared


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, by OpenAI's image API",
        description=shared.described(
            "Serve a model at /v1/images/generations until interrupted. Requests of equal size, steps and speed are "
            "drawn in batches; a seed gives the same picture in any batch. Needs tokenmerge[serve]."
        ),
    )
    shared.add_model(parser, "tiny-flux")
    parser.add_argument("--host", default=Serving.host, help="address to listen on (default: %(default)s)")
    _add_number(parser, "port", "port to listen on", most=65535)
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="file of API keys, one per line (default: none; then only this machine is served)",
    )
    _add_number(parser, "replicas", "pipelines that draw in parallel, each on a GPU of its own if there are any")
    _add_number(parser, "max-batch", "maximum pictures in a batch")
    _add_number(parser, "max-queue", "maximum pictures that wait or are drawn; further requests get status 429")
    _add_number(parser, "max-side", "maximum pixels along a side of a picture")
    _add_number(parser, "max-steps", "maximum steps in a request")
    _add_number(parser, "max-n", "maximum pictures in a request")
    _add_number(parser, "max-prompt", "maximum characters in a prompt")
    parser.add_argument(
        "--timeout",
        type=real(above=0),
        default=Serving.timeout,
        metavar="SECONDS",
        help="maximum seconds from a request to its answer (default: %(default)g)",
    )
    parser.add_argument(
        "--speed",
        choices=list(BATCHED_SPEEDS),
        default=Serving.speed,
        help="speed of requests that name none (default: %(default)s)",
    )
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="a running Ray cluster to serve on, or auto to find one (default: start Ray here, on loopback)",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="folder for Ray's logs (default: a temporary one)")
    shared.add_machine_options(parser, threads=Serving.threads)
    shared.add_dtype(parser)
    parser.set_defaults(run=run)


def _add_number(parser: argparse.ArgumentParser, name: str, about: str, most: float = math.inf) -> None:
    default = getattr(Serving, name.replace("-", "_"))
    parser.add_argument(
        f"--{name}", type=whole(1, most), default=default, metavar="N", help=f"{about} (default: {default})"
    )


def run(options: argparse.Namespace) -> None:
    from ..serving.run import run_server

    run_server(Serving(**shared.given(options, Serving)))

"""`tokenmerge demo`: a page that draws pictures plain and fast."""

from __future__ import annotations

import argparse
from typing import Any

from ..fields import whole
from . import options as shared

_MODELS = ("tiny-sdxl", "tiny-flux")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="serve a page that draws pictures plain and fast, side by side",
        description=shared.described(
            "Serve a page on this machine. It draws a picture plain and with a technique, shows both with a slider "
            "between them, and reports times and drift. Visitors choose among --models only. Only safetensors are "
            "loaded, and code beside a model never runs.",
        ),
    )
    parser.add_argument(
        "--models",
        nargs="+",
        action="extend",
        metavar="MODEL",
        help="bundled models (tiny-flux, tiny-sdxl), folders or hub ids; the first is loaded at the start "
        f"(default: {' '.join(_MODELS)})",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 lets other machines in, without a password (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=whole(1, 65535), default=7860, metavar="N", help="port to listen on (default: %(default)s)"
    )
    shared.add_machine_options(parser)
    shared.add_dtype(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from ..demo.serving import serve

    serve(
        options.models or _MODELS,
        host=options.host,
        port=options.port,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
    )

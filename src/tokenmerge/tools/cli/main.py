"""`tokenmerge`: the parser of all commands, and how errors and interrupts are reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ... import __version__
from ...errors import TokenMergeError
from . import bench, demo, eval, generate, heal, metrics, plan, presets, reproduce, serve, tune
from .options import Command, described

# The extra that installs each package. Packages that are not listed belong to `eval`.
_EXTRAS = {
    **dict.fromkeys(("diffusers", "transformers", "PIL"), "generate"),
    "gradio": "demo",
    "peft": "heal",
    **dict.fromkeys(("ray", "starlette", "prometheus_client", "psutil"), "serve"),
}
_COMMANDS = (generate, demo, serve, plan, bench, eval, tune, heal, reproduce, metrics, presets)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output, such as `head`, has stopped. Discard the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parser().parse_args(words)
        options.words = ["tokenmerge", *words]
        options.run(options)
    except TokenMergeError as error:
        print(f"tokenmerge: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tokenmerge"):
            raise
        extra = _EXTRAS.get(error.name.partition(".")[0], "eval")
        print(f"tokenmerge: {error.name} is not installed; pip install tokenmerge[{extra}]", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        # The message follows a progress bar, which has no end of line.
        for message in interrupt.args:
            print(f"\ntokenmerge: {message}", file=sys.stderr)
        print("tokenmerge: interrupted", file=sys.stderr)
        return 130
    return 0


def parser() -> Command:
    """The parser of the whole command line."""
    whole = Command(
        prog="tokenmerge",
        description=described(
            "Faster diffusers pipelines without training: Merge runs steps on fewer tokens, Hold runs fewer steps."
        ),
    )
    whole.add_argument("--version", action="version", version=f"tokenmerge {__version__}")
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Command)
    for command in _COMMANDS:
        command.add(commands)
    return whole

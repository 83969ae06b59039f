"""Options that commands share, and how commands parse them and print help."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...config import Hold, Merge
from ...errors import TokenMergeError, did_you_mean
from ..fields import parse_as, parse_size, real, whole, write_value
from ..files import to_json
from ..random_models import RANDOM_MODELS
from ..solvers import SCHEDULERS

# The choices of --compile. Without a value it means the first.
COMPILE_WAYS = ("both", "blocks", "graphs")
DTYPES = ("float32", "float16", "bfloat16")
# How to type techniques.
EXAMPLES = {
    "none": "the plain model",
    "toma": "a preset; `tokenmerge presets` lists them",
    "toma:ratio=0.5,regions=stripe:64": "a preset with fields changed",
    "toma:components=self_attention,mlp": "a list: a part without = continues the field before it",
    '"unet:ratio=0.5 + hold:every=4"': "both techniques",
    "my.yaml": "a YAML or JSON file, such as `tokenmerge tune` writes",
    "mine@toma:regions=whole": "any of these under a name of your own",
}
# Rivals, which only `eval` and `generate` accept beside techniques.
RIVALS = {
    '"none + mag:threshold=0.06"': "a step cache: first-block, mag, taylorseer, faster, cache-dit or deepcache",
    '"none + unipc:steps=14"': "another schedule: steps, unipc or dpm++",
}
FAMILY_DEFAULT = "the merging preset of the model's family (unet, dit or video), hold, and both"
_WIDTH, _INDENT = 110, 28


class Command(argparse.ArgumentParser):
    """A parser whose errors are one line and suggest the nearest option.

    It refuses abbreviated options, because the next version may have two that begin alike.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=_Formatter)

    def error(self, message: str) -> Any:
        raise TokenMergeError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is not None:
            # The other words belong to a command.
            return super().parse_known_args(args, namespace)
        # Refuse a misspelt option before argparse complains that a required one is missing. By now argparse has read
        # argument files. Words after -- are not options.
        words = takewhile(lambda word: word != "--", args)
        self._refuse_unknown(word for word in words if word.startswith("--") and " " not in word)
        known, rest = super().parse_known_args(args, namespace)
        self._refuse_unknown(word for word in rest if word.startswith("-"))
        return known, rest

    def _refuse_unknown(self, words: Iterable[str]) -> None:
        for name in (word.partition("=")[0] for word in words):
            if name not in self._option_string_actions:
                near = did_you_mean(name, self._option_string_actions)
                raise TokenMergeError(
                    f"{self.prog.split()[-1]} has no option {name}{near}; {self.prog} --help lists all of them"
                )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that keeps the lines of descriptions, never breaks words at hyphens, and has each command on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_INDENT, width=_WIDTH)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            # argparse does not count that commands are indented once more.
            self._action_max_length += self._indent_increment

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def described(*paragraphs: str) -> str:
    """A command's description in wrapped paragraphs."""
    return "\n\n".join(textwrap.fill(paragraph, _WIDTH, break_on_hyphens=False) for paragraph in paragraphs)


def add_techniques(
    parser: argparse.ArgumentParser, default: str = FAMILY_DEFAULT, about: str = "to compare", rivals: bool = True
) -> None:
    """rivals: whether step caches and schedules may be typed too."""
    parser.add_argument(
        "--techniques",
        nargs="+",
        action="extend",
        metavar="TECHNIQUE",
        help=f"techniques {about}, as typed below (default: {default})",
    )
    parser.epilog = techniques_help(EXAMPLES | RIVALS if rivals else EXAMPLES)


def add_ratios(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ratios",
        type=parse_as(tuple[float, ...]),
        metavar="A,B,...",
        help="ratios at which to run each technique that merges and has no typed ratio (default: its own)",
    )


def techniques_help(examples: Mapping[str, str]) -> str:
    """How to type techniques, and what their fields mean, from the classes themselves."""
    lines = ["techniques as typed:"]
    lines += [f"  {typed:36}  {meaning}" for typed, meaning in examples.items()]
    for technique in (Merge, Hold):
        lines += ["", f"fields of {technique.__name__}, with defaults that presets may change:"]
        docs = technique.field_docs()
        for item in fields(technique):
            name = f"  {item.name} ({write_value(item.default)})"
            meaning = textwrap.wrap(docs[item.name], _WIDTH - _INDENT, break_on_hyphens=False)
            # A name that is too long gets a line of its own.
            first = [f"{name:{_INDENT}}{meaning.pop(0)}"] if len(name) < _INDENT - 1 else [name]
            lines += [*first, *(" " * _INDENT + line for line in meaning)]
    return "\n".join(lines)


def add_model(parser: argparse.ArgumentParser, default: str | None, shown: str = "", random: bool = False) -> None:
    """shown: the default in the help, if not `default`; random: whether `RANDOM_MODELS` may be named."""
    names = "bundled model (tiny-flux, tiny-sdxl), folder or hub id"
    if random:
        names += f", or random weights in a published model's size: {', '.join(RANDOM_MODELS)}"
    parser.add_argument("--model", default=default, help=f"{names} (default: {shown or default})")


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    """Options that hold for all pictures."""
    parser.add_argument("--steps", type=whole(), metavar="N", help="denoising steps (default: the model's)")
    parser.add_argument("--guidance", type=real(), metavar="N", help="guidance strength (default: the model's)")
    about = f"scheduler of all pictures, also plain ones: {', '.join(SCHEDULERS)} (default: the model's own)"
    parser.add_argument("--scheduler", choices=SCHEDULERS, metavar="NAME", help=about)
    add_size(parser)


def add_size(parser: argparse.ArgumentParser) -> None:
    about = "width x height in pixels (default: the model's)"
    parser.add_argument("--size", type=parse_size, metavar="WxH", help=about)


def add_frames(parser: argparse.ArgumentParser) -> None:
    about = "frames of a video (default: the usual number of the model's family)"
    parser.add_argument("--frames", type=whole(), metavar="N", help=about)


def add_machine_options(parser: argparse.ArgumentParser, threads: int | None = None) -> None:
    """Where a command runs. threads: the default; None leaves the number to torch."""
    shown = threads or "OMP_NUM_THREADS, else one per core"
    parser.add_argument("--device", help="cuda, mps or cpu (default: the best available)")
    parser.add_argument("--threads", type=whole(), default=threads, metavar="N", help=f"CPU threads (default: {shown})")


def add_dtype(parser: argparse.ArgumentParser, shown: str = "float32 on a CPU, else bfloat16") -> None:
    parser.add_argument("--dtype", choices=DTYPES, help=f"type of the weights (default: {shown})")


def add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile",
        nargs="?",
        const=COMPILE_WAYS[0],
        choices=COMPILE_WAYS,
        help="compile transformer blocks, replay denoiser calls as CUDA graphs, or both (default: neither; without a "
        "value: both, or blocks where the device has no CUDA graphs)",
    )


def add_prompt_options(
    parser: argparse.ArgumentParser, default: str | None = None, about: str = "prompts to draw"
) -> None:
    about = f"{about}: 'flowers' or a .txt, .csv, .tsv, .json or .jsonl file (default: {default or 'none'})"
    parser.add_argument("--prompts", default=default, metavar="FILE", help=about)
    parser.add_argument("--column", metavar="NAME", help="column of the file with the prompts (default: prompt)")
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="sentence to put each prompt into (default: 'a photo of a {}' for flowers, else '{}')",
    )


def add_network_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Where to find the networks of metrics. names: the networks with an option of their own."""
    models = {"clip": "openai/clip-vit-large-patch14", "dino": "facebook/dinov2-base"}
    parser.add_argument(
        "--networks",
        metavar="FOLDER",
        type=Path,
        help="folder with the networks that metrics need (default: installed packages and the hub)",
    )
    for name in names:
        parser.add_argument(
            f"--{name}",
            metavar="NAME",
            help=f"folder or hub id of a {name.upper()} model (default: {models[name]})",
        )


def add_metrics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics",
        type=parse_as(tuple[str, ...]),
        metavar="A,B,...",
        help="any of mse, psnr, ssim, lpips, dino, sscd, clip, fid, kid (default: all whose networks are available)",
    )
    add_network_options(parser, "clip", "dino")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help='print JSON instead of a table; infinite values are the string "inf"'
    )


def given(options: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """The options that are fields of a dataclass, by name."""
    return {item.name: getattr(options, item.name) for item in fields(kind) if hasattr(options, item.name)}


def prompts_of(options: argparse.Namespace, limit: int | None = None) -> tuple[str, ...]:
    from ..evaluation.prompts import read_prompts

    return read_prompts(options.prompts, column=options.column, template=options.template, limit=limit)


def sources_of(options: argparse.Namespace) -> Any:
    from ..quality.networks import Sources

    named = {name: getattr(options, name, None) for name in ("clip", "dino")}
    return Sources(folder=options.networks, **{name: value for name, value in named.items() if value is not None})


def typed_command(words: Sequence[str], without: str | None = None) -> str:
    """The command as typed, but without one option and its value."""
    kept = [word for word in words if without is None or not word.startswith(f"{without}=")]
    if without in kept:
        place = kept.index(without)
        del kept[place : place + 2]
    return shlex.join(kept)


def print_json(value: Any) -> None:
    print(to_json(value, indent=2), end="")

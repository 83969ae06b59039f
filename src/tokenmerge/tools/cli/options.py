"""Options that commands share, and how they are parsed and told."""

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

# What --compile makes fast. Without a value it is the first, as far as the device can.
COMPILE_WAYS = ("both", "blocks", "graphs")
DTYPES = ("float32", "float16", "bfloat16")
# How techniques are typed.
EXAMPLES = {
    "none": "the plain model",
    "toma": "a preset; `tokenmerge presets` lists them",
    "toma:ratio=0.5,regions=stripe:64": "with fields changed",
    "toma:components=self_attention,mlp": "a list: what has no = belongs to the field before it",
    '"unet:ratio=0.5 + hold:every=4"': "both techniques",
    "my.yaml": "a YAML or JSON file, as `tokenmerge tune` writes it",
    "mine@toma:regions=whole": "under a name of your own",
}
# What `eval` and `generate` also take.
RIVALS = {
    '"none + mag:threshold=0.06"': "a step cache: first-block, mag, taylorseer, faster, cache-dit or deepcache",
    '"none + unipc:steps=14"': "another schedule: steps, unipc or dpm++",
}
FAMILY_DEFAULT = (
    "default: the merging preset of the model's family, unet or dit (for video name `video`); hold; and both"
)
_WIDTH, _INDENT = 110, 28


class Command(argparse.ArgumentParser):
    """A parser whose errors are one line, and name the option somebody may have meant. An option that is written in
    part is none: the next version may have two that begin so."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=_Formatter)

    def error(self, message: str) -> Any:
        raise TokenMergeError(f"{message.removeprefix('argument ')} ({self.prog} --help tells more)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is not None:
            # What follows is a command's.
            return super().parse_known_args(args, namespace)
        # Before argparse misses what was to be given by it, and after it has read files of arguments. After two dashes
        # alone nothing is an option.
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
    """Help with lines of descriptions as they are, and words with hyphens in one piece."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_INDENT, width=_WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def described(*paragraphs: str) -> str:
    """Paragraphs for a command's description."""
    return "\n\n".join(textwrap.fill(paragraph, _WIDTH) for paragraph in paragraphs)


def add_techniques(
    parser: argparse.ArgumentParser, default: str = FAMILY_DEFAULT, about: str = "to compare", rivals: bool = True
) -> None:
    """rivals: whether step caches and schedules go with them."""
    parser.add_argument(
        "--techniques",
        nargs="+",
        action="extend",
        metavar="TECHNIQUE",
        help=f"techniques {about}; see below ({default})",
    )
    parser.epilog = techniques_help(EXAMPLES | RIVALS if rivals else EXAMPLES)


def add_ratios(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ratios",
        type=parse_as(tuple[float, ...]),
        metavar="A,B,...",
        help="run every technique that merges and gives no ratio at each of these (default: its own ratio)",
    )


def techniques_help(examples: Mapping[str, str]) -> str:
    """How techniques are typed, and what their fields mean, from the classes themselves."""
    lines = ["techniques as typed:"]
    lines += [f"  {typed:36}  {meaning}" for typed, meaning in examples.items()]
    for technique in (Merge, Hold):
        lines += ["", f"fields of {technique.__name__}, with defaults that presets may change:"]
        docs = technique.field_docs()
        for item in fields(technique):
            name = f"  {item.name} ({write_value(item.default)})"
            meaning = textwrap.wrap(docs[item.name], _WIDTH - _INDENT, break_on_hyphens=False)
            # A name that is too long has a line of its own.
            first = [f"{name:{_INDENT}}{meaning.pop(0)}"] if len(name) < _INDENT - 1 else [name]
            lines += [*first, *(" " * _INDENT + line for line in meaning)]
    return "\n".join(lines)


def add_model(parser: argparse.ArgumentParser, default: str | None, told: str = "", random: bool = False) -> None:
    names = "bundled model (tiny-flux, tiny-sdxl), folder or hub id"
    if random:
        names += f", or random weights in a published model's size: {', '.join(RANDOM_MODELS)}"
    parser.add_argument("--model", default=default, help=f"{names} (default: {told or default})")


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    """What is chosen for all pictures."""
    parser.add_argument("--steps", type=whole(), metavar="N", help="denoising steps (default: the model's)")
    parser.add_argument("--guidance", type=real(), metavar="N", help="strength of guidance (default: the model's)")
    told = f"{', '.join(SCHEDULERS)}: for all pictures, the plain ones too (default: the model's own)"
    parser.add_argument("--scheduler", choices=SCHEDULERS, metavar="NAME", help=told)
    add_size(parser)


def add_size(parser: argparse.ArgumentParser) -> None:
    told = "width x height in pixels (default: the model's)"
    parser.add_argument("--size", type=parse_size, metavar="WxH", help=told)


def add_frames(parser: argparse.ArgumentParser) -> None:
    told = "frames of a video (default: as many as the model's family usually makes)"
    parser.add_argument("--frames", type=whole(), metavar="N", help=told)


def add_machine_options(parser: argparse.ArgumentParser, threads: int | None = None) -> None:
    """Where and how it runs. threads: by default; None is what torch takes by itself."""
    told = threads or "what OMP_NUM_THREADS says, else one for each core"
    parser.add_argument("--device", help="cuda, mps or cpu (default: the best there is)")
    parser.add_argument("--threads", type=whole(), default=threads, metavar="N", help=f"CPU threads (default: {told})")


def add_dtype(parser: argparse.ArgumentParser, told: str = "float32 on a CPU, else bfloat16") -> None:
    parser.add_argument("--dtype", choices=DTYPES, help=f"type of the weights (default: {told})")


def add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile",
        nargs="?",
        const=COMPILE_WAYS[0],
        choices=COMPILE_WAYS,
        help="compile the transformer blocks, replay denoiser calls as CUDA graphs, or both (default: neither; "
        "without a value: both, as far as the device can)",
    )


def add_prompt_options(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    told = "'flowers' or a .txt, .csv, .tsv, .json or .jsonl file"
    parser.add_argument("--prompts", default=default, metavar="FILE", help=f"{told} (default: {default or 'none'})")
    parser.add_argument("--column", metavar="NAME", help="column of the file that holds the prompts (default: prompt)")
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="sentence that each prompt is put into (default: 'a photo of a {}' for flowers, else '{}')",
    )


def add_network_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Where networks that judge pictures come from. names: of those that may be folders or hub ids."""
    models = {"clip": "openai/clip-vit-large-patch14", "dino": "facebook/dinov2-base"}
    parser.add_argument(
        "--networks",
        metavar="FOLDER",
        type=Path,
        help="folder with the networks that judge pictures (default: installed packages and the hub)",
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
        help="any of mse, psnr, ssim, lpips, dino, sscd, clip, fid, kid (default: all whose networks are there)",
    )
    add_network_options(parser, "clip", "dino")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help='print JSON instead of a table; infinite values are the text "inf"'
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
    """What was typed, but for one option: where results go says nothing about them."""
    kept = [word for word in words if without is None or not word.startswith(f"{without}=")]
    if without in kept:
        place = kept.index(without)
        del kept[place : place + 2]
    return shlex.join(kept)


def print_json(value: Any) -> None:
    print(to_json(value, indent=2), end="")

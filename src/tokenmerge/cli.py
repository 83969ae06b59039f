"""The `tokenmerge` command: parse and print; no logic."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from . import __version__
from .config import METHODS, MergeConfig, Schedule, TokenMergeError, presets


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    options.command = shlex.join(["tokenmerge", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        options.run(options)
    except TokenMergeError as error:
        print(f"tokenmerge: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tokenmerge: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenmerge", description="Token merging for diffusers pipelines.")
    parser.add_argument("--version", action="version", version=f"tokenmerge {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    make = commands.add_parser(
        "generate",
        help="make a picture with and without merging, and compare",
        description="Make a picture from a prompt unmerged and merged, with the same seed; write both and where they "
        "differ into one picture, and print what it cost and changed.",
    )
    make.add_argument("prompt", nargs="?", default="a photo of a sunflower", help="(default: %(default)s)")
    make.add_argument("--model", default="tiny-flux", help="bundled name, folder or hub id (default: %(default)s)")
    make.add_argument("--ratios", type=_parse_as(tuple[float, ...]), metavar="A,B,...", help="several, side by side")
    make.add_argument("--steps", type=int, metavar="N", help="denoising steps (default: the model's)")
    make.add_argument("--guidance", type=float, metavar="N", help="strength of guidance (default: the model's)")
    make.add_argument("--seed", type=int, default=0, metavar="N", help="of the first picture (default: %(default)s)")
    make.add_argument("--size", metavar="WxH", help="pixels (default: the model's)")
    make.add_argument("--number", type=int, default=1, metavar="N", help="pictures, each with the next seed")
    make.add_argument("--show-destinations", action="store_true", help="show regions, destinations and what merged")
    make.add_argument("--out", metavar="FILE", help="picture to write (default: named after the prompt)")
    make.add_argument("--json", action="store_true", help="print JSON instead of a table")
    make.add_argument("--device", help="cuda, mps or cpu (default: the best there is)")
    make.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="(default: float32 on a CPU, else bfloat16)"
    )
    make.add_argument("--compile", action="store_true", help="compile the transformer blocks")
    _add_config_options(make, without=("seed",))
    make.set_defaults(run=_generate)

    plan = commands.add_parser(
        "plan",
        help="show what would be merged where, from a model's config alone",
        description="Print what merging would do to a model at a size, and what that saves and spends by the paper's "
        "cost model. Only the model's config files are read, no weights.",
    )
    plan.add_argument("--model", required=True, help="a diffusers folder or a hub id")
    plan.add_argument("--height", type=int, default=1024, help="pixels (default: %(default)s)")
    plan.add_argument("--width", type=int, default=1024, help="pixels (default: %(default)s)")
    plan.add_argument("--sites-list", action="store_true", help="list every site by name")
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_config_options(plan)
    plan.set_defaults(run=_plan)

    bench = commands.add_parser(
        "bench",
        help="time a denoiser with and without merging",
        description="Latency by phase and over a whole schedule, launches and peak memory of a denoiser: as it is, "
        "merged by each preset and ratio, and the bound of linear merging. Prints Markdown tables.",
    )
    names = "sdxl-random, flux-random, sd35-random"
    bench.add_argument("--model", default="tiny-flux", help=f"bundled name, folder, hub id, or {names}: random weights")
    bench.add_argument("--presets", type=_parse_as(tuple[str, ...]), default=("default",), metavar="A,B,...")
    bench.add_argument("--ratios", type=_parse_as(tuple[float, ...]), default=(0.5,), metavar="A,B,...")
    bench.add_argument("--sizes", type=_parse_as(tuple[str, ...]), default=("1024x1024",), metavar="WxH,...")
    bench.add_argument("--batches", type=_parse_as(tuple[int, ...]), default=(1,), metavar="A,B,...")
    bench.add_argument(
        "--modes", type=_parse_as(tuple[str, ...]), default=("eager",), help="eager,graph,compiled,compiled+graph"
    )
    bench.add_argument("--steps", type=int, default=50, metavar="N", help="of the schedule (default: %(default)s)")
    bench.add_argument("--warmups", type=int, default=5, metavar="N", help="of every phase (default: %(default)s)")
    bench.add_argument("--repeats", type=int, default=20, metavar="N", help="of every phase (default: %(default)s)")
    bench.add_argument("--loops", type=int, default=0, metavar="N", help="whole schedules to run from end to end too")
    bench.add_argument("--rounds", type=int, default=1, metavar="N", help="measure all of it again, in reverse order")
    bench.add_argument("--out", metavar="FILE", help="append JSON lines")
    bench.add_argument("--table", metavar="FILE", help="print the tables of a finished run and stop")
    bench.add_argument("--json", action="store_true", help="print JSON instead of tables")
    bench.add_argument("--device", help="cuda, mps or cpu (default: the best there is)")
    bench.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="(default: the model's usual)")
    _add_config_options(bench, without=("ratio", "preset"))
    bench.set_defaults(run=_bench)

    listing = commands.add_parser("presets", help="list the named presets")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    listing.set_defaults(run=_presets)
    return parser


def _plan(options: argparse.Namespace) -> None:
    from . import api
    from .adapters.loading import empty_denoiser

    denoiser, scale = empty_denoiser(options.model)
    plan = api.plan(
        denoiser,
        height=options.height,
        width=options.width,
        preset=options.preset,
        vae_scale_factor=scale,
        **_config_options(options),
    )
    if options.json:
        print(json.dumps(plan.to_dict(), indent=2))
        return
    print(plan)
    if options.sites_list:
        print("\nSites:")
        for site in plan.sites:
            print(f"  {site.name}  [{site.group}]  {site.skipped or 'merged'}")


def _generate(options: argparse.Namespace) -> None:
    from .generate import make_picture

    result = make_picture(
        options.prompt,
        options.model,
        preset=options.preset,
        changes=_config_options(options, without=("seed",)),
        ratios=options.ratios,
        steps=options.steps,
        guidance=options.guidance,
        seed=options.seed,
        size=options.size,
        number=options.number,
        show_destinations=options.show_destinations,
        out=options.out,
        device=options.device,
        dtype=options.dtype,
        compile_blocks=options.compile,
    )
    print(json.dumps(result.to_dict(), indent=2) if options.json else result)


def _bench(options: argparse.Namespace) -> None:
    from pathlib import Path

    from . import bench
    from .generate import best_device, parse_size

    if options.table:
        print(bench.report(bench.read(Path(options.table))))
        return
    records = bench.run(
        options.model,
        sizes=[parse_size(size) for size in options.sizes],
        batches=options.batches,
        modes=options.modes,
        presets=options.presets,
        ratios=options.ratios,
        changes=_config_options(options, without=("ratio",)),
        steps=options.steps,
        warmups=options.warmups,
        repeats=options.repeats,
        loops=options.loops,
        rounds=options.rounds,
        device=best_device(options.device),
        dtype=options.dtype,
        out=Path(options.out) if options.out else None,
        command=options.command,
    )
    print(json.dumps(records, indent=2) if options.json else bench.report(records))


def _presets(options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({name: config.to_dict() for name, config in presets().items()}, indent=2))
        return
    from .tables import table

    header = ["preset", "method", "regions", "merge_regions", "sites", "skip_first"]
    rows = [[name, *(str(getattr(config, field)) for field in header[1:])] for name, config in presets().items()]
    print(table(header, rows))


def _config_fields() -> dict[str, Any]:
    """Every field of MergeConfig and Schedule with its type hint: the command line has them all."""
    hints = {**get_type_hints(MergeConfig), **get_type_hints(Schedule)}
    return {
        item.name: hints[item.name] for item in (*fields(MergeConfig), *fields(Schedule)) if item.name != "schedule"
    }


def _add_config_options(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    group = parser.add_argument_group("merging", "any field of MergeConfig; the preset gives the rest")
    if "preset" not in without:
        group.add_argument("--preset", help="a preset's name, or a YAML or JSON file (default: the model family's)")
    for name, hint in _config_fields().items():
        if name not in without:
            known = "one of " + ", ".join(METHODS) if name == "method" else None
            group.add_argument(f"--{name.replace('_', '-')}", type=_parse_as(hint), metavar=_metavar(hint), help=known)


def _config_options(options: argparse.Namespace, without: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that were given."""
    names = [name for name in _config_fields() if name not in without]
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _parse_as(hint: Any) -> Any:
    """A parser of command-line text for a field's type: numbers as numbers, tuples by commas."""
    choices = [
        choice for choice in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if choice is not type(None)
    ]
    if get_origin(choices[0]) is tuple:
        item = get_args(choices[0])[0]

        def parse(text: str) -> tuple[Any, ...]:
            return tuple(item(part) for part in text.split(","))

        return parse
    if choices == [int, float]:
        return _number
    return choices[0]


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _metavar(hint: Any) -> str:
    text = str(hint)
    if "tuple" in text:
        return "A,B,..."
    return "TEXT" if "str" in text else "N"

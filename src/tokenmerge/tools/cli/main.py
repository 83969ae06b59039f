"""The `tokenmerge` command: parse and print; no logic."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from ... import __version__
from ...presets import presets
from ...errors import TokenMergeError, did_you_mean
from ..typed import COMPILE_WAYS, FIELDS, config_fields, parse_as


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = _parser().parse_args(arguments)
        options.command = ["tokenmerge", *(sys.argv[1:] if arguments is None else arguments)]
        options.run(options)
    except TokenMergeError as error:
        print(f"tokenmerge: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        # After a bar, which has no end of line.
        for told in interrupt.args:
            print(f"\ntokenmerge: {told}", file=sys.stderr)
        print("tokenmerge: interrupted", file=sys.stderr)
        return 130
    return 0


class _Command(argparse.ArgumentParser):
    """A command that names the option somebody may have meant. One that is written in part is no option: the next
    version may have two that begin so."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Before argparse misses what was to be given by it, and after it has read files of arguments.
        self._refuse_unknown(word for word in _before_dashes(args) if word.startswith("--") and " " not in word)
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


def _before_dashes(words: Sequence[str]) -> Iterable[str]:
    """Words up to two dashes alone, after which nothing is an option."""
    return takewhile(lambda word: word != "--", words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenmerge", description="Token merging for diffusers pipelines.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tokenmerge {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Command)
    _add_generate(commands)
    _add_plan(commands)
    _add_bench(commands)
    _add_eval(commands)
    _add_reproduce(commands)
    _add_metrics(commands)
    _add_tune(commands)
    _add_presets(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="make a picture with and without merging, and compare",
        description="Make a picture from a prompt as the model does, and with blocks held or, given a ratio, tokens "
        "merged, with the same seed; write both and where they differ into one picture, and print what it cost and "
        "changed.",
    )
    parser.add_argument("prompt", nargs="?", default="a photo of a sunflower", help="(default: %(default)s)")
    parser.add_argument("--model", default="tiny-flux", help="bundled name, folder or hub id (default: %(default)s)")
    parser.add_argument("--ratios", type=parse_as(tuple[float, ...]), metavar="A,B,...", help="several, side by side")
    parser.add_argument("--steps", type=int, metavar="N", help="denoising steps (default: the model's)")
    parser.add_argument("--guidance", type=float, metavar="N", help="strength of guidance (default: the model's)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first picture (default: %(default)s)")
    parser.add_argument("--size", metavar="WxH", help="pixels (default: the model's)")
    parser.add_argument("--number", type=int, default=1, metavar="N", help="pictures, each with the next seed")
    parser.add_argument("--show-destinations", action="store_true", help="show regions, destinations and what merged")
    parser.add_argument("--out", metavar="FILE", help="picture to write (default: named after the prompt)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the best there is)")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="(default: float32 on a CPU, else bfloat16)"
    )
    _add_compile(parser)
    parser.add_argument(
        "--cache",
        metavar="CACHE",
        help="a step cache of diffusers for the merged pictures, as in first-block:threshold=0.1; or mag, or with "
        "--method none taylorseer or faster",
    )
    _add_config_options(parser, without=("seed",))
    parser.set_defaults(run=_generate)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="show what would be merged where, from a model's config alone",
        description="Print what merging would do to a model at a size, and what that saves and spends by the paper's "
        "cost model. Only the model's config files are read, no weights.",
    )
    parser.add_argument("--model", required=True, help="bundled name, folder, hub id, or sdxl-random and the like")
    parser.add_argument("--height", type=int, default=1024, help="pixels (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="pixels (default: %(default)s)")
    parser.add_argument("--sites-list", action="store_true", help="list every site by name")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_config_options(parser)
    parser.set_defaults(run=_plan)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time a denoiser with and without merging",
        description="Latency by phase and over a whole schedule, launches and peak memory of a denoiser: as it is, "
        "merged by each preset and ratio, and the bound of linear merging. Prints Markdown tables.",
    )
    names = "sdxl-random, flux-random, sd35-random"
    parser.add_argument(
        "--model", default="tiny-flux", help=f"bundled name, folder, hub id, or {names}: random weights"
    )
    parser.add_argument("--presets", type=parse_as(tuple[str, ...]), default=("default",), metavar="A,B,...")
    parser.add_argument(
        "--ratios", type=parse_as(tuple[float, ...]), default=(), metavar="A,B,...", help="(default: each preset's own)"
    )
    parser.add_argument("--sizes", type=parse_as(tuple[str, ...]), default=("1024x1024",), metavar="WxH,...")
    parser.add_argument("--batches", type=parse_as(tuple[int, ...]), default=(1,), metavar="A,B,...")
    parser.add_argument(
        "--modes", type=parse_as(tuple[str, ...]), default=("eager",), help="eager,graph,compiled,compiled+graph"
    )
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="of the schedule (default: %(default)s)")
    parser.add_argument("--warmups", type=int, default=5, metavar="N", help="of every phase (default: %(default)s)")
    parser.add_argument(
        "--settle", type=float, metavar="N", help="seconds of warming up at least (default: 2 on a GPU, else 0)"
    )
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="of every phase (default: %(default)s)")
    parser.add_argument("--loops", type=int, default=0, metavar="N", help="whole schedules to run from end to end too")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="measure all of it again, in reverse order")
    parser.add_argument("--out", metavar="FILE", help="append JSON lines")
    parser.add_argument("--table", metavar="FILE", help="print the tables of a finished run and stop")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the best there is)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="(default: the model's usual)")
    _add_config_options(parser, without=("ratio", "preset"))
    parser.set_defaults(run=_bench)


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="compare configurations by time and quality over many prompts and seeds",
        description="Make pictures with every configuration, measure and time them, and report. Everything is kept as "
        "it is made; --resume goes on after an interruption. `accelerate launch -m tokenmerge eval ...` splits the "
        "work over processes, with the same results. @FILE stands for the arguments in a file, one to a line.",
        fromfile_prefix_chars="@",
    )
    parser.convert_arg_line_to_args = _arguments_in
    parser.add_argument(
        "--configs",
        nargs="+",
        default=["default"],
        metavar="CONFIG",
        help="a preset, file or 'default', with fields changed as in toma:ratio=0.5,regions=stripe:64, and a step "
        "cache as in 'toma + first-block:threshold=0.1'; the unmerged model 'none' is always compared (default: what "
        "apply does without options)",
    )
    parser.add_argument("--ratios", type=parse_as(tuple[float, ...]), metavar="A,B,...", help="for each config without")
    _add_evaluation_options(parser, model="tiny-flux", number="all", seeds="0", repeats="5", out="evaluation")
    parser.set_defaults(run=_eval, model="tiny-flux", seeds=(0,), repeats=5, out="evaluation")


def _arguments_in(line: str) -> list[str]:
    """Of a file of arguments: one to a line, none in empty lines and comments."""
    text = line.strip()
    return [text] if text and not text.startswith("#") else []


def _add_reproduce(commands: Any) -> None:
    from ..paper.studies import FULL, INQUIRIES, NAMES, QUICK, STUDIES

    parser = commands.add_parser(
        "reproduce",
        help="make a table or figure of the paper",
        description="Make what one of the paper's tables or figures shows. "
        + "; ".join(f"{', '.join(item.names)}: {item.about}" for item in (*STUDIES, *INQUIRIES))
        + f". By default {FULL.prompts} prompts x {len(FULL.seeds)} seeds, as the paper's ablations have.",
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK.prompts} prompts, {QUICK.steps} steps: does everything run?"
    )
    _add_evaluation_options(
        parser,
        model="tiny-sdxl; for table10 tiny-flux",
        number=f"{FULL.prompts}, quick {QUICK.prompts}",
        seeds=f"{','.join(map(str, FULL.seeds))}, quick {','.join(map(str, QUICK.seeds))}",
        repeats=f"{FULL.repeats}, quick {QUICK.repeats}",
        out="reproduction/NAME-MODEL",
    )
    # Not everything has a use for them, so whether they were given must be known.
    usual = {name: parser.get_default(name) for name in ("prompts", "batch", "resume")}
    parser.set_defaults(run=_reproduce, usual=usual, **dict.fromkeys(usual))


def _add_evaluation_options(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """defaults: what the help tells of options that have another default in every command."""
    told = {name: f"(default: {default})" for name, default in defaults.items()}
    batch = 1
    parser.add_argument("--model", help=f"bundled name, folder or hub id {told['model']}")
    _add_prompt_options(parser, default="flowers")
    parser.add_argument("--number", type=int, metavar="N", help=f"the first N prompts {told['number']}")
    parser.add_argument(
        "--seeds", type=parse_as(tuple[int, ...]), metavar="A,B,...", help=f"of every prompt {told['seeds']}"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="denoising steps (default: the model's)")
    parser.add_argument("--guidance", type=float, metavar="N", help="strength of guidance (default: the model's)")
    parser.add_argument("--size", metavar="WxH", help="pixels (default: the model's)")
    parser.add_argument(
        "--reference", metavar="FOLDER", help="photographs for FID and KID (default: unmerged pictures)"
    )
    parser.add_argument("--batch", type=int, default=batch, metavar="N", help=f"of the timing (default: {batch})")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"timed batches, or 0 {told['repeats']}")
    parser.add_argument("--out", metavar="FOLDER", help=f"for all files {told['out']}")
    parser.add_argument("--resume", action="store_true", help="go on with what is in --out")
    _add_compile(parser)
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="(default: float32 on a CPU, else bfloat16)"
    )
    _add_metric_options(parser)


def _add_metrics(commands: Any) -> None:
    parser = commands.add_parser(
        "metrics",
        help="compare two folders of pictures",
        description="Measure the pictures of a folder against those of another, paired by file name.",
    )
    parser.add_argument("reference", help="folder of pictures")
    parser.add_argument("test", help="folder of pictures with the same names")
    _add_prompt_options(parser)
    _add_metric_options(parser)
    parser.set_defaults(run=_metrics)


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="search settings for a budget of drift or a wished speed-up, and write them as a preset",
        description="Draw candidates from the settings of merging and of holding, measure them by time and drift on "
        "ever more prompts, of which the better half goes on, and write the one that meets the goal on held-out "
        "prompts as preset.yaml. Everything is kept as it is made; --resume goes on after an interruption.",
    )
    add = parser.add_argument
    add("--model", default="tiny-flux", help="bundled name, folder or hub id (default: %(default)s)")
    add("--budget", metavar="NAME=N", help="the most drift, as in lpips=0.1 or mse=100: find the fastest within it")
    add("--speed-up", type=float, metavar="N", help="wished, as in 1.5: find the least drift at it")
    add("--metric", metavar="NAME", help="of drift: lpips, mse or dino (default: lpips)")
    _add_prompt_options(parser, default="flowers")
    add("--candidates", type=int, default=24, metavar="N", help="to begin with (default: %(default)s)")
    add("--rungs", type=int, default=3, metavar="N", help="halvings, and one (default: %(default)s)")
    add("--number", type=int, default=2, metavar="N", help="pictures in the first rung, later doubled (default: 2)")
    add("--seed", type=int, default=0, metavar="N", help="of candidates and pictures (default: %(default)s)")
    add("--steps", type=int, metavar="N", help="denoising steps (default: the model's)")
    add("--guidance", type=float, metavar="N", help="strength of guidance (default: the model's)")
    add("--size", metavar="WxH", help="pixels (default: the model's)")
    add("--batch", type=int, default=1, metavar="N", help="of the timing (default: %(default)s)")
    add("--repeats", type=int, default=3, metavar="N", help="timed batches in every rung (default: %(default)s)")
    add("--networks", metavar="FOLDER", help="that holds networks which judge pictures")
    add("--dino", metavar="NAME", help="folder or hub id of a DINO model")
    add("--device", help="cuda, mps or cpu (default: the best there is)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="(default: float32 on a CPU, else bfloat16)")
    add("--threads", type=int, default=1, metavar="N", help="of the CPU (default: %(default)s)")
    _add_compile(parser)
    add("--out", default="tuning", metavar="FOLDER", help="for all files (default: %(default)s)")
    add("--resume", action="store_true", help="go on with what is in --out")
    add("--json", action="store_true", help="print JSON instead of a table")
    # CLIP judges a picture by its prompt, which is no drift.
    parser.set_defaults(run=_tune, clip=None)


def _add_presets(commands: Any) -> None:
    parser = commands.add_parser("presets", help="list the named presets")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_presets)


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile",
        nargs="?",
        const=COMPILE_WAYS[0],
        choices=COMPILE_WAYS,
        help="compile the transformer blocks, replay denoiser calls as CUDA graphs, or both (without a value: both, "
        "as far as the device can; a prompt goes before it)",
    )


def _add_prompt_options(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    told = "'flowers' or a .txt, .csv, .tsv, .json or .jsonl file"
    parser.add_argument("--prompts", default=default, metavar="FILE", help=f"{told} (default: {default or 'none'})")
    parser.add_argument("--column", metavar="NAME", help="of the file, that holds the prompts (default: prompt)")
    parser.add_argument("--template", metavar="TEXT", help="what a prompt is put into, as in 'a photo of a {}'")


def _add_metric_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--metrics", type=parse_as(tuple[str, ...]), metavar="A,B,...", help="(default: all there are)")
    parser.add_argument("--networks", metavar="FOLDER", help="that holds networks which judge pictures")
    parser.add_argument("--clip", metavar="NAME", help="folder or hub id of a CLIP model")
    parser.add_argument("--dino", metavar="NAME", help="folder or hub id of a DINO model")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the best there is)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the CPU (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _plan(options: argparse.Namespace) -> None:
    from ... import api
    from ..loading import empty_denoiser

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
            print(f"  {site.name}  [{site.group}]  {site.skipped or ('held' if plan.config.holds else 'merged')}")


def _generate(options: argparse.Namespace) -> None:
    from ..drawing.generate import make_picture

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
        compile=options.compile,
        cache=options.cache,
    )
    print(json.dumps(result.to_dict(), indent=2) if options.json else result)


def _bench(options: argparse.Namespace) -> None:
    from .. import bench
    from ..drawing.generate import best_device, parse_size

    if options.table:
        print(bench.report(bench.read(Path(options.table))))
        return
    names = (
        "model",
        "batches",
        "modes",
        "presets",
        "ratios",
        "steps",
        "warmups",
        "settle",
        "repeats",
        "loops",
        "rounds",
    )
    task = bench.Task(
        device=best_device(options.device),
        sizes=[parse_size(size) for size in options.sizes],
        changes=_config_options(options, without=("ratio",)),
        out=Path(options.out) if options.out else None,
        command=_command(options, without="--out"),
        **{name: getattr(options, name) for name in (*names, "dtype")},
    )
    records = bench.run(task)
    print(json.dumps(records, indent=2) if options.json else bench.report(records))


def _command(options: argparse.Namespace, without: str) -> str:
    """What was typed, but for one option: where results go says nothing about them."""
    words = [word for word in options.command if not word.startswith(f"{without}=")]
    if without in words:
        place = words.index(without)
        del words[place : place + 2]
    return shlex.join(words)


def _eval(options: argparse.Namespace) -> None:
    _evaluate(options, configurations=options.configs, ratios=options.ratios)


def _reproduce(options: argparse.Namespace) -> None:
    from ..paper.studies import FIGURE, FULL, QUICK, Inquiry, find_study

    item = find_study(options.name)
    if isinstance(item, Inquiry):
        for name, reason in item.useless().items():
            if getattr(options, name) is not None:
                raise TokenMergeError(f"--{name} is not for {options.name}, which {reason}; leave it out")
    scale = QUICK if options.quick else FIGURE if isinstance(item, Inquiry) else FULL
    options.model = options.model or item.model
    defaults = {"number": scale.prompts, "seeds": scale.seeds, "repeats": scale.repeats, "steps": scale.steps}
    defaults |= options.usual
    defaults["out"] = f"reproduction/{item.folder}-{Path(options.model).name}"
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if isinstance(item, Inquiry):
        _inquire(options, item, scale.ratios)
    else:
        _evaluate(options, configurations=item.configurations, tell_refused=True)


def _inquire(options: argparse.Namespace, inquiry: Any, ratios: Sequence[float]) -> None:
    from ..paper.inquiries import inquire
    from ..evaluation.prompts import read_prompts

    names = ("seeds", "steps", "guidance", "size", "batch", "repeats", "threads", "device", "dtype")
    finding = inquire(
        inquiry,
        options.model,
        read_prompts(options.prompts, column=options.column, template=options.template, limit=options.number),
        ratios=ratios,
        out=Path(options.out),
        **{name: getattr(options, name) for name in names},
    )
    print(json.dumps(finding.records, indent=2) if options.json else finding)


def _evaluate(options: argparse.Namespace, **task: Any) -> None:
    from ..evaluation.prompts import read_prompts
    from ..evaluation.run import Task, evaluate
    from ..evaluation.table import plain

    names = ("model", "seeds", "steps", "guidance", "size", "metrics", "batch", "repeats", "threads", "device", "dtype")
    given = {name: getattr(options, name) for name in (*names, "compile")}
    asked = Task(
        prompts=read_prompts(options.prompts, column=options.column, template=options.template, limit=options.number),
        sources=_sources(options),
        reference=Path(options.reference) if options.reference else None,
        **given,
        **task,
    )
    results = evaluate(asked, Path(options.out), resume=options.resume)
    if results is not None:
        print(json.dumps(results.to_dict(), indent=2) if options.json else plain(results))


def _metrics(options: argparse.Namespace) -> None:
    from ..evaluation.pairs import compare_folders
    from ..evaluation.prompts import read_prompts

    prompts = None
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, column=options.column, template=options.template)
    comparison = compare_folders(
        Path(options.reference),
        Path(options.test),
        metrics=options.metrics,
        sources=_sources(options),
        prompts=prompts,
        device=options.device,
        threads=options.threads,
    )
    print(json.dumps(comparison.to_dict(), indent=2) if options.json else comparison)


def _tune(options: argparse.Namespace) -> None:
    from ..evaluation.prompts import read_prompts
    from ..tuning.goal import read_goal
    from ..tuning.search import Search, tune

    sources = _sources(options)
    names = ("model", "candidates", "rungs", "number", "seed", "steps", "guidance", "size", "batch", "repeats")
    search = Search(
        prompts=read_prompts(options.prompts, column=options.column, template=options.template),
        goal=read_goal(options.budget, options.speed_up, options.metric, sources),
        sources=sources,
        **{name: getattr(options, name) for name in (*names, "threads", "device", "dtype", "compile")},
    )
    outcome = tune(search, Path(options.out), resume=options.resume, command=shlex.join(options.command))
    print(
        json.dumps(outcome.to_dict(), indent=2) if options.json else f"{outcome}\n\n{Path(options.out, outcome.file)}"
    )
    if (shortfall := outcome.shortfall()) is not None:
        raise TokenMergeError(shortfall)


def _sources(options: argparse.Namespace) -> Any:
    from ..quality.networks import Sources

    given = {name: getattr(options, name) for name in ("clip", "dino") if getattr(options, name) is not None}
    return Sources(folder=Path(options.networks) if options.networks else None, **given)


def _presets(options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({name: config.to_dict() for name, config in presets().items()}, indent=2))
        return
    from ...planning.tables import table

    fields, times = ["method", "regions", "merge_regions", "sites", "merge", "skip_first"], ["start", "anchor_every"]
    rows = [
        [
            name,
            *(str(getattr(config, field)) for field in fields),
            *(f"{getattr(config.schedule, field):g}" for field in times),
        ]
        for name, config in presets().items()
    ]
    print(table(["preset", *fields, *times], rows))


def _add_config_options(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    group = parser.add_argument_group("merging", "any field of MergeConfig; the preset gives the rest")
    if "preset" not in without:
        group.add_argument("--preset", help="a preset's name, or a YAML or JSON file (default: as apply has it)")
    for name, hint in config_fields().items():
        if name not in without:
            flag = f"--{name.replace('_', '-')}"
            group.add_argument(flag, type=parse_as(hint), metavar=_metavar(hint), help=FIELDS[name])


def _config_options(options: argparse.Namespace, without: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that were given."""
    names = [name for name in config_fields() if name not in without]
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _metavar(hint: Any) -> str:
    text = str(hint)
    if "tuple" in text:
        return "A,B,..."
    return "TEXT" if "str" in text else "N"

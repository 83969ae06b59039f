"""Writes the pages that are made from the code: options, the command line, and models, with README's table of models.

python scripts/pages.py           # write docs/options.md, docs/command-line.md, docs/models.md, and README's table
python scripts/pages.py --check   # list what is out of date, and fail
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenmerge.config import Hold, Merge
from tokenmerge.families import Family, families
from tokenmerge.families.generic import OBSTACLES
from tokenmerge.planning.tables import markdown
from tokenmerge.presets import RECOMMENDED, presets
from tokenmerge.tools.cli.main import parser
from tokenmerge.tools.cli.options import EXAMPLES, RIVALS
from tokenmerge.tools.fields import changes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
# README's table of models lies between these comments.
MODELS = re.compile(r"(<!-- models -->\n).*?(<!-- end of models -->)", re.DOTALL)
MADE = "<!-- Written by scripts/pages.py from the code. Change the code, then run `make docs`. -->"
# Words of help that look like an option, a placeholder or a typed technique.
CODE = re.compile(r"(?<![`\w])(--[a-z][a-z-]*|@FILE)(?![`\w])")


def options_page() -> str:
    """The fields of both techniques, and the presets."""
    return f"""{MADE}

# Options

`Merge` and `Hold` are frozen dataclasses. A wrong value raises `TokenMergeError`, an unknown field `TypeError`.
`technique.replace(ratio=0.25)` returns a copy with fields changed.

## Merge

{Merge.__doc__.splitlines()[0] if Merge.__doc__ else ""} See [Merging](merging.md).

{_fields(Merge)}

## Hold

{Hold.__doc__.splitlines()[0] if Hold.__doc__ else ""} See [Holding](holding.md).

{_fields(Hold)}

## Presets

`tokenmerge.apply(pipe, "toma-tile", ratio=0.25)` takes a preset by its name, with fields changed.
`apply(pipe)` takes `{RECOMMENDED}`. [Baselines](baselines.md) says what each method does.

{_presets()}

## Files

A `.json` or `.yaml` file holds one technique, or a list of one of each. Fields that it leaves out have the defaults
above. YAML needs `pip install "tokenmerge[yaml]"`.

```yaml
- technique: merge
  ratio: 0.5
  skip_first: 0.25
- technique: hold
  every: 3
```

`tokenmerge.apply(pipe, "mine.yaml")` applies it. `technique.to_dict()` is what a file holds.
`tokenmerge tune` [writes such files](tuning.md).
"""


def _fields(technique: type[Merge] | type[Hold]) -> str:
    docs = technique.field_docs()
    return markdown(
        ["field", "default", "meaning"],
        [[f"`{item.name}`", _value(item.default), docs[item.name]] for item in fields(technique)],
    )


def _value(value: Any) -> str:
    return ", ".join(f"`{each!r}`" for each in (value if isinstance(value, tuple) else (value,)))


def _presets() -> str:
    rows = []
    for name, technique in presets().items():
        changed = [f"`{field}={value!r}`" for field, value in changes(technique, type(technique)()).items()]
        rows.append([f"`{name}`", f"`{type(technique).__name__}`", ", ".join(changed)])
    return markdown(["preset", "technique", "fields that it sets"], rows)


def command_line_page() -> str:
    """Every command with its options."""
    listed = markdown(
        ["command", "what it does"], [[f"[`{name}`](#{name})", _sentence(about)] for name, about, _ in _commands()]
    )
    examples = EXAMPLES | RIVALS
    typed = markdown(["typed", "meaning"], [[f"`{text}`", _text(meaning)] for text, meaning in examples.items()])
    pages = "\n\n".join(_command(name, command) for name, _, command in _commands())
    return f"""{MADE}

# Command line

[Install](getting-started.md#install) says which extra each command needs. `tokenmerge COMMAND --help` prints what this
page says. Sizes are width x height in pixels: `1024x768`.

{listed}

## Techniques as typed

All commands take techniques in one form: a preset or a file, then fields after a colon. ` + ` joins Merge and Hold.
Only `eval` and `generate` take [rivals](evaluation.md#rivals), the last two rows.
[Options](options.md) lists presets and fields.

{typed}

{pages}
"""


def models_page() -> str:
    """Every family with a table, and what can be held without one."""
    images, videos = ([each for each in families() if (each.frames > 1) == video] for video in (False, True))
    obstacles = markdown(
        ["denoisers", "why they are not merged"],
        [[f"`{start}...`", reason] for start, reason in OBSTACLES.items()],
    )
    return f"""{MADE}

# Models

`apply` takes a pipeline of diffusers or its denoiser. The class of the denoiser decides what can be done.
Each class below has a table in `src/tokenmerge/families`, from which this page is made.
`tokenmerge.supported_models()` lists them. Most [other denoisers](#other-denoisers) can be held.

## Images

{_models(images)}

## Video

{_models(videos)}

- *Merge* names the preset that suits the family: `tokenmerge.apply(pipe, "dit")`. [Merging](merging.md) explains it.
- *Hold* says what is held by default. [Holding](holding.md) explains it.
- *Steps* is the usual number for these models. Of 4 steps little can be held, and `summary` says so.
- *Pipelines* are those in the tests. Others around the same denoiser, such as img2img or inpainting, call it the same
  way.

## How they are tested

Every pipeline above is built with tiny random weights and passes one contract. Pictures equal the plain ones bit for
bit at ratio 0, at `every=1` and after `remove`. Rotary tables, masks and modulations follow their tokens. Batches,
sizes, lengths of text and guidance may change from call to call. Blocks compile once. Random weights say nothing about
quality. We measured quality with trained weights, on `tiny-flux` and `tiny-sdxl` only ([Fidelity](fidelity.md)).

## Other denoisers

A denoiser without a table can be held if it has lists of blocks of one class and receives a timestep.
The first call shows which blocks follow each other, and `summary` says what is held. Where something happens between
all of them, as in Bria Fibo, the call is refused ([how it works](generic.md)). Without a table nothing is merged. These
models cannot merge:

{obstacles}
"""


def _models(listed: list[Family]) -> str:
    header = ["models", "denoiser", "Merge", "Hold", "steps", "tested with", "pipelines", "notes"]
    rows = []
    for each in listed:
        weights = f"tiny random weights; trained, `{each.trained}`" if each.trained else "tiny random weights"
        held = "stages" if each.stages is not None else "blocks"
        pipelines = ", ".join(f"`{name}`" for name in each.pipelines)
        what = (each.title, f"`{each.denoiser.__name__}`", f"`{each.merging}`", held, each.steps)
        rows.append([*what, weights, pipelines, each.note])
    return markdown(header, rows)


def models_table() -> str:
    """The models in short, for README."""
    rows = []
    for kind, video in (("Images", False), ("Video", True)):
        titles = "; ".join(each.title for each in families() if (each.frames > 1) == video)
        rows.append([kind, titles, "yes", "yes"])
    rows.append(["Others", "most denoisers of diffusers, such as Sana, LTX-2, OmniGen", "no", "yes"])
    return markdown(["", "models", "Merge", "Hold"], rows)


def readme() -> str:
    return MODELS.sub(rf"\g<1>{models_table()}\n\g<2>", README.read_text(encoding="utf-8"))


def _commands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """The name, short help and parser of every command."""
    for action in parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from ((each.dest, each.help or "", action.choices[each.dest]) for each in action._choices_actions)


def _command(name: str, command: argparse.ArgumentParser) -> str:
    actions = [each for each in command._actions if not isinstance(each, argparse._HelpAction)]
    # Positional arguments come first.
    actions.sort(key=lambda action: bool(action.option_strings))
    rows = [[_option(each), _help(each, command)] for each in actions]
    described = [_text(part) for part in (command.description or "").split("\n\n") if part]
    return "\n\n".join([f"## {name}", *described, markdown(["option", "meaning"], rows)])


def _option(action: argparse.Action) -> str:
    values = action.metavar if isinstance(action.metavar, str) else action.dest.upper().replace("_", "-")
    if action.choices and action.metavar is None:
        values = "|".join(map(str, action.choices))
    shown = {0: "", "?": f"[{values}]", "+": f"{values} ..."}.get(action.nargs, values)
    typed = " ".join([*action.option_strings[-1:], *([shown] if shown else [])])
    return f"`{typed}`".replace("|", "\\|")


def _help(action: argparse.Action, command: argparse.ArgumentParser) -> str:
    values: dict[str, Any] = {**vars(action), "prog": command.prog}
    return _text((action.help or "") % values).replace("|", "\\|")


def _text(words: str) -> str:
    """Help as Markdown: options become code, and everything else is escaped."""
    parts = " ".join(words.split()).split("`")
    for place in range(0, len(parts), 2):
        parts[place] = CODE.sub(r"`\1`", re.sub(r"([*<_])", r"\\\1", parts[place]))
    return "`".join(parts).replace("as typed below", "[as typed](#techniques-as-typed)")


def _sentence(words: str) -> str:
    return _text(words[:1].upper() + words[1:])


def pages() -> dict[Path, str]:
    return {
        DOCS / "options.md": options_page(),
        DOCS / "command-line.md": command_line_page(),
        DOCS / "models.md": models_page(),
        README: readme(),
    }


def main(arguments: list[str] | None = None) -> int:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    check = reader.parse_args(arguments).check
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'out of date; run python scripts/pages.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

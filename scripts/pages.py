"""Writes the pages of the site that say what the code says: options and the command line.

python scripts/pages.py           # write docs/options.md and docs/command-line.md
python scripts/pages.py --check   # say what is out of date, and fail
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
from tokenmerge.planning.tables import markdown
from tokenmerge.presets import RECOMMENDED, presets
from tokenmerge.tools.cli.main import parser
from tokenmerge.tools.cli.options import EXAMPLES

DOCS = Path(__file__).parent.parent / "docs"
MADE = "<!-- Written by scripts/pages.py from the code. Change the code, then run `make docs`. -->"
# Words of help that look like an option, a placeholder or a typed technique.
CODE = re.compile(r"(?<![`\w])(--[a-z][a-z-]*|@FILE)(?![`\w])")


def options_page() -> str:
    """The fields of both techniques, and the presets."""
    return f"""{MADE}

# Options

`Merge` and `Hold` are frozen dataclasses. A wrong value raises `TokenMergeError` at once, an unknown field `TypeError`.
`technique.replace(ratio=0.25)` is a copy with fields changed.

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
        default = type(technique)()
        values = {item.name: getattr(technique, item.name) for item in fields(technique)}
        told = [f"`{name}={value!r}`" for name, value in values.items() if value != getattr(default, name)]
        rows.append([f"`{name}`", f"`{type(technique).__name__}`", ", ".join(told)])
    return markdown(["preset", "technique", "fields that it sets"], rows)


def command_line_page() -> str:
    """Every command with its options."""
    listed = markdown(
        ["command", "what it does"], [[f"[`{name}`](#{name})", _sentence(about)] for name, about in _about(parser())]
    )
    typed = markdown(["typed", "meaning"], [[f"`{text}`", _text(meaning)] for text, meaning in EXAMPLES.items()])
    pages = "\n\n".join(_command(name, command) for name, command in _commands(parser()))
    return f"""{MADE}

# Command line

`pip install "tokenmerge[generate]"` has what `generate` needs, `"tokenmerge[eval]"` what all commands need.
`tokenmerge COMMAND --help` prints what this page says.

Sizes are width x height in pixels: `1024x768`.

{listed}

## Techniques as typed

All commands take techniques in one form: a preset or a file, then fields after a colon. ` + ` joins Merge, Hold and a
step cache of diffusers. [Options](options.md) lists presets and fields.

{typed}

{pages}
"""


def _commands(command: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _about(command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from ((str(each.dest), each.help or "") for each in action._choices_actions)


def _command(name: str, command: argparse.ArgumentParser) -> str:
    actions = [each for each in command._actions if not isinstance(each, argparse._HelpAction)]
    # What has no dashes is typed first.
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
    """Help as Markdown: options as code, and nothing else taken for markup."""
    parts = " ".join(words.split()).split("`")
    for place in range(0, len(parts), 2):
        parts[place] = CODE.sub(r"`\1`", re.sub(r"([*<_])", r"\\\1", parts[place]))
    return "`".join(parts).replace("as typed below", "[as typed](#techniques-as-typed)")


def _sentence(words: str) -> str:
    return _text(words[:1].upper() + words[1:])


def pages() -> dict[Path, str]:
    return {DOCS / "options.md": options_page(), DOCS / "command-line.md": command_line_page()}


def main(arguments: list[str] | None = None) -> int:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    check = reader.parse_args(arguments).check
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"docs/{path.name}: {'out of date; run python scripts/pages.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

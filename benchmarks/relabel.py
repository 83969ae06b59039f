"""Rewrites result files of tokenmerge 0.1 as rows of today's techniques, `Merge` and `Hold`.

    python benchmarks/relabel.py FILE ...

Figures stay. What a row is of is written anew, by the tables below:
- `config` becomes `techniques`, the form of `Techniques.to_list`. The plain model has none.
- Labels become techniques as typed: `hold:sites=stage,anchor_every=2` is `hold:every=2`. On UNets `hold` now holds
  stages, so held blocks are `hold:what=blocks`. `default` meant `hold`, on UNets held stages; with a ratio it meant
  anchored merging. Names of a study's rows stay.
- Phases of steps become what the timeline calls them, and `modes` becomes `kinds`: a held run's anchors are full steps.
- `command` becomes what would measure the same today. What ran then is kept as `ran`.
Rows of what went are left out: anchored merging with its bounds, and holding by the last residual alone or with
residuals in float8. A file that is written anew already is refused; one without configs has nothing to write anew.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from tokenmerge.config import Hold, Merge, Techniques
from tokenmerge.presets import preset

PRESETS = {"default": "hold", "unet-hold": "hold", "unpatched": "none"}
FIELDS = {"anchor_every": "every", "gap": "extrapolate"}
PHASES = {
    "merge": {"select": "merged, select", "reweigh": "merged, reweigh", "reuse": "merged, reuse"},
    "hold": {"anchor, select": "full, kept", "reuse": "held"},
}
KINDS = {"merge": {}, "hold": {"anchor": "full", "merged": "held"}}
# Presets that went, and fields that did, with the values at which they did nothing. Gaps counted with anchors only.
GONE_PRESETS = ("unet-anchored", "dit-anchored")
GONE_FIELDS = {
    "coverage": None,
    "step_ratios": None,
    "block_ratios": None,
    "trust": 1.0,
    "gap_dtype": "tokens",
    "span": 0,
}
# Models whose `hold` holds stages.
UNETS = ("tiny-sdxl", "sdxl-random")


def relabel(row: dict[str, Any]) -> dict[str, Any] | None:
    """A row written anew, or None if it is of something that went."""
    if why_gone(row):
        return None
    techniques = techniques_of(row)
    kind = "hold" if techniques.hold else "merge"
    new: dict[str, Any] = {}
    for name, value in row.items():
        if name == "config":
            new["techniques"] = techniques.to_list()
        elif name == "label":
            new[name] = label_of(row, techniques)
        elif name == "command":
            new |= {"command": command_of(value), "ran": value}
        elif name == "modes":
            new["kinds"] = _renamed(value, KINDS[kind])
        elif name in ("steps_by_phase", "laps_ms"):
            new[name] = _renamed(value, PHASES[kind])
        elif name == "timing" and kind == "hold":
            # What is held has no tokens to count.
            new[name] = {**value, "tokens": ""}
        else:
            new[name] = value
    return new


def why_gone(row: dict[str, Any]) -> str | None:
    """What a row is of that went, if it is of such."""
    if any(name in row["label"] for name in GONE_PRESETS):
        return "anchored merging"
    config = _flat(row["config"])
    for name, idle in GONE_FIELDS.items():
        if config.get(name, idle) != idle:
            return name
    if config.get("sites") == "span":
        return "sites=span"
    if config.get("method") == "hold":
        return "gap=last" if config["gap"] == "last" else None
    return "anchored merging" if config.get("anchor_every") else None


def techniques_of(row: dict[str, Any]) -> Techniques:
    """What a row's config is now."""
    config = _flat(row["config"])
    if config.get("method", "none") == "none":
        return Techniques()
    if config["method"] != "hold":
        return Techniques.of(Merge(**{name: config[name] for name in Merge.field_docs()}))
    blocks = row["model"] in UNETS and config["sites"] == "block"
    return Techniques.of(
        Hold(
            every=config["anchor_every"],
            start=config["start"],
            stop=config["stop"],
            what="blocks" if blocks else "auto",
            extrapolate=config["gap"],
        )
    )


def label_of(row: dict[str, Any], techniques: Techniques) -> str:
    """A row's label as it is typed now."""
    label: str = row["label"]
    if techniques.hold is not None:
        return _label_of_held(label, techniques.hold)
    # Benchmarks told the ratio after the preset's name.
    found = re.fullmatch(r"(lower-bound of )?(\S+) [\d.]+", label) if "laps_ms" in row else None
    if techniques.merge is not None and found:
        return f"{found[1] or ''}{_typed(found[2], techniques.merge)}"
    return PRESETS.get(label, label)


def command_of(ran: str) -> str:
    """The command that measures today what a command of version 0.1 did, less what went."""
    words = shlex.split(ran)
    options = dict(zip(words[2::2], words[3::2], strict=True))
    first = options.pop("--skip-first", None)
    names = [name for name in options["--presets"].split(",") if name not in GONE_PRESETS]
    blocks = {"hold": "hold:what=blocks"} if options["--model"] in UNETS else {}
    typed = [blocks.get(name) or PRESETS.get(name, name) for name in names]
    merging = [isinstance(preset(name.partition(":")[0]), Merge) for name in typed]
    if first:
        typed = [f"{name}:skip_first={first}" for name in typed]
    if not any(merging):
        options.pop("--ratios", None)
    told = [f"{name} {' '.join(typed) if name == '--presets' else value}" for name, value in options.items()]
    return " ".join([*words[:2], *told]).replace("--presets", "--techniques")


def _label_of_held(label: str, hold: Hold) -> str:
    technique, plus, cache = label.partition(" + ")
    name, _, typed = technique.partition(":")
    fields = dict(part.split("=") for part in typed.split(",")) if typed else {}
    fields.pop("sites", None)
    told = {"what": hold.what} if hold.what != "auto" else {}
    told |= {FIELDS.get(field, field): value for field, value in fields.items()}
    return f"{_joined(PRESETS.get(name, name), told)}{plus}{cache}"


def _typed(name: str, merge: Merge) -> str:
    """A preset with what differs from it, and its ratio. A bound has the name of what it bounds."""
    base = preset(name)
    fields = [field for field in Merge.field_docs() if field not in ("ratio", "method")]
    told = {field: getattr(merge, field) for field in fields if getattr(merge, field) != getattr(base, field)}
    return _joined(name, {**told, "ratio": f"{merge.ratio:g}"})


def _joined(name: str, fields: dict[str, Any]) -> str:
    typed = ",".join(f"{field}={value}" for field, value in fields.items())
    return f"{name}:{typed}" if typed else name


def _flat(config: dict[str, Any] | None) -> dict[str, Any]:
    """A config with its schedule's fields beside the others."""
    flat = dict(config or {})
    return {**flat, **flat.pop("schedule", {})}


def _renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Keys renamed; numbers whose keys become the same are added up."""
    new: dict[str, Any] = {}
    for key, value in values.items():
        first = "first " if key.startswith("first ") else ""
        name = key.removeprefix(first)
        name = first + names.get(name, name)
        new[name] = new[name] + value if name in new else value
    return new


def rewrite(path: Path) -> tuple[int, int]:
    """Write a file anew; how many rows stay, and how many go."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if any("techniques" in row for row in rows):
        raise SystemExit(f"{path} is written anew already; give a file of tokenmerge 0.1")
    if not all("config" in row for row in rows):
        return len(rows), 0
    kept = [new for new in map(relabel, rows) if new is not None]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return len(kept), len(rows) - len(kept)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        stay, go = rewrite(Path(argument))
        print(f"{argument}: {stay} rows stay, {go} go")

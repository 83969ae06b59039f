"""The nodes' widgets: fields of the techniques, with tooltips from the classes' own documentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmerge import Hold, Merge, presets
from tokenmerge.config import HELD, LARGEST_SEED, TOLERANCE, Techniques

# Stands for the preset that suits the model's family.
AUTO = "auto"
_UNSET = " (0: the default)"


@dataclass(frozen=True)
class Setting:
    """One widget of a node."""

    name: str
    kind: str  # float, int or combo
    default: Any
    tooltip: str
    options: tuple[str, ...] = ()
    least: float = 0
    most: float = 1
    step: float = 0.01


def _setting(technique: type[Hold] | type[Merge], name: str, kind: str, default: Any, note: str = "", **more: Any):
    return Setting(name, kind, default, technique.field_docs()[name] + note, **more)


HOLD = (
    _setting(Hold, "tolerance", "float", TOLERANCE, " (ignored if every is set)", least=0.01),
    _setting(Hold, "every", "int", 0, " (0: tolerance decides)", most=50, step=1),
    _setting(Hold, "start", "float", 0.0, _UNSET),
    _setting(Hold, "stop", "float", 1.0, least=0.01),
    _setting(Hold, "what", "combo", "auto", options=HELD),
)


def merge_presets() -> dict[str, Merge]:
    """The presets that merge something."""
    return {name: each for name, each in presets().items() if isinstance(each, Merge) and each.ratio}


MERGE = (
    _setting(Merge, "ratio", "float", 0.5, least=0.01, most=0.95),
    Setting(
        "preset",
        "combo",
        AUTO,
        "how tokens merge: a method with its settings; auto chooses what suits the model",
        options=(AUTO, *merge_presets()),
    ),
    _setting(Merge, "start", "float", 0.0, most=0.99),
    _setting(Merge, "stop", "float", 1.0, least=0.01),
    _setting(Merge, "seed", "int", 0, most=LARGEST_SEED, step=1),
)
# The widgets of every node.
SETTINGS = {"TokenMergeHold": HOLD, "TokenMergeMerge": MERGE}


def hold_of(tolerance: float, every: int, start: float, stop: float, what: str) -> Hold:
    """The technique that Hold's widgets describe."""
    chosen = {"every": every} if every else {"tolerance": tolerance}
    return Hold(**chosen, start=start or None, stop=stop, what=what)


def merge_of(preset: str, usual: str, **fields: Any) -> Merge:
    """The technique that Merge's widgets describe. usual: the preset of the model's family."""
    return merge_presets()[usual if preset == AUTO else preset].replace(**fields)


def joined(before: Techniques, technique: Hold | Merge) -> Techniques:
    """The techniques of nodes in a row. The last node of each kind counts."""
    return before._replace(**{technique.NAME: technique})

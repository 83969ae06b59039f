"""The catalog of presets: configs by name, and which of them is meant where none is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .config import MergeConfig, Schedule, one_by_one
from .errors import TokenMergeError, did_you_mean

# Among names of presets: what is taken where none is named.
DEFAULT = "default"
# Methods that by themselves mean the preset of their name: what the family's own would make of them is not theirs.
_NAMESAKES = ("hold", "tomesd", "tofu", "todo")

# The paper's variants. Its text gives ToMA's selection stripes as 256 regions, merged over the whole image.
_PAPER = MergeConfig(regions="stripe:256", merge_regions="whole", sites="component")
# In its package's form: matched on self-attention's tokens at every call. There only level 1 is merged by default, and
# SDXL has no attention on that; here all levels are.
_TOMESD = MergeConfig(
    method="tomesd", regions="whole", selection="random", sites="component", components=("self_attention",)
)
# Cells of 2x2, as ToDo has them. Other ratios make other cells.
_CELLS = MergeConfig(ratio=0.75, regions="tile:2x2")
_UNET, _DIT = MergeConfig(), MergeConfig(skip_first=0.25)
_HOLD = MergeConfig(method="hold", ratio=1.0, gap="linear", schedule=Schedule(start=0.2, anchor_every=3))
_ANCHORED: dict[str, Any] = {"merge": "pick", "start": 0.2, "anchor_every": 5}
_PRESETS: dict[str, MergeConfig] = {
    "toma": _PAPER,
    "toma-once": _PAPER.replace(sites="block"),
    "toma-stripe": _PAPER.replace(regions="stripe:64", merge_regions=None),
    "toma-tile": _PAPER.replace(regions="tile:64", merge_regions=None),
    "lower-bound": _PAPER.replace(method="lower-bound", regions="tile:64", merge_regions=None),
    "tomesd": _TOMESD,
    "tofu": _TOMESD.replace(method="tofu"),
    "todo": _CELLS.replace(method="todo", sites="component", components=("self_attention",)),
    "pool": _CELLS.replace(method="pool"),
    # What `apply(pipe)` uses. Nothing is merged: between anchors blocks do not run, or a UNet's stages.
    "hold": _HOLD,
    "unet-hold": _HOLD.replace(sites="stage"),
    "random": MergeConfig(method="random"),
    "uniform": MergeConfig(method="uniform"),
    "none": MergeConfig(method="none", ratio=0.0),
    # Small tiles, which keep pictures better than large ones, and one merge per block; in joint-attention models the
    # first blocks, where text and image blend, stay whole.
    "unet": _UNET,
    "dit": _DIT,
    # What `apply(pipe, ratio=...)` uses. The first steps decide what the picture is, and gaps change fast there. Merged
    # joint-attention blocks say little of what has changed since the last anchor.
    "unet-anchored": _UNET.replace(**_ANCHORED),
    "dit-anchored": _DIT.replace(**_ANCHORED, gap="linear", trust=0.25),
}
# Options that holding has too, and those that only held blocks have. Any other asks for tokens to be merged.
_OF_HOLDING = frozenset(("gap", "gap_dtype", "start", "stop", "anchor_every"))
_OF_HELD_BLOCKS = frozenset(("levels", "skip_first", "skip_last", "span"))


class Defaults(NamedTuple):
    """The presets of a model family, where none is named."""

    merging: str
    holding: str = "hold"


def presets() -> dict[str, MergeConfig]:
    """Every named preset, by name."""
    return dict(_PRESETS)


def default_preset(options: Mapping[str, Any], defaults: Defaults) -> str:
    """Where none is named: a method's own, or else what the family holds by, which changes pictures least
    (docs/fidelity.md), and what it merges by where an option asks for that."""
    options = one_by_one(options)
    method = options.get("method")
    if method in _NAMESAKES:
        return str(method)
    asked = options.keys() - ({"sites"} if options.get("sites") == "stage" else ())
    if options.get("anchor_every") == 0 or not asked <= _OF_HOLDING | _OF_HELD_BLOCKS:
        return defaults.merging
    return "hold" if asked & _OF_HELD_BLOCKS else defaults.holding


def load_preset(name: str | Path) -> MergeConfig:
    """A preset by name, or a config from a YAML or JSON file. What the default is, only `default_preset` knows."""
    names = (*_PRESETS, DEFAULT)
    if not isinstance(name, str | Path):
        raise TypeError(
            f"preset is a {type(name).__name__}; it is one of {', '.join(names)}, or the path of a .yaml or .json "
            "file. Fields are given by name, as in ratio=0.5, and a MergeConfig as config"
        )
    if name in _PRESETS:
        return _PRESETS[name]
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        if not path.is_file():
            raise TokenMergeError(f"preset file {name!r} is not there; give an existing .yaml or .json file")
        try:
            text = path.read_text(encoding="utf-8")
            return MergeConfig.from_json(text) if path.suffix == ".json" else MergeConfig.from_yaml(text)
        except UnicodeDecodeError as error:
            raise TokenMergeError(f"preset file {name!r} is no text in UTF-8 ({error}); write it as such") from error
        except OSError as error:
            raise TokenMergeError(f"preset file {name!r} cannot be read ({error.strerror}); give another") from error
        except TokenMergeError as error:
            raise TokenMergeError(f"preset file {name!r}: {error}") from error
    raise TokenMergeError(
        f"preset {name!r} is unknown{did_you_mean(name, names)}; use one of {', '.join(names)}, or the path of a .yaml "
        "or .json file"
    )

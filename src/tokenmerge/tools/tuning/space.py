"""The settings that are searched, and candidates drawn from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from random import Random
from typing import Any

from ...presets import Defaults, load_preset
from ...config import GAPS, MergeConfig, Schedule
from ...errors import TokenMergeError
from ..evaluation.configurations import Configuration

Changes = Mapping[str, Any]

_EVEN: Changes = {"block_ratios": None, "step_ratios": None}
_HARD: Changes = {"unmerge": "transpose", "temperature": 0.001}
_HOLD = "hold"
_STARTS: tuple[Changes, ...] = tuple({"start": start} for start in (0.0, 0.1, 0.2, 0.3))
_SKIPS: tuple[Changes, ...] = tuple({"skip_first": share} for share in (0, 0.125, 0.25, 0.375))

# A candidate takes one entry of every axis. Fields that only make sense together share an axis, so that no combination
# is without meaning: between hard clusters the pseudo-inverse is the transpose, and soft ones need it.
AXES: dict[str, tuple[Changes, ...]] = {
    "amount": (
        *({"ratio": ratio, **_EVEN} for ratio in (0.25, 0.5, 0.75, 0.875, 0.9375)),
        *({**_EVEN, "block_ratios": ratios} for ratios in ((0.25, 0.75), (0.5, 0.75), (0.75, 0.875))),
    ),
    "regions": tuple({"regions": f"tile:{side}x{side}", "merge_regions": None} for side in (2, 4, 8)),
    "maps": (
        {"merge": "mean", **_HARD},
        {"merge": "pick", **_HARD},
        {"merge": "mean", "unmerge": "pinv", "temperature": 0.05},
    ),
    "anchors": (
        {"anchor_every": 0, "gap": "last", "trust": 1.0},
        *(
            {"anchor_every": every, "gap": gap, "trust": trust}
            for every in (2, 3, 5, 8)
            for gap in GAPS
            for trust in (0.25, 0.5, 1.0)
        ),
    ),
    "refresh": (
        {"destinations_every": 10, "weights_every": 5},
        {"destinations_every": 1, "weights_every": 1},
    ),
    "start": _STARTS,
    "skip_first": _SKIPS,
}
# The same for blocks that do not run between anchors.
HELD_AXES: dict[str, tuple[Changes, ...]] = {
    "anchors": tuple({"anchor_every": every, "gap": gap} for every in (2, 3, 4, 5, 8) for gap in GAPS),
    "start": _STARTS,
    "skip_first": _SKIPS,
}
# And for stages of a UNet that do not, which are held all together.
STAGE_AXES: dict[str, tuple[Changes, ...]] = {name: HELD_AXES[name] for name in ("anchors", "start")}
# Always among the candidates: what a user would try first.
FIXED: tuple[Changes, ...] = (
    *({"ratio": ratio, **_EVEN} for ratio in (0.5, 0.75)),
    {"ratio": 0.875, **_EVEN, "anchor_every": 8},
    {"ratio": 0.5, **_EVEN, "anchor_every": 0, "gap": "last", "trust": 1.0, "start": 0.0, "merge": "mean", **_HARD},
)
HELD_FIXED: tuple[Changes, ...] = ({"anchor_every": 3}, {"anchor_every": 5})
# Far fewer than the axes have combinations, so that drawing new ones stays easy.
MOST = 1000


def draw_candidates(defaults: Defaults, count: int, seed: int) -> tuple[Configuration, ...]:
    """`count` different candidates: the fixed ones, then ones drawn from any kind of axes by a generator of its own.

    defaults: the presets of the model's family, which like "hold" give all fields that no axis has.
    """
    kinds = [(defaults.merging, FIXED, AXES), (_HOLD, HELD_FIXED, HELD_AXES)]
    if load_preset(defaults.holding).sites == "stage":
        kinds.append((defaults.holding, HELD_FIXED, STAGE_AXES))
    fixed = [(preset, changes) for preset, listed, _ in kinds for changes in listed]
    if not len(fixed) <= count <= MOST:
        raise TokenMergeError(
            f"--candidates is {count}; it must be from {len(fixed)}, which are always tried, to {MOST}"
        )
    found = {load_preset(preset).replace(**changes): preset for preset, changes in fixed}
    generator = Random(seed)
    while len(found) < count:
        preset, _, axes = generator.choice(kinds)
        drawn: dict[str, Any] = {}
        for axis in axes.values():
            drawn |= generator.choice(axis)
        config = load_preset(preset).replace(**drawn)
        if fits_regions(config):
            found[config] = preset
    return tuple(Configuration(label(config, preset), config) for config, preset in found.items())


def fits_regions(config: MergeConfig) -> bool:
    """Whether regions can remove exactly what is asked; else the candidate would be another one in disguise."""
    height, width = config.select_in.tile or (1, 1)
    return all((ratio * height * width).is_integer() for ratio in config.ratios)


def label(config: MergeConfig, preset: str) -> str:
    """A config by how it differs from a preset, as `tokenmerge eval --configs` reads it."""
    base = load_preset(preset)
    names = [item.name for item in fields(MergeConfig) if item.name != "schedule"]
    changed = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(base, name)}
    for item in fields(Schedule):
        value = getattr(config.schedule, item.name)
        if value != getattr(base.schedule, item.name):
            changed[item.name] = value
    told = ",".join(f"{name}={_typed(value)}" for name, value in changed.items())
    return f"{preset}:{told}" if told else preset


def _typed(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)

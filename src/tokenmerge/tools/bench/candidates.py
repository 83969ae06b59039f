"""Candidates: what `bench` compares, and what each of them does at every step of a schedule."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ... import api
from ...presets import DEFAULT, load_preset
from ...config import SELECTIONS, MergeConfig
from ...errors import TokenMergeError
from ...merging.methods import method_for

# What the bound of linear merging has in place of a config's own; the rest they share.
BOUND = {"method": "lower-bound", "selection": "facility-location", "unmerge": "transpose", "anchor_every": 0}


@dataclass(frozen=True)
class Candidate:
    """One row of a comparison; without a config the denoiser as it is."""

    label: str
    config: MergeConfig | None = None

    def phases(self, steps: int) -> list[str]:
        """The phase of every step. The first is one of its own, since there an image begins: how its tokens lie is read
        from the device. Fixed maps are made once; those of the bound cost nothing by definition."""
        if self.config is None:
            return ["full"] * steps
        method = method_for(self.config)
        phases = phases_of(method.settle(self.config), steps)
        if self.config.method == "lower-bound":
            return [_renamed(phase, "reuse") for phase in phases]
        if method.PER_BLOCK:
            phases = [_renamed(phase, "select") for phase in phases]
        elif not method.REFRESHES:
            made = {phases.index(each) for each in dict.fromkeys(phases) if "select" in each}
            phases = [phase if step in made else _renamed(phase, "reuse") for step, phase in enumerate(phases)]
        return [f"first {phases[0]}", *phases[1:]]


def candidates_for(
    denoiser: nn.Module, presets: Sequence[str], ratios: Sequence[float], changes: Mapping[str, Any]
) -> list[Candidate]:
    """The denoiser as it is; then for every ratio, or where there is none for its own, each preset, and where merging
    is linear its bound at those sites. A preset that holds has no ratio, and one with ratios for parts has them: those
    come once."""
    found = {"unpatched": Candidate("unpatched")}
    for ratio in ratios or (None,):
        for preset in presets:
            given = {} if ratio is None or not _takes_ratio(preset, changes) else {"ratio": ratio}
            config = api.config_for(denoiser, preset=None if preset == DEFAULT else preset, **given, **changes)
            if config.coverage is not None:
                raise TokenMergeError(
                    f"with coverage={config.coverage:g} a picture decides how much is removed at which step, so phases "
                    "cannot be timed one by one; use eval, which times whole pictures, or leave coverage out"
                )
            label = preset if config.holds else f"{preset} {'/'.join(f'{each:g}' for each in config.ratios)}"
            if config.method in ("toma", *SELECTIONS):
                found[f"lower-bound of {label}"] = Candidate(f"lower-bound of {label}", config.replace(**BOUND))
            found[label] = Candidate(label, config)
    return list(found.values())


def _takes_ratio(preset: str, changes: Mapping[str, Any]) -> bool:
    """Whether a ratio that is asked for counts with a preset, as it does with the default: it neither holds nor has
    ratios for parts."""
    own = MergeConfig() if preset == DEFAULT else load_preset(preset)
    method, *parts = (changes.get(name, getattr(own, name)) for name in ("method", "step_ratios", "block_ratios"))
    return method != "hold" and parts == [None, None]


def phases_of(config: MergeConfig, steps: int) -> list[str]:
    """The phase of every step of an image."""
    schedule = config.schedule
    phases = []
    # Each ratio has maps of its own; a gap is that of the last one.
    selected: dict[float, int] = {}
    weighed: dict[float, int] = {}
    anchored: tuple[float, int] | None = None
    for step in range(steps):
        ratio = config.ratio_at(step / steps)
        if not schedule.merges(step / steps) or ratio == 0:
            phases.append("full")
            continue
        last = anchored[1] if anchored and anchored[0] == ratio else None
        anchor = schedule.anchors(step, last, None if last is None else last / steps)
        phase = schedule.phase(step, selected.get(ratio), weighed.get(ratio), anchor=anchor)
        anchored = (ratio, step) if anchor else anchored
        if phase == "select":
            selected[ratio] = step
        if phase != "reuse":
            weighed[ratio] = step
        label = f"anchor, {phase}" if anchor else phase
        phases.append(f"{label} at {ratio:g}" if config.step_ratios else label)
    return phases


def visits(phases: Sequence[str]) -> dict[int, str | None]:
    """The steps of an image that are run to time every phase, each with the phase it is a lap of: the first that has
    it. Where that one would have to make the maps it is said to reuse, as a bound does, it is no lap; nor is the
    second, before which the device ran dry, since the host makes those maps; the third is one."""
    found: dict[int, str | None] = {}
    for phase in dict.fromkeys(phases):
        steps = [step for step, each in enumerate(phases) if each == phase]
        made = any(before.endswith(_renamed(phase, "select")) for before in phases[: steps[0]])
        *others, lap = steps[:1] if made or "reuse" not in phase else steps[:3]
        found |= {**dict.fromkeys(others), lap: phase}
    return found


def typical_step(phases: Sequence[str]) -> int:
    """The second step, or else the only one, of the most frequent phase: of those that reuse maps, or where none does
    of those that merge, or where nothing is merged of all. The first may also begin an image, or make a bound's maps.
    """
    reused = [phase for phase in phases if phase.startswith("reuse")]
    merged = [phase for phase in phases if "full" not in phase]
    (phase, _), *_ = Counter(reused or merged or phases).most_common(1)
    return [step for step, each in enumerate(phases) if each == phase][:2][-1]


def _renamed(phase: str, name: str) -> str:
    """A phase as if `name` were what it renews."""
    return re.sub("select|reweigh|reuse", name, phase)

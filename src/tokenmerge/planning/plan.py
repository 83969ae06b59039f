"""Plan: which sites merge, which blocks are held, the kind of every step, and what this saves. No tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..config import Hold, Merge, Techniques
from ..families.base import Family
from ..families.calls import DenoiserCall
from ..holding.sites import HeldRun, held_runs
from ..merging.lora import Lora, check_lora, read_lora
from ..merging.methods import method_for
from ..merging.places import MergePlace, merge_places, skip_reasons
from ..runtime.timeline import DUE, FULL, HELD, MERGED, Step, Timeline
from .costs import PlannedGroup, planned_groups
from .tables import counted, table


@dataclass(frozen=True)
class Plan:
    """What `apply` will do to a model and, if the size of the image is known, what that saves."""

    model: str
    family: str
    techniques: Techniques
    sites: tuple[MergePlace, ...] = ()
    runs: tuple[HeldRun, ...] = ()
    groups: tuple[PlannedGroup, ...] = ()
    timeline: tuple[Step, ...] = ()  # for one denoiser call per step
    merging: str = ""  # the preset that merges this model best; empty if it cannot be merged
    lora: Lora | None = field(default=None, compare=False, repr=False)

    @property
    def merged_sites(self) -> tuple[MergePlace, ...]:
        return tuple(site for site in self.sites if not site.skipped)

    @property
    def acting(self) -> Techniques:
        """The techniques that have something to act on."""
        merge, hold = self.techniques
        return Techniques(merge if self.merged_sites else None, hold if self.runs else None)

    @property
    def steps(self) -> Counter[str]:
        """The number of steps of each kind: full, merged, held."""
        return Counter(step.kind for step in self.timeline)

    @property
    def saved(self) -> float:
        """Share of the transformer blocks' multiplications that is saved."""
        return self._share(HELD) + self._share(MERGED) * sum(group.saved for group in self.groups) / self._total

    @property
    def spent(self) -> float:
        """Multiplications that merging itself costs, as a share of the transformer blocks' own."""
        return self._share(MERGED) * sum(group.spent for group in self.groups) / self._total

    def _share(self, kind: str) -> float:
        return self.steps[kind] / len(self.timeline) if self.timeline else 0.0

    @property
    def _total(self) -> float:
        return sum(group.total for group in self.groups) or 1.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "family": self.family,
            "techniques": self.techniques.to_list(),
            "sites": [
                {"name": site.name, "component": site.component, "group": site.group, "skipped": site.skipped}
                for site in self.sites
            ],
            "runs": [[block.name for block in run.blocks] for run in self.runs],
            "groups": [
                {
                    "name": group.name,
                    "grid": group.grid,
                    "regions": group.regions,
                    "tokens": group.tokens,
                    "merged": group.merged,
                    "blocks": group.blocks,
                    "merged_blocks": group.merged_blocks,
                    "merges": group.merges,
                    "saved": group.saved,
                    "spent": group.spent,
                    "total": group.total,
                }
                for group in self.groups
            ],
            "steps": dict(self.steps),
            "saved": self.saved,
            "spent": self.spent,
        }

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.family}): {self._headline()}"]
        if self.groups:
            lines += ["", self._table(), "", *self._costs()]
        reasons = skip_reasons(self.sites)
        if reasons:
            lines += ["", "Not merged:", *(f"  {count} x {reason}" for reason, count in reasons.items())]
        return "\n".join(lines)

    def _headline(self) -> str:
        merge, hold = self.techniques
        parts = []
        if merge is not None:
            how = f"{merge.method} at ratio {merge.ratio:g}, once per {merge.sites}"
            parts.append(f"{how}, {len(self.merged_sites)} of {counted(len(self.sites), 'site')}")
            if merge.lora is not None:
                parts.append(f"healed by {merge.lora}")
        if hold is not None:
            blocks = sum(len(run.blocks) for run in self.runs)
            noun = "stage" if any(run.stages for run in self.runs) else "block"
            among = "among " if any(run.generic for run in self.runs) else ""
            how = f"every {hold.every}" if hold.every is not None else f"within {hold.tolerance:g}"
            what = "the clean prediction" if any(run.whole for run in self.runs) else counted(blocks, noun)
            parts.append(f"hold {how}, {among}{what}")
        return "; ".join(parts) or "nothing is applied"

    def _table(self) -> str:
        header = ["group", "blocks", "grid"]
        rows = [[group.name, str(group.blocks), group.grid] for group in self.groups]
        if self.techniques.merge is not None:
            header += ["merged", "tokens", "regions", "saved", "spent"]
            for row, group in zip(rows, self.groups, strict=True):
                row += [str(group.merged_blocks), f"{group.tokens} -> {group.merged}", group.regions or "not merged"]
                row += [f"{group.saved / self._total:.1%}", f"{group.spent / self._total:.1%}"]
        return table(header, rows)

    def _costs(self) -> list[str]:
        """The kinds of steps, and what they save."""
        kinds = ", ".join(f"{self.steps[kind]} {kind}" for kind in (FULL, MERGED, HELD) if self.steps[kind])
        spent = f" and spends {self.spent:.1%}" if self.techniques.merge is not None else ""
        lines = [
            f"Of {counted(len(self.timeline), 'step')}: {kinds}.",
            f"Multiplications in transformer blocks, by the paper's cost model: this saves {self.saved:.1%}{spent}.",
        ]
        if any(run.stages for run in self.runs):
            lines.append("The other layers of the stages are held too, but not counted.")
        if self.merged_sites and self.saved <= self.spent:
            lines.append("By this count, the model would be slower than plain; raise the ratio.")
        return lines


def make_plan(
    denoiser: nn.Module,
    family: Family,
    techniques: Techniques,
    call: DenoiserCall | None = None,
    steps: int = 0,
    levels: Sequence[float] | None = None,
) -> Plan:
    """The plan for a denoiser.

    call: the call made for an image of some size; with it, the plan has groups and costs. levels: the ratio of noise to
    signal at every step, if the scheduler gives them.
    """
    merge, hold = techniques
    sites = merge_places(denoiser, family, merge) if merge is not None else ()
    lora = None
    if merge is not None and merge.lora is not None:
        lora = read_lora(merge.lora)
        check_lora(lora, merge, denoiser, [site.block for site in sites if not site.skipped])
    runs: tuple[HeldRun, ...] = ()
    if hold is not None and hold.acts:
        if hold.what == "auto":
            raise ValueError("resolve Hold's what='auto' before planning")
        runs = held_runs(denoiser, family, hold.what)
    timeline = timeline_of(merge if any(not site.skipped for site in sites) else None, hold)
    kinds = tuple(timeline.steps(steps, levels))
    groups: tuple[PlannedGroup, ...] = ()
    if call is not None and call.grids:
        groups = tuple(planned_groups(family.blocks(denoiser), sites, merge, call, kinds))
    preset = "" if family.unmergeable(denoiser) else family.merging
    return Plan(type(denoiser).__name__, family.name, techniques, sites, runs, groups, kinds, preset, lora)


def timeline_of(merge: Merge | None, hold: Hold | None) -> Timeline:
    """The timeline of these techniques. Give only those that act somewhere."""
    return Timeline(merge, hold, method_for(merge).RENEWS if merge is not None else DUE)

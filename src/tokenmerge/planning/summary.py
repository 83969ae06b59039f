"""Summary: what is applied to a model, and what its last image did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import Hold
from ..runtime.timeline import FULL, HELD, MERGED
from .drift import Drift
from .plan import Plan
from .tables import counted, table

# Of an image's steps: where fewer are held, a summary says what saves more.
_LITTLE = 0.15
_COLUMNS = ("group", "sites", "grid", "tokens", "regions", "selected", "weighed", "backend")


@dataclass(frozen=True)
class Summary:
    """What is applied, and what ran. Print it, or take `to_dict()`."""

    plan: Plan | None
    groups: tuple[dict[str, Any], ...] = ()  # of merging
    compiled: str = "not by tokenmerge.compile"
    residual_bytes: int = 0  # that Hold keeps
    held: str = ""  # what is, where no table says it
    steps: dict[str, int] = field(default_factory=dict)  # of the last image: full, merged, held, skipped
    nonsense: int = 0  # errors of Hold in the last image that were not finite
    drift: Drift | None = None  # of the last image, by the errors of Hold
    others: tuple[Summary, ...] = ()  # of a pipeline's other denoisers

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_dict() if self.plan else None,
            "groups": list(self.groups),
            "compiled": self.compiled,
            "residual_bytes": self.residual_bytes,
            "held": self.held,
            "steps": self.steps,
            "nonsense": self.nonsense,
            "drift": None if self.drift is None else self.drift._asdict(),
            "others": [other.to_dict() for other in self.others],
        }

    def __str__(self) -> str:
        return "\n\n".join([self._told(), *map(str, self.others)])

    def _told(self) -> str:
        compiled = f"Compiled: {self.compiled}."
        if self.plan is None:
            return f"No technique is applied.\n{compiled}"
        lines = [str(self.plan), compiled]
        if self.held:
            lines.append(self.held)
        if self.residual_bytes:
            lines.append(f"Residuals take {self.residual_bytes / 2**20:.1f} MiB.")
        if self.steps:
            merging = f'apply(pipe, "{self.plan.merging}")' if self.plan.merging else ""
            lines.append(told_steps(self.steps, self.plan.techniques.hold, merging))
        if self.drift is not None:
            lines.append(str(self.drift))
        if self.nonsense:
            found = counted(self.nonsense, "error")
            lines.append(
                f"Hold: {found} of the last image not finite (overflow?); the second step after each ran in full."
            )
        if self.groups:
            rows = [[str(group[column]) for column in _COLUMNS] for group in self.groups]
            lines += ["", table(list(_COLUMNS), rows)]
        return "\n".join(lines)


def told_steps(steps: Mapping[str, int], hold: Hold | None = None, merging: str = "Merge(ratio=0.5)") -> str:
    """What the steps of an image did, by kind, and what saves more where little was saved. hold: that was applied.
    merging: what merges the model; empty if nothing can."""
    named = {FULL: "full", MERGED: "merged", HELD: "held", "skipped": "skipped by a cache"}
    told = ", ".join(f"{steps[kind]} {name}" for kind, name in named.items() if steps.get(kind))
    told = f"Steps of the last image: {told}"
    total, held = sum(steps.values()), steps.get(HELD, 0)
    if not steps.get(MERGED) and not held:
        saved = "merging saved nothing" if steps.get("skipped") else "nothing was saved"
        return f"{told}: {saved}. At more drift: {_saves_more(steps, merging)}."
    # With every=1 nobody asks for held steps.
    asked = hold is not None and hold.acts
    if (asked or held) and held < _LITTLE * total:
        share = f"{held} of {total} steps were held, less than {100 * _LITTLE:.0f} %"
        return f"{told}. {share}: Hold saves little. At more drift: {_saves_more(steps, merging)}."
    return f"{told}."


def _saves_more(steps: Mapping[str, int], merging: str) -> str:
    # The first and the last step always run.
    few = sum(steps.values()) < 3
    hold = "Hold(every=2, start=0) in 3 steps or more" if few else "Hold(every=2, start=0), which holds more"
    if not merging:
        return hold
    merge = "a Merge of a higher ratio" if steps.get(MERGED) else f"{merging}, which saves work in every step"
    return f"{hold}, or {merge}"

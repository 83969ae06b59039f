"""Summary: what is applied to a model, and what its last image did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..runtime.timeline import FULL, HELD, MERGED
from .plan import Plan
from .tables import table

_COLUMNS = ("group", "sites", "grid", "tokens", "regions", "selected", "weighed", "backend")


@dataclass(frozen=True)
class Summary:
    """What is applied, and what ran. Print it, or take `to_dict()`."""

    plan: Plan | None
    groups: tuple[dict[str, Any], ...] = ()  # of merging
    compiled: str = "not by tokenmerge.compile"
    residual_bytes: int = 0  # that Hold keeps
    steps: dict[str, int] = field(default_factory=dict)  # of the last image: full, merged, held, skipped

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_dict() if self.plan else None,
            "groups": list(self.groups),
            "compiled": self.compiled,
            "residual_bytes": self.residual_bytes,
            "steps": self.steps,
        }

    def __str__(self) -> str:
        compiled = f"Compiled: {self.compiled}."
        if self.plan is None:
            return f"No technique is applied.\n{compiled}"
        lines = [str(self.plan), compiled]
        if self.residual_bytes:
            lines.append(f"Residuals take {self.residual_bytes / 2**20:.1f} MiB.")
        if self.steps:
            lines.append(told_steps(self.steps))
        if self.groups:
            rows = [[str(group[column]) for column in _COLUMNS] for group in self.groups]
            lines += ["", table(list(_COLUMNS), rows)]
        return "\n".join(lines)


def told_steps(steps: Mapping[str, int]) -> str:
    """What the steps of an image did, by kind."""
    named = {FULL: "full", MERGED: "merged", HELD: "held", "skipped": "skipped by a cache"}
    told = ", ".join(f"{steps[kind]} {name}" for kind, name in named.items() if steps.get(kind))
    if steps.get(MERGED) or steps.get(HELD):
        return f"Steps of the last image: {told}."
    saved = "merging saved nothing" if steps.get("skipped") else "nothing was saved"
    return (
        f"Steps of the last image: {told}: {saved}. For so few steps, at more drift: Hold(start=0), or a Merge that "
        "acts in every step."
    )

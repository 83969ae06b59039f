"""Summary: what is applied to a model, and what happened in its last image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import Hold
from ..runtime.timeline import FULL, HELD, MERGED
from .drift import Drift
from .plan import Plan
from .tables import table

# If a smaller share of the steps was held, a summary says what would save more.
_LITTLE = 0.15
_COLUMNS = ("group", "sites", "grid", "tokens", "regions", "selected", "weighed", "backend")


@dataclass(frozen=True)
class Summary:
    """What is applied, and what happened in the last image. Print it, or use `to_dict()`."""

    plan: Plan | None
    groups: tuple[dict[str, Any], ...] = ()  # one for each group that merges
    compiled: str = "not by tokenmerge.compile"
    residual_bytes: int = 0  # memory of the residuals that Hold keeps
    held: str = ""  # what is held, for models without a table
    steps: dict[str, int] = field(default_factory=dict)  # number of steps: full, merged, held, skipped
    nonsense: int = 0  # number of Hold's errors that were not finite
    drift: Drift | None = None  # estimated from Hold's errors
    others: tuple[Summary, ...] = ()  # summaries of the pipeline's other denoisers

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
        return "\n\n".join([self._text(), *map(str, self.others)])

    def _text(self) -> str:
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
            lines.append(describe_steps(self.steps, self.plan.techniques.hold, merging))
        if self.drift is not None:
            lines.append(str(self.drift))
        if self.nonsense:
            lines.append(
                f"Errors of Hold that were not finite in the last image (overflow?): {self.nonsense}. "
                "The second step after each ran in full."
            )
        if self.groups:
            rows = [[str(group[column]) for column in _COLUMNS] for group in self.groups]
            lines += ["", table(list(_COLUMNS), rows)]
        return "\n".join(lines)


def describe_steps(steps: Mapping[str, int], hold: Hold | None = None, merging: str = "Merge(ratio=0.5)") -> str:
    """The number of steps of each kind in an image and, if few were saved, what would save more.

    hold: the one applied. merging: what to write to merge the model; empty if it cannot be merged.
    """
    names = {FULL: "full", MERGED: "merged", HELD: "held", "skipped": "skipped by a cache"}
    counts = ", ".join(f"{steps[kind]} {name}" for kind, name in names.items() if steps.get(kind))
    text = f"Steps of the last image: {counts}"
    total, held = sum(steps.values()), steps.get(HELD, 0)
    if not steps.get(MERGED) and not held:
        saved = "merging saved nothing" if steps.get("skipped") else "nothing was saved"
        return f"{text}: {saved}. To save more, with more drift: {_saves_more(steps, merging)}."
    # Hold(every=1) asks for no held steps.
    expected = hold is not None and hold.acts
    if (expected or held) and held < _LITTLE * total:
        share = f"{held} of {total} steps were held, less than {100 * _LITTLE:.0f} %"
        return f"{text}. {share}: Hold saves little. To save more, with more drift: {_saves_more(steps, merging)}."
    return f"{text}."


def _saves_more(steps: Mapping[str, int], merging: str) -> str:
    # The first and the last step always run.
    few = sum(steps.values()) < 3
    hold = "Hold(every=2, start=0) in at least 3 steps" if few else "Hold(every=2, start=0), which holds more"
    if not merging:
        return hold
    merge = "a Merge with a higher ratio" if steps.get(MERGED) else f"{merging}, which saves work in every step"
    return f"{hold}, or {merge}"

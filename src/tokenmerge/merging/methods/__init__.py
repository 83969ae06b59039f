"""Methods: how tokens are merged. All have one interface, so a comparison changes one word of the technique."""

from __future__ import annotations

from typing import Any

from ...config import Merge
from .base import Given, Method, Rates
from .bipartite import Bipartite
from .downsample import Pool, ToDo
from .lower_bound import LowerBound
from .toma import Toma

__all__ = ["Given", "Method", "Rates", "method_for"]

_METHODS: dict[str, Method[Any]] = {
    "toma": Toma(),
    "random": Toma(unread=("selection",)),
    "uniform": Toma(unread=("selection", "seed")),
    "lower-bound": LowerBound(),
    "pool": Pool(),
    "tomesd": Bipartite(),
    "todo": ToDo(),
}


def method_for(technique: Merge, depth: float = 0.0) -> Method[Any]:
    """The method at a `depth`, the share of the model's blocks that run before. ToFu prunes in the first half only."""
    if technique.method == "tofu":
        return Bipartite("prune", "pruned") if depth < 0.5 else Bipartite("mlerp", "merged")
    return _METHODS[technique.method]

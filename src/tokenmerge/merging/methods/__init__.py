"""Methods: how tokens are merged. One interface; a comparison changes one word of the config."""

from __future__ import annotations

from typing import Any

from ...config import MergeConfig
from .base import Given, Method
from .bipartite import Bipartite
from .downsample import Pool, ToDo
from .hold import Hold
from .lower_bound import LowerBound
from .toma import Toma

__all__ = ["Given", "Method", "method_for"]

_METHODS: dict[str, Method[Any]] = {
    "toma": Toma(),
    "random": Toma(),
    "uniform": Toma(),
    "lower-bound": LowerBound(),
    "pool": Pool(),
    "tomesd": Bipartite(),
    "todo": ToDo(),
    "hold": Hold(),
    # Merges nothing, but its plan shows what there would be to merge.
    "none": Toma(),
}


def method_for(config: MergeConfig, depth: float = 0.0) -> Method[Any]:
    """The method at a `depth` of the model, the share of its blocks that run before: ToFu's first half prunes."""
    if config.method == "tofu":
        return Bipartite("prune", "pruned") if depth < 0.5 else Bipartite("mlerp", "merged")
    return _METHODS[config.method]

"""Techniques as named speeds, from 'plain' to 'fastest', for people who do not want to know fields."""

from __future__ import annotations

from ..config import Hold, Techniques

# From the plain picture to the fewest full steps. Each picture decides by its own errors.
SPEEDS: dict[str, Techniques] = {
    "plain": Techniques(),
    "careful": Techniques(hold=Hold(tolerance=0.05)),
    "balanced": Techniques(hold=Hold()),
    "fast": Techniques(hold=Hold(tolerance=0.4)),
    "fastest": Techniques(hold=Hold(tolerance=0.8)),
}
# Speeds for batches: steps are fixed, so that no picture depends on the others.
BATCHED_SPEEDS: dict[str, Techniques] = {
    "plain": Techniques(),
    "careful": Techniques(hold=Hold(every=2)),
    "balanced": Techniques(hold=Hold(every=3)),
    "fast": Techniques(hold=Hold(every=5)),
    "fastest": Techniques(hold=Hold(every=8)),
}
DEFAULT = "balanced"

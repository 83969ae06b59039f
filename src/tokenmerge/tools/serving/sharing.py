"""Whether pictures may share a batch. Each must come out as it would alone."""

from __future__ import annotations

from torch import nn

from ...config import Merge, Techniques
from ...families import Family, family_of

# Methods and selections that decide by a sample's own tokens or by position. Others draw one pattern per batch.
_METHODS = ("toma", "pool", "todo", "uniform")
_SELECTIONS = ("facility-location", "graph-cut", "uniform")


def may_share(techniques: Techniques, denoiser: nn.Module) -> bool:
    """Whether nothing is decided for a batch as a whole. The denoiser may be on the meta device.

    A Hold with a fixed `every` decides by the number of the step; without, by the errors of all samples together.
    A Merge shares destinations where samples share tables with a row for every token.
    """
    merge, hold = techniques
    if hold is not None and hold.every is None:
        return False
    return merge is None or _merges_apart(merge, family_of(denoiser), denoiser)


def _merges_apart(merge: Merge, family: Family, denoiser: nn.Module) -> bool:
    chosen = merge.method in _METHODS and (merge.method != "toma" or merge.selection in _SELECTIONS)
    shared = any(each.axis == 0 for block in family.blocks(denoiser) for each in block.kind.ports.per_token)
    return chosen and not shared

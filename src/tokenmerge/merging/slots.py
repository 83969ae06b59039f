"""Slot: the tensors of a group for one image size, and whose maps they hold."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from ..runtime.clock import MAX_CALLS
from .clustermap import ClusterMap
from .mergemap import MergeMap


@dataclass
class Made:
    """The image and the steps in which the maps of one turn were made."""

    image: int
    selected: int | None = None
    weighed: int | None = None


@dataclass(eq=False)
class Slot:
    """The tensors that the layers of a group read for one image size. Each turn of a step has its own maps in them."""

    map: MergeMap | ClusterMap
    # [W, 0], where W image tokens lie before or after those that merge, and never merge. Tensors, not numbers: the
    # compiler takes a tensor's size for a variable.
    before: Tensor
    after: Tensor
    resident: Hashable | None = None  # the turn whose maps the tensors hold
    made: dict[Hashable, Made] = field(default_factory=dict)  # by turn
    saved: dict[Hashable, list[Tensor]] = field(default_factory=dict)  # maps of the other turns
    image: int = -1  # the last image that used this slot
    lent: bool = False  # whether a backward pass may still read the tensors, which then must not change

    @property
    def merges(self) -> bool:
        """Whether any token is removed at this size."""
        return self.map.merged_count < self.map.token_count

    def load(self, turn: Hashable) -> None:
        """Load the maps of `turn` into the tensors, and save those they held."""
        if self.resident == turn:
            return
        if self.resident not in (None, MAX_CALLS):
            self.saved[self.resident] = [tensor.clone() for tensor in self.map.tensors]
        for tensor, kept in zip(self.map.tensors, self.saved.pop(turn, ()), strict=False):
            tensor.copy_(kept)
        self.resident = turn

    def made_for(self, turn: Hashable, image: int) -> Made:
        known = self.made.get(turn)
        # All turns from MAX_CALLS on share one entry, so each selects anew.
        if known is None or known.image != image or turn == MAX_CALLS:
            known = self.made[turn] = Made(image)
        return known

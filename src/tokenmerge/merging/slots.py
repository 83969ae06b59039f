"""Slot: the tensors of a group for one size of image, and whose maps they hold."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from ..runtime.clock import MAX_CALLS
from .clustermap import ClusterMap
from .mergemap import MergeMap


@dataclass
class Made:
    """When the maps of one call of the step were made."""

    image: int
    selected: int | None = None
    weighed: int | None = None


@dataclass(eq=False)
class Slot:
    """The tensors that the layers of a group read for one size of image."""

    map: MergeMap | ClusterMap
    # [W, 0] for the W image tokens that never merge, before those that do and after them: of a tensor the compiler
    # takes the size for a variable.
    before: Tensor
    after: Tensor
    resident: Hashable | None = None  # the call of a step whose maps the tensors hold
    made: dict[Hashable, Made] = field(default_factory=dict)  # by call
    saved: dict[Hashable, list[Tensor]] = field(default_factory=dict)  # maps of the other calls
    image: int = -1  # the last one that used it
    lent: bool = False  # whether a backward pass may still read its tensors, which then must not change

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that belongs to one call of a step."""
        return self.map.tensors

    @property
    def merges(self) -> bool:
        """Whether any token is removed at this size."""
        return self.map.merged_count < self.map.token_count

    def bring_in(self, call: Hashable) -> None:
        """Let the tensors hold the maps of `call`, and keep those they held."""
        if self.resident == call:
            return
        if self.resident not in (None, MAX_CALLS):
            self.saved[self.resident] = [tensor.clone() for tensor in self.tensors]
        for tensor, kept in zip(self.tensors, self.saved.pop(call, ()), strict=False):
            tensor.copy_(kept)
        self.resident = call

    def made_for(self, call: Hashable, image: int) -> Made:
        known = self.made.get(call)
        # Later calls than are kept apart select anew.
        if known is None or known.image != image or call == MAX_CALLS:
            known = self.made[call] = Made(image)
        return known

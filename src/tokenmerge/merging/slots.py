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


@dataclass
class _History:
    """Whose maps a slot's tensors hold, and the maps of the other calls of a step."""

    resident: Hashable | None = None
    made: dict[Hashable, Made] = field(default_factory=dict)
    saved: dict[Hashable, list[Tensor]] = field(default_factory=dict)

    def bring_in(self, call: Hashable, tensors: list[Tensor]) -> None:
        """Swap `tensors` so that they hold the maps of `call`, keeping those they held."""
        if self.resident == call:
            return
        if self.resident not in (None, MAX_CALLS):
            self.saved[self.resident] = [tensor.clone() for tensor in tensors]
        for tensor, kept in zip(tensors, self.saved.pop(call, ()), strict=False):
            tensor.copy_(kept)
        self.resident = call

    def made_for(self, call: Hashable, image: int) -> Made:
        known = self.made.get(call)
        # Later calls than are kept apart select anew.
        if known is None or known.image != image or call == MAX_CALLS:
            known = self.made[call] = Made(image)
        return known


@dataclass(eq=False)
class Slot:
    """The tensors that the layers of a group read for one size of image."""

    map: MergeMap | ClusterMap
    # [W, 0] for the W image tokens that never merge, before those that do and after them: of a tensor the compiler
    # takes the size for a variable.
    before: Tensor
    after: Tensor
    history: _History = field(default_factory=_History)
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

"""Slot: the tensors of a group for one size of image, and whose maps they hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .clustermap import ClusterMap
from .mergemap import MergeMap

# Denoiser calls within one step that keep maps of their own (guidance makes two or three). Later ones select anew.
MAX_CALLS = 4


@dataclass
class Record:
    """When the maps of one call of the step were made."""

    image: int
    selected: int | None = None
    weighed: int | None = None
    rotary: bool = False  # whether the rotary tables follow the selection
    coverages: list[float] | None = None  # of the selection, once they have been read from the device


@dataclass
class _History:
    """Whose maps a slot's tensors hold, and the maps of the other calls of a step."""

    resident: int | None = None
    records: dict[int, Record] = field(default_factory=dict)
    saved: dict[int, list[Tensor]] = field(default_factory=dict)

    def bring_in(self, call: int, tensors: list[Tensor]) -> None:
        """Swap `tensors` so that they hold the maps of `call`, keeping those they held."""
        if self.resident == call:
            return
        if self.resident is not None and self.resident < MAX_CALLS:
            self.saved[self.resident] = [tensor.clone() for tensor in tensors]
        for tensor, kept in zip(tensors, self.saved.pop(call, ()), strict=False):
            tensor.copy_(kept)
        self.resident = call

    def record(self, call: int, image: int) -> Record:
        known = self.records.get(call)
        if known is None or known.image != image or call == MAX_CALLS:
            return self.new_record(call, image)
        return known

    def new_record(self, call: int, image: int) -> Record:
        """Forget what `call` had."""
        self.records[call] = Record(image)
        return self.records[call]


@dataclass
class Slot:
    """The tensors that the layers of a group read for one size of image."""

    map: MergeMap | ClusterMap
    rotary: list[Tensor]  # cosines and sines [T + M, D], where the model has them
    # fp32 [buckets], where a target chooses the ratio; written by a selection, from the ratio of this slot on.
    coverages: Tensor | None = None
    history: _History = field(default_factory=_History)
    image: int = -1  # the last one that used it

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that belongs to one call of a step."""
        measured = [] if self.coverages is None else [self.coverages]
        return [*self.map.tensors, *self.rotary, *measured]

    @property
    def merges(self) -> bool:
        """Whether any token is removed at this size."""
        return self.map.merged_count < self.map.token_count

"""The interface of all methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...config import SITES, Merge
from ...errors import TokenMergeError
from ...families.calls import TokenGrid
from ...runtime.timeline import DUE
from ..clustermap import ClusterMap
from ..grid import Layout, Partition, partition_grids
from ..mergemap import MapSpace, MergeMap
from ..ops import reference

Map = TypeVar("Map", MergeMap, ClusterMap)

# Fields that decide how ToMA weighs, and when it renews maps.
WEIGHTS = ("similarity", "temperature", "unmerge", "destinations_every", "weights_every")
# Fields that decide the regions of maps.
REGIONS = ("regions", "merge_regions")


@dataclass(frozen=True)
class Given:
    """What a map is made from."""

    tokens: Tensor  # [B, N, C]
    partition: Partition
    technique: Merge  # as `Method.effective` returns it
    generator: torch.Generator
    shared: bool  # whether all samples of a batch have the same destinations
    ops: ModuleType = reference

    @property
    def samples(self) -> int:
        """Sets of destinations: one per sample, or one for the whole batch."""
        return 1 if self.shared else self.tokens.shape[0]


class Rates(NamedTuple):
    """How often maps are renewed: shares of the merged steps."""

    selected: float
    weighed: float


class Method(ABC, Generic[Map]):
    """How the layers of a group merge. It has no state, and takes its randomness from the generator only."""

    # When maps are renewed: when the technique's fields say so, once per image, or always. If always, every block has
    # its own map, made from the tokens that enter it.
    RENEWS: ClassVar[str] = DUE
    KEYS_VALUES: ClassVar[bool] = False  # whether only keys and values see merged tokens, and nothing is unmerged
    SITES: ClassVar[tuple[str, ...]] = SITES  # the kinds of site where it can be applied
    label: str = ""  # names its groups, if the method differs between layers
    unread: tuple[str, ...] = ()  # fields that it never reads, or sets itself

    def effective(self, technique: Merge) -> Merge:
        """The technique that takes effect, with the fields that the method sets. Raises if the method cannot do it."""
        return technique

    def check_read(self, technique: Merge) -> None:
        """Refuse a changed field that has no effect, unless it has the value that the method sets anyway."""
        usual = Merge()
        own = self.effective(technique.replace(**{name: getattr(usual, name) for name in self.unread}))
        for name in self.unread:
            value = getattr(technique, name)
            if value not in (getattr(usual, name), getattr(own, name)):
                raise TokenMergeError(
                    f"{name} is {value!r}, but method {technique.method!r} does not read it; leave it out, or use "
                    "method='toma'"
                )

    # All methods below receive the effective technique.

    def splits(self, technique: Merge) -> bool:
        """Whether regions merge independently of each other, so that processes can share an image."""
        return False

    def needs_host(self, technique: Merge) -> bool:
        """Whether renewing a map needs the host, for random numbers, index tables or a solver. A CUDA graph cannot
        record that."""
        return False

    def partition(self, grids: tuple[TokenGrid, ...], technique: Merge) -> Partition:
        return partition_grids(grids, technique)

    @abstractmethod
    def empty_map(self, layout: Layout, ops: ModuleType, technique: Merge, space: MapSpace) -> Map:
        """A map of the right shapes, for `renew` to fill."""

    @abstractmethod
    def map_over(self, layout: Layout, ops: ModuleType, tensors: list[Tensor]) -> Map:
        """A map over the `tensors` of another map."""

    @abstractmethod
    def renew(self, merge_map: Map, phase: str, given: Given) -> None:
        """Fill a map in place: all of it in phase "select", its weights in "reweigh"."""

    @abstractmethod
    def spent(self, layout: Layout, width: int, technique: Merge, rates: Rates, *, blocks: int, merges: int) -> float:
        """Multiplications that merging itself costs in one denoiser call, in a group that merges `merges` times in
        `blocks` blocks."""


class LinearMethod(Method[MergeMap]):
    """Destinations and weights by region. Merging and unmerging are matrix products."""

    @abstractmethod
    def select(self, given: Given) -> Tensor:
        """Destinations [S, R, k] by selection region, as row-major token indices; S is `given.samples`."""

    @abstractmethod
    def weigh(self, given: Given, destinations: Tensor) -> tuple[Tensor, Tensor]:
        """Merge weights [B, R, k, n] and unmerge weights [B, R, n, k] by merging region. Rows of both sum to 1."""

    def splits(self, technique: Merge) -> bool:
        return "whole" not in (technique.select_in.kind, technique.merge_in.kind)

    def making(self, layout: Layout, width: int, technique: Merge, rates: Rates) -> float:
        """Multiplications for selection and weights in one denoiser call."""
        return 0.0

    def empty_map(self, layout: Layout, ops: ModuleType, technique: Merge, space: MapSpace) -> MergeMap:
        kinds = (technique.select_in.kind, technique.merge_in.kind)
        ordered = "tile" in kinds and kinds[1] != "whole"
        return MergeMap.empty(layout, ops, space, ordered=ordered)

    def map_over(self, layout: Layout, ops: ModuleType, tensors: list[Tensor]) -> MergeMap:
        return MergeMap.over(layout, ops, tensors)

    def renew(self, merge_map: MergeMap, phase: str, given: Given) -> None:
        layout = merge_map.layout
        if phase == "select":
            destinations = self.select(given)
        else:
            destinations = merge_map.destinations.unflatten(1, (layout.select_regions, layout.select_count))
        merge_map.fill(given.partition, destinations, *self.weigh(given, destinations))

    def spent(self, layout: Layout, width: int, technique: Merge, rates: Rates, *, blocks: int, merges: int) -> float:
        return self.making(layout, width, technique, rates) + 2 * merges * layout.tokens * layout.merge_count * width


class ClusterMethod(Method[ClusterMap]):
    """Clusters by index. Merging is a gather and a scatter, unmerging a gather."""

    rule: str  # one of `clustermap.RULES`

    def effective(self, technique: Merge) -> Merge:
        if technique.backend == "triton":
            raise TokenMergeError(
                f"method {technique.method!r} has no kernels; use backend='auto' or backend='reference'"
            )
        return technique.replace(backend="reference")

    def empty_map(self, layout: Layout, ops: ModuleType, technique: Merge, space: MapSpace) -> ClusterMap:
        return ClusterMap.empty(self.rule, layout, space)

    def map_over(self, layout: Layout, ops: ModuleType, tensors: list[Tensor]) -> ClusterMap:
        return ClusterMap(self.rule, *tensors)

"""ClusterMap: the map of methods that put every token into one cluster, with indices in place of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import Layout
from .mergemap import MapSpace

# What a cluster becomes: the mean of its tokens; its destination alone; or a token with the direction of the mean and
# the largest norm in the cluster (MLERP).
RULES = ("mean", "prune", "mlerp")


@dataclass(frozen=True)
class ClusterMap:
    """One cluster per destination. A refresh fills its tensors in place, and compiled code reads them as inputs.

    The interface is that of `MergeMap`. Merging need not be linear; unmerging copies a cluster's result to its tokens.
    """

    rule: str
    destinations: Tensor  # [S, M] row-major token indices; S is 1 if the batch shares them
    sources: Tensor  # [S, N - M] row-major indices of the tokens that are not destinations
    places: Tensor  # [B, N] place among the merged tokens of every token's cluster

    @classmethod
    def empty(cls, rule: str, layout: Layout, space: MapSpace) -> ClusterMap:
        """A map of the right shapes, for `fill`."""
        samples, merged, tokens = space.samples, layout.merged, layout.tokens
        shapes = [(samples, merged), (samples, tokens - merged), (space.batch, tokens)]
        return cls(rule, *(torch.zeros(shape, dtype=torch.int64, device=space.device) for shape in shapes))

    # Sizes are read off tensors: the compiler would take a plain number in a site for a constant.
    @property
    def token_count(self) -> int:
        return self.places.shape[1]

    @property
    def merged_count(self) -> int:
        return self.destinations.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that a refresh writes."""
        return [self.destinations, self.sources, self.places]

    def fill(self, destinations: Tensor, sources: Tensor, places: Tensor) -> None:
        """Overwrite the tensors in place."""
        for tensor, value in zip(self.tensors, (destinations, sources, places), strict=True):
            tensor.copy_(value)

    def merge(self, tokens: Tensor) -> Tensor:
        """[B, N, C] to [B, M, C], by the rule."""
        merged = _rows(tokens, self.destinations)
        if self.rule == "prune":
            return merged
        # Destinations are in their places already, so only sources move.
        sources, places = _rows(tokens, self.sources), _rows(self.places, self.sources)
        mean = _mean(merged, sources, places)
        if self.rule == "mean":
            return mean
        precise = torch.promote_types(tokens.dtype, torch.float32)
        lengths = [each.to(precise).norm(dim=-1) for each in (merged, sources)]
        largest = lengths[0].scatter_reduce(1, places, lengths[1], "amax")
        return (F.normalize(mean.to(precise), dim=-1) * largest[..., None]).to(tokens.dtype)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None, entered: Tensor | None = None) -> Tensor:
        """[B, M, C] to [B, N, C]: every token gets its cluster's result, plus `residual` [B, N, C]. With `entered`
        [B, M, C], it gets only the change from that."""
        tokens = _rows(merged if entered is None else merged - entered, self.places)
        return tokens if residual is None else residual + tokens

    def owners(self) -> Tensor:
        """[N] the destination, by row-major index, whose result each token of the first sample gets."""
        return self.destinations[0][self.places[0]]


def _samples(batch: int, device: torch.device) -> Tensor:
    return torch.arange(batch, device=device)[:, None]


def _rows(tokens: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B or 1, K] of tokens [B, N, ...], as [B, K, ...]."""
    return tokens[_samples(tokens.shape[0], tokens.device), index]


def _mean(merged: Tensor, sources: Tensor, places: Tensor) -> Tensor:
    """The mean [B, M, C] of every row of merged [B, M, C] and the sources [B, K, C] whose place [B, K] is that row."""
    batch, count, _ = merged.shape
    # One index per row is much faster than one per number.
    rows = (places + count * _samples(batch, places.device)).flatten()
    sums = merged.flatten(0, 1).index_add(0, rows, sources.flatten(0, 1))
    # In fp32: half precision cannot count far.
    members = torch.ones(batch * count, device=rows.device).index_add(
        0, rows, torch.ones(len(rows), device=rows.device)
    )
    return (sums / members[:, None]).to(merged.dtype).unflatten(0, (batch, count))

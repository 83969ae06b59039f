"""The specification: every operation of token merging in plain PyTorch, vectorised over batch and regions.

Similarity, selection and softmax accumulate in fp32, whatever the tokens' dtype. Kernels have the same signatures and
are tested against this file. Section numbers refer to the ToMA paper.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grid import invert_order, join_regions, split_regions

# Bits of an fp32 sum, minus one for a gain's sign and growth; and the fewest and most bits that a similarity keeps. The
# most must still round a token's similarity to itself to 1, which is off by a few roundings.
_SUM_BITS = 22
_LEAST_BITS, MOST_BITS = 14, 18
# Share of the best gain that stochastic greedy may lose in expectation.
_STOCHASTIC_LOSS = 0.1
_RIDGE = 1e-6


def select(
    tokens: Tensor,
    order: Tensor | None,
    regions: int,
    count: int,
    *,
    selection: str = "facility-location",
    similarity: str = "cosine",
    shared: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose `count` destinations in every region (section 4.1).

    tokens: [B, N, C] row-major; order: [N] token indices region by region, or None. Returns int64 [S, R, count]
    distinct row-major token indices in selection order. S is B, or 1 if `shared`: then all samples have the same
    destinations, chosen by the sum of their gains.
    """
    batch, token_count, _ = tokens.shape
    size = token_count // regions
    samples = 1 if shared else batch
    if selection == "uniform":
        chosen = uniform_destinations(size, count, tokens.device).expand(samples, regions, count)
    elif selection == "random":
        keys = _random((samples, regions, size), tokens.device, generator)
        chosen = keys.topk(count, dim=-1).indices
    else:
        pairs = pairwise_similarity(split_regions(tokens, order, regions), similarity)
        if selection == "graph-cut":
            chosen = select_graph_cut(pairs.sum(0, keepdim=True) if shared else pairs, count)
        else:
            if shared:
                pairs = pairs.transpose(0, 1).flatten(1, 2)[None]
            if selection == "stochastic":
                chosen = select_stochastic(pairs, count, generator)
            else:
                chosen = select_destinations(with_exact_sums(pairs) if similarity == "cosine" else pairs, count)
    indices = torch.arange(token_count, device=tokens.device) if order is None else order
    return indices.view(regions, size)[torch.arange(regions, device=tokens.device)[:, None], chosen]


def pairwise_similarity(regions: Tensor, similarity: str) -> Tensor:
    """fp32 [B, R, n, n] from [B, R, n, C]: cosine, or the dot product over sqrt(C). NaN counts as no similarity."""
    directions = _directions(regions, similarity)
    return torch.nan_to_num(directions @ directions.transpose(-1, -2), nan=0.0)


def with_exact_sums(similarity: Tensor) -> Tensor:
    """Cosine similarities [B, R, m, n], rounded so that sums over up to 256 sources are exact in fp32.

    Two tokens that are nearest to each other tie. Rounding would break the tie by batch size, order of summation or
    compiler; with exact sums the lower index wins.
    """
    scale = 2.0 ** sum_bits(similarity.shape[-2])
    return (similarity * scale + 0.5).floor() / scale


def sum_bits(sources: int) -> int:
    """Fractional bits of a similarity whose sums over this number of sources are to be exact."""
    return min(MOST_BITS, max(_LEAST_BITS, _SUM_BITS - math.ceil(math.log2(sources))))


def select_destinations(similarity: Tensor, count: int) -> Tensor:
    """Greedily pick `count` destinations that maximise coverage, sum_i max_j S_ij (facility location).

    similarity: [B, R, m, n], sources by candidates; returns int64 [B, R, count] in selection order. Ties go to the
    lowest index.
    """
    gains = similarity.sum(-2)
    covered: Tensor | None = None
    chosen = []
    taken = torch.zeros_like(gains, dtype=torch.bool)
    for _ in range(count):
        if covered is not None:
            gains = (similarity - covered[..., None]).clamp_min_(0).sum(-2)
        pick = gains.masked_fill(taken, -math.inf).argmax(-1, keepdim=True)
        chosen.append(pick)
        taken.scatter_(-1, pick, True)
        column = _column(similarity, pick)
        covered = column if covered is None else torch.maximum(covered, column)
    return torch.cat(chosen, dim=-1)


def select_graph_cut(similarity: Tensor, count: int) -> Tensor:
    """Greedily maximise the graph cut sum_{i, j in T} S_ij - 1/2 sum_{i, j both in T} S_ij; S is clamped at 0.

    similarity: [B, R, n, n], symmetric; returns int64 [B, R, count] in selection order. Unlike coverage, the graph cut
    penalises destinations that resemble each other.
    """
    similarity = similarity.clamp_min(0)
    gains = similarity.sum(-2) - 0.5 * similarity.diagonal(dim1=-2, dim2=-1)
    chosen = []
    for _ in range(count):
        pick = gains.argmax(-1, keepdim=True)
        chosen.append(pick)
        gains = (gains - _column(similarity, pick)).scatter_(-1, pick, -math.inf)
    return torch.cat(chosen, dim=-1)


def select_stochastic(similarity: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Stochastic ("lazier than lazy") greedy: each turn considers only a random sample of the candidates.

    similarity: [B, R, m, n]; returns int64 [B, R, count] in selection order. With n/k ln(1/eps) candidates in a sample,
    the expected value is at least 1 - 1/e - eps of the optimum.
    """
    size = similarity.shape[-1]
    sample = min(size, math.ceil(size / count * math.log(1.0 / _STOCHASTIC_LOSS)))
    keys = _random((count, *similarity.shape[:2], size), similarity.device, generator)
    covered: Tensor | None = None
    chosen = []
    taken = torch.zeros(*similarity.shape[:2], size, dtype=torch.bool, device=similarity.device)
    for turn in range(count):
        candidates = keys[turn].masked_fill(taken, -1.0).topk(sample, dim=-1).indices
        columns = similarity.gather(-1, candidates[..., None, :].expand(*similarity.shape[:3], sample))
        gains = columns if covered is None else (columns - covered[..., None]).clamp_min_(0)
        scores = gains.sum(-2).masked_fill(taken.gather(-1, candidates), -math.inf)
        pick = candidates.gather(-1, scores.argmax(-1, keepdim=True))
        chosen.append(pick)
        taken.scatter_(-1, pick, True)
        column = _column(similarity, pick)
        covered = column if covered is None else torch.maximum(covered, column)
    return torch.cat(chosen, dim=-1)


def uniform_destinations(size: int, count: int, device: torch.device) -> Tensor:
    """int64 [count]: every (size / count)-th place, centred."""
    return (torch.arange(count, device=device) * 2 + 1) * size // (2 * count)


def coverage(similarity: Tensor, destinations: Tensor) -> Tensor:
    """Facility-location value [B, R] of `destinations` [B, R, k], as places in a region; similarity: [B, R, n, n]."""
    index = destinations[..., None, :].expand(*similarity.shape[:3], -1)
    return similarity.gather(-1, index).amax(-1).sum(-1)


def weigh(
    tokens: Tensor,
    order: Tensor | None,
    destinations: Tensor,
    *,
    similarity: str = "cosine",
    temperature: float = 0.001,
) -> tuple[Tensor, Tensor]:
    """Merge and unmerge weights (section 4.2), in the tokens' dtype.

    tokens: [B, N, C] row-major; order: [N] or None; destinations: [S, R, k] row-major token indices, S in {1, B}.
    A [k, n] is the softmax over destinations of similarity / temperature. Its columns sum to 1: every source spreads
    weight 1 over the destinations. Returns merge [B, R, k, n], A with rows divided by their sums, so that each merged
    token is a mean; and unmerge [B, R, n, k], the transpose of A, so that each source gets a mean of merged results.
    """
    sources = _directions(split_regions(tokens, order, destinations.shape[1]), similarity)
    targets = _destination_directions(tokens, destinations, similarity)
    pairs = torch.nan_to_num(targets @ sources.transpose(-1, -2), nan=0.0)
    spread = torch.softmax(pairs / temperature, dim=-2)
    totals = spread.sum(-1, keepdim=True)
    # With dot products a destination may attract no source, not even itself. It then stands for itself.
    alone = _own_places(order, destinations, tokens.shape[1])
    least = torch.finfo(spread.dtype).tiny
    merge = torch.where(totals > least, spread / totals.clamp_min(least), alone)
    return merge.to(tokens.dtype), spread.transpose(-1, -2).to(tokens.dtype)


def pinv_weights(merge: Tensor, fallback: Tensor) -> Tensor:
    """Unmerge by the pseudo-inverse A~^T (A~ A~^T)^-1 of the merge weights, rows scaled to sum to 1.

    merge: [B, R, k, n], rows sum to 1; returns [B, R, n, k]. Uses Cholesky with a relative ridge. Identical tokens make
    the Gram matrix singular: a region where the factorisation fails takes its `fallback` [B, R, n, k].
    """
    # Not every device has fp64; fp32 then relies on the fallback more often.
    precise = merge.to(torch.float32 if merge.device.type == "mps" else torch.float64)
    gram = precise @ precise.transpose(-1, -2)
    ridge = _RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge[..., None])
    factor, failed = torch.linalg.cholesky_ex(gram)
    inverse = torch.cholesky_solve(precise, factor).transpose(-1, -2)
    totals = inverse.sum(-1, keepdim=True)
    rows = inverse / totals
    # A row whose entries cancel out has no sum to scale by.
    usable = (failed == 0)[..., None, None] & (totals.abs() > 1e-3) & rows.isfinite().all(-1, keepdim=True)
    return torch.where(usable, rows, fallback.to(rows.dtype)).to(merge.dtype)


def merge(tokens: Tensor, order: Tensor | None, weights: Tensor) -> Tensor:
    """[B, N, C] to [B, M, C], M = R k, by weights [B, R, k, n]."""
    return (weights.to(tokens.dtype) @ split_regions(tokens, order, weights.shape[1])).flatten(1, 2)


def unmerge(
    merged: Tensor,
    order: Tensor | None,
    inverse: Tensor | None,
    weights: Tensor,
    residual: Tensor | None = None,
    entered: Tensor | None = None,
) -> Tensor:
    """[B, M, C] to [B, N, C] row-major by weights [B, R, n, k], plus `residual` [B, N, C].

    entered: [B, M, C] earlier merged tokens; with them only the change since then is unmerged. order: [N] token indices
    region by region; inverse: [N] its inverse; or both None. This file gathers by inverse, kernels scatter by order.
    """
    if entered is not None:
        merged = merged - entered
    regions = weights.to(merged.dtype) @ merged.unflatten(1, (weights.shape[1], -1))
    tokens = join_regions(regions, inverse)
    return tokens if residual is None else residual + tokens


def _directions(tokens: Tensor, similarity: str) -> Tensor:
    tokens = tokens.float()
    if similarity == "cosine":
        return F.normalize(tokens, dim=-1, eps=1e-12)
    return tokens / tokens.shape[-1] ** 0.25


def _destination_directions(tokens: Tensor, destinations: Tensor, similarity: str) -> Tensor:
    """Directions [B, R, k, C] of the tokens [B, N, C] at destinations [S, R, k]."""
    batch, _, channels = tokens.shape
    _, regions, count = destinations.shape
    index = destinations.expand(batch, regions, count).reshape(batch, -1, 1)
    picked = tokens.gather(1, index.expand(-1, -1, channels)).view(batch, regions, count, channels)
    return _directions(picked, similarity)


def _column(similarity: Tensor, pick: Tensor) -> Tensor:
    """Column `pick` [B, R, 1] of similarity [B, R, m, n], as [B, R, m]."""
    return similarity.gather(-1, pick[..., None, :].expand(*similarity.shape[:3], 1)).squeeze(-1)


def _own_places(order: Tensor | None, destinations: Tensor, token_count: int) -> Tensor:
    """One-hot [S, R, k, n]: the place of every destination in its region."""
    _, regions, _ = destinations.shape
    size = token_count // regions
    ranks = destinations if order is None else invert_order(order)[destinations]
    return F.one_hot(ranks % size, size).float()


def _random(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
    # Drawn on the generator's device, so that a seed gives the same choice on every device.
    source = generator.device if generator is not None else device
    return torch.rand(shape, device=source, generator=generator).to(device)

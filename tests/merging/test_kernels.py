"""Kernels agree with the reference: on a CUDA device where there is one, elsewhere in Triton's interpreter.

The tolerance law: a kernel may be at most twice as far from the exact result as plain PyTorch is in the same dtype,
plus one rounding. Outputs and scratch buffers are poisoned first. Selections are compared by coverage, since rounding
decides near ties, and by indices where every turn has a clear winner.

Triton decides at its first import whether it interprets, and other tests may have imported it by then. So on a CPU the
tests run in a separate process. This process compiles the kernels for the GPUs they target, which needs no GPU.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from tokenmerge import Merge, TokenMergeError
from tokenmerge.families.calls import TokenGrid
from tokenmerge.merging import ops
from tokenmerge.merging.grid import Partition, invert_order, partition_grids, split_regions
from tokenmerge.merging.mergemap import MapSpace, MergeMap
from tokenmerge.merging.methods import Given, method_for
from tokenmerge.merging.ops import backend_for, kernels, reference
from tokenmerge.merging.ops.kernels import merging, selection, weighing

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# Triton's interpreter gives wrong results in bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA

# Rounding error of similarities. The softmax divides it by the temperature.
FP32_ROUNDING = torch.finfo(torch.float32).eps

# Grid, regions, ratio, channels. They cover tiles, ragged tiles, stripes and whole grids, sizes that do and do not fill
# a block, and matrix products of several steps.
CASES = [
    (TokenGrid(8, 8), "tile:4x4", 0.5, 32),
    (TokenGrid(6, 10), "tile:4x4", 0.5, 37),
    (TokenGrid(12, 10), "tile:8x8", 0.5, 40),
    (TokenGrid(8, 16), "stripe:2", 0.75, 16),
    (TokenGrid(4, 5), "whole", 0.9, 7),
    (TokenGrid(13, 20), "stripe:2", 0.25, 24),
]
SIZES = [pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2]}-{case[3]}".replace(":", "")) for case in CASES]
REAL = [
    (2, TokenGrid(64, 64), 640, "tile:4x4", 0.5),
    (2, TokenGrid(64, 64), 640, "tile:8x8", 0.5),
    (2, TokenGrid(64, 64), 640, "tile:16x16", 0.5),
    (2, TokenGrid(32, 32), 1280, "tile:8x8", 0.75),
    (1, TokenGrid(64, 64), 3072, "tile:8x8", 0.75),
    (2, TokenGrid(68, 120), 640, "tile:8x8", 0.5),
    (2, TokenGrid(64, 64), 640, "whole", 0.5),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills every buffer that kernels allocate with NaN or an index out of bounds, so that unwritten elements show."""

    def poison(make: Any) -> Any:
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if not sys._getframe(1).f_globals["__name__"].startswith(f"{kernels.__name__}."):
                return tensor
            return tensor.fill_(math.nan if tensor.is_floating_point() else -(2**30))

        return filled

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(Tensor, "new_empty", poison(Tensor.new_empty))


def partition_of(grid: TokenGrid, regions: str, ratio: float) -> Partition:
    return partition_grids((grid,), Merge(ratio=ratio, regions=regions)).to(DEVICE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def image_like(batch: int, grid: TokenGrid, channels: int, seed: int = 0) -> Tensor:
    """Tokens that resemble their neighbours."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, channels, grid.height // 4 + 1, grid.width // 4 + 1, generator=generator)
    smooth = F.interpolate(coarse, size=(grid.height, grid.width), mode="bilinear", align_corners=True)
    noise = torch.randn(smooth.shape, generator=generator)
    return (smooth + 0.3 * noise).flatten(2).transpose(1, 2).contiguous().to(DEVICE)


def assert_lawful(result: Tensor, plain: Tensor, exact: Tensor, floor: float = 0.0) -> None:
    assert result.shape == plain.shape
    assert result.dtype == plain.dtype
    assert torch.equal(result.isnan(), exact.isnan()), "NaN where there is none, or an element never written"
    error, allowed = (torch.nan_to_num(each.double() - exact).abs().max() for each in (result, plain))
    rounding = torch.finfo(plain.dtype).eps * torch.nan_to_num(exact).abs().max().clamp(1e-3)
    assert error <= 2 * allowed + rounding + floor, f"off by {error:.3g}, plain PyTorch by {allowed:.3g}"


def weights_for(partition: Partition, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    layout = partition.layout
    raw = random(batch, layout.merge_regions, layout.merge_count, layout.merge_size, seed=1)
    return raw.softmax(-1).to(dtype), raw.transpose(-1, -2).softmax(-1).to(dtype).contiguous()


def inverse_of(order: Tensor | None) -> Tensor | None:
    return None if order is None else invert_order(order.cpu()).to(DEVICE)


def check_merge_and_unmerge(partition: Partition, tokens: Tensor, merge: Tensor, unmerge: Tensor) -> None:
    order, inverse = partition.order, inverse_of(partition.order)
    merged = kernels.merge(tokens, order, merge)
    exact = reference.merge(tokens.double(), order, merge.double())
    assert_lawful(merged, reference.merge(tokens, order, merge), exact)
    for added in ((), (tokens,), (tokens, merged.flip(1))):
        exact = reference.unmerge(
            merged.double(), order, inverse, unmerge.double(), *(tensor.double() for tensor in added)
        )
        plain = reference.unmerge(merged, order, inverse, unmerge, *added)
        assert_lawful(kernels.unmerge(merged, order, inverse, unmerge, *added), plain, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("grid", "regions", "ratio", "channels"), SIZES)
def test_merge_and_unmerge(grid: TokenGrid, regions: str, ratio: float, channels: int, dtype: torch.dtype) -> None:
    partition = partition_of(grid, regions, ratio)
    tokens = random(2, grid.count, channels, dtype=dtype)
    check_merge_and_unmerge(partition, tokens, *weights_for(partition, 2, dtype))


@pytest.mark.parametrize("layout", ["slice", "convolution", "shared weights", "transposed weights"])
def test_tokens_and_weights_come_with_any_strides(layout: str) -> None:
    grid = TokenGrid(6, 10)
    partition = partition_of(grid, "tile:4x4", 0.5)
    tokens = random(2, grid.count, 20)
    merge, unmerge = weights_for(partition, 2, torch.float32)
    if layout == "slice":
        tokens = random(2, grid.count + 7, 24)[:, 7:, :20]
    elif layout == "convolution":
        tokens = random(2, 20, *(grid.height, grid.width)).permute(0, 2, 3, 1).flatten(1, 2)
        assert not tokens.is_contiguous()
    elif layout == "shared weights":
        merge, unmerge = merge[:1].expand(2, -1, -1, -1), unmerge[:1].expand(2, -1, -1, -1)
    else:
        unmerge = merge.transpose(-1, -2)
    check_merge_and_unmerge(partition, tokens, merge, unmerge)


def test_a_broken_region_leaves_the_others_alone() -> None:
    partition = partition_of(TokenGrid(8, 8), "tile:4x4", 0.5)
    tokens = random(2, 64, 16)
    tokens[1, 9] = math.nan
    check_merge_and_unmerge(partition, tokens, *weights_for(partition, 2, torch.float32))


def test_unmerging_promotes_to_the_dtype_of_the_residual() -> None:
    partition = partition_of(TokenGrid(8, 8), "tile:4x4", 0.5)
    tokens, (merge, unmerge) = random(2, 64, 16), weights_for(partition, 2, torch.float16)
    merged = reference.merge(tokens.half(), partition.order, merge)
    order, inverse = partition.order, inverse_of(partition.order)
    plain = reference.unmerge(merged, order, inverse, unmerge, tokens)
    exact = reference.unmerge(merged.double(), order, inverse, unmerge.double(), tokens.double())
    assert_lawful(kernels.unmerge(merged, order, inverse, unmerge, tokens), plain, exact)


def test_large_regions_and_other_dtypes_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = partition_of(TokenGrid(8, 8), "tile:4x4", 0.5)
    merge, unmerge = weights_for(partition, 2, torch.float64)
    check_merge_and_unmerge(partition, random(2, 64, 8, dtype=torch.float64), merge, unmerge)
    monkeypatch.setattr(merging, "_MERGE_SIZE", 8)
    monkeypatch.setattr(merging, "_merge_kernel", None)
    monkeypatch.setattr(merging, "_unmerge_kernel", None)
    check_merge_and_unmerge(partition, random(2, 64, 8), merge.float(), unmerge.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("grid", "regions", "ratio", "channels"), SIZES)
def test_gradients_are_those_of_the_reference(
    grid: TokenGrid, regions: str, ratio: float, channels: int, dtype: torch.dtype
) -> None:
    partition = partition_of(grid, regions, ratio)
    merge, unmerge = weights_for(partition, 2, dtype)
    order, inverse = partition.order, inverse_of(partition.order)
    merged = random(2, partition.layout.merged, channels, dtype=dtype, seed=2)
    given = random(2, grid.count, channels, dtype=dtype), merged, merged.flip(1)

    def gradients(module: Any, to: torch.dtype) -> list[Tensor]:
        tokens, after, entered = (each.to(to).requires_grad_() for each in given)
        fewer = module.merge(tokens, order, merge.to(to))
        whole = module.unmerge(after, order, inverse, unmerge.to(to), tokens, entered)
        # Every element has its own factor, so that no two gradients are alike.
        scales = [torch.linspace(-1, 1, each.numel(), dtype=to, device=DEVICE).view_as(each) for each in (fewer, whole)]
        pairs = zip((fewer, whole), scales, strict=True)
        return list(torch.autograd.grad(sum((each * scale).sum() for each, scale in pairs), (tokens, after, entered)))

    exact = gradients(reference, torch.float64)
    plain = gradients(reference, dtype)
    for found, *expected in zip(gradients(kernels, dtype), plain, exact, strict=True):
        assert_lawful(found, *expected)


def test_gradients_of_gradients_flow() -> None:
    partition = partition_of(TokenGrid(8, 8), "tile:4x4", 0.5)
    merge, _ = weights_for(partition, 1, torch.float32)
    found = []
    for module in (reference, kernels):
        tokens = random(1, 64, 8).requires_grad_()
        (first,) = torch.autograd.grad(
            module.merge(tokens, partition.order, merge).pow(3).sum(), tokens, create_graph=True
        )
        found.append(torch.autograd.grad(first.square().sum(), tokens)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_sees_one_graph(backend: str) -> None:
    partition = partition_of(TokenGrid(6, 10), "tile:4x4", 0.5)
    merge, unmerge = weights_for(partition, 2, torch.float32)
    order, inverse = partition.order, inverse_of(partition.order)

    def run(tokens: Tensor) -> Tensor:
        merged = kernels.merge(tokens * 1.5, order, merge)
        return kernels.unmerge(merged.sin(), order, inverse, unmerge, tokens)

    torch._dynamo.reset()
    # With dynamic shapes, inductor compiles once for all of these sizes.
    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True if backend == "inductor" else None)
    for channels in (8, 24, 40):
        tokens = random(2, 60, channels)
        torch.testing.assert_close(compiled(tokens), run(tokens))


def test_operators_are_well_formed() -> None:
    partition = partition_of(TokenGrid(6, 10), "tile:4x4", 0.5)
    merge, unmerge = weights_for(partition, 2, torch.float32)
    order, inverse = partition.order, inverse_of(partition.order)
    tokens = random(2, 60, 8)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(merging._merge_operator, (tokens, order, merge), test_utils=checks)
    merged = kernels.merge(tokens, order, merge)
    strided = tokens.transpose(1, 2).contiguous().transpose(1, 2)
    for added in ((None, None), (strided, merged.double())):
        torch.library.opcheck(merging._unmerge_operator, (merged, order, inverse, unmerge, *added), test_utils=checks)


def exact_weights(
    tokens: Tensor, order: Tensor | None, destinations: Tensor, similarity: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """`reference.weigh` in fp64, for destinations that attract at least one token."""
    batch, _, channels = tokens.shape
    _, regions, count = destinations.shape
    values = tokens.double()
    values = F.normalize(values, dim=-1) if similarity == "cosine" else values / channels**0.25
    sources = split_regions(values, order, regions)
    index = destinations.expand(batch, -1, -1).reshape(batch, -1, 1).expand(-1, -1, channels)
    targets = values.gather(1, index).view(batch, regions, count, channels)
    spread = (torch.nan_to_num(targets @ sources.transpose(-1, -2), nan=0.0) / temperature).softmax(-2)
    return spread / spread.sum(-1, keepdim=True), spread.transpose(-1, -2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("similarity", "temperature"), [("cosine", 0.001), ("cosine", 0.1), ("dot", 0.05)])
@pytest.mark.parametrize(("grid", "regions", "ratio", "channels"), SIZES)
def test_weigh(
    grid: TokenGrid,
    regions: str,
    ratio: float,
    channels: int,
    similarity: str,
    temperature: float,
    dtype: torch.dtype,
) -> None:
    partition = partition_of(grid, regions, ratio)
    layout, order = partition.layout, partition.order
    tokens = random(2, grid.count, channels, dtype=dtype)
    # Some cases share one selection among all samples.
    shared = channels % 3 == 1
    chosen = reference.select(tokens, order, layout.select_regions, layout.select_count, shared=shared)
    arguments = {"similarity": similarity, "temperature": temperature}
    results = kernels.weigh(tokens, order, chosen, **arguments)
    plains = reference.weigh(tokens, order, chosen, **arguments)
    for result, plain, exact in zip(
        results, plains, exact_weights(tokens, order, chosen, similarity, temperature), strict=True
    ):
        assert_lawful(result, plain, exact, FP32_ROUNDING / temperature)


@pytest.mark.parametrize("size", [16, 80])
@pytest.mark.parametrize("kind", ["zero", "nan", "identical", "alone"])
def test_weigh_hard_tokens_as_the_reference_does(kind: str, size: int) -> None:
    tokens = random(2, 2 * size, 12)
    similarity = "cosine"
    if kind == "zero":
        tokens[:, ::2] = 0
    elif kind == "nan":
        tokens[0, 3] = math.nan
        tokens[1, :, 5] = math.nan
    elif kind == "identical":
        tokens[:] = tokens[:, :1].clone()
    else:
        # By dot product no token prefers the small destination, not even that destination itself.
        similarity = "dot"
        tokens = tokens.abs()
        tokens[:, 1] *= 1e-3
        tokens[:, 2] *= 1e3
    chosen = torch.arange(size // 2, device=DEVICE) + torch.arange(2, device=DEVICE)[:, None] * size
    results = kernels.weigh(tokens, None, chosen[None], similarity=similarity)
    for result, expected in zip(
        results, reference.weigh(tokens, None, chosen[None], similarity=similarity), strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
    if kind == "alone":
        assert torch.equal(results[0][:, 0, 1], F.one_hot(torch.tensor([1, 1]), size).to(results[0]))


# Where a selection keeps similarity: in registers, in a scratch buffer, or computed beforehand.
PATHS = {"registers": {}, "scratch": {"_REGISTER_SIZE": 0}, "given": {"_REGISTER_SIZE": 0, "_SCRATCH_SIZE": 0}}


@pytest.fixture(params=list(PATHS))
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in PATHS[request.param].items():
        monkeypatch.setattr(selection, name, value)
    return request.param


def assert_covers(
    chosen: Tensor, tokens: Tensor, partition: Partition, similarity: str = "cosine", shared: bool = False
) -> None:
    """A greedy selection: in the right regions, no token twice, and each pick the best of its turn up to rounding.

    A turn may take either of two nearly equal tokens, and later turns depend on that choice. So neither the picks nor
    their coverage need equal the reference's.
    """
    layout, order = partition.layout, partition.order
    assert chosen.shape == (1 if shared else len(tokens), layout.select_regions, layout.select_count)
    places = chosen if order is None else inverse_of(order)[chosen]
    assert torch.equal(
        places // layout.select_size,
        torch.arange(layout.select_regions, device=DEVICE)[:, None].expand_as(chosen),
    )
    assert bool((chosen.sort(-1).values.diff(dim=-1) > 0).all()), "a destination twice"
    pairs = reference.pairwise_similarity(split_regions(tokens.double(), order, layout.select_regions), similarity)
    if shared:
        pairs = pairs.transpose(0, 1).flatten(1, 2)[None]
    picks = places % layout.select_size
    # A gain sums similarities to all sources, each off by a few roundings of fp32 and fixed point.
    allowed = 1e-5 * pairs.shape[-2] * pairs.abs().amax((-2, -1)).clamp_min(1e-30)
    covered: Tensor | None = None
    for turn in range(layout.select_count):
        gains = pairs.sum(-2) if covered is None else (pairs - covered[..., None]).clamp_min(0).sum(-2)
        best = gains.scatter(-1, picks[..., :turn], -torch.inf).amax(-1)
        pick = picks[..., turn, None]
        taken = gains.gather(-1, pick)[..., 0]
        assert bool((taken >= best - allowed).all()), f"turn {turn} gains less by {(best - taken).max():.3g}"
        column = pairs.gather(-1, pick[..., None, :].expand(*pairs.shape[:-1], 1))[..., 0]
        covered = column if covered is None else torch.maximum(covered, column)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("grid", "regions", "ratio", "channels"), SIZES[:4])
def test_select_covers_as_well_as_the_reference(
    grid: TokenGrid, regions: str, ratio: float, channels: int, dtype: torch.dtype, path: str
) -> None:
    partition = partition_of(grid, regions, ratio)
    layout = partition.layout
    tokens = image_like(2, grid, channels).to(dtype)
    shared, similarity = dtype == torch.float16, "dot" if channels == 40 else "cosine"
    chosen = kernels.select(
        tokens, partition.order, layout.select_regions, layout.select_count, similarity=similarity, shared=shared
    )
    assert_covers(chosen, tokens, partition, similarity, shared)


@pytest.mark.parametrize(("dtype", "similarity"), [(torch.float32, "dot"), (torch.float16, "cosine")])
def test_select_in_regions_of_several_blocks(dtype: torch.dtype, similarity: str) -> None:
    grid = TokenGrid(13, 20)
    partition = partition_of(grid, "stripe:2", 0.9)
    tokens = image_like(2, grid, 20).to(dtype)
    chosen = kernels.select(tokens, None, 2, partition.layout.select_count, similarity=similarity)
    assert_covers(chosen, tokens, partition, similarity)


@pytest.mark.parametrize("kind", ["zero", "nan", "clusters"])
def test_select_among_hard_tokens(kind: str, path: str) -> None:
    partition = partition_of(TokenGrid(6, 10), "tile:4x4", 0.5)
    tokens = random(2, 60, 8)
    if kind == "zero":
        tokens[:, ::2] = 0
    elif kind == "nan":
        tokens[0, 3] = math.nan
        tokens[1, :, 5] = math.nan
    else:
        tokens = tokens[:, :3].repeat(1, 20, 1)
    chosen = kernels.select(tokens, partition.order, 4, partition.layout.select_count)
    assert_covers(chosen, tokens, partition)


@pytest.mark.parametrize("shared", [False, True])
def test_ties_go_to_the_lowest_index(shared: bool, path: str) -> None:
    tokens = random(2, 1, 8).expand(2, 40, 8)
    chosen = kernels.select(tokens, None, 2, 7, shared=shared)
    assert torch.equal(chosen, (torch.arange(7) + torch.tensor([[0], [20]])).to(DEVICE).expand_as(chosen))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_rounding_does_not_decide_in_small_regions(size: int, shared: bool, path: str) -> None:
    """A token's similarity to itself is 1 only up to rounding."""
    # The interpreter takes a tenth of a second per region.
    regions = 24 if CUDA else 6
    tokens = random(2, regions * size, 64)
    moved = tokens * (1 + 1e-7 * random(*tokens.shape, seed=1))
    chosen, again = (kernels.select(each, None, regions, 1, shared=shared) for each in (tokens, moved))
    assert torch.equal(chosen, again)
    assert torch.equal(chosen, reference.select(tokens, None, regions, 1, shared=shared))
    if size == 2:
        assert not (chosen % 2).any(), "of two tokens the first is chosen"


def least_lead(pairs: Tensor, count: int) -> float:
    """Smallest lead of a greedy turn's winner over the second, given similarities `pairs` [m, n]."""
    covered = torch.full(pairs.shape[:1], -1e3, dtype=pairs.dtype)
    taken: list[int] = []
    lead = math.inf
    for _ in range(count):
        gains = (pairs - covered[:, None]).clamp_min(0).sum(0)
        gains[taken] = -math.inf
        best, second = gains.topk(2).values.tolist()
        lead = min(lead, best - second)
        taken.append(int(gains.argmax()))
        covered = torch.maximum(covered, pairs[:, taken[-1]])
    return lead


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("size", "count", "seed"), [(15, 4, 5), (64, 6, 7)])
def test_select_chooses_the_same_where_every_turn_has_a_clear_winner(
    size: int, count: int, seed: int, shared: bool, similarity: str, path: str
) -> None:
    order = torch.randperm(2 * size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    tokens = random(2, 2 * size, 10, seed=seed)
    pairs = reference.pairwise_similarity(split_regions(tokens, order, 2), similarity).double().cpu()
    stacks = pairs.transpose(0, 1).flatten(1, 2) if shared else pairs.flatten(0, 1)
    assert min(least_lead(each, count) for each in stacks) > 1e-2, "take another seed"
    arguments = {"similarity": similarity, "shared": shared}
    chosen = kernels.select(tokens, order, 2, count, **arguments)
    assert torch.equal(chosen, reference.select(tokens, order, 2, count, **arguments))


@pytest.mark.parametrize("selection", ["graph-cut", "stochastic", "random", "uniform"])
def test_other_selections_are_those_of_the_reference(selection: str) -> None:
    tokens = random(2, 64, 8)
    results = [
        module.select(tokens, None, 4, 8, selection=selection, generator=torch.Generator().manual_seed(0))
        for module in (kernels, reference)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "technique",
    [
        Merge(ratio=0.5, backend="triton"),
        Merge(ratio=0.5, regions="tile:4x4", merge_regions="tile:8x8", unmerge="pinv", backend="triton"),
        Merge(ratio=0.75, method="lower-bound", regions="stripe:4", backend="triton"),
    ],
    ids=["default", "nested", "lower-bound"],
)
def test_a_map_of_kernels_is_a_map(technique: Merge) -> None:
    """Methods and maps work on kernels as on the reference: constants survive, and restored tokens are equal."""
    ops, description = backend_for(technique.backend, DEVICE)
    assert (ops, description) == (kernels, "triton")
    partition = partition_grids((TokenGrid(8, 16),), technique).to(DEVICE)
    method, generator = method_for(technique), torch.Generator().manual_seed(0)
    tokens = image_like(2, TokenGrid(8, 16), 16)
    given = Given(tokens, partition, technique, generator, shared=True, ops=ops)
    destinations = method.select(given)
    merge, unmerge = method.weigh(given, destinations)
    space = MapSpace(2, True, tokens.dtype, DEVICE)
    merge_map = MergeMap.empty(partition.layout, ops, space, ordered=partition.merge_order is not None)
    merge_map.fill(partition, destinations, merge, unmerge)
    constant = torch.full_like(tokens, 3.0)
    torch.testing.assert_close(merge_map.unmerge(merge_map.merge(constant)), constant, rtol=1e-4, atol=1e-4)
    plain = MergeMap.over(partition.layout, reference, merge_map.tensors)
    restored = [each.unmerge(each.merge(tokens), residual=tokens) for each in (merge_map, plain)]
    torch.testing.assert_close(*restored, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "grid", "channels", "regions", "ratio"), REAL, ids=lambda value: str(value).replace(":", "")
)
def test_at_real_sizes(
    batch: int, grid: TokenGrid, channels: int, regions: str, ratio: float, dtype: torch.dtype
) -> None:
    partition = partition_of(grid, regions, ratio)
    layout, order = partition.layout, partition.order
    tokens = image_like(batch, grid, channels).to(dtype)
    chosen = kernels.select(tokens, order, layout.select_regions, layout.select_count)
    if regions == "whole":
        # A comparison with the reference would take a minute.
        assert bool((chosen.sort(-1).values.diff(dim=-1) > 0).all())
    else:
        assert_covers(chosen, tokens, partition)
    for temperature in (0.001, 0.1):
        results = kernels.weigh(tokens, order, chosen, temperature=temperature)
        plains = reference.weigh(tokens, order, chosen, temperature=temperature)
        exacts = exact_weights(tokens, order, chosen, "cosine", temperature)
        for result, plain, exact in zip(results, plains, exacts, strict=True):
            assert_lawful(result, plain, exact, FP32_ROUNDING / temperature)
    check_merge_and_unmerge(partition, tokens, *results)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("regions", ["tile:4x4", "tile:8x8", "tile:16x16"])
def test_results_do_not_move_under_load(regions: str) -> None:
    partition = partition_of(TokenGrid(64, 64), regions, 0.5)
    layout, order = partition.layout, partition.order
    tokens = image_like(2, TokenGrid(64, 64), 640).to(torch.bfloat16)
    chosen = kernels.select(tokens, order, layout.select_regions, layout.select_count)
    weights = kernels.weigh(tokens, order, chosen)
    # While another stream keeps matrix units busy, a kernel's products finish late, which exposes races.
    other, busy = torch.cuda.Stream(), torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(200):
        with torch.cuda.stream(other):
            busy @ busy
        again = kernels.select(tokens, order, layout.select_regions, layout.select_count)
        assert torch.equal(again, chosen)
        for one, two in zip(kernels.weigh(tokens, order, chosen), weights, strict=True):
            assert torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_graph_of_kernels_replays() -> None:
    partition = partition_of(TokenGrid(64, 64), "tile:8x8", 0.5)
    layout, order, inverse = partition.layout, partition.order, inverse_of(partition.order)
    tokens = image_like(2, TokenGrid(64, 64), 640).half()

    def run() -> Tensor:
        chosen = kernels.select(tokens, order, layout.select_regions, layout.select_count)
        merge, unmerge = kernels.weigh(tokens, order, chosen)
        return kernels.unmerge(kernels.merge(tokens, order, merge), order, inverse, unmerge, tokens)

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for _ in range(3):
        output.fill_(math.nan)
        graph.replay()
        assert torch.equal(output, expected), "a moving result is a race"


def test_the_benchmark_runs_and_refuses_wrong_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("ops_benchmark", Path(__file__).parents[2] / "benchmarks" / "ops.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)
    spec.loader.exec_module(benchmark)
    out = tmp_path / "ops.jsonl"
    benchmark.main(["--smoke", "--out", str(out)])
    printed = capsys.readouterr().out
    for layer in ("2 x 8x8 x 24", "1 x 3x4x4 x 24"):
        assert f"| {layer} float32 | tile:2x4x4 | 0.5 | unmerge |" in printed
    right = kernels.merge
    monkeypatch.setattr(kernels, "merge", lambda *arguments: right(*arguments) * 1.01)
    with pytest.raises(benchmark.WrongResult, match="merge in tile:2x4x4 of smoke is off by"):
        benchmark.main(["--smoke", "--operations", "merge"])


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert backend_for("reference", cpu) == (reference, "reference")
    assert backend_for("auto", cpu) == (reference, "reference (no kernels for cpu)")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(TokenMergeError, match="no kernels for cpu; use backend='auto'"):
        backend_for("triton", cpu)
    monkeypatch.setattr(ops, "find_spec", lambda name: None)
    ops._obstacle.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TokenMergeError, match="triton is not installed"):
        backend_for("triton", cpu)
    ops._obstacle.cache_clear()


def test_auto_takes_the_kernels_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    for capability, expected in (((7, 5), reference), ((9, 0), kernels)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        ops._obstacle.cache_clear()
        assert backend_for("auto", device)[0] is expected
    ops._obstacle.cache_clear()


class Compiler:
    """Stands in for a kernel and compiles its launches for a GPU that need not be present."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel = kernel
        self.capability = capability

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        def compile_launch(*args: Any, num_warps: int = 4, **kwargs: Any) -> None:
            names = self.kernel.arg_names
            signature, constants, hints = {}, {}, {}
            for place, name in enumerate(names):
                value = args[place] if place < len(args) else kwargs[name]
                if name.isupper() or value is None or (isinstance(value, int) and value == 1):
                    signature[name], constants[(place,)] = "constexpr", value
                    continue
                kinds = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32", torch.float16: "*fp16"}
                if isinstance(value, Tensor):
                    signature[name] = kinds.get(value.dtype, "*bf16")
                else:
                    signature[name] = "i32" if isinstance(value, int) else "fp32"
                if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                    hints[(place,)] = [["tt.divisibility", 16]]
            source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=hints)
            target = GPUTarget("cuda", self.capability, 32)
            compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
            # Shared memory of a program on consumer GPUs, which have the least of their generation.
            assert compiled.metadata.shared <= 99 * 1024
            for buffers, ahead in pipelines(compiled.asm["ttgir"]):
                assert buffers > ahead, f"{self.kernel.__name__} loads into what a product still reads"

        return compile_launch


def pipelines(code: str) -> Iterator[tuple[int, int]]:
    """Counts of buffers and of loads ahead, for every operand of a product that may still run while its loop loads.

    With no more buffers than loads ahead, the last load overwrites an operand that the product still reads. Results
    hardly ever show this race.
    """
    lines = code.splitlines()
    # The parent of each view: a buffer or another view.
    views = dict(re.findall(r"(%\S+) = ttg\.memdesc_(?:index|trans) (%[\w#:]+)", code))
    counts = dict(re.findall(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", code))

    def buffer(view: str) -> str:
        return buffer(views[view]) if view in views else view

    def loaded(body: list[str]) -> list[str]:
        found = re.findall(r"async_copy_global_to_local %\S+, (%[\w#:]+)", "\n".join(body))
        return [buffer(view) for view in found]

    for at, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        margin = line[: len(line) - len(line.lstrip())]
        end = next(place for place in range(at, len(lines)) if lines[place].startswith(f"{margin}}}"))
        body = [each for each in lines[at + 1 : end] if each.startswith(f"{margin}  ") and each[len(margin) + 2] != " "]
        pending = any(int(count) for count in re.findall(r"dot_wait .*pendings = (\d+)", "\n".join(body)))
        before = [each for each in lines[:at] if each.startswith(margin) and each[len(margin)] != " "]
        for operand in re.findall(r"warp_group_dot (%[\w#:]+), (%[\w#:]+)", "\n".join(body)) if pending else ():
            for held in {buffer(view) for view in operand} & {*loaded(body)}:
                yield int(counts[held]), loaded(before).count(held)


@pytest.mark.parametrize(("capability", "dtype"), [(89, torch.float16), (90, torch.bfloat16), (100, torch.bfloat16)])
def test_kernels_compile(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler may refuse code that the interpreter accepts."""
    for module in (selection, weighing, merging):
        for name, kernel in list(vars(module).items()):
            # An imported kernel is compiled with the kernels that call it.
            if name.endswith("_kernel") and kernel.__module__ == module.__name__:
                monkeypatch.setattr(module, name, Compiler(kernel, capability))
    bfloat = dtype == torch.bfloat16
    for size, samples in ((16, 2), (64, 1), (256, 1)):
        tokens = torch.zeros(2, 512, 192, dtype=dtype)
        regions, count = 512 // size, size // 2 - bfloat
        order = torch.arange(512) if bfloat else None
        for similarity in ("cosine", "dot"):
            kernels.select(tokens, order, regions, count, similarity=similarity, shared=samples > 1)
            kernels.weigh(tokens, order, torch.zeros(samples, regions, count, dtype=torch.int64), similarity=similarity)
        weights = torch.zeros(2, regions, count, size, dtype=dtype)
        kernels.merge(tokens, order, weights)
        merged = torch.zeros(2, regions * count, 192, dtype=dtype)
        added = (tokens, merged) if bfloat else ()
        kernels.unmerge(merged, order, order, weights.transpose(-1, -2), *added)
    kernels.select(torch.zeros(1, 4096, 64, dtype=dtype), None, 1, 1024)


def test_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


if kernels.INTERPRETED or CUDA:
    del test_kernels_in_the_interpreter
else:
    _ANYWHERE = ("test_kernels_", "test_dispatch", "test_auto_", "test_other_")
    for _name in [name for name in globals() if name.startswith("test_") and not name.startswith(_ANYWHERE)]:
        del globals()[_name]
if kernels.INTERPRETED:
    del test_kernels_compile

"""Laws of token merging hold for random shapes, dtypes, ratios and partitions, and for tokens hard to handle."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tokenmerge import Merge, TokenMergeError
from tokenmerge.config import Regions
from tokenmerge.families.calls import DenoiserCall, Shard, TokenGrid
from tokenmerge.merging.controller import Merging
from tokenmerge.merging.grid import (
    drawn_alone,
    invert_order,
    join_regions,
    layout_for,
    merging_grids,
    nearest_divisor,
    partition_grids,
    region_size,
    shard_partition,
    split_regions,
)
from tokenmerge.merging.groups import refresh
from tokenmerge.merging.mergemap import MapSpace, MergeMap
from tokenmerge.merging.methods import Given, method_for
from tokenmerge.merging.ops import reference
from tokenmerge.runtime.clock import Clock
from tokenmerge.runtime.timeline import MERGED, Step

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Weights are rounded to the tokens' dtype, so the sum of a row is off by up to this much.
ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
KINDS = ("plain", "clustered", "identical", "zero", "nan")

grids = st.builds(TokenGrid, st.integers(1, 14), st.integers(1, 14))
videos = st.builds(TokenGrid, st.integers(1, 12), st.integers(1, 12), st.integers(1, 6))
# Grids of one sequence: of any sizes, or of one size and any lengths, such as a picture before a video.
sequences = st.one_of(
    st.lists(videos, min_size=1, max_size=3).map(tuple),
    st.builds(
        lambda plane, lengths: tuple(TokenGrid(plane.height, plane.width, frames) for frames in lengths),
        grids,
        st.lists(st.integers(1, 6), min_size=2, max_size=3),
    ),
)
regions = st.one_of(
    st.just("whole"),
    st.builds("{}:{}".format, st.sampled_from(("tile", "stripe")), st.integers(1, 40)),
    st.builds("tile:{}x{}".format, st.integers(1, 9), st.integers(1, 9)),
)
deep_regions = st.builds("tile:{}x{}x{}".format, st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
ratios = st.one_of(st.sampled_from((0.0, 0.25, 0.5, 0.75)), st.floats(0.0, 0.95))
seeds = st.integers(0, 2**31)


@st.composite
def tokens(draw: st.DrawFn, count: int, kinds: tuple[str, ...] = KINDS, batch: int | None = None) -> Tensor:
    """Tokens [B, count, C] of one of the kinds that real and broken models produce."""
    kind = draw(st.sampled_from(kinds))
    generator = torch.Generator().manual_seed(draw(seeds))
    size = (batch or draw(st.integers(1, 3)), count, draw(st.integers(1, 9)))
    values = torch.randn(size, generator=generator)
    if kind == "clustered":
        values = torch.randn(3, size[2], generator=generator)[torch.randint(3, size[:2], generator=generator)]
        values = values + 0.01 * torch.randn(size, generator=generator)
    elif kind == "identical":
        values = values[:, :1].expand(size).contiguous()
    elif kind == "zero":
        values = values * (torch.rand(size[:2], generator=generator) < 0.5)[..., None]
    elif kind == "nan":
        values[:, torch.randint(count, (1,), generator=generator)] = math.nan
    return values.to(draw(st.sampled_from(DTYPES)))


def make_map(values: Tensor, grid: TokenGrid, technique: Merge, shared: bool = False) -> MergeMap:
    partition = partition_grids((grid,), technique)
    method, generator = method_for(technique), torch.Generator().manual_seed(technique.seed)
    given = Given(values, partition, technique, generator, shared)
    destinations = method.select(given)
    merge, unmerge = method.weigh(given, destinations)
    space = MapSpace(len(values), shared, values.dtype, values.device)
    merge_map = MergeMap.empty(partition.layout, reference, space, ordered=partition.merge_order is not None)
    merge_map.fill(partition, destinations, merge, unmerge)
    return merge_map


def assert_refused_rightly(given_grids: tuple[TokenGrid, ...], technique: Merge) -> None:
    """A refusal is right only for merging regions finer than selection regions, or of another kind or depth."""
    wish, has = technique.merge_in, technique.select_in
    merging = merging_grids(given_grids, technique)
    finer = region_size(merging, wish, technique.ratio) < region_size(merging, has, technique.ratio)
    assert technique.merge_regions is not None
    assert finer or (wish.kind, wish.frames) != (has.kind, has.frames)


@settings(max_examples=400, deadline=None)
@given(grid=grids, spec=regions, merge_spec=st.none() | regions, ratio=ratios)
def test_a_partition_holds_every_token_once_in_regions_of_equal_size(
    grid: TokenGrid, spec: str, merge_spec: str | None, ratio: float
) -> None:
    technique = Merge(ratio=ratio, regions=spec, merge_regions=merge_spec)
    try:
        partition = partition_grids((grid,), technique)
    except TokenMergeError:
        assert_refused_rightly((grid,), technique)
        return
    layout = partition.layout
    wish = layout.select_size if merge_spec is None else region_size((grid,), technique.merge_in, ratio)
    assert wish >= layout.select_size, "a wish for smaller merging regions must not come to nothing in silence"
    assert layout.select_regions * layout.select_size == layout.merge_regions * layout.merge_size == grid.count
    assert layout.merge_size % layout.select_size == 0
    wished = round(layout.select_size * (1 - ratio))
    assert layout.select_count == max(1, min(wished, layout.select_size - (ratio > 0)))
    assert ratio == 0 or grid.count == 1 or layout.merged < grid.count, "a ratio above 0 must remove something"
    assert layout.merge_count * layout.merge_regions == layout.merged <= grid.count
    assert layout == layout_for((grid,), technique)
    row = TokenGrid(1, grid.count)
    assert layout == layout_for((row,), technique), "shapes of one frame may depend on the token count alone"
    assert (partition.grids, partition.before, partition.after) == ((grid,), 0, 0)
    order = torch.arange(grid.count) if partition.order is None else partition.order
    assert torch.equal(order.sort().values, torch.arange(grid.count))


@pytest.mark.parametrize(
    ("spec", "merge_spec", "message"),
    [
        ("tile:4x4", "stripe:16", "regions 'tile:4x4' do not nest in merge_regions 'stripe:16'"),
        ("stripe:16", "tile:4x4", "regions 'stripe:16' do not nest in merge_regions 'tile:4x4'"),
        ("tile:4x4", "tile:2x2", "'tile:2x2' have 4 tokens, fewer than the 16 of regions 'tile:4x4'.* use larger"),
        ("stripe:4", "stripe:8", "'stripe:8' have 32 tokens, fewer than the 64 of regions 'stripe:4'"),
        ("whole", "tile:4x4", "'tile:4x4' have 16 tokens, fewer than the 256 of regions 'whole'"),
    ],
)
def test_merging_regions_that_are_no_unions_are_refused(spec: str, merge_spec: str, message: str) -> None:
    with pytest.raises(TokenMergeError, match=message):
        partition_grids((TokenGrid(16, 16),), Merge(regions=spec, merge_regions=merge_spec))


@pytest.mark.parametrize(
    ("grid", "spec", "merge_spec"),
    [
        (TokenGrid(16, 16), "tile:4x4", "tile:16"),
        (TokenGrid(16, 16), "stripe:16", "stripe:16"),
        (TokenGrid(16, 16), "tile:1x16", "stripe:16"),
        (TokenGrid(4, 4), "tile:4x4", "whole"),
        (TokenGrid(2, 2), "tile:4x4", "stripe:1"),
        (TokenGrid(2, 2), "whole", "tile:4x4"),
    ],
)
def test_merging_regions_may_be_the_selection_regions_themselves(grid: TokenGrid, spec: str, merge_spec: str) -> None:
    alone = partition_grids((grid,), Merge(regions=spec))
    both = partition_grids((grid,), Merge(regions=spec, merge_regions=merge_spec))
    assert both.layout == alone.layout
    natural = torch.arange(grid.count)
    orders = [natural if each is None else each for each in (alone.order, both.order, both.merge_order)]
    assert all(torch.equal(order, orders[0]) for order in orders)


@settings(max_examples=200, deadline=None)
@given(grid=grids, spec=regions, data=st.data())
def test_split_and_join_are_inverse_on_every_grid(grid: TokenGrid, spec: str, data: st.DataObject) -> None:
    values = data.draw(tokens(grid.count))
    partition = partition_grids((grid,), Merge(regions=spec))
    split = split_regions(values, partition.order, partition.layout.select_regions)
    inverse = None if partition.order is None else invert_order(partition.order)
    assert torch.equal(join_regions(split, inverse).nan_to_num(), values.nan_to_num())


@settings(max_examples=300, deadline=None)
@given(grid=st.builds(TokenGrid, st.integers(2, 90), st.integers(2, 90)), side=st.sampled_from((4, 8)))
def test_tiles_are_compact_on_every_grid(grid: TokenGrid, side: int) -> None:
    """No tile extends much further than the square it stands for, however odd the grid."""
    partition = partition_grids((grid,), Merge(regions=f"tile:{side}x{side}"))
    size = partition.layout.select_size
    assert partition.order is not None
    places = partition.order.view(-1, size)
    for axis, length in ((places // grid.width, grid.height), (places % grid.width, grid.width)):
        extent = (axis.amax(1) - axis.amin(1) + 1).max().item()
        other = grid.count // length
        # Where the other side of the grid is short, a region of this size must be long.
        needed = max(math.sqrt(size), size / other)
        # A band may be 1.5 times as high as the tile, and a region that continues in the next band covers both.
        assert extent <= 3 * needed + 2


@pytest.mark.parametrize(("number", "wished", "expected"), [(4096, 64, 64), (8040, 64, 67), (67, 8, 1), (7, 0.1, 1)])
def test_the_nearest_divisor_is_nearest_in_ratio(number: int, wished: float, expected: int) -> None:
    assert nearest_divisor(number, wished) == expected


@settings(max_examples=250, deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 40),
    region_count=st.integers(1, 3),
    selection=st.sampled_from(("facility-location", "graph-cut", "stochastic", "random", "uniform")),
    similarity=st.sampled_from(("cosine", "dot")),
    shared=st.booleans(),
)
def test_selection_never_takes_a_destination_twice_and_is_deterministic(
    data: st.DataObject, count: int, region_count: int, selection: str, similarity: str, shared: bool
) -> None:
    values = data.draw(tokens(count * region_count))
    wanted = data.draw(st.integers(1, count))
    before = torch.random.get_rng_state()
    runs = [
        reference.select(
            values,
            None,
            region_count,
            wanted,
            selection=selection,
            similarity=similarity,
            shared=shared,
            generator=torch.Generator().manual_seed(7),
        )
        for _ in range(2)
    ]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(before, torch.random.get_rng_state()), "the global random state was touched"
    assert runs[0].shape == (1 if shared else len(values), region_count, wanted)
    for sample in runs[0]:
        for number, region in enumerate(sample.tolist()):
            assert len(set(region)) == wanted
            assert all(number * count <= index < (number + 1) * count for index in region)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), count=st.integers(2, 9))
def test_greedy_reaches_its_share_of_the_best_coverage(data: st.DataObject, count: int) -> None:
    values = data.draw(tokens(count, kinds=("plain", "clustered", "identical", "zero"), batch=1)).float()
    wanted = data.draw(st.integers(1, min(count, 4)))
    # The bound holds only where no similarity is negative.
    similarity = reference.pairwise_similarity(values[:, None], "cosine").clamp_min(0)
    greedy = reference.coverage(similarity, reference.select_destinations(similarity, wanted)).item()
    best = max(
        reference.coverage(similarity, torch.tensor([[subset]])).item()
        for subset in itertools.combinations(range(count), wanted)
    )
    assert greedy >= (1 - 1 / math.e) * best - 1e-4


@settings(max_examples=150, deadline=None)
@given(data=st.data(), count=st.integers(2, 30))
def test_gains_never_rise(data: st.DataObject, count: int) -> None:
    values = data.draw(tokens(count, batch=1)).float()
    similarity = reference.pairwise_similarity(values[:, None], "cosine").clamp_min(0)
    chosen = reference.select_destinations(similarity, count)
    covered = [reference.coverage(similarity, chosen[..., : turn + 1]).item() for turn in range(count)]
    gains = [later - earlier for earlier, later in itertools.pairwise([0.0, *covered])]
    assert all(later <= earlier + 1e-3 for earlier, later in itertools.pairwise(gains))


def test_each_pick_is_the_best_one_left() -> None:
    """A plain loop tries every candidate. It compares values, since tokens that are each other's nearest truly tie."""
    similarity = reference.pairwise_similarity(torch.randn(2, 3, 12, 5), "cosine")
    chosen = reference.select_destinations(similarity, 6)
    for sample, region in itertools.product(range(2), range(3)):
        pairs, picks = similarity[sample, region], chosen[sample, region].tolist()
        for turn in range(6):
            values = {
                candidate: pairs[:, [*picks[:turn], candidate]].amax(1).sum().item()
                for candidate in range(12)
                if candidate not in picks[:turn]
            }
            assert values[picks[turn]] >= max(values.values()) - 1e-5


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("spec", ["whole", "tile:4x4", "stripe:4"])
def test_a_selection_of_fewer_begins_one_of_more(spec: str, shared: bool) -> None:
    values = torch.randn(3, 64, 6, generator=torch.Generator().manual_seed(0))
    partition = partition_grids((TokenGrid(8, 8),), Merge(ratio=0.25, regions=spec))
    regions_count, most = partition.layout.select_regions, partition.layout.select_count
    chosen = reference.select(values, partition.order, regions_count, most, shared=shared)
    for count in (1, 2, most // 2):
        fewer = reference.select(values, partition.order, regions_count, count, shared=shared)
        assert torch.equal(fewer, chosen[..., :count])


def test_ties_go_to_the_lowest_index() -> None:
    assert reference.select_destinations(torch.ones(1, 1, 6, 6), 3).tolist() == [[[0, 1, 2]]]


@pytest.mark.parametrize("size", [16, 64, 256])
def test_rounding_does_not_decide_between_nearest_tokens(size: int) -> None:
    """Tokens come in pairs, which tie when half of them are kept. The lower index wins, however sums are rounded."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1, size // 2, 40, generator=generator)
    tokens = torch.stack([base, base + 0.05 * torch.randn(base.shape, generator=generator)], dim=2).flatten(1, 2)
    first = reference.select(tokens, None, 1, size // 2)
    for seed in range(5):
        noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(seed))
        other = reference.select(tokens * (1 + 1e-7 * noise), None, 1, size // 2)
        assert (first == other).float().mean() > 0.97
    batched = reference.select(tokens.expand(3, -1, -1), None, 1, size // 2)
    assert torch.equal(batched[1:2], first)


# Number of regions that have few tokens, where ties are frequent.
SMALL_REGIONS = 2048


@pytest.mark.parametrize("channels", [64, 640, 1536])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_noise_of_rounding_flips_no_selection(size: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, SMALL_REGIONS * size, channels, generator=generator)
    noise = 1 + 1e-7 * torch.randn(tokens.shape, generator=generator)
    chosen, again = (reference.select(each, None, SMALL_REGIONS, size // 2) for each in (tokens, tokens * noise))
    assert torch.equal(chosen.sort(-1).values, again.sort(-1).values)


def test_the_first_of_two_tokens_is_chosen() -> None:
    tokens = torch.randn(1, 2 * SMALL_REGIONS, 64, generator=torch.Generator().manual_seed(1))
    chosen = reference.select(tokens, None, SMALL_REGIONS, 1)
    assert torch.equal(chosen.flatten(), torch.arange(0, 2 * SMALL_REGIONS, 2))


def test_a_batch_selects_as_its_samples_do_alone() -> None:
    tokens = torch.randn(2, 2 * SMALL_REGIONS, 320, generator=torch.Generator().manual_seed(2))
    together = reference.select(tokens, None, SMALL_REGIONS, 1)
    alone = torch.cat([reference.select(sample[None], None, SMALL_REGIONS, 1) for sample in tokens])
    assert torch.equal(together, alone)


def test_graph_cut_greedily_maximises_its_own_value() -> None:
    similarity = reference.pairwise_similarity(torch.rand(1, 1, 10, 4), "cosine").clamp_min(0)
    pairs = similarity[0, 0]

    def value(chosen: list[int]) -> float:
        return (pairs[:, chosen].sum() - 0.5 * pairs[chosen][:, chosen].sum()).item()

    picked: list[int] = []
    for _ in range(4):
        picked.append(max((c for c in range(10) if c not in picked), key=lambda c: value([*picked, c])))
    assert reference.select_graph_cut(similarity, 4)[0, 0].tolist() == picked


def test_shared_destinations_maximise_the_coverage_of_all_samples() -> None:
    values = torch.randn(3, 16, 4)
    chosen = reference.select(values, None, 1, 5, shared=True)
    stacked = reference.pairwise_similarity(values[:, None], "cosine").transpose(0, 1).flatten(1, 2)[None]
    assert torch.equal(chosen, reference.select_destinations(stacked, 5))


@settings(max_examples=250, deadline=None)
@given(
    grid=grids,
    spec=regions,
    ratio=ratios,
    temperature=st.sampled_from((0.001, 0.05, 1.0)),
    unmerge=st.sampled_from(("transpose", "pinv")),
    similarity=st.sampled_from(("cosine", "dot")),
    shared=st.booleans(),
    whole=st.booleans(),
    data=st.data(),
)
def test_weights_are_means_and_constants_survive(
    grid: TokenGrid,
    spec: str,
    ratio: float,
    temperature: float,
    unmerge: str,
    similarity: str,
    shared: bool,
    whole: bool,
    data: st.DataObject,
) -> None:
    """Rows of merge and unmerge weights sum to 1, so constants survive merging and unmerging, whatever the tokens."""
    values = data.draw(tokens(grid.count))
    technique = Merge(
        ratio=ratio,
        regions=spec,
        merge_regions="whole" if whole else None,
        temperature=temperature,
        unmerge=unmerge,
        similarity=similarity,
    )
    merge_map = make_map(values, grid, technique, shared)
    rounding = ROUNDING[values.dtype]
    for weights in (merge_map.merge_weights, merge_map.unmerge_weights):
        assert weights.dtype == values.dtype
        assert weights.isfinite().all()
        totals = weights.float().sum(-1)
        scale = weights.float().abs().sum(-1)
        assert ((totals - 1).abs() <= rounding * scale.clamp_min(1)).all()
    assert (merge_map.merge_weights >= 0).all()
    constant = torch.ones(len(values), grid.count, 3)
    merged = merge_map.merge(constant)
    assert merged.shape == (len(values), merge_map.layout.merged, 3)
    restored = merge_map.unmerge(merged)
    scale = merge_map.unmerge_weights.float().abs().sum(-1).max().clamp_min(1)
    torch.testing.assert_close(restored, constant, rtol=0, atol=2 * rounding * scale.item())


@settings(max_examples=150, deadline=None)
@given(grid=grids, spec=regions, data=st.data())
def test_ratio_zero_is_the_identity(grid: TokenGrid, spec: str, data: st.DataObject) -> None:
    values = torch.randn(2, grid.count, 6, generator=torch.Generator().manual_seed(data.draw(seeds)))
    # Tokens are distinct, so each is nearest to itself.
    merge_map = make_map(values, grid, Merge(ratio=0.0, regions=spec, temperature=1e-6))
    assert merge_map.layout.merged == grid.count
    restored = merge_map.unmerge(merge_map.merge(values))
    torch.testing.assert_close(restored, values, rtol=1e-3, atol=1e-3)


@settings(max_examples=100, deadline=None)
@given(grid=grids, ratio=st.sampled_from((0.25, 0.5, 0.75)), seed=seeds)
def test_a_cold_temperature_gives_the_mean_of_each_cluster(grid: TokenGrid, ratio: float, seed: int) -> None:
    values = torch.randn(1, grid.count, 6, generator=torch.Generator().manual_seed(seed))
    merge_map = make_map(values, grid, Merge(ratio=ratio, regions="whole", temperature=1e-6))
    directions = torch.nn.functional.normalize(values[0], dim=-1)
    nearest = (directions @ directions[merge_map.destinations[0]].T).argmax(1)
    merged = merge_map.merge(values)
    for place in range(merge_map.layout.merged):
        torch.testing.assert_close(merged[0, place], values[0, nearest == place].mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(merge_map.unmerge(merged), merged[:, nearest], rtol=1e-3, atol=1e-3)


@settings(max_examples=100, deadline=None)
@given(seed=seeds, count=st.integers(2, 12), size=st.integers(12, 24))
def test_pinv_is_the_pseudo_inverse_up_to_row_sums(seed: int, count: int, size: int) -> None:
    raw = torch.rand(1, 1, count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    merge = (raw / raw.sum(-1, keepdim=True)).float()
    unmerge = reference.pinv_weights(merge, fallback=torch.full((1, 1, size, count), 1 / count))
    expected = torch.linalg.pinv(merge.double())
    totals = expected.sum(-1, keepdim=True)
    usable = (totals.abs() > 2e-3).expand_as(expected)
    scaled = (expected / totals)[usable]
    # The ridge of 1e-6 shows where the pseudo-inverse itself is badly conditioned.
    condition = torch.linalg.cond(merge.double()).item() ** 2
    limit = max(1e-3, 1e-5 * condition) * scaled.abs().max().clamp_min(1)
    assert (unmerge.double()[usable] - scaled).abs().max() <= limit


def test_identical_tokens_do_not_break_pinv() -> None:
    values = torch.ones(1, 16, 4)
    merge_map = make_map(values, TokenGrid(4, 4), Merge(unmerge="pinv", regions="whole", temperature=0.05))
    restored = merge_map.unmerge(merge_map.merge(values))
    torch.testing.assert_close(restored, values, rtol=1e-4, atol=1e-4)


@settings(max_examples=120, deadline=None)
@given(
    grid=st.builds(TokenGrid, st.integers(2, 9), st.integers(2, 9)),
    spec=regions,
    merge_spec=st.none() | regions,
    seed=seeds,
)
def test_merging_equals_a_plain_loop_over_regions(
    grid: TokenGrid, spec: str, merge_spec: str | None, seed: int
) -> None:
    values = torch.randn(2, grid.count, 5, generator=torch.Generator().manual_seed(seed))
    technique = Merge(ratio=0.5, regions=spec, merge_regions=merge_spec, temperature=0.1)
    try:
        partition = partition_grids((grid,), technique)
    except TokenMergeError:
        return
    count = partition.layout.merge_regions
    order = torch.arange(grid.count) if partition.merge_order is None else partition.merge_order
    merge_map = make_map(values, grid, technique)
    merged = merge_map.merge(values).unflatten(1, (count, -1))
    restored = merge_map.unmerge(merge_map.merge(values))
    for sample in range(2):
        for number, members in enumerate(order.view(count, -1)):
            chosen = merge_map.destinations[sample].view(count, -1)[number]
            assert set(chosen.tolist()) <= set(members.tolist()), "a destination lies outside of its region"
            unit = torch.nn.functional.normalize(values[sample], dim=-1)
            spread = torch.softmax(unit[chosen] @ unit[members].T / 0.1, dim=0)
            expected = spread / spread.sum(1, keepdim=True) @ values[sample, members]
            torch.testing.assert_close(merged[sample, number], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(restored[sample, members], spread.T @ expected, rtol=1e-4, atol=1e-4)


def test_several_images_of_one_sequence_are_cut_separately_where_tiles_fit() -> None:
    partition = partition_grids((TokenGrid(8, 8), TokenGrid(8, 8)), Merge(regions="tile:4x4"))
    assert partition.order is not None
    first, second = partition.order.view(2, 4, 16)
    assert first.max() < 64 <= second.min()


def in_regions(order: Tensor | None, count: int, size: int) -> Tensor:
    """Token indices by region, [R, size]. Each of the `count` tokens must occur once."""
    order = torch.arange(count) if order is None else order
    assert torch.equal(order.sort().values, torch.arange(count))
    return order.view(-1, size)


def slab_numbers(grid: TokenGrid, depth: int) -> list[int]:
    """The slab number of every frame. Slabs have `depth` frames; frames that are left over come first, as slab 0."""
    left_over = grid.frames % depth
    return [0 if frame < left_over else 1 + (frame - left_over) // depth for frame in range(grid.frames)]


def assert_regions_keep_apart(places: Tensor, merging: tuple[TokenGrid, ...], wished: Regions) -> None:
    """No region of `places` [R, n] mixes grids, and no tile mixes slabs. A tile takes equally many of each frame."""
    number = torch.cat([torch.full((grid.count,), number) for number, grid in enumerate(merging)])[places]
    assert bool((number == number[:, :1]).all()), "a region holds tokens of two images"
    if wished.kind != "tile":
        return
    for region, image in zip(places.tolist(), number[:, 0].tolist(), strict=True):
        grid, offset = merging[image], sum(each.count for each in merging[:image])
        slabs = slab_numbers(grid, min(wished.frames, grid.frames))
        spots: dict[int, set[int]] = {}
        for token in region:
            frame, spot = divmod(token - offset, grid.area)
            spots.setdefault(frame, set()).add(spot)
        (slab,) = {slabs[frame] for frame in spots}
        # Two regions may divide the frames of one spot, so their counts per frame may differ by 1.
        sizes = {len(spots.get(frame, ())) for frame, each in enumerate(slabs) if each == slab}
        assert max(sizes) - min(sizes) <= 1
        if len(region) % slabs.count(slab) == 0:
            assert all(each == next(iter(spots.values())) for each in spots.values()), "frames have other places"


@settings(max_examples=400, deadline=None)
@given(given_grids=sequences, spec=regions | deep_regions, ratio=ratios)
def test_no_region_holds_tokens_of_two_images_nor_of_frames_it_should_not(
    given_grids: tuple[TokenGrid, ...], spec: str, ratio: float
) -> None:
    technique = Merge(ratio=ratio, regions=spec)
    partition = partition_grids(given_grids, technique)
    layout, merging = partition.layout, partition.grids
    assert merging == merging_grids(given_grids, technique)
    drawn, before, after = drawn_alone(given_grids)
    assert before == 0 or drawn.frames > given_grids[0].frames
    assert merging in (given_grids, (drawn,))
    if len(merging) < len(given_grids):
        assert (partition.before, partition.after) == (before, after)
    assert layout == layout_for(merging, technique)
    assert layout.tokens == sum(grid.count for grid in merging)
    assert partition.before + layout.tokens + partition.after == sum(grid.count for grid in given_grids)
    assert ("of the first image" in partition.description) == (partition.before == 0 < partition.after)
    assert ("of the frames after the first" in partition.description) == (partition.before > 0)
    assert layout.select_size == layout.merge_size
    assert ratio == 0 or layout.merged < layout.tokens or math.gcd(*(grid.area for grid in merging)) == 1
    for order in (partition.order, partition.merge_order):
        places = in_regions(order, layout.tokens, layout.select_size)
        assert_regions_keep_apart(places, merging, technique.select_in)


@settings(max_examples=400, deadline=None)
@given(given_grids=sequences, spec=regions | deep_regions, ranks=st.integers(2, 4), even=st.booleans())
def test_what_processes_have_of_regions_is_all_of_them(
    given_grids: tuple[TokenGrid, ...], spec: str, ranks: int, even: bool
) -> None:
    partition = partition_grids(given_grids, Merge(regions=spec))
    layout, tokens = partition.layout, sum(grid.count for grid in given_grids)
    parts = [list(part) for part in torch.arange(tokens).tensor_split(ranks)]
    owner = torch.tensor([rank for rank, part in enumerate(parts) for _ in part])
    regions_of = in_regions(partition.order, layout.tokens, layout.select_size)
    owners = owner[regions_of + partition.before]
    counts = owners[:, 0].bincount(minlength=ranks)
    whole = bool((owners == owners[:, :1]).all())
    fits = whole and bool(counts.min()) and (not even or counts.min() == counts.max())
    shards = [Shard(rank, ranks, even, None) for rank in range(ranks)]
    if not fits:
        for shard in shards:
            with pytest.raises(TokenMergeError, match="straddle the shards" if not whole else "of them"):
                shard_partition(partition, shard)
        return
    found = []
    for shard, part in zip(shards, parts, strict=True):
        own = shard_partition(partition, shard)
        assert own.before + own.layout.tokens + own.after == len(part)
        assert own.layout.select_size == layout.select_size
        assert own.layout.merged * layout.tokens == layout.merged * own.layout.tokens
        begin = int(part[0]) + own.before
        found.append(in_regions(own.order, own.layout.tokens, layout.select_size) + begin)
        assert torch.equal(in_regions(own.merge_order, own.layout.tokens, layout.select_size) + begin, found[-1])
    assert torch.equal(torch.cat(found).sort(0).values, regions_of.sort(0).values + partition.before)


@settings(max_examples=400, deadline=None)
@given(given_grids=sequences, spec=regions | deep_regions, merge_spec=regions | deep_regions, ratio=ratios)
def test_nor_does_a_merging_region(
    given_grids: tuple[TokenGrid, ...], spec: str, merge_spec: str, ratio: float
) -> None:
    technique = Merge(ratio=ratio, regions=spec, merge_regions=merge_spec)
    try:
        partition = partition_grids(given_grids, technique)
    except TokenMergeError:
        assert_refused_rightly(given_grids, technique)
        return
    layout, merging = partition.layout, partition.grids
    selected = in_regions(partition.order, layout.tokens, layout.select_size)
    merged = in_regions(partition.merge_order, layout.tokens, layout.merge_size)
    assert_regions_keep_apart(selected, merging, technique.select_in)
    assert_regions_keep_apart(merged, merging, technique.merge_in)
    owner = torch.empty(layout.tokens, dtype=torch.int64)
    owner[merged] = torch.arange(layout.merge_regions)[:, None].expand_as(merged)
    assert bool((owner[selected] == owner[selected[:, :1]]).all()), "a selection region lies in two merging regions"


@pytest.mark.parametrize(
    ("given_grids", "spec", "merging"),
    [
        ((TokenGrid(8, 8), TokenGrid(8, 8)), "tile:4x4", 2),
        ((TokenGrid(8, 8), TokenGrid(8, 12)), "tile:4x4", 2),
        ((TokenGrid(8, 8), TokenGrid(8, 8, 3)), "tile:4x4", 2),
        ((TokenGrid(8, 8), TokenGrid(6, 8)), "stripe:7", 2),
        # 64 and 49 tokens share no divisor but 1.
        ((TokenGrid(8, 8), TokenGrid(7, 7)), "tile:4x4", 1),
        ((TokenGrid(8, 8), TokenGrid(7, 7)), "stripe:4", 1),
        # Both images have one size, but a single region would hold both.
        ((TokenGrid(8, 8), TokenGrid(8, 8)), "whole", 1),
        ((TokenGrid(8, 8), TokenGrid(8, 8)), "tile:1", 2),
        # A first frame that may be given, then the video.
        ((TokenGrid(8, 8), TokenGrid(8, 8, 3)), "whole", 1),
        ((TokenGrid(8, 8), TokenGrid(8, 8, 3)), "stripe:1", 1),
    ],
)
def test_several_images_merge_where_regions_fit_all_and_else_the_drawn_one_alone(
    given_grids: tuple[TokenGrid, ...], spec: str, merging: int
) -> None:
    partition = partition_grids(given_grids, Merge(regions=spec))
    video = given_grids[-1].frames > 1
    drawn = given_grids if merging == 2 else given_grids[1:] if video else given_grids[:1]
    assert partition.grids == drawn
    left = sum(grid.count for grid in given_grids) - sum(grid.count for grid in drawn)
    assert (partition.before, partition.after) == ((left, 0) if video else (0, left))
    if merging == 1:
        alone = partition_grids(drawn, Merge(regions=spec))
        assert partition.layout == alone.layout
        orders = (partition.order, alone.order)
        assert torch.equal(*orders) if None not in orders else orders == (None, None)


@pytest.mark.parametrize(
    ("frames", "spec", "description"),
    [
        (4, "tile:4x4", "16 tiles of 4x4"),
        (4, "tile:2x4x4", "8 tiles of 2x4x4"),
        (4, "tile:9x4x4", "4 tiles of 4x4x4"),
        (1, "tile:2x4x4", "4 tiles of 4x4"),
        # Frames that are left over come first.
        (5, "tile:2x4x4", "2 tiles of 8x4, 8 tiles of 2x4x4"),
        (6, "tile:4x4x4", "2 tiles of 2x8x4, 4 tiles of 4x4x4"),
        (13, "tile:2x4x4", "2 tiles of 8x4, 24 tiles of 2x4x4"),
        (31, "tile:2x4x4", "2 tiles of 8x4, 60 tiles of 2x4x4"),
    ],
)
def test_tiles_span_frames_where_asked(frames: int, spec: str, description: str) -> None:
    partition = partition_grids((TokenGrid(8, 8, frames),), Merge(regions=spec))
    assert partition.description == description


@pytest.mark.parametrize(
    ("given_grids", "description"),
    [
        # Wan at 720p with 81 and 121 frames, without and with a given first frame; Wan at 480p; odd areas.
        ((TokenGrid(45, 80, 21),), "120 tiles of 3x10, 2400 tiles of 2x3x5"),
        ((TokenGrid(45, 80), TokenGrid(45, 80, 20)), "120 tiles of 3x10, 2400 tiles of 2x3x5"),
        ((TokenGrid(45, 80, 31),), "120 tiles of 3x10, 3600 tiles of 2x3x5"),
        ((TokenGrid(45, 80), TokenGrid(45, 80, 30)), "120 tiles of 3x10, 3600 tiles of 2x3x5"),
        ((TokenGrid(30, 52, 21),), "52 ragged tiles of 30, 1040 ragged tiles of 2x15"),
        ((TokenGrid(15, 15, 13),), "9 tiles of 5x5, 108 ragged tiles of 2x12.5"),
        ((TokenGrid(16, 16, 3), TokenGrid(16, 16, 2)), "8 tiles of 8x4, 32 tiles of 2x4x4"),
    ],
    ids=str,
)
def test_tiles_span_frames_of_real_sizes(given_grids: tuple[TokenGrid, ...], description: str) -> None:
    technique = Merge(regions="tile:2x4x4")
    partition = partition_grids(given_grids, technique)
    assert partition.description == description
    places = in_regions(partition.order, partition.layout.tokens, partition.layout.select_size)
    assert partition.grids == given_grids
    assert_regions_keep_apart(places, given_grids, technique.select_in)


@pytest.mark.parametrize(
    ("spec", "merge_spec"),
    [
        ("tile:2x2", "tile:4x4"),
        ("tile:2x2", "tile:64x64"),
        ("tile:2x2", "stripe:4"),
        ("stripe:16", "stripe:4"),
        ("stripe:4", "whole"),
        ("tile:1", "whole"),
    ],
)
@pytest.mark.parametrize("grid", [TokenGrid(8, 8), TokenGrid(32, 2)], ids=str)
def test_a_model_merges_in_the_regions_that_were_planned(grid: TokenGrid, spec: str, merge_spec: str) -> None:
    """A group makes the planned map, although its tensors are laid out before the grid is known."""
    technique = Merge(ratio=0.5, regions=spec, merge_regions=merge_spec)
    clock = Clock()
    clock.start_image(None)
    merging = Merging(technique, clock)
    group = merging.add_group("level-1", 0, method_for(technique), shared=False)
    values = torch.randn(1, 64, 6, generator=torch.Generator().manual_seed(0))
    call = DenoiserCall(1, values.dtype, values.device, torch.zeros(()), (grid,))
    merging.enter(call, Step(MERGED), waits=False)
    assert group.slot is not None
    refresh(values, group.handle, group.slot.map.tensors)
    expected = make_map(values, grid, technique)
    torch.testing.assert_close(group.slot.map.merge(values), expected.merge(values))
    restored = group.slot.map.unmerge(group.slot.map.merge(values))
    torch.testing.assert_close(restored, expected.unmerge(expected.merge(values)))

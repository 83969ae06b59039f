"""A coverage target in place of a fixed ratio: what is measured, what is chosen from it, and the pictures it gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tiny
import tokenmerge
from tokenmerge import MergeConfig, TokenMergeError, bench
from tokenmerge.families import denoiser_of, family_of
from tokenmerge.families.calls import DenoiserCall
from tokenmerge.merging.grid import TokenGrid, layout_for, partition_grids, split_regions
from tokenmerge.merging.groups import MergeGroup, refresh
from tokenmerge.merging.ops import reference
from tokenmerge.runtime.state import MergeState

# Its buckets are 0.25, 0.5 and 0.75.
MOST = 0.75
NONE, SOME, FULL = 0.0, 0.8, 1.0


def random(batch: int = 1, count: int = 64, seed: int = 0) -> Tensor:
    return tiny.noise(batch, count, 6, seed=seed)


def constant(batch: int = 1, count: int = 64) -> Tensor:
    return torch.full((batch, count, 6), 0.3)


def apply(pipe: Any, coverage: float = NONE, **options: Any) -> Any:
    return tokenmerge.apply(pipe, **{**tiny.PLAIN, "ratio": MOST, "coverage": coverage, "skip_first": 0, **options})


class Driven:
    """One group of an 8x8 grid, whose tokens are given step by step."""

    def __init__(self, **options: Any) -> None:
        self.config = MergeConfig(ratio=MOST).replace(**{"destinations_every": 1, **options})
        self.state = MergeState(self.config, lambda: None)
        self.group: MergeGroup = self.state.add_group("level-1")
        self.timestep = 1000.0

    def step(self, *tokens: Tensor) -> list[float]:
        """The ratio of every call of a step."""
        self.timestep -= 1
        ratios = []
        for each in tokens:
            self.enter(each)
            slot = self.group.slot
            assert slot is not None
            refresh(each, [], self.group.handle, slot.map.tensors, slot.rotary)
            ratios.append(self.group.ratio)
            self.state.leave()
        return ratios

    def enter(self, tokens: Tensor) -> None:
        timestep = torch.tensor(self.timestep)
        self.state.enter(DenoiserCall(tokens.shape[0], tokens.dtype, tokens.device, timestep, 8, 8))

    def new_image(self) -> None:
        self.timestep += 1000.0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("regions", ["whole", "tile:4x4", "stripe:4", "tile:64"])
def test_the_first_of_a_selection_cover_as_much_as_a_selection_of_that_many(regions: str, shared: bool) -> None:
    tokens = random(batch=3)
    config = MergeConfig(ratio=0.25, coverage=SOME, regions=regions)
    partition = partition_grids((TokenGrid(8, 8),), config)
    layout, order = partition.layout, partition.order
    counts = list(range(1, layout.select_count + 1))

    def select(count: int) -> Tensor:
        return reference.select(tokens, order, layout.select_regions, count, shared=shared)

    measured = reference.mean_coverages(tokens, order, select(layout.select_count), counts)
    pairs = reference.pairwise_similarity(split_regions(tokens, None, 1), "cosine")[:, 0]
    areas = split_regions(torch.arange(64).view(1, 64, 1), order, layout.select_regions)[0, :, :, 0]
    for count, value in zip(counts, measured, strict=True):
        chosen = select(count).expand(3, -1, -1)
        best = [
            pairs[sample][area][:, chosen[sample, region]].amax(1)
            for sample in range(3)
            for region, area in enumerate(areas)
        ]
        assert value.item() == pytest.approx(torch.cat(best).mean().item(), abs=1e-5)
    assert bool((measured.diff() > 0).all())


def test_equal_tokens_are_covered_exactly() -> None:
    destinations = torch.tensor([[[3, 7]]])
    assert reference.mean_coverages(constant(2), None, destinations.expand(2, -1, -1), [1, 2]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("regions", ["whole", "tile", "stripe:64", "tile:16", "tile:2x2", "tile:3x5", "stripe:1000"])
@pytest.mark.parametrize("tokens", [4, 16, 60, 64, 221, 4096])
def test_all_buckets_lie_in_the_same_regions(tokens: int, regions: str) -> None:
    config = MergeConfig(ratio=0.9, coverage=SOME, regions=regions)
    layouts = [layout_for(tokens, config.replace(ratio=ratio)) for ratio in config.buckets]
    assert len({(layout.select_size, layout.merge_size) for layout in layouts}) == 1
    counts = [layout.select_count for layout in layouts]
    assert counts == sorted(counts, reverse=True)
    assert 1 <= counts[-1] <= counts[0] < layouts[0].select_size


@pytest.mark.parametrize(
    ("used", "coverages", "chosen"),
    [
        (0.25, (0.9, 0.8, 0.7), 0.5),
        (0.25, (0.9, 0.85, 0.8), 0.75),
        (0.25, (0.7, 0.6, 0.5), 0.25),
        (0.5, (math.nan, 0.9, 0.7), 0.5),
        (0.5, (math.nan, 0.7, 0.6), 0.25),
        (0.75, (math.nan, math.nan, 0.8), 0.75),
        (0.75, (math.nan, math.nan, 0.1), 0.5),
    ],
)
def test_the_largest_ratio_that_reaches_the_target_or_one_less(
    used: float, coverages: tuple[float, ...], chosen: float
) -> None:
    config = MergeConfig(ratio=MOST, coverage=SOME)
    assert config.buckets == (0.25, 0.5, 0.75)
    assert config.next_ratio(used, coverages) == chosen


def test_the_ratio_follows_the_tokens_and_maps_are_never_old() -> None:
    driven = Driven(coverage=0.9)
    given = [constant(), random(seed=1), constant(), random(seed=2), random(seed=3), random(seed=4)]
    ratios = []
    for tokens in given:
        ratios += driven.step(tokens)
        assert driven.group.slot is not None
        # Also in tensors that were in use some selections ago.
        layout = layout_for(64, driven.config.replace(ratio=ratios[-1]))
        order = partition_grids((TokenGrid(8, 8),), driven.config).order
        fresh = reference.select(tokens, order, layout.select_regions, layout.select_count)
        assert torch.equal(driven.group.slot.map.destinations, fresh.flatten(1))
    assert ratios == [0.25, 0.75, 0.5, 0.75, 0.5, 0.25]


def test_a_selection_that_did_not_run_is_made_at_the_ratio_chosen_for_it() -> None:
    driven = Driven(coverage=0.9)
    assert [driven.step(tokens) for tokens in (constant(), random(), constant())] == [[0.25], [0.75], [0.5]]
    for _ in range(3):
        # As when a cache skips all layers. What this ratio once covered must not count.
        driven.timestep -= 1
        driven.enter(random())
        assert (driven.group.ratio, driven.group.phase) == (0.75, "select")
        assert driven.group.coverage is None
    assert driven.step(constant()) == [0.75]
    assert driven.group.coverage == 1.0


def test_each_call_of_a_step_has_a_ratio_of_its_own() -> None:
    driven = Driven(coverage=0.9, destinations_every=2)
    for step in range(5):
        expected = [0.25, 0.25] if step < 2 else [0.75, 0.25]
        assert driven.step(constant(), random(seed=step)) == expected


def test_calls_beyond_those_that_maps_are_kept_for_remove_least() -> None:
    driven = Driven(coverage=NONE)
    driven.step(*[constant()] * 6)
    assert driven.step(*[constant()] * 6) == [0.75] * 4 + [0.25] * 2


def test_every_image_begins_with_the_smallest_ratio() -> None:
    driven = Driven(coverage=0.9)
    for _ in range(3):
        assert [driven.step(constant()) for _ in range(3)] == [[0.25], [0.75], [0.75]]
        driven.new_image()


def test_a_batch_is_measured_together() -> None:
    pair = torch.cat([constant(), random()])
    measured = []
    for tokens in (*pair.split(1), pair):
        driven = Driven(coverage=0.9)
        driven.step(tokens)
        measured.append(driven.group.coverage)
    assert measured[0] == 1.0
    assert measured[2] == pytest.approx(sum(measured[:2]) / 2)


@pytest.mark.parametrize("kind", tiny.FAMILIES)
@pytest.mark.parametrize(("target", "lowest", "highest"), [(NONE, 0.75, 0.75), (FULL, 0.25, 0.25), (SOME, 0.25, 0.75)])
def test_pictures_end_at_the_ratio_of_their_target(kind: str, target: float, lowest: float, highest: float) -> None:
    pipe = apply(tiny.build(kind), target, destinations_every=2)
    tiny.draw(pipe, steps=7)
    groups = tokenmerge.summary(pipe).groups
    for group in groups:
        assert lowest <= group["ratio"] <= highest
        before, after = map(int, group["tokens"].split(" -> "))
        assert after == before * (1 - group["ratio"])
        assert group["coverage"] >= target or group["ratio"] == 0.25
    if target == SOME and kind != "sd3":
        assert any(group["ratio"] == 0.5 for group in groups)


ALIKE: list[dict[str, Any]] = [
    {},
    {"sites": "component"},
    {"sites": "span"},
    {"regions": "stripe:16"},
    {"anchor_every": 2},
    {"anchor_every": 2, "gap": "linear"},
]


@pytest.mark.parametrize("kind", ["sdxl", "sd3", "flux"])
@pytest.mark.parametrize("options", ALIKE, ids=str)
def test_a_target_that_is_always_reached_is_a_ratio_that_rises(kind: str, options: dict[str, Any]) -> None:
    """Like ratios told by step: a third at first, all from the second selection on."""
    options = {"skip_first": 0, "destinations_every": 4, "weights_every": 2, **options}
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe)
    risen = tiny.draw(tokenmerge.apply(pipe, **{**tiny.PLAIN, "step_ratios": (0.25, 0.75), **options}), steps=8)
    assert torch.equal(tiny.draw(apply(pipe, NONE, **options), steps=8), risen)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe), plain)


def negative() -> dict[str, Any]:
    return {
        "true_cfg_scale": 3.0,
        "negative_prompt_embeds": tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH, seed=50),
        "negative_pooled_prompt_embeds": tiny.noise(1, tiny.POOLED_WIDTH, seed=51),
    }


@pytest.mark.parametrize("anchor_every", [0, 2])
def test_two_calls_in_a_step(anchor_every: int) -> None:
    options: dict[str, Any] = {**tiny.PLAIN, "destinations_every": 4, "anchor_every": anchor_every}
    pipe = tokenmerge.apply(tiny.build("flux"), step_ratios=(0.25, 0.75), skip_first=0, **options)
    risen = tiny.draw(pipe, steps=8, **negative())
    assert torch.equal(tiny.draw(apply(pipe, NONE, **options), steps=8, **negative()), risen)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_picture_does_not_depend_on_those_before_it(kind: str) -> None:
    requests: list[dict[str, Any]] = [{"seed": 0}, {"seed": 1, "size": (64, 96)}, {"seed": 2, "batch": 2}, {"seed": 0}]
    pipe = apply(tiny.build(kind), SOME, destinations_every=2)
    for request in requests:
        alone = apply(tiny.build(kind), SOME, destinations_every=2)
        assert torch.equal(tiny.draw(pipe, steps=5, **request), tiny.draw(alone, steps=5, **request))


SHORT: dict[str, Any] = {
    "sdxl": lambda: tiny.build("sdxl", unet=tiny.short_sdxl_unet()),
    "flux": lambda: tiny.build("flux", transformer=tiny.flux_transformer(num_layers=2, num_single_layers=2)),
}


@pytest.mark.parametrize("kind", SHORT)
def test_nothing_is_compiled_after_every_bucket_was_seen_once(kind: str) -> None:
    torch._dynamo.reset()
    pipe = apply(SHORT[kind](), destinations_every=2)
    denoiser = denoiser_of(pipe)

    def draw_all() -> list[Tensor]:
        pictures = []
        for target in (NONE, SOME, FULL):
            for group in denoiser._tokenmerge.state.groups:
                group._wish = group._wish.replace(coverage=target)
            pictures.append(tiny.draw(pipe, steps=5))
            ratios.update(group["ratio"] for group in tokenmerge.summary(pipe).groups)
        return pictures

    ratios: set[float] = set()
    eager = draw_all()
    assert ratios == {0.25, 0.5, 0.75}
    counter = CompileCounterWithBackend("aot_eager")
    for block in family_of(denoiser).blocks(denoiser):
        block.module.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(draw_all(), eager, rtol=0, atol=1e-4)
    first = counter.frame_count
    draw_all()
    assert counter.frame_count == first
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coverage": 1.5}, r"must be in \[0, 1\]"),
        ({"coverage": -0.1}, r"must be in \[0, 1\]"),
        ({"coverage": float("nan")}, r"must be in \[0, 1\]"),
        ({"coverage": "most"}, "a number or None"),
        ({"step_ratios": (0.25, 0.5)}, "both coverage and step_ratios"),
        ({"block_ratios": (0.25, 0.5)}, "both coverage and block_ratios"),
        ({"method": "random"}, "method='toma'"),
        ({"method": "tomesd"}, "method='toma'"),
        ({"selection": "graph-cut"}, "selection='facility-location'"),
        ({"selection": "stochastic"}, "selection='facility-location'"),
        ({"similarity": "dot"}, "similarity='cosine'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenMergeError, match=message):
        MergeConfig(**{"coverage": SOME, **options})


def test_a_plan_tells_the_most_and_a_bench_refuses() -> None:
    pipe = tiny.build("flux")
    size = {"height": 64, "width": 64}
    plan, fixed = tokenmerge.plan(pipe, ratio=MOST, coverage=SOME, **size), tokenmerge.plan(pipe, ratio=MOST, **size)
    assert plan.saved == fixed.saved
    assert plan.spent > fixed.spent
    assert "ratio 0.75 or less for a coverage of 0.8" in str(plan)
    assert "at ratio 0.75, the most that is removed" in str(plan)
    with pytest.raises(TokenMergeError, match="use eval"):
        bench.candidates_for(pipe.transformer, ["default"], [MOST], {"coverage": SOME})


def test_a_summary_tells_what_is_in_use() -> None:
    pipe = apply(tiny.build("flux"), NONE, destinations_every=2)
    assert "not run yet" in str(tokenmerge.summary(pipe))
    tiny.draw(pipe, steps=3)
    (header, _, *rows) = str(tokenmerge.summary(pipe)).split("\n\n")[-1].splitlines()
    assert header.split()[4:6] == ["ratio", "coverage"]
    assert all(" 0.75 " in row for row in rows)
    assert "coverage" not in str(tokenmerge.summary(tokenmerge.apply(pipe, ratio=MOST)))

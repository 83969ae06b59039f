"""Every method keeps one contract in every family and equals a second implementation of its authors' definition.

ToMeSD is compared with the `tomesd` package itself, in fp64, where rounding decides no match.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tomesd
import torch
import torch.nn.functional as F
from diffusers.models.attention import BasicTransformerBlock
from peft import LoraConfig
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tiny
import tokenmerge
from tokenmerge import Merge, TokenMergeError
from tokenmerge.config import COMPONENTS, METHODS
from tokenmerge.families.calls import TokenGrid
from tokenmerge.merging.clustermap import RULES, ClusterMap
from tokenmerge.merging.mergemap import MapSpace
from tokenmerge.merging.methods import Given, method_for
from tokenmerge.merging.methods.bipartite import match, split_cells
from tokenmerge.merging.ops import reference
from traces import attributes, same

KINDS = ("sdxl", "sd3", "flux")
# ToDo keeps fewer keys than queries, but Flux rotates both by one table.
PAIRS = [pair for pair in itertools.product(METHODS, KINDS) if pair != ("todo", "flux")]
BLOCK_PAIRS = [pair for pair in PAIRS if pair[0] in ("tomesd", "tofu", "pool")]


def merge_by(method: str, **fields: Any) -> Merge:
    """A method at the sites its authors use, by default at ratio 0.5."""
    base = tokenmerge.presets()[method] if method in ("tomesd", "tofu", "todo") else Merge(method=method)
    assert isinstance(base, Merge)
    return base.replace(**{"ratio": 0.5, **fields})


def apply(pipe: Any, method: str, **fields: Any) -> Any:
    return tokenmerge.apply(pipe, merge_by(method, **fields))


def run_unet(unet: nn.Module, size: tuple[int, int] = (32, 32), samples: slice = slice(None)) -> list[Tensor]:
    """Outputs of all blocks and of the UNet, for one call in fp64 with `samples` of a batch of two."""
    outputs: list[Tensor] = []
    blocks = [module for module in unet.modules() if isinstance(module, BasicTransformerBlock)]
    handles = [block.register_forward_hook(lambda module, args, output: outputs.append(output)) for block in blocks]
    sample, text, pooled, ids = (
        each.double()[samples]
        for each in (
            tiny.noise(2, 4, *size),
            tiny.noise(2, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH, seed=1),
            tiny.noise(2, tiny.POOLED_WIDTH, seed=2),
            torch.ones(2, 6),
        )
    )
    with torch.no_grad():
        result = unet(sample, torch.tensor(500.0), text, added_cond_kwargs={"text_embeds": pooled, "time_ids": ids})
    for handle in handles:
        handle.remove()
    return [*outputs, result.sample]


# The contract.


@pytest.mark.parametrize(("method", "kind"), PAIRS)
def test_a_method_draws_alike_by_its_own_generator_and_leaves_nothing_behind(method: str, kind: str) -> None:
    pipe = tiny.build(kind)
    unpatched = tiny.draw(pipe)
    before = attributes(pipe)
    apply(pipe, method)
    with torch.random.fork_rng():
        state = torch.manual_seed(1).get_state()
        merged = pipe(**tiny.call_arguments(pipe)).images
        assert torch.equal(torch.get_rng_state(), state)
    assert merged.shape == unpatched.shape
    assert merged.isfinite().all()
    assert not torch.equal(merged, unpatched)
    assert torch.equal(tiny.draw(pipe), merged)
    assert torch.equal(tiny.draw(apply(tiny.build(kind), method)), merged)
    summary = tokenmerge.summary(pipe)
    assert f"{method} at ratio 0.5" in str(summary)
    assert summary.groups[0]["tokens"] == "256 -> 128"
    tokenmerge.remove(pipe)
    after = attributes(pipe)
    # Every image sets new timesteps in the scheduler.
    assert all(same(before[name], after[name]) for name in before if name != "scheduler")
    assert torch.equal(tiny.draw(pipe), unpatched)


@pytest.mark.parametrize(("method", "kind"), PAIRS)
def test_a_method_takes_every_shape_of_grid_and_every_precision(method: str, kind: str) -> None:
    """72x40 pixels have 18x10 and 9x5 tokens in a UNet, 18x10 elsewhere; 56x72 have 14x18 and 7x9."""
    pipe = apply(tiny.build(kind).to(torch.bfloat16), method)
    for size in ((72, 40), (56, 72)):
        image = tiny.draw(pipe, size=size, steps=1)
        assert image.dtype == torch.bfloat16
        assert image.isfinite().all()
        counts = {tuple(map(int, group["tokens"].split(" -> "))) for group in tokenmerge.summary(pipe).groups}
        assert all(merged < count for count, merged in counts)
        # The tolerance is for rounding: a region of 15 tokens keeps 8.
        assert dict(counts)[size[0] * size[1] // 16] == pytest.approx(size[0] * size[1] / 32, rel=1 / 15)


@pytest.mark.parametrize(("method", "kind"), PAIRS)
def test_samples_share_destinations_only_where_they_share_positions(method: str, kind: str) -> None:
    pipe = apply(tiny.build(kind), method)
    shape = {"sdxl": (4, 32, 32), "sd3": (4, 32, 32), "flux": (256, 16)}[kind]
    latents = tiny.noise(3, *shape, seed=9)
    images = [tiny.draw(pipe, batch=2, steps=1, latents=latents[[0, mate]]) for mate in (1, 2)]
    assert not torch.equal(images[0][1], images[1][1])
    looks_at_tokens = method in ("toma", "tomesd", "tofu")
    assert torch.equal(images[0][0], images[1][0]) == (kind != "flux" or not looks_at_tokens)


@pytest.mark.parametrize("method", ["toma", "tomesd", "tofu", "todo", "pool", "uniform"])
def test_guidance_in_one_call_is_guidance_in_two(method: str) -> None:
    """Without randomness, a sample has the same maps beside another sample and in a call of its own."""
    unet = tiny.sdxl_unet().double()
    apply(unet, method, **({"selection": "uniform"} if method in ("tomesd", "tofu") else {}))
    together = run_unet(unet)[-1]
    apart = [run_unet(unet, samples=slice(place, place + 1))[-1] for place in range(2)]
    torch.testing.assert_close(torch.cat(apart), together, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", [method for method, kind in PAIRS if kind == "flux"])
def test_true_guidance_calls_twice_in_a_step(method: str) -> None:
    pipe = apply(tiny.build("flux"), method)
    negative = {
        "true_cfg_scale": 3.0,
        "negative_prompt_embeds": tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH, seed=50),
        "negative_pooled_prompt_embeds": tiny.noise(1, tiny.POOLED_WIDTH, seed=51),
    }
    guided = tiny.draw(pipe, **negative)
    assert guided.isfinite().all()
    assert torch.equal(tiny.draw(pipe, **negative), guided)
    assert not torch.equal(tiny.draw(pipe), guided)


@pytest.mark.parametrize(
    ("method", "selected"),
    [("toma", 2), ("random", 2), ("pool", 1), ("todo", 1), ("lower-bound", 1), ("tomesd", 12 * 4), ("tofu", 12 * 2)],
)
def test_maps_are_made_as_often_as_a_method_needs(method: str, selected: int) -> None:
    """In 12 steps of SD3, with four blocks: every 10 steps, once, or in every block. ToFu has two groups of blocks."""
    pipe = apply(tiny.build("sd3"), method)
    tiny.draw(pipe, steps=12)
    assert {group["selected"] for group in tokenmerge.summary(pipe).groups} == {selected}


@pytest.mark.parametrize(("method", "kind"), BLOCK_PAIRS)
def test_baselines_merge_whole_blocks_too(method: str, kind: str) -> None:
    pipe = tiny.build(kind)
    unpatched = tiny.draw(pipe)
    whole = {"sites": "block", "components": COMPONENTS}
    merged = tiny.draw(apply(pipe, method, **whole))
    assert merged.isfinite().all()
    assert not torch.equal(merged, unpatched)


@pytest.mark.parametrize(("method", "kind"), PAIRS)
def test_a_plan_says_what_a_method_saves_and_spends(method: str, kind: str) -> None:
    plan = tokenmerge.plan(tiny.build(kind), merge_by(method), height=64, width=96)
    assert str(plan).splitlines()[0].startswith(f"{plan.model} ({plan.family}): {method} at ratio 0.5")
    assert 0 < plan.saved < 1
    assert (plan.spent == 0) == (method == "todo")


@pytest.mark.parametrize("name", ["tomesd", "tofu", "todo", "pool", "random", "uniform"])
def test_every_method_is_a_preset(name: str) -> None:
    technique = tokenmerge.presets()[name]
    assert technique.method == name
    pipe = tokenmerge.apply(tiny.build("sdxl"), name)
    assert tokenmerge.summary(pipe).plan.techniques == (technique, None)
    assert {group["group"].split()[0] for group in tokenmerge.summary(pipe).groups} == {"level-2", "level-4"}
    assert tiny.draw(pipe, steps=1).isfinite().all()


@pytest.mark.parametrize("selection", ["random", "uniform"])
def test_random_and_uniform_are_toma_with_that_selection(selection: str) -> None:
    image = tiny.draw(apply(tiny.build("sdxl"), "toma", selection=selection))
    assert torch.equal(tiny.draw(apply(tiny.build("sdxl"), selection)), image)


def test_a_seed_decides_random_patterns_in_even_batches() -> None:
    def image(seed: int, **options: Any) -> Tensor:
        return tiny.draw(apply(tiny.build("sdxl"), "tomesd", seed=seed), **options)

    assert not torch.equal(image(0), image(1))
    # Without guidance the batch is one sample, which gets no random pattern, as in the package.
    assert torch.equal(image(0, guided=False), image(1, guided=False))


# Refusals.


@pytest.mark.parametrize(
    ("kind", "method", "options", "message"),
    [
        ("sdxl", "tomesd", {"ratio": 0.8}, "removes at most 0.75"),
        ("flux", "tofu", {"ratio": 0.76}, "removes at most 0.75"),
        ("sdxl", "tomesd", {"selection": "graph-cut"}, "use 'random' or 'uniform', or the preset 'tomesd'"),
        ("sdxl", "tomesd", {"backend": "triton"}, "no kernels"),
        ("sdxl", "todo", {"backend": "triton"}, "no kernels"),
        ("sdxl", "pool", {"ratio": 0.25}, "ratio is 0.25: use 0.5"),
        ("flux", "pool", {"ratio": 0.6}, "ratio is 0.6: use 0.5"),
        ("sd3", "todo", {"ratio": 0.7}, "ratio is 0.7: use 0.667"),
        ("sdxl", "todo", {"sites": "block", "components": COMPONENTS}, "use sites='component', or the preset 'todo'"),
        ("sdxl", "todo", {"components": ("mlp",)}, "no site .* self_attention is not in components"),
        ("flux", "todo", {}, "same rotary table"),
    ],
)
def test_what_a_method_cannot_do_is_refused(kind: str, method: str, options: dict[str, Any], message: str) -> None:
    pipe = tiny.build(kind)
    before = attributes(pipe)
    with pytest.raises(TokenMergeError, match=message):
        apply(pipe, method, **options)
    assert same(attributes(pipe), before)


# A changed value for every field that some method does not read.
CHANGED: dict[str, Any] = {
    "regions": "tile:8x8",
    "merge_regions": "whole",
    "selection": "stochastic",
    "similarity": "dot",
    "temperature": 0.1,
    "unmerge": "pinv",
    "destinations_every": 3,
    "weights_every": 2,
    "seed": 3,
}


@pytest.mark.parametrize("method", METHODS)
def test_fields_that_a_method_does_not_read_are_refused(method: str) -> None:
    """Nothing changes before a refusal. Fields that are read, or repeat the method's own setting, are accepted."""
    pipe = tiny.build("sdxl")
    before = attributes(pipe)
    technique = merge_by(method)
    read = method_for(technique)
    assert set(read.unread) <= CHANGED.keys()
    for name, value in CHANGED.items():
        changed = technique.replace(**{name: value})
        if name in read.unread:
            told = f"{name} is {value!r}, but method '{method}' does not read it; leave it out, or use method='toma'"
            with pytest.raises(TokenMergeError, match=re.escape(told)):
                tokenmerge.apply(pipe, changed)
            read.check_read(technique.replace(**{name: getattr(read.effective(technique), name)}))
        elif (method, name) not in (("tomesd", "selection"), ("tofu", "selection")):
            read.check_read(changed)
    assert same(attributes(pipe), before)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_says_it_does_not_read_changes_no_map(method: str) -> None:
    """Every other field changes the map, except the seed and how often maps are renewed."""
    grid = TokenGrid(16, 16)
    tokens = tiny.noise(2, grid.count, 8)
    chosen = "random" if method in ("tomesd", "tofu", "random") else "facility-location"
    technique = Merge(method=method, ratio=0.75, regions="tile:4x4", selection=chosen)
    expected = [*filled_map(technique, tokens, grid).tensors]
    for name, value in CHANGED.items():
        if name == "selection" and method in ("tomesd", "tofu"):
            value = "uniform"
        if name == "seed" or name.endswith("_every"):
            continue
        made = filled_map(technique.replace(**{name: value}), tokens, grid).tensors
        equal = len(made) == len(expected) and all(map(torch.equal, made, expected))
        assert equal == (name in method_for(technique).unread), name


def test_a_grid_without_cells_is_refused_and_of_several_images_the_first_merges() -> None:
    technique = Merge(method="tomesd", selection="uniform")
    method = method_for(technique)
    with pytest.raises(TokenMergeError, match="no 2x2 cell"):
        method.partition((TokenGrid(1, 64),), technique)
    partition = method.partition((TokenGrid(8, 8), TokenGrid(8, 8)), technique)
    assert (partition.layout.tokens, partition.before, partition.after) == (64, 0, 64)


@pytest.mark.parametrize("kind", ["sdxl", "sd3"])
def test_todo_refuses_fused_projections_whenever_they_come(kind: str) -> None:
    pipe = tiny.build(kind)
    denoiser = tiny.denoiser_of(pipe)
    denoiser.fuse_qkv_projections()
    with pytest.raises(TokenMergeError, match="unfuse_qkv_projections"):
        apply(pipe, "todo")
    denoiser.unfuse_qkv_projections()
    image = tiny.draw(apply(pipe, "todo"))
    denoiser.fuse_qkv_projections()
    with pytest.raises(TokenMergeError, match="unfuse_qkv_projections"):
        tiny.draw(pipe)
    denoiser.unfuse_qkv_projections()
    assert torch.equal(tiny.draw(pipe), image)


@pytest.mark.parametrize("method", ["tomesd", "todo"])
def test_a_lora_on_keys_may_come_before_or_after(method: str) -> None:
    def image(*steps: str) -> Tensor:
        pipe = tiny.build("sdxl", unet=tiny.short_sdxl_unet())
        for step in steps:
            if step == "apply":
                apply(pipe, method)
                tiny.draw(pipe, steps=1)
            else:
                with torch.random.fork_rng():
                    torch.manual_seed(0)
                    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["attn1.to_k"], init_lora_weights=False))
        return tiny.draw(pipe)

    both = image("apply", "lora")
    assert torch.equal(image("lora", "apply"), both)
    assert not torch.equal(image("apply"), both)
    assert not torch.equal(image("lora"), both)


# Compiled code.


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "method", "graphs"),
    [("sdxl", "tomesd", 2), ("sdxl", "tofu", 3), ("sdxl", "todo", 2), ("sdxl", "pool", 2), ("flux", "tomesd", 3)],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_methods_compile_once(kind: str, method: str, graphs: int) -> None:
    few = {"sdxl": {"unet": tiny.short_sdxl_unet()}, "flux": {"transformer": tiny.flux_transformer()}}
    pipe = apply(tiny.build(kind, **few[kind]), method)
    sizes = ((64, 64), (64, 96))
    eager = [tiny.draw(pipe, size=size) for size in sizes]
    counter = CompileCounterWithBackend("aot_eager")
    tiny.denoiser_of(pipe).compile_repeated_blocks(fullgraph=True, backend=counter)
    compiled = [tiny.draw(pipe, size=sizes[0])]
    assert counter.frame_count <= graphs
    compiled.append(tiny.draw(pipe, size=sizes[1]))
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5)
    count = counter.frame_count
    assert all(torch.equal(tiny.draw(pipe, size=size), image) for size, image in zip(sizes, compiled, strict=True))
    assert counter.frame_count == count


# ToMeSD.


# The UNet's grids are 16x16 and 8x8; 18x14 and 9x7; 17x23 and 9x12. Cells of 2x2 do not divide the odd ones.
@pytest.mark.parametrize("size", [(32, 32), (36, 28), (34, 46)])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("components", [("self_attention",), ("self_attention", "cross_attention", "mlp")])
def test_tomesd_equals_the_package(components: tuple[str, ...], ratio: float, size: tuple[int, int]) -> None:
    unet = tiny.sdxl_unet().double()
    unpatched = run_unet(unet, size)
    every = len(components) > 1
    tomesd.apply_patch(unet, ratio=ratio, max_downsample=4, use_rand=False, merge_crossattn=every, merge_mlp=every)
    expected = run_unet(unet, size)
    tomesd.remove_patch(unet)
    tokenmerge.apply(unet, "tomesd", selection="uniform", ratio=ratio, components=components)
    outputs = run_unet(unet, size)
    assert len(outputs) == len(expected) == 12
    for output, wanted, plain in zip(outputs, expected, unpatched, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-9)
        assert (wanted - plain).abs().max() > 1e-4


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (4, 6), (5, 4), (7, 9)])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_cells_give_one_destination_each_and_edges_none(shape: tuple[int, int], seed: int | None) -> None:
    grid = TokenGrid(*shape)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    destinations, others = split_cells(grid, torch.device("cpu"), generator)
    assert sorted([*destinations.tolist(), *others.tolist()]) == list(range(grid.count))
    rows, columns = destinations // grid.width, destinations % grid.width
    cells = [(row, column) for row in range(shape[0] // 2) for column in range(shape[1] // 2)]
    assert list(zip((rows // 2).tolist(), (columns // 2).tolist(), strict=True)) == cells
    if seed is None:
        assert not (rows % 2).any()
        assert not (columns % 2).any()


def test_random_cells_take_all_four_tokens() -> None:
    destinations, _ = split_cells(TokenGrid(64, 64), torch.device("cpu"), torch.Generator().manual_seed(0))
    corners = destinations // 64 % 2 * 2 + destinations % 2
    assert corners.bincount().min() > 200


@pytest.mark.parametrize("shared", [False, True])
def test_those_most_like_a_destination_join_it(shared: bool) -> None:
    tokens = tiny.noise(3, 35, 6).double()
    candidates, others = split_cells(TokenGrid(5, 7), tokens.device, None)
    destinations, sources, places = match(tokens, candidates, others, 20, shared=shared)
    assert destinations.shape == (1 if shared else 3, 20)
    similarity = F.cosine_similarity(tokens[:, :, None], tokens[:, None], dim=-1)[..., candidates]
    scores = similarity.amax(-1)
    for sample in range(3):
        chosen, gone = destinations[0 if shared else sample], sources[0 if shared else sample]
        ranked = scores.sum(0) if shared else scores[sample]
        kept = torch.tensor(sorted(set(chosen.tolist()) - set(candidates.tolist())))
        assert ranked[gone].min() > ranked[kept].max()
        assert torch.equal(places[sample, chosen], torch.arange(20))
        nearest = candidates[similarity[sample, gone].argmax(-1)]
        assert torch.equal(chosen[places[sample, gone]], nearest)


# ToFu.


def plain_merge(tokens: Tensor, rule: str, clusters: list[list[int]]) -> Tensor:
    """Merges clusters of one sample's tokens [N, C] by the rule's definition. Clusters list their destination first."""
    rows = []
    for members in clusters:
        mean = tokens[members].mean(0)
        largest = max(tokens[member].norm() for member in members)
        rows.append({"mean": mean, "prune": tokens[members[0]], "mlerp": mean / mean.norm() * largest}[rule])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_clusters_merge_by_their_rule_and_unmerge_by_copies(rule: str, dtype: torch.dtype) -> None:
    tokens = tiny.noise(2, 48, 6, seed=3).to(dtype)
    candidates, others = split_cells(TokenGrid(6, 8), tokens.device, None)
    destinations, sources, places = match(tokens, candidates, others, 18, shared=False)
    merge_map = ClusterMap(rule, destinations, sources, places)
    merged = merge_map.merge(tokens)
    assert merged.dtype == dtype
    for sample in range(2):
        clusters = [
            [own, *(index for index in range(48) if places[sample, index] == place and index != own)]
            for place, own in enumerate(destinations[sample].tolist())
        ]
        wanted = plain_merge(tokens[sample].float(), rule, clusters)
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(merged[sample].float(), wanted, rtol=tolerance, atol=tolerance)
        assert torch.equal(merge_map.unmerge(merged)[sample], merged[sample][places[sample]])
    assert torch.equal(merge_map.unmerge(merged, residual=tokens), tokens + merge_map.unmerge(merged))


def test_zero_tokens_stay_zero_under_every_rule() -> None:
    tokens = torch.zeros(1, 16, 4)
    found = match(tokens, *split_cells(TokenGrid(4, 4), tokens.device, None), 8, shared=False)
    for rule in RULES:
        assert torch.equal(ClusterMap(rule, *found).merge(tokens), torch.zeros(1, 8, 4))


@pytest.mark.parametrize("rule", RULES)
def test_broken_tokens_break_their_own_clusters_only(rule: str) -> None:
    tokens = tiny.noise(2, 36, 4)
    tokens[0, 8] = torch.nan
    tokens[0, 21] = torch.inf
    found = match(tokens, *split_cells(TokenGrid(6, 6), tokens.device, None), 18, shared=False)
    merge_map = ClusterMap(rule, *found)
    restored = merge_map.unmerge(merge_map.merge(tokens))
    touched = {int(merge_map.places[0, index]) for index in (8, 21)}
    whole = torch.tensor([int(place) not in touched for place in merge_map.places[0]])
    assert whole.any()
    assert restored[0][whole].isfinite().all()
    assert restored[1].isfinite().all()


def test_the_first_half_of_tofus_layers_prunes_and_the_second_merges_by_mlerp() -> None:
    """Inputs of every block's queries equal the definition. Depth is counted over all 11 blocks."""
    unet = tiny.sdxl_unet().double()
    tokenmerge.apply(unet, "tofu", selection="uniform")
    blocks = [module for module in unet.modules() if isinstance(module, BasicTransformerBlock)]
    order = [unet.get_submodule(site.block.name) for site in tokenmerge.summary(unet).plan.merged_sites]
    assert set(order) == set(blocks)
    seen: dict[nn.Module, dict[str, Tensor]] = {block: {} for block in blocks}
    for block in blocks:
        for name, module in (("entered", block), ("normed", block.norm1), ("merged", block.attn1.to_q)):
            hook = keep_normed if name == "normed" else keep_input
            hook(module, seen[block], name)
    run_unet(unet)
    for place, block in enumerate(order):
        entered, normed, merged = (seen[block][name] for name in ("entered", "normed", "merged"))
        side = int(entered.shape[1] ** 0.5)
        cells = split_cells(TokenGrid(side, side), entered.device, None)
        destinations, _, places = match(entered, *cells, side * side // 2, shared=False)
        for sample in range(2):
            clusters = [
                [own, *(index for index in range(side * side) if places[sample, index] == number and index != own)]
                for number, own in enumerate(destinations[sample].tolist())
            ]
            wanted = plain_merge(normed[sample], "prune" if place < 5.5 else "mlerp", clusters)
            torch.testing.assert_close(merged[sample], wanted, rtol=1e-6, atol=1e-6)


def keep_input(module: nn.Module, into: dict[str, Tensor], name: str) -> None:
    module.register_forward_pre_hook(lambda module, args: into.__setitem__(name, args[0]))


def keep_normed(module: nn.Module, into: dict[str, Tensor], name: str) -> None:
    module.register_forward_hook(lambda module, args, output: into.__setitem__(name, output))


# ToDo and pooling.


def downsampled(tokens: Tensor, height: int, width: int) -> Tensor:
    """Nearest tokens [B, N / 4, C] of tokens [B, N, C], on a grid of half the height and width."""
    image = tokens.transpose(1, 2).unflatten(2, (height, width))
    return F.interpolate(image, (height // 2, width // 2), mode="nearest").flatten(2).transpose(1, 2)


@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
@pytest.mark.parametrize("kind", ["sdxl", "sd3"])
def test_todo_attends_to_nearest_tokens(kind: str, size: tuple[int, int]) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), "todo")
    image = tiny.draw(pipe, size=size)
    plain = tiny.build(kind)
    unpatched = tiny.draw(plain, size=size)

    def shorten(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        height = int((args[0].shape[1] * size[0] / size[1]) ** 0.5 + 0.5)
        return (downsampled(args[0], height, args[0].shape[1] // height),)

    # In a UNet attn2 is cross-attention, in SD3 a second self-attention.
    names = ("attn1",) if kind == "sdxl" else ("attn", "attn2")
    for name, module in tiny.denoiser_of(plain).named_modules():
        if name.endswith(tuple(f"{attention}.{part}" for attention in names for part in ("to_k", "to_v"))):
            module.register_forward_pre_hook(shorten)
    torch.testing.assert_close(tiny.draw(plain, size=size), image, rtol=0, atol=1e-5)
    assert (unpatched - image).abs().max() > 1e-3


def filled_map(technique: Merge, tokens: Tensor, grid: TokenGrid) -> Any:
    method = method_for(technique)
    technique = method.effective(technique)
    partition = method.partition((grid,), technique)
    space = MapSpace(len(tokens), False, tokens.dtype, tokens.device)
    merge_map = method.empty_map(partition.layout, reference, technique, space)
    method.renew(merge_map, "select", Given(tokens, partition, technique, torch.Generator(), shared=False))
    return merge_map


@pytest.mark.parametrize(("ratio", "cell"), [(0.5, (1, 2)), (0.667, (1, 3)), (0.75, (2, 2)), (1 - 1 / 9, (3, 3))])
def test_pool_is_average_pooling_and_nearest_upsampling(ratio: float, cell: tuple[int, int]) -> None:
    grid = TokenGrid(12, 18)
    tokens = tiny.noise(2, grid.count, 5)
    merge_map = filled_map(Merge(method="pool", ratio=ratio), tokens, grid)
    image = tokens.transpose(1, 2).unflatten(2, (grid.height, grid.width))
    pooled = F.avg_pool2d(image, cell)
    torch.testing.assert_close(merge_map.merge(tokens), pooled.flatten(2).transpose(1, 2))
    wanted = F.interpolate(pooled, (grid.height, grid.width), mode="nearest").flatten(2).transpose(1, 2)
    torch.testing.assert_close(merge_map.unmerge(merge_map.merge(tokens)), wanted)


# Awkward sizes: 97 is prime, so the whole grid is one region, and 35 and 63 are odd.
@pytest.mark.parametrize(
    ("method", "grid"),
    [
        *itertools.product(["pool", "todo"], [TokenGrid(1, 97), TokenGrid(5, 7), TokenGrid(7, 9), TokenGrid(6, 6)]),
        *itertools.product(["tomesd", "tofu"], [TokenGrid(5, 7), TokenGrid(7, 9), TokenGrid(6, 6)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_maps_of_fixed_clusters_hold_every_token_once(method: str, ratio: float, grid: TokenGrid) -> None:
    tokens = tiny.noise(2, grid.count, 5)
    merge_map = filled_map(Merge(method=method, ratio=ratio, selection="uniform"), tokens, grid)
    assert merge_map.token_count == grid.count
    assert merge_map.merged_count < grid.count
    constant = torch.full_like(tokens, 3.0)
    torch.testing.assert_close(merge_map.unmerge(merge_map.merge(constant)), constant)
    owners = merge_map.owners()
    assert sorted(set(owners.tolist())) == sorted(merge_map.destinations[0].tolist())
    assert torch.equal(owners[merge_map.destinations[0]], merge_map.destinations[0])

"""Techniques in whole pipelines: number of sites, what stays bit-equal, what changes, sizes, batches and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline, FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.config import Techniques
from traces import attributes

BOTH = [Merge(), Hold(every=3, start=0.0)]


def apply(pipe: Any, **fields: Any) -> Any:
    return tokenmerge.apply(pipe, Merge(**fields))


def replaced_forwards(module: nn.Module) -> int:
    return sum("forward" in vars(each) for each in module.modules())


# kind, options, merged sites, all sites. SD: 3 blocks on levels 1, 2, 4, one on level 8. SDXL: 3 on level 2, 8 on
# level 4. SD3: 4 blocks, one of them with two attentions. Flux: 2 joint blocks, 3 single.
COUNTS = [
    ("sd", {"sites": "component"}, 30, 30),
    ("sd", {"sites": "component", "components": ("self_attention",)}, 10, 30),
    ("sd", {"sites": "component", "components": ("cross_attention", "mlp"), "levels": (1, 2)}, 12, 30),
    ("sd", {"sites": "block"}, 10, 10),
    ("sd", {"sites": "block", "levels": (1,)}, 3, 10),
    ("sd", {"sites": "block", "levels": (8, 2)}, 4, 10),
    ("sd", {"sites": "block", "skip_first": 1, "levels": (1, 2, 4)}, 6, 10),
    ("sdxl", {"sites": "component"}, 33, 33),
    ("sdxl", {"sites": "component", "components": ("mlp",)}, 11, 33),
    ("sdxl", {"sites": "block"}, 11, 11),
    ("sdxl", {"sites": "block", "levels": (2,)}, 3, 11),
    ("sdxl", {"sites": "block", "skip_first": 1, "skip_last": 1}, 7, 11),
    ("sdxl", {"sites": "block", "skip_first": 0.25, "skip_last": 0.5}, 2, 11),
    ("sd3", {"sites": "component"}, 9, 9),
    ("sd3", {"sites": "component", "components": ("self_attention",)}, 5, 9),
    ("sd3", {"sites": "block"}, 4, 4),
    ("sd3", {"sites": "block", "skip_first": 0.25}, 3, 4),
    ("flux", {"sites": "component"}, 10, 10),
    ("flux", {"sites": "component", "components": ("mlp",)}, 5, 10),
    ("flux", {"sites": "block"}, 5, 5),
    ("flux", {"sites": "block", "skip_first": 1}, 3, 5),
    ("flux", {"ratio": 0.0}, 0, 5),
    ("sdxl", {"ratio": 0.0, "sites": "component"}, 0, 33),
]


@pytest.mark.parametrize(("kind", "options", "merged", "total"), COUNTS)
def test_number_of_sites_is_exact(kind: str, options: dict[str, Any], merged: int, total: int) -> None:
    pipe = apply(tiny.build(kind), **options)
    plan = tokenmerge.summary(pipe).plan
    assert (len(plan.merged_sites), len(plan.sites)) == (merged, total)
    assert all(site.skipped for site in plan.sites if site not in plan.merged_sites)
    # Tokens enter a Flux single block's MLP in one submodule and leave it in another.
    split = sum(site.part is not None and site.part.leave is not None for site in plan.merged_sites)
    assert replaced_forwards(tiny.denoiser_of(pipe)) == merged + split


def test_number_of_sites_of_the_published_models() -> None:
    xl = {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
    }
    with torch.device("meta"):
        models: dict[str, tuple[nn.Module, dict[str, int]]] = {
            "sd": (UNet2DConditionModel(), {"level-1": 5, "level-2": 5, "level-4": 5, "level-8": 1}),
            "sdxl": (UNet2DConditionModel(**xl), {"level-2": 10, "level-4": 60}),
            "sd3": (SD3Transformer2DModel(num_layers=24), {"joint": 24}),
            "flux": (FluxTransformer2DModel(), {"joint": 19, "single": 38}),
        }
    for model, groups in models.values():
        plan = tokenmerge.plan(model, Merge(), height=1024, width=1024)
        assert {group.name: group.merged_blocks for group in plan.groups} == groups


@pytest.mark.parametrize(
    ("kind", "what", "runs"),
    [
        ("sd", "blocks", [1] * 10),
        ("sd", "stages", [9]),
        ("sdxl", "blocks", [1, 2, 2, 2, 2, 1, 1]),  # a run stays within one Transformer2DModel
        ("sdxl", "stages", [7]),
        ("sd3", "blocks", [4]),
        ("flux", "blocks", [5]),  # a run continues from joint into single blocks
    ],
)
def test_held_runs_are_blocks_with_nothing_between_them(kind: str, what: str, runs: list[int]) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), Hold(every=3, start=0.2, what=what))
    plan = tokenmerge.summary(pipe).plan
    assert [len(run.blocks) for run in plan.runs] == runs
    assert replaced_forwards(tiny.denoiser_of(pipe)) == sum(runs)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_what_does_nothing_and_remove_are_bit_equal_to_the_plain_pipeline(kind: str) -> None:
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe, steps=4)
    for nothing in (Merge(ratio=0.0), Hold(every=1), [Merge(ratio=0.0), Hold(every=1)], Techniques()):
        tokenmerge.apply(pipe, nothing)
        assert torch.equal(tiny.draw(pipe, steps=4), plain), nothing
    for techniques in ([Merge(sites="component")], [Merge()], BOTH):
        tokenmerge.apply(pipe, techniques)
        assert not torch.equal(tiny.draw(pipe, steps=4), plain)
        tokenmerge.remove(pipe)
        assert torch.equal(tiny.draw(pipe, steps=4), plain), techniques


@pytest.mark.parametrize("sites", ["component", "block"])
@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_merging_changes_the_image_by_its_ratio(kind: str, sites: str) -> None:
    pipe = tiny.build(kind)
    images = [tiny.draw(pipe)]
    for ratio in (0.25, 0.5, 0.75):
        apply(pipe, ratio=ratio, sites=sites)
        images.append(tiny.draw(pipe))
    assert all(image.isfinite().all() for image in images)
    for place, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:place])


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_default_holds_blocks_or_stages_in_every_pipeline(kind: str) -> None:
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe, steps=16)
    merged = tiny.draw(apply(pipe), steps=16)
    tokenmerge.apply(pipe)
    what = "stages" if hasattr(pipe, "unet") else "blocks"
    assert tokenmerge.summary(pipe).plan.techniques == (None, Hold(what=what))
    # Residuals of random weights bend more than those of trained ones.
    tokenmerge.apply(pipe, Hold(tolerance=0.5))
    held = tiny.draw(pipe, steps=16)
    told = tokenmerge.summary(pipe)
    assert told.steps["held"] >= 2
    assert 0 < (held - plain).abs().mean() < (merged - plain).abs().mean() / 2
    tokenmerge.apply(pipe, Hold(every=3, start=0.2, what="blocks"))
    tiny.draw(pipe, steps=16)
    assert 0 < told.residual_bytes <= tokenmerge.summary(pipe).residual_bytes


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_both_techniques_run_merged_what_hold_lets_run_in_every_pipeline(kind: str) -> None:
    pipe = tiny.build(kind)
    plain, known = tiny.draw(pipe, steps=10), {name: sorted(each) for name, each in attributes(pipe).items()}
    merged = tiny.draw(apply(pipe), steps=10)
    hold = Hold(every=2, start=0.75)
    tokenmerge.apply(pipe, hold)
    tiny.draw(pipe, steps=10)
    steps = tokenmerge.summary(pipe).steps
    tokenmerge.apply(pipe, [Merge(), hold])
    both = tiny.draw(pipe, steps=10)
    told = tokenmerge.summary(pipe)
    assert told.steps == {"merged": steps["full"], "held": steps["held"]}
    assert all(group["selected"] >= 1 for group in told.groups)
    # Merging causes most of the drift; holding adds little.
    assert 0 < (both - merged).abs().mean() < (merged - plain).abs().mean() / 2
    assert torch.equal(tiny.draw(pipe, steps=10), both)
    tokenmerge.remove(pipe)
    assert {name: sorted(each) for name, each in attributes(pipe).items()} == known
    assert torch.equal(tiny.draw(pipe, steps=10), plain)


@pytest.mark.parametrize("preset", ["toma", "toma-once", "toma-stripe", "toma-tile", "lower-bound"])
@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_every_preset_runs_in_every_family(kind: str, preset: str) -> None:
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe)
    tokenmerge.apply(pipe, preset, ratio=0.5)
    image = tiny.draw(pipe)
    assert image.isfinite().all()
    assert not torch.equal(image, plain)
    summary = tokenmerge.summary(pipe)
    assert all(group["selected"] == 1 for group in summary.groups)
    assert "reference" in str(summary)
    finest = summary.groups[0]["tokens"]
    assert finest == "256 -> 128"


@pytest.mark.parametrize(
    "options",
    [
        {"selection": "graph-cut"},
        {"selection": "stochastic"},
        {"selection": "random"},
        {"selection": "uniform"},
        {"similarity": "dot", "temperature": 0.1},
        {"unmerge": "pinv"},
        {"regions": "whole"},
        {"regions": "stripe:16", "merge_regions": "stripe:4"},
        {"regions": "tile:2x2", "merge_regions": "tile:4x4"},
        {"regions": "tile:4x4", "merge_regions": "whole"},
    ],
)
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_every_option_runs_and_matters(kind: str, options: dict[str, Any]) -> None:
    pipe = apply(tiny.build(kind))
    default = tiny.draw(pipe)
    apply(pipe, **options)
    image = tiny.draw(pipe)
    assert image.isfinite().all()
    assert not torch.equal(image, default)


def inputs_of(module: nn.Module, seen: list[Tensor]) -> None:
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))


@pytest.mark.parametrize("sites", ["component", "block"])
def test_unet_queries_are_merged_and_text_is_not(sites: str) -> None:
    pipe = apply(tiny.build("sdxl"), sites=sites, ratio=0.75)
    queries: list[Tensor] = []
    texts: list[Tensor] = []
    for name, module in pipe.unet.named_modules():
        if name.endswith(("attn1.to_q", "attn2.to_q", "ff.net.0.proj")):
            inputs_of(module, queries)
        if name.endswith("attn2.to_k"):
            inputs_of(module, texts)
    arguments = tiny.call_arguments(pipe, steps=1)
    pipe(**arguments)
    assert len(queries) == 33
    assert {tokens.shape[1] for tokens in queries} == {256 // 4, 64 // 4}
    prompt = torch.cat([arguments["negative_prompt_embeds"], arguments["prompt_embeds"]])
    assert len(texts) == 11
    assert all(torch.equal(text, prompt) for text in texts)


@pytest.mark.parametrize("sites", ["component", "block"])
@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_joint_attention_sees_merged_image_tokens_and_all_text_tokens(kind: str, sites: str) -> None:
    pipe = apply(tiny.build(kind), sites=sites, ratio=0.75)
    image_tokens: list[Tensor] = []
    text_tokens: list[Tensor] = []
    joint_tokens: list[Tensor] = []
    for name, module in pipe.transformer.named_modules():
        if name.startswith("single") and name.endswith("to_q"):
            inputs_of(module, joint_tokens)
        elif name.endswith("to_q"):
            inputs_of(module, image_tokens)
        elif name.endswith(("add_q_proj", "ff_context")):
            inputs_of(module, text_tokens)
    tiny.draw(pipe, steps=1)
    assert {tokens.shape[1] for tokens in image_tokens} == {64}
    assert {tokens.shape[1] for tokens in text_tokens} == {tiny.TEXT_TOKENS}
    assert {tokens.shape[1] for tokens in joint_tokens} == ({tiny.TEXT_TOKENS + 64} if kind == "flux" else set())


# Multiples of 8 for UNets: 18x26 then 9x13 tokens; 11x13, both prime, on SDXL's third level; wide.
# Multiples of 4 for DiTs: 19x25 tokens, then 17x23, both prime; tall.
SIZES = {"unet": [(72, 104), (88, 104), (64, 168)], "dit": [(76, 100), (68, 92), (120, 36)]}


@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_odd_and_long_sizes_are_merged(kind: str) -> None:
    pipe = tiny.build(kind)
    for size in SIZES["unet" if kind in ("sd", "sdxl") else "dit"]:
        plain = tiny.draw(tokenmerge.remove(pipe), size=size)
        for sites in ("component", "block"):
            image = tiny.draw(apply(pipe, sites=sites), size=size)
            assert image.shape == plain.shape
            assert image.isfinite().all()
            assert not torch.equal(image, plain)
            group = tokenmerge.summary(pipe).groups[0]
            before, after = map(int, group["tokens"].split(" -> "))
            assert group["grid"] == f"{size[0] // 4}x{size[1] // 4}"
            assert before == (size[0] // 4) * (size[1] // 4)
            assert 0.4 <= after / before <= 0.6


@pytest.mark.parametrize("sites", ["component", "block"])
@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_an_image_does_not_depend_on_sizes_and_batches_before_it(kind: str, sites: str) -> None:
    calls: list[dict[str, Any]] = [
        {},
        {"size": (72, 104)},
        {"batch": 2},
        {"guided": False},
        {"size": (104, 72)},  # as many tokens as before, on another grid
        {},
        {"size": (80, 80), "batch": 2},
        {"size": (96, 64)},
        {"size": (72, 104)},
    ]
    pipe = apply(tiny.build(kind), sites=sites)
    fresh = tiny.build(kind)
    for call in calls:
        apply(fresh, sites=sites)
        assert torch.equal(tiny.draw(pipe, **call), tiny.draw(fresh, **call)), call


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_half_precision_pipelines_keep_their_dtype(kind: str, dtype: torch.dtype) -> None:
    pipe = tiny.build(kind).to(dtype)
    plain = tiny.draw(pipe)
    for techniques in ([Merge(sites="component")], BOTH):
        tokenmerge.apply(pipe, techniques)
        image = tiny.draw(pipe)
        assert image.dtype == plain.dtype
        assert image.isfinite().all()
        assert not torch.equal(image, plain)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe), plain)


@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_images_decode(kind: str) -> None:
    pipe = apply(tiny.build(kind))
    image = tiny.draw(pipe, output_type="np")
    assert image.shape == (1, 64, 64, 3)


@pytest.mark.parametrize("sites", ["component", "block"])
@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_state_dict_is_the_same_while_applied(kind: str, sites: str) -> None:
    pipe = tiny.build(kind)
    denoiser = tiny.denoiser_of(pipe)
    before = denoiser.state_dict()
    apply(pipe, sites=sites)
    tiny.draw(pipe)
    during = denoiser.state_dict()
    assert list(during) == list(before)
    assert all(torch.equal(during[name], before[name]) for name in before)
    denoiser.load_state_dict(before)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_second_apply_replaces_the_first(kind: str) -> None:
    pipe = tiny.build(kind)
    second = {"ratio": 0.25, "sites": "component", "regions": "stripe:8"}
    expected = tiny.draw(apply(tiny.build(kind), **second))
    apply(pipe, ratio=0.75, sites="block")
    tiny.draw(pipe)
    apply(pipe, **second)
    assert torch.equal(tiny.draw(pipe), expected)
    tokenmerge.remove(pipe)
    tokenmerge.remove(pipe)
    assert replaced_forwards(tiny.denoiser_of(pipe)) == 0


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_applied_restores_what_was_there(kind: str) -> None:
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe)
    with tokenmerge.applied(pipe, BOTH) as same:
        assert same is pipe
        outer = tiny.draw(pipe)
        with tokenmerge.applied(pipe, "toma", ratio=0.75):
            inner = tiny.draw(pipe)
        assert torch.equal(tiny.draw(pipe), outer)
        with pytest.raises(ZeroDivisionError), tokenmerge.applied(pipe, "none"):
            tiny.draw(pipe, callback_on_step_end=lambda *_: 1 / 0)
        assert torch.equal(tiny.draw(pipe), outer)
        with pytest.raises(TokenMergeError), tokenmerge.applied(pipe, "toma", ratio=1.0):
            pass
        assert torch.equal(tiny.draw(pipe), outer)
    assert torch.equal(tiny.draw(pipe), plain)
    assert tokenmerge.summary(pipe).plan is None
    assert not torch.equal(inner, outer)


@pytest.mark.parametrize("techniques", [[Merge()], [Merge(), Hold(every=3, start=0.0)]], ids=["merge", "both"])
def test_a_bare_denoiser_and_its_pipeline_are_the_same_to_apply(techniques: list[Any]) -> None:
    pipe = tiny.build("sdxl")
    tokenmerge.apply(pipe.unet, techniques, scheduler=pipe.scheduler)
    by_denoiser = tiny.draw(pipe)
    tokenmerge.apply(pipe, techniques)
    assert torch.equal(tiny.draw(pipe), by_denoiser)
    assert str(tokenmerge.summary(pipe)) == str(tokenmerge.summary(pipe.unet))


@pytest.mark.parametrize("sites", ["component", "block"])
def test_reference_images_have_regions_of_their_own(sites: str) -> None:
    pipe = FluxKontextPipeline(**tiny.build("flux").components)
    pipe.set_progress_bar_config(disable=True)
    reference = {"image": tiny.noise(1, 3, 64, 96).sigmoid(), "max_area": 64 * 64, "_auto_resize": False}
    plain = tiny.draw(pipe, **reference)
    apply(pipe, sites=sites)
    merged = tiny.draw(pipe, **reference)
    assert merged.isfinite().all()
    assert not torch.equal(merged, plain)
    group = tokenmerge.summary(pipe).groups[0]
    assert (group["grid"], group["tokens"]) == ("16x16 + 16x24", "640 -> 320")
    assert group["regions"] == "40 tiles of 4x4"
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, **reference), plain)

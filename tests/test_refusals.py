"""What cannot work is refused with a TokenMergeError that names the way out, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, StableDiffusionXLPAGPipeline, UNet2DModel
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor, nn

import tiny
import tokenmerge
import zoo
from denoisers import DENOISERS
from tokenmerge import Hold, Merge, TokenMergeError, presets
from tokenmerge.families.calls import TokenGrid
from tokenmerge.merging.grid import partition_grids
from tokenmerge.tools.bench.timing import Loop
from traces import attributes, same

# Merge and Hold together refuse whatever Merge alone refuses.
MERGED = [[Merge(sites="component")], [Merge()], [Merge(), Hold(every=3, start=0.2)]]


def apply(pipe: Any, **fields: Any) -> Any:
    return tokenmerge.apply(pipe, Merge(**fields))


def told(techniques: list[Any]) -> str:
    return "+".join(getattr(each, "what", None) or each.sites for each in techniques)


@pytest.mark.parametrize(
    ("kind", "technique", "fields", "message"),
    [
        ("sdxl", "toma", {"ratio": 1.0}, r"must be in \[0, 1\)"),
        ("sdxl", "fast", {}, "preset 'fast' is unknown"),
        ("sdxl", "nothing.json", {}, "does not exist"),
        ("sdxl", [Merge(), Merge()], {}, "Merge was given twice"),
        ("sdxl", [], {}, "empty"),
        ("sdxl", "unet", {"skip_first": 100}, "no site .* skip_first"),
        ("sdxl", "unet", {"skip_first": 0.5, "skip_last": 0.5}, "no site .* skip_last"),
        ("sdxl", "unet", {"levels": (16,)}, "no site .* change levels"),
        ("sdxl", "unet", {"levels": (1,)}, "no site .* change levels"),
        ("sdxl", [Merge(levels=(1,)), Hold(every=3, start=0.2)], {}, "no site .* change levels"),
        ("flux", "toma", {"components": ("cross_attention",)}, "no site .* components"),
        ("flux", "toma", {"levels": (1,)}, "has only one"),
        ("flux", "todo", {}, "fewer keys than queries"),
        ("flux", Hold(every=3, start=0.2, what="stages"), {}, "has none; use what='blocks'"),
        ("flux", [Merge(), Hold(every=3, start=0.2, what="stages")], {}, "has none; use what='blocks'"),
        ("sd3", "dit", {"skip_last": 4}, "no site .* skip_last"),
    ],
)
@pytest.mark.parametrize("before", [None, [Merge(), Hold(every=3, start=0.0)]], ids=["plain", "applied"])
def test_a_refused_apply_leaves_the_model_as_it_was(
    kind: str, technique: Any, fields: dict[str, Any], message: str, before: Any
) -> None:
    pipe = tiny.build(kind)
    if before is not None:
        tokenmerge.apply(pipe, before)
    image = tiny.draw(pipe)
    known = attributes(pipe)
    with pytest.raises(TokenMergeError, match=message):
        tokenmerge.apply(pipe, technique, **fields)
    assert same(attributes(pipe), known)
    assert torch.equal(tiny.draw(pipe), image)


@pytest.mark.parametrize("before", [Merge(ratio=0.25), Hold(every=3, start=0.0)], ids=["merge", "hold"])
def test_a_scheduler_that_fails_leaves_the_model_as_it_was(before: Any) -> None:
    class Broken(Loop):
        @property
        def sigmas(self) -> Tensor:
            raise RuntimeError("no noise levels")

    unet, broken = tiny.sdxl_unet(), Broken(4)
    tokenmerge.apply(unet, before, scheduler=Loop(4))
    known = dict(vars(broken))
    with pytest.raises(RuntimeError, match="no noise levels"):
        tokenmerge.apply(unet, [Merge(), Hold()], scheduler=broken)
    plan = tokenmerge.summary(unet).plan
    assert plan is not None
    assert [each.replace(what="auto") if isinstance(each, Hold) else each for each in plan.techniques if each] == [
        before
    ]
    assert vars(broken) == known


def test_a_site_that_cannot_be_installed_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites installed before the failure are removed, and the earlier techniques are applied again."""
    pipe = tokenmerge.apply(tiny.build("sdxl"), [Merge(ratio=0.25), Hold(every=3, start=0.0)])
    image, names = tiny.draw(pipe), sorted(vars(pipe.scheduler))
    forwards = replaced_forwards(pipe.unet)
    last = [module for module in pipe.unet.modules() if type(module).__name__ == "BasicTransformerBlock"][-1]

    def refuse(*_: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("no such module")

    monkeypatch.setattr(last, "get_submodule", refuse)
    with pytest.raises(RuntimeError, match="no such module"):
        tokenmerge.apply(pipe, Merge(sites="component"))
    assert replaced_forwards(pipe.unet) == forwards
    assert sorted(vars(pipe.scheduler)) == names
    assert torch.equal(tiny.draw(pipe), image)


def test_a_second_denoiser_that_fails_leaves_both_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tokenmerge.apply(zoo.MODELS["wan2.2-a14b"].build(), Hold(every=3, start=0.0))
    both, names = (pipe.transformer, pipe.transformer_2), sorted(vars(pipe.scheduler))
    forwards = [replaced_forwards(each) for each in both]

    def refuse(*_: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("no such module")

    monkeypatch.setattr(pipe.transformer_2.blocks[-1], "get_submodule", refuse)
    with pytest.raises(RuntimeError, match="no such module"):
        tokenmerge.apply(pipe, Merge())
    assert [replaced_forwards(each) for each in both] == forwards
    assert sorted(vars(pipe.scheduler)) == names
    plans = [tokenmerge.summary(each).plan for each in both]
    assert [plan and plan.techniques.merge for plan in plans] == [None, None]
    assert [plan and plan.techniques.hold and plan.techniques.hold.every for plan in plans] == [3, 3]


def replaced_forwards(module: nn.Module) -> set[str]:
    return {name for name, each in module.named_modules() if "forward" in vars(each)}


@pytest.mark.parametrize("call", [tokenmerge.apply, tokenmerge.remove, tokenmerge.summary])
def test_something_without_a_denoiser_is_refused(call: Any) -> None:
    for model in ("sdxl", None, object()):
        with pytest.raises(TokenMergeError, match=r"supported_models\(\)"):
            call(model)


def test_an_unsupported_denoiser_is_refused() -> None:
    with pytest.raises(TokenMergeError, match=r"Linear is not supported: .* no list of blocks.* denoisers are UNet2D"):
        tokenmerge.apply(nn.Linear(2, 2))
    with pytest.raises(TokenMergeError, match="has no timestep argument that we know"):
        tokenmerge.apply(DENOISERS["UVit2DModel"].build())


def test_a_denoiser_of_which_nothing_can_be_held_is_refused_when_it_runs() -> None:
    """Only a call shows that no two of its blocks follow each other."""
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    pipe = DDPMPipeline(unet, tiny.ddim())
    pipe.set_progress_bar_config(disable=True)
    before = [list(vars(module)) for module in unet.modules()]
    tokenmerge.apply(pipe, Hold())
    for _ in range(2):
        with pytest.raises(TokenMergeError, match=r"UNet2DModel cannot be held: .* no two follow each other"):
            pipe(num_inference_steps=2)
    tokenmerge.remove(pipe)
    assert [list(vars(module)) for module in unet.modules()] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in unet.modules())
    pipe(num_inference_steps=2)


class Cascade:
    """A pipeline whose denoiser is neither `unet` nor `transformer`."""

    def __init__(self) -> None:
        self.decoder = DENOISERS["SanaTransformer2DModel"].build()
        self.text_encoder = nn.ModuleList([nn.Linear(2, 2)])


def test_a_pipeline_with_a_denoiser_of_another_name_is_told_how_to_hold_it() -> None:
    with pytest.raises(TokenMergeError, match=r"but Hold works on its decoder: apply to pipe\.decoder, with sched"):
        tokenmerge.apply(Cascade())


def test_the_nearest_supported_ones_are_named() -> None:
    for name, near in {
        "StableDiffusion3OtherPipeline": "StableDiffusion3Pipeline",
        "WanTransformer4DModel": "WanTransformer3D",
    }.items():
        model = type(name, (nn.Module,) if "Model" in name else (), {})()
        with pytest.raises(TokenMergeError, match=f"supported (denoisers|pipelines) are .*{near}"):
            tokenmerge.apply(model)


def test_merging_says_why_a_model_without_a_table_cannot_be_merged() -> None:
    reasons = {
        "SanaTransformer2DModel": "convolutions",
        "ErnieImageTransformer2DModel": "no table",
        # AnimateDiff's UNet, which cannot be held either.
        "UNetMotionModel": "motion blocks",
    }
    for name, reason in reasons.items():
        denoiser = DENOISERS[name].build()
        before = [dict(vars(module)) for module in denoiser.modules()]
        for technique in (Merge(), [Merge(), Hold(start=0.0)], "toma"):
            with pytest.raises(TokenMergeError, match=f"{name} cannot be merged: .*{reason}.*; use Hold, unless"):
                tokenmerge.apply(denoiser, technique)
        assert [dict(vars(module)) for module in denoiser.modules()] == before


def draw_refused(pipe: Any, message: str, **options: Any) -> None:
    """A refused call raises before it changes anything, so the next image is the same as without it."""
    expected = tiny.draw(pipe)
    before = attributes(pipe)
    with pytest.raises(TokenMergeError, match=message):
        tiny.draw(pipe, **options)
    after = attributes(pipe)
    assert all(same(before[name], after[name]) for name in before if name != "scheduler")
    assert torch.equal(tiny.draw(pipe), expected)


@pytest.mark.parametrize("techniques", MERGED, ids=told)
@pytest.mark.parametrize("by_name", [True, False])
def test_an_attention_mask_is_refused(techniques: list[Any], by_name: bool) -> None:
    pipe = tiny.build("sd")
    pipe.unet.eval()
    inputs = (tiny.noise(1, 4, 16, 16), 500, tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH))
    mask = torch.ones(1, 256)
    plain = pipe.unet(*inputs).sample
    tokenmerge.apply(pipe, techniques)
    with pytest.raises(TokenMergeError, match="attention_mask masks image tokens"):
        pipe.unet(*inputs, attention_mask=mask) if by_name else pipe.unet(*inputs, None, None, mask)
    pipe.unet(*inputs)
    tokenmerge.remove(pipe)
    assert torch.equal(pipe.unet(*inputs).sample, plain)


def chunk_feed_forward(pipe: Any, size: int | None) -> None:
    for module in tiny.denoiser_of(pipe).modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(size, dim=1)


@pytest.mark.parametrize("kind", ["sdxl", "sd3"])
@pytest.mark.parametrize("techniques", MERGED, ids=told)
def test_chunked_feed_forward_is_refused_before_and_after_apply(kind: str, techniques: list[Any]) -> None:
    pipe = tiny.build(kind)
    chunk_feed_forward(pipe, 16)
    before = attributes(pipe)
    with pytest.raises(TokenMergeError, match="disable_forward_chunking"):
        tokenmerge.apply(pipe, techniques)
    assert same(attributes(pipe), before)
    chunk_feed_forward(pipe, None)
    tokenmerge.apply(pipe, techniques)
    merged = tiny.draw(pipe)
    chunk_feed_forward(pipe, 16)
    with pytest.raises(TokenMergeError, match="disable_forward_chunking"):
        tiny.draw(pipe)
    chunk_feed_forward(pipe, None)
    assert torch.equal(tiny.draw(pipe), merged)


def test_the_ways_out_of_ip_adapter_masks_lead_out() -> None:
    pipe = tiny.build("sdxl")
    masks = {"ip_adapter_masks": [torch.ones(1, 1, 64, 64)]}
    for techniques in ([Merge()], [Merge(), Hold(every=3, start=0.2)]):
        tokenmerge.apply(pipe, techniques)
        draw_refused(
            pipe, r"use Merge\(sites='component'\), .* or Hold, or leave the masks out", cross_attention_kwargs=masks
        )
    for techniques in (
        [Merge(sites="component")],
        [Hold(every=3, start=0.2)],
        [Hold(every=3, start=0.2, what="blocks")],
        [Merge(sites="component"), Hold(every=3, start=0.2)],
    ):
        tokenmerge.apply(pipe, techniques)
        assert tiny.draw(pipe, steps=8, cross_attention_kwargs=masks).isfinite().all()
    # The same field makes presets of whole blocks accept masks.
    tokenmerge.apply(pipe, "unet", sites="component")
    assert tiny.draw(pipe, cross_attention_kwargs=masks).isfinite().all()


@pytest.mark.parametrize("techniques", MERGED, ids=told)
def test_gligen_is_refused(techniques: list[Any]) -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), techniques)
    draw_refused(pipe, "'gligen'", cross_attention_kwargs={"gligen": {"boxes": torch.zeros(1, 1, 4)}})


@pytest.mark.parametrize("techniques", [[Merge()], [Merge(), Hold(every=3, start=0.2)]], ids=told)
def test_layers_may_be_skipped(techniques: list[Any]) -> None:
    pipe = tokenmerge.apply(tiny.build("sd3"), techniques)
    options = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    skipped = tiny.draw(pipe, steps=8, **options)
    assert skipped.isfinite().all()
    assert not torch.equal(tiny.draw(pipe, steps=8), skipped)


def test_todo_refuses_perturbed_attention_guidance() -> None:
    """PAG pairs values with queries one to one, and ToDo leaves fewer values than queries."""
    pipe = tiny.build("sdxl")
    perturbed = StableDiffusionXLPAGPipeline(**pipe.components, add_watermarker=False, pag_applied_layers=["mid"])
    perturbed.set_progress_bar_config(disable=True)
    plain = tiny.draw(perturbed, pag_scale=3.0)
    for techniques in ([presets()["todo"]], [presets()["todo"], Hold(every=3, start=0.2)]):
        tokenmerge.apply(perturbed, techniques)
        for _ in range(2):
            with pytest.raises(TokenMergeError, match=r"perturbed-attention guidance \(PAG.* use another method"):
                tiny.draw(perturbed, pag_scale=3.0)
        # Both ways out work: a pipeline without PAG, and another method (below).
        pipe.unet.set_attn_processor(AttnProcessor2_0())
        tokenmerge.apply(pipe, techniques)
        assert tiny.draw(pipe).isfinite().all()
    tokenmerge.apply(perturbed, "toma")
    assert tiny.draw(perturbed, pag_scale=3.0).isfinite().all()
    tokenmerge.remove(perturbed)
    assert torch.equal(tiny.draw(perturbed, pag_scale=3.0), plain)


def test_the_ways_out_of_a_unet_without_transformer_blocks_under_noise_lead_out() -> None:
    """A UNet like Kandinsky 2.2's has nothing to merge, and only stages or the prediction to hold."""
    unet = tiny.sd_unet(
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(8, 16),
    )
    pipe = tiny.build("sd", unet=unet, scheduler=DDPMScheduler())
    for technique in (Hold(every=3, start=0.2, what="blocks"), Merge(), "toma", [Merge(), Hold(every=3, start=0.2)]):
        with pytest.raises(TokenMergeError, match=r"use \w*\(?what='(stages|prediction)'"):
            tokenmerge.apply(pipe, technique)
    with pytest.raises(TokenMergeError, match=r"adds noise .* use Hold\(what='prediction'\)"):
        tokenmerge.apply(pipe, Hold(every=3, start=0.2, what="stages"))
    for technique in (Hold(every=3, start=0.2, what="prediction"), Hold(every=3, start=0.2)):
        tokenmerge.apply(pipe, technique)
        assert tiny.draw(pipe, steps=8).isfinite().all()
        assert tokenmerge.summary(pipe).steps["held"] > 0
    pipe.scheduler = tiny.ddim()
    tokenmerge.apply(pipe, Hold(every=3, start=0.2, what="stages"))
    assert tiny.draw(pipe, steps=8).isfinite().all()
    assert tokenmerge.summary(pipe).steps["held"] > 0


def test_regions_that_do_not_nest_are_refused_when_the_grid_is_known() -> None:
    pipe = apply(tiny.build("sdxl"))
    expected = tiny.draw(pipe)
    apply(pipe, merge_regions="stripe:8")
    with pytest.raises(TokenMergeError, match="do not nest"):
        tiny.draw(pipe)
    apply(pipe)
    assert torch.equal(tiny.draw(pipe), expected)


def test_ids_that_form_no_grid_are_refused() -> None:
    transformer = apply(tiny.flux_transformer())
    inputs: dict[str, Tensor] = {
        "hidden_states": tiny.noise(1, 10, 16),
        "encoder_hidden_states": tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH),
        "pooled_projections": tiny.noise(1, tiny.POOLED_WIDTH),
        "timestep": torch.ones(1),
        "txt_ids": torch.zeros(tiny.TEXT_TOKENS, 3),
        "img_ids": torch.zeros(10, 3),
    }
    with pytest.raises(TokenMergeError, match="img_ids place 10 tokens on a 1x1 grid"):
        transformer(**inputs)


def test_a_block_called_by_itself_is_refused() -> None:
    pipe = apply(tiny.build("sd"))
    block = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]
    with pytest.raises(TokenMergeError, match="outside of its denoiser"):
        block(tiny.noise(1, 256, 8), encoder_hidden_states=tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH))
    tiny.draw(pipe)


@pytest.mark.parametrize("selection", ["facility-location", "graph-cut", "stochastic", "random", "uniform"])
@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_nan_in_the_tokens_passes_through(kind: str, selection: str) -> None:
    pipe = apply(tiny.build(kind), selection=selection, unmerge="pinv")
    expected = tiny.draw(pipe)
    shape = {"sd": (1, 4, 16, 16), "flux": (1, 256, 16)}.get(kind, (1, 4, 32, 32))
    for poison in (torch.nan, torch.inf):
        latents = tiny.noise(*shape)
        latents.view(-1)[:32] = poison
        assert not tiny.draw(pipe, latents=latents).isfinite().all()
        assert torch.equal(tiny.draw(pipe), expected)


def test_caches_put_on_by_function_are_seen_too() -> None:
    from diffusers.hooks import (
        FirstBlockCacheConfig,
        PyramidAttentionBroadcastConfig,
        apply_first_block_cache,
        apply_pyramid_attention_broadcast,
    )

    cached = tiny.build("flux")
    apply_first_block_cache(cached.transformer, FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(TokenMergeError, match="a cache must come after a technique"):
        apply(cached)
    pipe = apply(tiny.build("sdxl"))
    broadcast = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )
    apply_pyramid_attention_broadcast(pipe.unet, broadcast)
    with pytest.raises(TokenMergeError, match="stores tensors inside of blocks"):
        tiny.draw(pipe)


def test_reference_images_are_not_merged_into_the_picture() -> None:
    grids = (TokenGrid(8, 8), TokenGrid(6, 8))
    alone = partition_grids(grids, Merge(regions="stripe", merge_regions="whole"))
    assert (alone.layout.tokens, alone.before, alone.after) == (64, 0, 48), "no region holds tokens of both"
    assert partition_grids(grids, Merge()).layout.tokens == 112

"""What cannot work is refused with a TokenMergeError that names the way out, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, UNet2DModel
from torch import Tensor, nn

import tiny
import tokenmerge
from tokenmerge import MergeConfig, TokenMergeError
from tokenmerge.tools.bench.timing import Loop
from traces import attributes, same

OPTIONS: dict[str, Any] = {**tiny.PLAIN, "regions": "tile:4x4", "skip_first": 0}


def apply(pipe: Any, **options: Any) -> Any:
    return tokenmerge.apply(pipe, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sdxl", {"ratio": 1.0}, r"must be in \[0, 1\)"),
        ("sdxl", {"ratio": -0.1}, r"must be in \[0, 1\)"),
        ("sdxl", {"ratio": float("nan")}, r"must be in \[0, 1\)"),
        ("sdxl", {"ratio": "half"}, "it must be a number"),
        ("sdxl", {"regions": "tiles"}, "write 'whole', 'tile', 'stripe'"),
        ("sdxl", {"regions": "tile:0"}, "start at 1"),
        ("sdxl", {"regions": "stripe:4x4"}, "only 'tile' takes a shape"),
        ("sdxl", {"merge_regions": "whole:3"}, "takes no number"),
        ("sdxl", {"method": "tome"}, "choose from toma"),
        ("sdxl", {"temperature": 0.0}, "positive"),
        ("sdxl", {"preset": "fast"}, "preset 'fast' is unknown"),
        ("sdxl", {"start": 0.8, "stop": 0.2}, "0 <= start < stop <= 1"),
        ("sdxl", {"skip_first": 100}, "no site .* skip_first"),
        ("sdxl", {"skip_first": 0.5, "skip_last": 0.5}, "no site .* skip_last"),
        ("sdxl", {"levels": (16,)}, "no site .* change levels"),
        ("sdxl", {"levels": (1,)}, "no site .* change levels"),
        ("flux", {"sites": "component", "components": ("cross_attention",)}, "no site .* components"),
        ("flux", {"levels": (1,)}, "has only one"),
        ("sdxl", {"components": ("mlp",)}, r"components is \('mlp',\), which counts with sites='component'"),
        ("sdxl", {"ratio": 0.5, "span": 2}, "span is 2, which counts with sites='span' .* or held blocks"),
        ("sdxl", {"preset": "unet", "gap": "linear"}, "gap is 'linear', which counts with anchors"),
        ("flux", {"preset": "dit", "trust": 0.5}, "trust is 0.5, which counts with anchors"),
        ("flux", {"preset": "hold", "anchor_every": 3, "trust": 0.5}, "which counts with anchors of merged blocks"),
        ("flux", {"anchor_every": 0, "gap_dtype": "float8"}, "gap_dtype is 'float8', which counts with anchors"),
        ("sdxl", {"ratio": 0.25, "step_ratios": (0.5, 0.75)}, "ratio is 0.25, and step_ratios gives other ratios"),
        ("flux", {"ratio": 0.25, "block_ratios": (0.5,)}, "ratio is 0.25, and block_ratios gives other ratios"),
        ("sd3", {"skip_last": 4}, "no site .* skip_last"),
    ],
)
@pytest.mark.parametrize("merged_before", [False, True])
def test_a_refused_apply_leaves_the_model_as_it_was(
    kind: str, options: dict[str, Any], message: str, merged_before: bool
) -> None:
    pipe = tiny.build(kind)
    if merged_before:
        apply(pipe)
    image = tiny.draw(pipe, steps=1)
    before = attributes(pipe)
    with pytest.raises(TokenMergeError, match=message):
        apply(pipe, **options)
    assert same(attributes(pipe), before)
    assert torch.equal(tiny.draw(pipe, steps=1), image)


def test_a_scheduler_that_fails_leaves_the_model_as_it_was() -> None:
    class Broken(Loop):
        @property
        def sigmas(self) -> Tensor:
            raise RuntimeError("no noise levels")

    unet, broken = tiny.sdxl_unet(), Broken(4)
    apply(unet, scheduler=Loop(4), ratio=0.25)
    before = dict(vars(broken))
    with pytest.raises(RuntimeError, match="no noise levels"):
        apply(unet, scheduler=broken)
    plan = tokenmerge.summary(unet).plan
    assert plan is not None
    assert plan.config.ratio == 0.25
    assert vars(broken) == before


def test_config_and_preset_together_and_wrong_types_are_refused() -> None:
    pipe = tiny.build("flux")
    with pytest.raises(TokenMergeError, match="give one of them"):
        tokenmerge.apply(pipe, MergeConfig(), preset="toma")
    with pytest.raises(TypeError, match="give a MergeConfig"):
        tokenmerge.apply(pipe, {"ratio": 0.5})
    for preset in ({"ratio": 0.5}, MergeConfig(), 3):
        with pytest.raises(TypeError, match=f"preset is a {type(preset).__name__}; it is one of toma, .*ratio=0.5"):
            tokenmerge.apply(pipe, preset=preset)
    for wrong, near in (("ratoi", "ratio"), ("achor_every", "anchor_every")):
        with pytest.raises(TypeError, match=f"no option '{wrong}' .did you mean '{near}'.*fields of tokenmerge.Merge"):
            tokenmerge.apply(pipe, **{wrong: 4})
    with pytest.raises(TypeError, match="no option 'tile_size'; options are"):
        tokenmerge.apply(pipe, tile_size=4)
    assert tokenmerge.summary(pipe).plan is None


@pytest.mark.parametrize("call", [tokenmerge.apply, tokenmerge.remove, tokenmerge.summary])
def test_something_without_a_denoiser_is_refused(call: Any) -> None:
    for model in ("sdxl", None, object()):
        with pytest.raises(TokenMergeError, match="supported denoisers are UNet2DConditionModel"):
            call(model)


def test_an_unsupported_denoiser_is_refused() -> None:
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    for model in (nn.Linear(2, 2), unet, DDPMPipeline(unet, tiny.ddim())):
        with pytest.raises(TokenMergeError, match="supported denoisers are UNet2DConditionModel"):
            tokenmerge.apply(model)
        assert not any("forward" in vars(module) for module in unet.modules())


def draw_refused(pipe: Any, message: str, **options: Any) -> None:
    """A refused call raises before it does anything: the next image is as if it had not been."""
    expected = tiny.draw(pipe)
    before = attributes(pipe)
    with pytest.raises(TokenMergeError, match=message):
        tiny.draw(pipe, **options)
    after = attributes(pipe)
    assert all(same(before[name], after[name]) for name in before if name != "scheduler")
    assert torch.equal(tiny.draw(pipe), expected)


@pytest.mark.parametrize("sites", ["component", "block", "span"])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_attention_mask_is_refused(sites: str, by_name: bool) -> None:
    pipe = tiny.build("sd")
    pipe.unet.eval()
    inputs = (tiny.noise(1, 4, 16, 16), 500, tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH))
    mask = torch.ones(1, 256)
    unpatched = pipe.unet(*inputs).sample
    apply(pipe, sites=sites)
    with pytest.raises(TokenMergeError, match="attention_mask masks image tokens"):
        pipe.unet(*inputs, attention_mask=mask) if by_name else pipe.unet(*inputs, None, None, mask)
    pipe.unet(*inputs)
    tokenmerge.remove(pipe)
    assert torch.equal(pipe.unet(*inputs).sample, unpatched)


def chunk_feed_forward(pipe: Any, size: int | None) -> None:
    for module in tiny.denoiser_of(pipe).modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(size, dim=1)


@pytest.mark.parametrize("kind", ["sdxl", "sd3"])
@pytest.mark.parametrize("sites", ["component", "block"])
def test_chunked_feed_forward_is_refused_before_and_after_apply(kind: str, sites: str) -> None:
    pipe = tiny.build(kind)
    chunk_feed_forward(pipe, 16)
    before = attributes(pipe)
    with pytest.raises(TokenMergeError, match="disable_forward_chunking"):
        apply(pipe, sites=sites)
    assert same(attributes(pipe), before)
    chunk_feed_forward(pipe, None)
    apply(pipe, sites=sites)
    merged = tiny.draw(pipe)
    chunk_feed_forward(pipe, 16)
    with pytest.raises(TokenMergeError, match="disable_forward_chunking"):
        tiny.draw(pipe)
    chunk_feed_forward(pipe, None)
    assert torch.equal(tiny.draw(pipe), merged)


@pytest.mark.parametrize("sites", ["block", "span"])
def test_ip_adapter_masks_are_refused_with_block_sites(sites: str) -> None:
    pipe = apply(tiny.build("sdxl"), sites=sites)
    masks = {"ip_adapter_masks": [torch.ones(1, 1, 64, 64)]}
    draw_refused(pipe, "use sites='component'", cross_attention_kwargs=masks)


@pytest.mark.parametrize("sites", ["component", "block"])
def test_gligen_is_refused(sites: str) -> None:
    pipe = apply(tiny.build("sdxl"), sites=sites)
    draw_refused(pipe, "'gligen'", cross_attention_kwargs={"gligen": {"boxes": torch.zeros(1, 1, 4)}})


@pytest.mark.parametrize("kind", ["sd3-controlnet", "flux-controlnet"])
def test_controlnet_between_blocks_is_refused_with_spans(kind: str) -> None:
    pipe = tiny.build(kind)
    unpatched = tiny.draw(pipe)
    apply(pipe, sites="span")
    with pytest.raises(TokenMergeError, match="use sites='block'"):
        tiny.draw(pipe)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe), unpatched)


def test_skipped_layers_are_refused_with_spans_and_work_with_blocks() -> None:
    pipe = apply(tiny.build("sd3"), sites="span")
    options = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    draw_refused(pipe, "skip_layers acts between blocks", **options)
    apply(pipe, sites="block")
    assert tiny.draw(pipe, steps=4, **options).isfinite().all()


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
    pipe = apply(tiny.build("sd"), sites="block")
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
    with pytest.raises(TokenMergeError, match="a cache must come after merging"):
        apply(cached)
    pipe = apply(tiny.build("sdxl"), ratio=0.5)
    broadcast = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )
    apply_pyramid_attention_broadcast(pipe.unet, broadcast)
    with pytest.raises(TokenMergeError, match="stores tensors inside of blocks"):
        tiny.draw(pipe)


def test_reference_images_are_not_merged_into_the_picture() -> None:
    from tokenmerge.merging.grid import TokenGrid, partition_grids

    grids = (TokenGrid(8, 8), TokenGrid(6, 8))
    with pytest.raises(TokenMergeError, match="would be merged as one"):
        partition_grids(grids, MergeConfig(regions="stripe", merge_regions="whole"))
    assert partition_grids(grids, MergeConfig()).layout.tokens == 112

"""Techniques leave no trace when removed, in every order with offload and LoRA, and beside other model changes."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families import family_of
from traces import attributes, same

COMPONENTS = Merge(sites="component")
# With these, one of two steps is held.
BLOCKS, STAGES = Hold(every=3, what="blocks", start=0.0), Hold(every=3, what="stages", start=0.0)
FORMS: dict[str, tuple[str, list[Any]]] = {
    "sdxl-components": ("sdxl", [COMPONENTS]),
    "sdxl-merged": ("sdxl", [Merge()]),
    "sdxl-held": ("sdxl", [BLOCKS]),
    "sdxl-both": ("sdxl", [Merge(), STAGES]),
    "sd3-components": ("sd3", [COMPONENTS]),
    "sd3-both": ("sd3", [Merge(), BLOCKS]),
    "flux-components": ("flux", [COMPONENTS]),
    "flux-both": ("flux", [COMPONENTS, BLOCKS]),
}


def apply(pipe: Any, **fields: Any) -> Any:
    return tokenmerge.apply(pipe, Merge(**fields))


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_200_cycles_leave_nothing_behind(kind: str) -> None:
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe)
    ways = [[Merge()], [COMPONENTS], [Merge(ratio=0.0)], [Hold(every=3, start=0.0)], [Merge(), BLOCKS]]
    tokenmerge.apply(pipe, ways[-1])
    tiny.draw(pipe)
    tokenmerge.remove(pipe)
    before, tensors = attributes(pipe), live_tensors()
    states = []
    for cycle in range(200):
        tokenmerge.apply(pipe, ways[cycle % len(ways)])
        states.append(weakref.ref(vars(tiny.denoiser_of(pipe))["_tokenmerge"].state))
        draws = cycle % 21 == 0
        if draws:
            tiny.draw(pipe)
        tokenmerge.remove(pipe)
        if draws:
            assert torch.equal(tiny.draw(pipe), plain)
    check_unchanged(before, attributes(pipe))
    del before
    gc.collect()
    assert not any(state() is not None for state in states)
    assert live_tensors() == tensors


def check_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Only the scheduler may differ: every image sets new timesteps on it."""
    assert list(before["scheduler"]) == list(after["scheduler"])
    assert {name for name in before if name != "scheduler" and not same(before[name], after[name])} == set()


@pytest.mark.parametrize("form", FORMS)
def test_remove_restores_every_attribute(form: str) -> None:
    kind, techniques = FORMS[form]
    pipe = tiny.build(kind)
    plain = tiny.draw(pipe)
    before = attributes(pipe)
    tokenmerge.apply(pipe, techniques)
    assert not same(before, attributes(pipe))
    tokenmerge.remove(pipe)
    assert same(before, attributes(pipe))
    tokenmerge.apply(pipe, techniques)
    for size in ((64, 64), (72, 104), (64, 64)):
        tiny.draw(pipe, size=size)
    tokenmerge.remove(pipe)
    check_unchanged(before, attributes(pipe))
    assert torch.equal(tiny.draw(pipe), plain)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_freed_with_its_pipeline(form: str) -> None:
    """Without waiting for the cyclic collector: until it runs, the weights stay on the GPU. Flux is not drawn here:
    diffusers leaves a hook registry on its transformer, which keeps a used pipeline alive even without a technique."""
    kind, techniques = FORMS[form]
    pipe = tokenmerge.apply(tiny.build(kind), techniques)
    if kind == "flux":
        denoiser = pipe.transformer
        with torch.no_grad():
            denoiser(**family_of(denoiser).example(denoiser, 1, 16, 16))
        del denoiser
    else:
        tiny.draw(pipe, steps=3)
    seen = [weakref.ref(pipe), weakref.ref(vars(tiny.denoiser_of(pipe))["_tokenmerge"].state)]
    seen += [weakref.ref(module) for module in tiny.denoiser_of(pipe).modules()]
    gc.collect()
    gc.disable()
    try:
        del pipe
        assert [part() for part in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_a_flux_pipeline_that_has_drawn_is_freed_by_the_collector() -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), [Merge(), Hold(every=3, start=0.2)])
    tiny.draw(pipe)
    parts = [weakref.ref(each) for each in (pipe, pipe.transformer, pipe.scheduler)]
    del pipe
    gc.collect()
    assert [part() for part in parts] == [None, None, None]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_model_with_techniques_refuses_to_be_copied(copied: Callable[[Any], Any]) -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), [Merge(), Hold(every=3, start=0.2)])
    for module in (pipe.transformer, pipe.transformer.transformer_blocks[0]):
        with pytest.raises(TokenMergeError, match="remove first"):
            copied(module)
    tokenmerge.remove(pipe)
    copied(pipe.transformer)


# Orders: every change to a pipeline can be made and undone.


@functools.cache
def lora_weights(kind: str) -> dict[str, Tensor]:
    denoiser = tiny.denoiser_of(build(kind))
    denoiser.add_adapter(LoraConfig(r=2, target_modules=["attn1.to_q", "attn.to_q", "proj_mlp"]))
    shapes = {name: weight.shape for name, weight in get_peft_model_state_dict(denoiser).items()}
    return {name: 0.3 * tiny.noise(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def load_lora(pipe: Any, kind: str) -> None:
    tiny.denoiser_of(pipe).load_lora_adapter(lora_weights(kind), prefix=None)


def offload_models(pipe: Any, folder: Path) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def offload_weights(pipe: Any, folder: Path) -> None:
    """Sequential offload to disk instead of the CPU: hooks on every module that has weights."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module):
            accelerate.disk_offload(part, folder / type(part).__name__ / name, execution_device=torch.device("cpu"))


def offload_groups(pipe: Any, folder: Path) -> None:
    cpu = torch.device("cpu")
    tiny.denoiser_of(pipe).enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)


def stop_offload(pipe: Any) -> None:
    pipe.remove_all_hooks()


def stop_group_offload(pipe: Any) -> None:
    registry = tiny.denoiser_of(pipe)._diffusers_hook
    for name in ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"):
        registry.remove_hook(name, recurse=True)


OFFLOADS = {
    "model": (offload_models, stop_offload),
    "weights": (offload_weights, stop_offload),
    "group": (offload_groups, stop_group_offload),
}


def others_hooks(pipe: Any) -> dict[str, Any]:
    """Hooks of accelerate, diffusers and peft on each module. A plain forward counts as none, however it is stored."""
    found = {}
    for name, module in tiny.denoiser_of(pipe).named_modules():
        attributes = dict(vars(module))
        forward = attributes.pop("forward", None)
        if forward is not None and forward != types.MethodType(type(module).forward, module):
            attributes["forward"] = forward
        attributes.pop("_tokenmerge", None)
        registry = attributes.pop("_diffusers_hook", None)
        hooks = [] if registry is None else [(hook, type(registry.hooks[hook])) for hook in registry._hook_order]
        found[name] = (type(module), sorted(attributes), type(attributes.get("forward")), hooks)
        found[name] += (type(attributes.get("_hf_hook")), len(module._forward_pre_hooks), len(module._forward_hooks))
    return found


def build(kind: str) -> Any:
    """A pipeline with few blocks, because LoRA is slow to load on each."""
    if kind != "sdxl":
        return tiny.build(kind)
    return tiny.build(kind, unet=tiny.short_sdxl_unet())


def change(pipe: Any, kind: str, offload: str, step: str, folder: Path) -> None:
    start, stop = OFFLOADS[offload]
    if step == "offload":
        start(pipe, folder)
    elif step == "undo offload":
        stop(pipe)
    elif step == "lora":
        load_lora(pipe, kind)
    elif step == "undo lora":
        tiny.denoiser_of(pipe).unload_lora()


@functools.cache
def hooks_without_techniques(kind: str, offload: str, steps: tuple[str, ...], folder: Path) -> dict[str, Any]:
    pipe = build(kind)
    for step in steps:
        change(pipe, kind, offload, step, folder)
    return others_hooks(pipe)


def steps(techniques: list[Any]) -> int:
    """The fewest steps in which the techniques take effect."""
    return 3 if any(isinstance(each, Hold) for each in techniques) else 1


def travel(form: str, offload: str, journey: tuple[str, ...], folder: Path, images: dict[Any, Tensor]) -> None:
    """Make the changes of a journey, then undo them in every order. After each change the image must be right; without
    techniques, the hooks of other libraries must be as if no technique had ever been applied."""
    kind, techniques = FORMS[form]
    for back in itertools.permutations(journey):
        pipe = build(kind)
        done: list[str] = []
        for step in (*journey, *(f"undo {each}" for each in back)):
            if step == "apply":
                tokenmerge.apply(pipe, techniques)
            elif step == "undo apply":
                tokenmerge.remove(pipe)
            else:
                change(pipe, kind, offload, step, folder)
            done.append(step)
            if step in journey and back != journey:
                # One order checks these states; images in between might hide errors that occur without them.
                continue
            present = {each for each in done if f"undo {each}" not in done}
            image = tiny.draw(pipe, steps=steps(techniques))
            assert torch.equal(image, images["lora" in present, "apply" in present]), done
            if "apply" not in present:
                without = tuple(each for each in done if "apply" not in each)
                assert others_hooks(pipe) == hooks_without_techniques(kind, offload, without, folder), done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offloaded")


@functools.cache
def images(form: str) -> dict[Any, Tensor]:
    """Expected images, keyed by (LoRA loaded, techniques applied)."""
    kind, techniques = FORMS[form]
    found: dict[Any, Tensor] = {}
    for lora, applies in itertools.product([False, True], repeat=2):
        pipe = build(kind)
        if lora:
            load_lora(pipe, kind)
        if applies:
            tokenmerge.apply(pipe, techniques)
        found[lora, applies] = tiny.draw(pipe, steps=steps(techniques))
    assert len({image.sum().item() for image in found.values()}) == 4
    return found


@pytest.mark.parametrize("journey", list(itertools.permutations(["apply", "offload", "lora"])), ids="-".join)
@pytest.mark.parametrize(
    ("form", "offload"),
    [
        ("sdxl-merged", "group"),
        ("sdxl-both", "model"),
        ("flux-components", "group"),
        ("flux-both", "model"),
        ("flux-both", "group"),
    ],
)
def test_every_order_of_apply_offload_and_lora(form: str, offload: str, journey: tuple[str, ...], folder: Path) -> None:
    travel(form, offload, journey, folder, images(form))


# LoRA cannot be combined with weights on disk, with or without merging.
@pytest.mark.parametrize("journey", list(itertools.permutations(["apply", "offload"])), ids="-".join)
@pytest.mark.parametrize("form", FORMS)
def test_every_order_of_apply_and_offload_of_single_weights(form: str, journey: tuple[str, ...], folder: Path) -> None:
    travel(form, "weights", journey, folder, images(form))


@pytest.mark.parametrize("form", ["sdxl-components", "sdxl-both"])
def test_lora_through_the_pipeline_loads_scales_fuses_and_unloads_while_applied(form: str) -> None:
    pipe = tokenmerge.apply(build("sdxl"), FORMS[form][1])
    plain = tiny.draw(pipe)
    pipe.load_lora_weights({f"unet.{name}": weight for name, weight in lora_weights("sdxl").items()}, "style")
    loaded = tiny.draw(pipe)
    pipe.set_adapters("style", 0.5)
    half = tiny.draw(pipe)
    assert not torch.equal(loaded, plain)
    assert not torch.equal(half, loaded)
    pipe.set_adapters("style", 1.0)
    pipe.fuse_lora()
    torch.testing.assert_close(tiny.draw(pipe), loaded, rtol=0, atol=2e-2)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    torch.testing.assert_close(tiny.draw(pipe), plain, rtol=0, atol=2e-2)


@pytest.mark.parametrize("told", [True, False])
def test_a_forward_somebody_else_wrapped_merges_once_until_remove(told: bool) -> None:
    """With and without `__wrapped__` on the wrapper."""
    pipe = tiny.build("flux")
    plain = tiny.draw(pipe)
    apply(pipe)
    merged = tiny.draw(pipe)
    for block in pipe.transformer.transformer_blocks:
        inner = block.forward
        wrapper = lambda *args, inner=inner, **kwargs: inner(*args, **kwargs)  # noqa: E731
        block.forward = functools.wraps(inner)(wrapper) if told else wrapper
    assert torch.equal(tiny.draw(pipe), merged)
    assert torch.equal(tiny.draw(pipe), merged)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe), plain)


# Other features of diffusers.


@pytest.mark.parametrize("sites", ["component", "block"])
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
@pytest.mark.parametrize("fused_first", [True, False])
def test_fused_projections_merge_alike(kind: str, sites: str, fused_first: bool) -> None:
    pipe = tiny.build(kind)
    expected = tiny.draw(apply(tiny.build(kind), sites=sites))
    if fused_first:
        tiny.denoiser_of(pipe).fuse_qkv_projections()
    apply(pipe, sites=sites)
    if not fused_first:
        tiny.denoiser_of(pipe).fuse_qkv_projections()
    # Rounding differs and can change which tokens are selected, so images are close, not equal.
    assert (tiny.draw(pipe) - expected).abs().mean() < 0.05
    selected = tokenmerge.summary(pipe).groups[0]["selected"]
    assert selected == 1


def ip_adapter(unet: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Random weights of an IP-Adapter with 4 image tokens from an embedding of 8."""
    names = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    keys: dict[str, Tensor] = {}
    # The format numbers processors in UNet order, self-attention included; only the odd ones are cross-attention.
    for place, name in enumerate(names):
        width = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        for part, seed in (("to_k_ip", 0), ("to_v_ip", 1)):
            keys[f"{2 * place + 1}.{part}.weight"] = tiny.noise(width, tiny.TEXT_WIDTH, seed=seed + 2 * place)
    projection = {
        "proj.weight": tiny.noise(4 * tiny.TEXT_WIDTH, 8),
        "proj.bias": torch.zeros(4 * tiny.TEXT_WIDTH),
        "norm.weight": torch.ones(tiny.TEXT_WIDTH),
        "norm.bias": torch.zeros(tiny.TEXT_WIDTH),
    }
    return {"image_proj": projection, "ip_adapter": keys}


@pytest.mark.parametrize("sites", ["component", "block"])
def test_unmasked_ip_adapter_works_before_and_after_apply(sites: str) -> None:
    embeds = [torch.cat([torch.zeros(1, 1, 8), tiny.noise(1, 1, 8)])]
    images = []
    for first in (True, False):
        pipe = tiny.build("sd")
        weights = ip_adapter(pipe.unet)
        if first:
            pipe.unet._load_ip_adapter_weights([weights])
        apply(pipe, sites=sites)
        if not first:
            pipe.unet._load_ip_adapter_weights([weights])
        images.append(tiny.draw(pipe, ip_adapter_image_embeds=embeds))
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], tiny.draw(apply(tiny.build("sd"), sites=sites)))


def test_masked_ip_adapter_leaves_cross_attention_whole() -> None:
    pipe = tiny.build("sd")
    pipe.unet._load_ip_adapter_weights([ip_adapter(pipe.unet)])
    options = {
        "ip_adapter_image_embeds": [torch.cat([torch.zeros(1, 1, 8), tiny.noise(1, 1, 8)])],
        "cross_attention_kwargs": {"ip_adapter_masks": [torch.ones(1, 1, 64, 64)]},
    }
    apply(pipe, sites="component", components=("cross_attention",))
    masked = tiny.draw(pipe, **options)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, **options), masked)
    apply(pipe, sites="component")
    assert not torch.equal(tiny.draw(pipe, **options), masked)


@pytest.mark.parametrize("sites", ["component", "block"])
def test_first_block_cache_works_on_top_of_merging(sites: str) -> None:
    pipe = tiny.build("flux")
    plain = tiny.draw(pipe, steps=6)
    apply(pipe, sites=sites)
    merged = tiny.draw(pipe, steps=6)
    # A threshold of 0 never skips, one of 10 always does.
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    assert torch.equal(tiny.draw(pipe, steps=6), merged)
    pipe.transformer.disable_cache()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    cached = tiny.draw(pipe, steps=6)
    assert cached.isfinite().all()
    assert not torch.equal(cached, merged)
    pipe.transformer.disable_cache()
    assert torch.equal(tiny.draw(pipe, steps=6), merged)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe, steps=6), plain)


def test_mag_cache_works_on_top_of_merging() -> None:
    pipe = apply(tiny.build("flux"), sites="block")
    merged = tiny.draw(pipe, steps=6)
    for skipped in (0, 2):
        pipe.transformer.enable_cache(
            MagCacheConfig(
                threshold=1.0, max_skip_steps=skipped, num_inference_steps=6, mag_ratios=[1.0] * 6, retention_ratio=0.2
            )
        )
        assert torch.equal(tiny.draw(pipe, steps=6), merged) == (skipped == 0)
        pipe.transformer.disable_cache()
    assert torch.equal(tiny.draw(pipe, steps=6), merged)


@pytest.mark.parametrize(
    "techniques",
    [[Merge()], [Hold(every=3, start=0.2)], [Merge(), Hold(every=3, start=0.2)]],
    ids=["merge", "hold", "both"],
)
@pytest.mark.parametrize("merged_before", [True, False])
def test_a_cache_that_came_first_is_refused(merged_before: bool, techniques: list[Any]) -> None:
    pipe = tiny.build("flux")
    if merged_before:
        apply(pipe)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    before = tiny.draw(pipe), attributes(pipe)
    # A cache must not come first, and cannot be combined with Hold at all.
    told = "use only one of them" if Hold(every=3, start=0.2) in techniques else "a cache must come after a technique"
    with pytest.raises(TokenMergeError, match=told):
        tokenmerge.apply(pipe, techniques)
    assert same(before[1], attributes(pipe))
    assert torch.equal(tiny.draw(pipe), before[0])


@pytest.mark.parametrize(
    "config",
    [
        PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500),
        FasterCacheConfig(spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500),
        TaylorSeerCacheConfig(),
    ],
    ids=lambda config: type(config).__name__,
)
@pytest.mark.parametrize("techniques", [[Merge()], [Merge(), Hold(every=3, start=0.2)]], ids=["merge", "both"])
def test_caches_inside_of_blocks_are_refused_when_the_model_is_called(techniques: list[Any], config: Any) -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), techniques)
    merged = tiny.draw(pipe)
    pipe.transformer.enable_cache(config)
    with pytest.raises(TokenMergeError, match="stores tensors inside of blocks"):
        tiny.draw(pipe)
    pipe.transformer.disable_cache()
    assert torch.equal(tiny.draw(pipe), merged)

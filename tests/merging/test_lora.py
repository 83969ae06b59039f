"""`Merge(lora=...)`: a healed LoRA acts in merged steps only, leaves no trace, and is refused where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tiny
import tokenmerge
from healed import adapter_of, healed
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families import family_of
from tokenmerge.merging.lora import METADATA

MERGE = Merge(regions="tile:2x2", skip_first=1)
KINDS = ("flux", "sdxl")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Merge]:
    folder = tmp_path_factory.mktemp("loras")
    made = {kind: healed(tiny.denoiser_of(tiny.build(kind)), MERGE, folder / f"{kind}.safetensors") for kind in KINDS}
    return made.__getitem__


def outputs(pipe: Any, steps: int = 4) -> list[Tensor]:
    """The denoiser's output at every step of a picture."""
    found: list[Tensor] = []
    handle = tiny.denoiser_of(pipe).register_forward_hook(lambda module, args, output: found.append(output[0]))
    try:
        tiny.draw(pipe, steps=steps)
    finally:
        handle.remove()
    return found


def user_lora(denoiser: Any) -> None:
    """Adds a user's own LoRA, on layers that the healed LoRA changes too."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        targets = ["attn1.to_q", "attn.to_q", "ff.net.0.proj"]
        denoiser.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), "style")


@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_what_peft_would_and_leaves_no_trace(kind: str, files: Callable[[str], Merge]) -> None:
    technique = files(kind)
    pipe = tiny.build(kind)
    denoiser = tiny.denoiser_of(pipe)
    plain, keys = tiny.draw(pipe), list(denoiser.state_dict())
    merged = tiny.draw(tokenmerge.apply(pipe, MERGE))
    changed = tiny.draw(tokenmerge.apply(pipe, technique))
    assert (changed - merged).abs().max() > 1e-3
    assert list(denoiser.state_dict()) == keys
    assert torch.equal(tiny.draw(tokenmerge.apply(pipe, MERGE)), merged)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe), plain)
    assert not any("forward" in vars(module) for module in denoiser.modules())
    # A LoRA that the pipeline loads acts in all steps. Here all steps are merged, so images agree.
    pipe.load_lora_weights(technique.lora)
    torch.testing.assert_close(tiny.draw(tokenmerge.apply(pipe, MERGE)), changed, rtol=1e-4, atol=1e-5)


def test_a_bare_denoiser_takes_it_too(files: Callable[[str], Merge]) -> None:
    pipe = tiny.build("flux")
    expected = tiny.draw(tokenmerge.apply(pipe, files("flux")))
    tokenmerge.remove(pipe)
    tokenmerge.apply(pipe.transformer, files("flux"), scheduler=pipe.scheduler)
    assert torch.equal(tiny.draw(pipe), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_it_acts_in_merged_steps_only(kind: str, files: Callable[[str], Merge]) -> None:
    pipe = tiny.build(kind)
    plain = outputs(pipe)
    windowed = outputs(tokenmerge.apply(pipe, files(kind).replace(start=0.5)))
    assert [torch.equal(*pair) for pair in zip(plain, windowed, strict=True)] == [True, True, False, False]
    whole = outputs(tokenmerge.apply(pipe, MERGE.replace(start=0.5)))
    assert not torch.equal(whole[2], windowed[2])
    held = [files(kind), Hold(every=2, start=0.0, what="blocks")]
    assert tokenmerge.summary(tokenmerge.apply(pipe, held)).plan is not None
    tiny.draw(pipe, steps=4)
    assert tokenmerge.summary(pipe).steps["held"] >= 1


@pytest.mark.parametrize("first", ["theirs", "ours"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_adds_to_a_lora_of_the_users(kind: str, first: str, files: Callable[[str], Merge]) -> None:
    pipe = tiny.build(kind)
    denoiser = tiny.denoiser_of(pipe)
    steps: list[Callable[[], Any]] = [lambda: user_lora(denoiser), lambda: tokenmerge.apply(pipe, files(kind))]
    for step in steps if first == "theirs" else reversed(steps):
        step()
        tiny.draw(pipe)
    both = tiny.draw(pipe)
    assert not torch.equal(both, tiny.draw(tokenmerge.apply(pipe, MERGE)))
    tokenmerge.apply(pipe, files(kind))
    assert torch.equal(tiny.draw(pipe), both)
    denoiser.delete_adapters("style")
    denoiser.unload_lora()
    expected = tiny.draw(tokenmerge.apply(tiny.build(kind), files(kind)))
    assert torch.equal(tiny.draw(pipe), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_another_type_take_it(kind: str, files: Callable[[str], Merge]) -> None:
    pipe = tiny.build(kind)
    denoiser = tiny.denoiser_of(pipe)
    denoiser.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    plain = tiny.draw(pipe)
    merged = tiny.draw(tokenmerge.apply(pipe, MERGE))
    changed = tiny.draw(tokenmerge.apply(pipe, files(kind)))
    assert changed.isfinite().all()
    assert not torch.equal(changed, merged)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe), plain)


def test_nothing_is_compiled_for_it_when_it_turns_on_and_off(files: Callable[[str], Merge]) -> None:
    counts = []
    for technique in (MERGE, files("flux")):
        torch.compiler.reset()
        pipe = tokenmerge.apply(tiny.build("flux"), technique.replace(start=0.4))
        eager = tiny.draw(pipe, steps=4)
        counter = CompileCounterWithBackend("eager")
        for block in (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks):
            block.compile(backend=counter, fullgraph=True)
        torch.testing.assert_close(tiny.draw(pipe, steps=4), eager, rtol=1e-4, atol=1e-5)
        counts.append(counter.frame_count)
        tiny.draw(pipe, steps=4)
        assert counter.frame_count == counts[-1]
    assert counts[0] == counts[1]


def test_it_trains_no_further_and_lets_gradients_through(files: Callable[[str], Merge]) -> None:
    denoiser: nn.Module = tokenmerge.apply(tiny.denoiser_of(tiny.build("flux")), files("flux")).train()
    given = family_of(denoiser).example(denoiser, 1, 16, 16)
    given["hidden_states"].requires_grad_()
    denoiser(**given, return_dict=False)[0].sum().backward()
    assert given["hidden_states"].grad.abs().max() > 0


@pytest.mark.parametrize("first", ["fused", "healed"])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_projections_are_refused(kind: str, first: str, files: Callable[[str], Merge]) -> None:
    """Fused projections replace the query, key and value layers, whose part of the LoRA would be lost."""
    pipe = tiny.build(kind)
    denoiser = tiny.denoiser_of(pipe)
    technique = files(kind)
    expected = tiny.draw(tokenmerge.apply(pipe, technique))
    told = r"fused projections run in place of .*unfuse_qkv_projections\(\) first"
    if first == "fused":
        tokenmerge.remove(pipe)
        denoiser.fuse_qkv_projections()
        with pytest.raises(TokenMergeError, match=told):
            tokenmerge.apply(pipe, technique)
    else:
        denoiser.fuse_qkv_projections()
        with pytest.raises(TokenMergeError, match=told):
            tiny.draw(pipe)
    denoiser.unfuse_qkv_projections()
    assert torch.equal(tiny.draw(tokenmerge.apply(pipe, technique)), expected)
    denoiser.fuse_qkv_projections()
    tiny.draw(tokenmerge.apply(pipe, MERGE))


def other_model(technique: Merge) -> tuple[Any, Merge]:
    return tiny.build("sd3"), technique


def other_width(technique: Merge) -> tuple[Any, Merge]:
    pipe = tiny.build("flux", transformer=tiny.flux_transformer(num_attention_heads=4))
    return pipe, technique


def fewer_blocks(technique: Merge) -> tuple[Any, Merge]:
    return tiny.build("flux", transformer=tiny.flux_transformer(num_single_layers=2)), technique


def other_ratio(technique: Merge) -> tuple[Any, Merge]:
    return tiny.build("flux"), technique.replace(ratio=0.75, regions="stripe:4")


def no_file(technique: Merge) -> tuple[Any, Merge]:
    return tiny.build("flux"), technique.replace(lora="nowhere.safetensors")


def no_lora(technique: Merge) -> tuple[Any, Merge]:
    path = Path(technique.lora or "").with_name("broken.safetensors")
    path.write_bytes(b"no safetensors")
    return tiny.build("flux"), technique.replace(lora=path)


def not_healed(technique: Merge) -> tuple[Any, Merge]:
    path = Path(technique.lora or "").with_name("style.safetensors")
    save_file({"transformer.proj_out.lora_A.weight": torch.zeros(2, 16)}, path)
    return tiny.build("flux"), technique.replace(lora=path)


def for_comfyui(technique: Merge) -> tuple[Any, Merge]:
    path = Path(technique.lora or "").with_name("lora-comfyui.safetensors")
    adapter_of(tiny.build("sdxl").unet, technique).write_for_comfyui(path, technique, torch.float32)
    return tiny.build("sdxl"), technique.replace(lora=path)


REFUSED = {
    other_model: r"healed for a FluxTransformer2DModel of width 16, but this is a SD3Transformer2DModel of width 16",
    other_width: r"of width 16, but this is a FluxTransformer2DModel of width 32",
    fewer_blocks: r"changes 'single_transformer_blocks\.2\.\S+', which is in no block of this model that merges",
    other_ratio: r"healed for ratio=0\.5, regions='tile:2x2', but ratio=0\.75, regions='stripe:4' is applied",
    no_file: r"'nowhere\.safetensors' does not exist",
    no_lora: r"cannot be read",
    not_healed: r"does not record which Merge it was healed for",
    for_comfyui: r"give lora\.safetensors as `tokenmerge heal` wrote it, not the file for ComfyUI",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_what_does_not_fit_is_refused_before_anything_changes(
    case: Callable[[Merge], tuple[Any, Merge]], files: Callable[[str], Merge]
) -> None:
    pipe, technique = case(files("flux"))
    tokenmerge.apply(pipe, Merge(ratio=0.25, regions="tile:2x2"))
    before = tiny.draw(pipe)
    with pytest.raises(TokenMergeError, match=REFUSED[case]):
        tokenmerge.apply(pipe, technique)
    assert torch.equal(tiny.draw(pipe), before)


def without_half(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors[next(name for name in tensors if "lora_B" in name)]


def with_two_ranks(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name] = torch.zeros(tensors[name].shape[0], 5)


DAMAGES: list[tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = [
    (lambda record, tensors: record.clear(), r"is damaged \(its metadata cannot be read: KeyError\('merge'\)"),
    (lambda record, tensors: record.pop("width"), r"cannot be read: KeyError\('width'\)\); copy it again"),
    (lambda record, tensors: record.update(merge=3), r"cannot be read: TypeError"),
    (lambda record, tensors: tensors.clear(), r"is damaged \(it has no layers\)"),
    (without_half, r"lacks a matrix of 'single_transformer_blocks\.\d\.\S+'"),
    (with_two_ranks, r"is damaged \(the matrices of '\S+', \[2, \d+\] and \[\d+, 5\], differ in rank\)"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGES, ids=[told for _, told in DAMAGES])
def test_a_damaged_file_is_named(
    damage: Callable[[dict[str, Any], dict[str, Tensor]], Any],
    told: str,
    files: Callable[[str], Merge],
    tmp_path: Path,
) -> None:
    technique = files("flux")
    with safe_open(technique.lora, "pt") as file:
        record, tensors = json.loads(file.metadata()[METADATA]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    damage(record, tensors)
    save_file(tensors, tmp_path / "lora.safetensors", {METADATA: json.dumps(record)})
    with pytest.raises(TokenMergeError, match=told):
        tokenmerge.apply(tiny.build("flux"), technique.replace(lora=tmp_path / "lora.safetensors"))


def test_a_record_that_is_no_json_is_named(files: Callable[[str], Merge], tmp_path: Path) -> None:
    save_file({}, tmp_path / "lora.safetensors", {METADATA: "{"})
    with pytest.raises(TokenMergeError, match=r"is damaged \(its metadata cannot be read: JSONDecodeError"):
        tokenmerge.apply(tiny.build("flux"), files("flux").replace(lora=tmp_path / "lora.safetensors"))

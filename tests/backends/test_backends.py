"""Techniques on quantised and cast weights, with attention backends, and under group offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import gguf
import pytest
import torch
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel, GGUFQuantizationConfig, QuantoConfig, TorchAoConfig
from diffusers.hooks.group_offloading import LazyPrefetchGroupOffloadingHook, ModuleGroup
from diffusers.models.attention_dispatch import attention_backend
from diffusers.quantizers.bitsandbytes.utils import dequantize_bnb_weight, replace_with_bnb_linear
from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import denoisers
import tiny
import tokenmerge
from healed import healed
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.compiling import graphs

CPU = torch.device("cpu")
STEPS = 4
HOLD = Hold(every=2, start=0.0)
TECHNIQUES: dict[str, list[Any]] = {"merge": [Merge()], "hold": [HOLD], "both": [Merge(), HOLD]}
KINDS = {"merge": {"merged": 4}, "hold": {"full": 3, "held": 1}, "both": {"merged": 3, "held": 1}}


def flux() -> Any:
    """Flux with rows of 64 in its blocks: GGUF quantises 32 values together, bitsandbytes 64."""
    return tiny.flux_transformer(attention_head_dim=32, axes_dims_rope=(16, 8, 8))


def draw(pipe: Any, steps: int = STEPS) -> Tensor:
    return tiny.draw(pipe, steps=steps)


def distance(image: Tensor, other: Tensor) -> float:
    return float((image - other).norm() / other.norm())


# Quantised and cast weights


def of_torchao(config: Any, folder: Path) -> Any:
    return FluxTransformer2DModel.from_pretrained(
        folder, quantization_config=TorchAoConfig(config), torch_dtype=torch.float32
    )


def of_gguf(kind: Any, folder: Path) -> Any:
    file = folder / f"{kind.name}.gguf"
    writer = gguf.GGUFWriter(file, "flux")
    for name, weight in flux().state_dict().items():
        values = weight.numpy()
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = GGUFQuantizationConfig(compute_dtype=torch.float32)
    return FluxTransformer2DModel.from_single_file(
        str(file), config=str(folder), quantization_config=config, torch_dtype=torch.float32
    )


def of_bitsandbytes(bits: int, folder: Path) -> Any:
    """Flux with diffusers' bitsandbytes layers, which it refuses to load without a GPU: weights are put in here."""
    model = flux()
    weights = model.state_dict()
    config = BitsAndBytesConfig(
        load_in_8bit=bits == 8, load_in_4bit=bits == 4, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    small = ["x_embedder", "context_embedder", "time_text_embed", "proj_out"]
    model = replace_with_bnb_linear(model, modules_to_not_convert=small, quantization_config=config)
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt):
            options = {"quant_type": "nf4"} if bits == 4 else {"has_fp16_weights": False}
            made = bitsandbytes.nn.Params4bit if bits == 4 else bitsandbytes.nn.Int8Params
            module.weight = made(weights[f"{name}.weight"].clone(), requires_grad=False, **options).to(CPU)
            if module.bias is not None:
                module.bias = nn.Parameter(weights[f"{name}.bias"])
    return model.eval().requires_grad_(False)


def of_quanto(folder: Path) -> Any:
    config = QuantoConfig(weights_dtype="int8")
    return FluxTransformer2DModel.from_pretrained(folder, quantization_config=config, torch_dtype=torch.float32)


def of_casting(folder: Path) -> Any:
    model = flux()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    return model


def unchanged(weight: Tensor) -> Tensor:
    return weight.float()


def of_shell(weight: Any) -> Tensor:
    return weight.dequantize()


def of_packed(weight: Any) -> Tensor:
    """The values that the layer computes with: in half precision for 8-bit weights."""
    return dequantize_bnb_weight(weight, weight) if weight.dtype == torch.int8 else dequantize_bnb_weight(weight)


# How the model is made, the type of its quantised weights, and how to read their values.
BACKENDS: dict[str, tuple[Callable[[Path], Any], str, Callable[[Any], Tensor]]] = {
    "torchao int8": (partial(of_torchao, Int8WeightOnlyConfig()), "Int8Tensor", of_shell),
    "torchao fp8": (partial(of_torchao, Float8WeightOnlyConfig()), "Float8Tensor", of_shell),
    "torchao int8 activations": (
        partial(of_torchao, Int8DynamicActivationInt8WeightConfig()),
        "Int8Tensor",
        of_shell,
    ),
    "bitsandbytes 4 bits": (partial(of_bitsandbytes, 4), "Params4bit", of_packed),
    "bitsandbytes 8 bits": (partial(of_bitsandbytes, 8), "Int8Params", of_packed),
    "GGUF Q8_0": (partial(of_gguf, gguf.GGMLQuantizationType.Q8_0), "GGUFParameter", dequantize_gguf_tensor),
    "GGUF Q4_0": (partial(of_gguf, gguf.GGMLQuantizationType.Q4_0), "GGUFParameter", dequantize_gguf_tensor),
    "quanto int8": (of_quanto, "WeightQBytesTensor", of_shell),
    "layerwise casting": (of_casting, "Parameter", unchanged),
}


def dequantised(plain: Any, model: Any, kind: str, read: Callable[[Any], Tensor]) -> Any:
    """The plain model with the weights that the quantised one computes with."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            quantised = type(weight).__name__ == kind
            plain.get_parameter(name).copy_(read(weight) if quantised else weight.float())
    return plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved = tmp_path_factory.mktemp("flux")
    flux().save_pretrained(saved)
    return saved


@pytest.fixture(scope="module", params=BACKENDS)
def pipes(request: pytest.FixtureRequest, folder: Path) -> tuple[Any, Any]:
    """A pipeline with quantised weights, and one with plain weights of the same values."""
    make, kind, read = BACKENDS[request.param]
    model = make(folder)
    assert any(type(weight).__name__ == kind for weight in model.parameters())
    # Weights are read before the first call, in which bitsandbytes may pack them anew.
    plain = dequantised(flux(), model, kind, read)
    return tiny.build("flux", transformer=model), tiny.build("flux", transformer=plain)


def check_techniques(pipe: Any, plain: Any) -> None:
    """Techniques that save nothing change no bit, others draw as on plain weights, and all can be removed."""
    whole, of_plain = draw(pipe), draw(plain)
    for technique in (Merge(ratio=0.0), Hold(every=1)):
        with tokenmerge.applied(pipe, technique):
            assert torch.equal(draw(pipe), whole)
    exact = distance(whole, of_plain) < 1e-5  # unless activations are rounded too
    for name, techniques in TECHNIQUES.items():
        with tokenmerge.applied(pipe, techniques), tokenmerge.applied(plain, techniques):
            fast, of_plain_fast = draw(pipe), draw(plain)
            steps = tokenmerge.summary(pipe).steps
            assert steps == tokenmerge.summary(plain).steps
            assert set(steps) == set(KINDS[name])
        drift = distance(of_plain_fast, of_plain)
        assert distance(fast, whole) > 0.1 * drift > 0
        assert distance(fast, of_plain_fast) < (1e-5 if exact else 0.5 * drift)
    assert torch.equal(draw(pipe), whole)


def test_techniques_on_quantised_weights(pipes: tuple[Any, Any]) -> None:
    check_techniques(*pipes)


def test_a_healed_lora_on_quantised_weights(pipes: tuple[Any, Any], tmp_path: Path) -> None:
    technique = healed(flux(), Merge(), tmp_path / "lora.safetensors")
    found = []
    for each in pipes:
        whole, merged = draw(each), draw(tokenmerge.apply(each, Merge()))
        found.append((whole, draw(tokenmerge.apply(each, technique))))
        assert distance(found[-1][1], merged) > 0.01
        tokenmerge.remove(each)
        assert torch.equal(draw(each), whole)
    (whole, changed), (of_plain, changed_of_plain) = found
    exact = distance(whole, of_plain) < 1e-5  # unless activations are rounded too
    assert distance(changed, changed_of_plain) < (1e-5 if exact else 0.5 * distance(changed_of_plain, of_plain))


@pytest.mark.parametrize("weights", ["cast", "quantised"])
def test_stages_and_quantised_weights(weights: str) -> None:
    unet = tiny.short_sdxl_unet()
    if weights == "cast":
        unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    else:
        quantize_(unet, Int8WeightOnlyConfig())
    plain = dequantised(tiny.short_sdxl_unet(), unet, "Int8Tensor", of_shell)
    check_techniques(tiny.build("sdxl", unet=unet), tiny.build("sdxl", unet=plain))


def lora_weights() -> dict[str, Tensor]:
    model = flux()
    model.add_adapter(LoraConfig(r=2, target_modules=["attn.to_q", "proj_mlp"]))
    shapes = {name: weight.shape for name, weight in get_peft_model_state_dict(model).items()}
    return {name: 0.3 * tiny.noise(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


# Under layerwise casting a LoRA must be loaded first, with or without a technique.
@pytest.mark.parametrize("pipes", [name for name in BACKENDS if name != "layerwise casting"], indirect=True)
def test_lora_on_quantised_weights_comes_and_goes(pipes: tuple[Any, Any]) -> None:
    pipe, _ = pipes
    before = draw(tokenmerge.apply(pipe, TECHNIQUES["both"]))
    pipe.transformer.load_lora_adapter(lora_weights(), prefix=None)
    with_lora = draw(pipe)
    assert tokenmerge.summary(pipe).steps == KINDS["both"]
    tokenmerge.remove(pipe)
    plain = draw(pipe)
    assert torch.equal(draw(tokenmerge.apply(pipe, TECHNIQUES["both"])), with_lora)
    pipe.transformer.unload_lora()
    assert torch.equal(draw(pipe), before)
    tokenmerge.remove(pipe)
    assert min(distance(with_lora, before), distance(with_lora, plain)) > 1e-3


@pytest.mark.parametrize("name", ["merge", "hold", "both"])
def test_lora_loaded_before_layerwise_casting(name: str) -> None:
    images = []
    for first in ("apply", "cast"):
        model = flux()
        model.load_lora_adapter(lora_weights(), prefix=None)
        pipe = tiny.build("flux", transformer=model)
        for step in ("apply", "cast") if first == "apply" else ("cast", "apply"):
            if step == "apply":
                tokenmerge.apply(pipe, TECHNIQUES[name])
            else:
                model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        images.append(draw(pipe))
        assert tokenmerge.summary(pipe).steps == KINDS[name]
    assert torch.equal(*images)


def test_compiled_blocks_of_quantised_weights() -> None:
    model = tiny.flux_transformer(num_layers=1, num_single_layers=2)
    quantize_(model, Int8WeightOnlyConfig())
    pipe = tokenmerge.apply(tiny.build("flux", transformer=model), TECHNIQUES["both"])
    expected = draw(pipe)
    compiler = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=True, backend=compiler)
    assert distance(draw(pipe), expected) < 1e-5
    made = compiler.frame_count
    assert made > 0
    assert distance(draw(pipe), expected) < 1e-5
    assert compiler.frame_count == made
    torch._dynamo.reset()


def test_recordings_notice_quantised_weights_that_were_exchanged() -> None:
    """Quantised weights are shells without an address, so addresses cannot show the exchange."""
    model = tiny.flux_transformer()
    quantize_(model, Int8WeightOnlyConfig())
    before = graphs._state_of(model)
    assert graphs._state_of(model) == before
    layer = model.transformer_blocks[0].attn.to_q
    assert layer.weight.data_ptr() == 0
    layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    assert graphs._state_of(model) != before


def test_nothing_is_recorded_of_weights_that_are_cast_in_every_call() -> None:
    model = tiny.flux_transformer()
    assert graphs._obstacle(model) == ""
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert "layerwise casting" in graphs._obstacle(model)


# Attention backends


@pytest.fixture
def usual_attention() -> Iterator[None]:
    """Restores the process's backend, which setting a model's backend also changes."""
    with attention_backend("native"):
        yield


# The backends that run on a CPU.
@pytest.mark.parametrize("backend", ["native", "_native_math", "_native_flash", "flex"])
@pytest.mark.parametrize("first", ["apply", "backend"])
@pytest.mark.usefixtures("usual_attention")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_backends(backend: str, first: str) -> None:
    expected = draw(tokenmerge.apply(tiny.build("flux"), TECHNIQUES["both"]))
    pipe = tiny.build("flux")
    for step in ("apply", "backend") if first == "apply" else ("backend", "apply"):
        if step == "apply":
            tokenmerge.apply(pipe, TECHNIQUES["both"])
        else:
            pipe.transformer.set_attention_backend(backend)
    assert distance(draw(pipe), expected) < 1e-5
    assert tokenmerge.summary(pipe).steps == KINDS["both"]
    if backend != "flex":  # slow without a compiler
        tokenmerge.remove(pipe)
        whole = draw(pipe)
        assert torch.equal(draw(tokenmerge.apply(pipe, [Merge(ratio=0.0), Hold(every=1)])), whole)


# Group offload


def offload(pipe: Any, how: str, folder: Path) -> None:
    """how: what forms a group. Under disk offload, placeholders stand in for weights that are not loaded."""
    denoiser = tiny.denoiser_of(pipe)
    if how == "leaves":
        denoiser.enable_group_offload(CPU, CPU, offload_type="leaf_level")
        return
    number = 2 if how == "two blocks" else 1
    disk = str(folder) if how == "block, disk" else None
    denoiser.enable_group_offload(CPU, CPU, num_blocks_per_group=number, offload_to_disk_path=disk)
    if how == "block, tracked":
        # diffusers does this with streams, which a CPU lacks: each group then loads the next.
        denoiser._diffusers_hook.register_hook(LazyPrefetchGroupOffloadingHook(), "lazy_prefetch_group_offloading")


OFFLOADS = ["block", "two blocks", "leaves", "block, disk", "block, tracked"]


@pytest.fixture(scope="module")
def without_offload() -> Callable[[str, str], tuple[Tensor, dict[str, int]]]:
    known: dict[tuple[str, str], tuple[Tensor, dict[str, int]]] = {}

    def image(kind: str, name: str) -> tuple[Tensor, dict[str, int]]:
        if (kind, name) not in known:
            pipe = tokenmerge.apply(tiny.build(kind), TECHNIQUES[name])
            known[kind, name] = draw(pipe), dict(tokenmerge.summary(pipe).steps)
        return known[kind, name]

    return image


def built(kind: str, first: str, techniques: Any, how: str, folder: Path) -> Any:
    pipe = tiny.build(kind)
    for step in ("apply", "offload") if first == "apply" else ("offload", "apply"):
        tokenmerge.apply(pipe, techniques) if step == "apply" else offload(pipe, how, folder)
    return pipe


@pytest.mark.parametrize("first", ["apply", "offload"])
@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize(("kind", "name"), [("flux", "merge"), ("flux", "both"), ("sd3", "hold"), ("sdxl", "both")])
def test_group_offload(kind: str, name: str, how: str, first: str, tmp_path: Path, without_offload: Any) -> None:
    pipe = built(kind, first, TECHNIQUES[name], how, tmp_path)
    expected, steps = without_offload(kind, name)
    for _ in range(2):
        image = draw(pipe)
        # Weights loaded from disk have another memory layout, so sums round differently.
        assert distance(image, expected) < 1e-6 if "disk" in how else torch.equal(image, expected)
        assert tokenmerge.summary(pipe).steps == steps


@pytest.mark.parametrize("first", ["apply", "offload"])
@pytest.mark.parametrize("how", ["block", "two blocks", "block, tracked"])
def test_held_blocks_bring_no_weights(how: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = built("sd3", first, HOLD, how, tmp_path)
    draw(pipe)
    brought: list[nn.Module] = []
    bring = ModuleGroup.onload_

    def counted(group: ModuleGroup) -> None:
        brought.extend(group.modules)
        bring(group)

    monkeypatch.setattr(ModuleGroup, "onload_", counted)
    draw(pipe)
    # Where groups load the next, a group on a CPU cannot tell that it is loaded, and loads again.
    times = KINDS["hold"]["full"] * (2 if "tracked" in how else 1)
    assert {brought.count(block) for block in pipe.transformer.transformer_blocks[1:]} == {times}


def test_groups_of_which_only_some_may_be_held_are_refused() -> None:
    """Without a table, only the first call shows which blocks may be held."""
    name = "SanaTransformer2DModel"
    model = denoisers.DENOISERS[name].build()
    model.enable_group_offload(CPU, CPU, num_blocks_per_group=2)
    with pytest.raises(TokenMergeError, match="num_blocks_per_group=1"):
        tokenmerge.apply(model, HOLD)

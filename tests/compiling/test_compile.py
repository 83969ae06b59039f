"""Techniques under torch.compile: no graphs after the first image, the same images as without it, no stale graph."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import tiny
import tokenmerge
from tokenmerge import Hold, Merge
from tokenmerge.compiling import blocks, graphs
from tokenmerge.families import family_of

COMPONENTS = Merge(sites="component")
# Eight steps contain steps before the window, kept ones and held ones.
BLOCKS, STAGES = Hold(every=3, start=0.2, what="blocks"), Hold(every=3, start=0.2, what="stages")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(kind: str, how: str = "regional") -> Any:
    """The fewest blocks that show how graphs are shared: two of every class, or one if the model is one graph."""
    if kind == "deep sdxl":
        # Has runs of two blocks.
        return tiny.build("sdxl")
    if kind == "sdxl":
        return tiny.build(kind, unet=tiny.short_sdxl_unet())
    if kind == "sd3":
        return tiny.build(kind, transformer=tiny.sd3_transformer(num_layers=3, dual_attention_layers=()))
    count = 2 if how == "regional" else 1
    return tiny.build(kind, transformer=tiny.flux_transformer(num_layers=count, num_single_layers=count))


def apply(pipe: Any, **fields: Any) -> Any:
    return tokenmerge.apply(pipe, Merge(**fields))


def compile_model(pipe: Any, how: str, backend: Any) -> None:
    denoiser = tiny.denoiser_of(pipe)
    if how == "whole":
        denoiser.compile(fullgraph=True, backend=backend)
    elif how == "wrapped":
        name = "unet" if hasattr(pipe, "unet") else "transformer"
        setattr(pipe, name, torch.compile(denoiser, fullgraph=True, backend=backend))
    elif hasattr(denoiser, "_repeated_blocks") and denoiser._repeated_blocks:
        denoiser.compile_repeated_blocks(fullgraph=True, backend=backend)
    else:
        for block in denoiser.transformer_blocks:
            block.compile(fullgraph=True, backend=backend)


# kind, techniques, how, and the graphs that images of one size need. A merged model needs one graph per class of block
# and stride of its input with regional compilation, or one for the whole model. If the compiled part contains held
# modules, Hold adds a set for kept steps and one for held steps; the first, last and other blocks of a run differ.
CASES = [
    ("sdxl", [COMPONENTS], "regional", 1),
    ("sdxl", [Merge()], "regional", 1),
    ("sd3", [Merge()], "regional", 2),
    ("flux", [Merge()], "regional", 3),
    ("sdxl", [COMPONENTS], "whole", 1),
    ("flux", [Merge()], "whole", 1),
    ("sdxl", [STAGES], "whole", 2),
    ("sdxl", [Merge(), STAGES], "regional", 1),
    ("sdxl", [Merge(), STAGES], "wrapped", 2),
    ("deep sdxl", [Merge(), BLOCKS], "regional", 6),
    ("flux", [BLOCKS], "regional", 5),
    ("sd3", [Merge(), BLOCKS], "regional", 4),
    ("flux", [COMPONENTS, BLOCKS], "regional", 5),
    ("flux", [Merge(), BLOCKS], "whole", 2),
]


def told(value: Any) -> str:
    return (
        "+".join(getattr(each, "what", None) or each.sites for each in value) if isinstance(value, list) else str(value)
    )


@pytest.mark.parametrize(("kind", "techniques", "how", "graphs"), CASES, ids=told)
def test_no_graph_is_added_after_the_first_image(kind: str, techniques: list[Any], how: str, graphs: int) -> None:
    # Without Hold, enough steps to select destinations twice.
    steps = 8 if isinstance(techniques[-1], Hold) else 12
    pipe = tokenmerge.apply(build(kind, how), techniques)
    eager = tiny.draw(pipe, steps=steps)
    kinds = tokenmerge.summary(pipe).steps
    # UNet blocks are small enough to afford functionalisation too, as Inductor needs it.
    counter = CompileCounterWithBackend("aot_eager" if how == "regional" and "sdxl" in kind else "eager")
    compile_model(pipe, how, counter)
    compiled = tiny.draw(pipe, steps=steps)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5)
    assert torch.equal(tiny.draw(pipe, steps=steps), compiled)
    assert tokenmerge.summary(pipe).steps == kinds
    assert counter.frame_count == graphs


SIZES = [
    ("sdxl", [COMPONENTS], "regional"),
    ("sdxl", [Merge(), STAGES], "regional"),
    ("sd3", [Merge()], "regional"),
    ("flux", [Merge(), BLOCKS], "whole"),
]


@pytest.mark.parametrize(("kind", "techniques", "how"), SIZES, ids=told)
def test_another_size_and_batch_compile_once_more_and_then_none(kind: str, techniques: list[Any], how: str) -> None:
    steps = 6 if isinstance(techniques[-1], Hold) else 2
    shapes = [((64, 64), 1), ((64, 96), 1), ((64, 64), 2)]
    pipe = tokenmerge.apply(build(kind, how), techniques)

    def images() -> list[Any]:
        return [tiny.draw(pipe, steps=steps, size=size, batch=batch) for size, batch in shapes]

    eager = images()
    counter = CompileCounterWithBackend("eager")
    compile_model(pipe, how, counter)
    compiled = images()
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5)
    graphs = counter.frame_count
    assert all(torch.equal(*pair) for pair in zip(images(), compiled, strict=True))
    assert counter.frame_count == graphs


@pytest.mark.parametrize(("kind", "sites", "how"), [("flux", "block", "whole"), ("sdxl", "component", "regional")])
def test_many_sizes_share_graphs(kind: str, sites: str, how: str) -> None:
    """More sizes than maps are kept for, and more than the compiler would compile separately."""
    pipe = apply(build(kind, how), sites=sites)
    counter = CompileCounterWithBackend("eager")
    compile_model(pipe, how, counter)
    sizes = [(64, 64 + 8 * more) for more in range(10)]
    for size in sizes[:2]:
        tiny.draw(pipe, steps=1, size=size)
    second = counter.frame_count
    for size in sizes[2:] + sizes:
        tiny.draw(pipe, steps=1, size=size)
    assert counter.frame_count <= second + 1


@pytest.mark.parametrize(
    ("kind", "techniques", "how"),
    [
        ("sdxl", [COMPONENTS], "regional"),
        ("sdxl", [Merge(), STAGES], "regional"),
        ("flux", [COMPONENTS], "whole"),
        ("flux", [Merge(), BLOCKS], "wrapped"),
    ],
    ids=told,
)
def test_apply_and_remove_take_effect_on_a_compiled_model(kind: str, techniques: list[Any], how: str) -> None:
    steps = 6 if isinstance(techniques[-1], Hold) else 2
    pipe = build(kind, how)
    plain = tiny.draw(pipe, steps=steps)
    expected = tiny.draw(tokenmerge.apply(pipe, techniques), steps=steps)
    tokenmerge.remove(pipe)
    counter = CompileCounterWithBackend("eager")
    compile_model(pipe, how, counter)
    torch.testing.assert_close(tiny.draw(pipe, steps=steps), plain, rtol=0, atol=1e-5)
    tokenmerge.apply(pipe, techniques)
    torch.testing.assert_close(tiny.draw(pipe, steps=steps), expected, rtol=0, atol=1e-5)
    graphs = counter.frame_count
    tokenmerge.remove(pipe)
    torch.testing.assert_close(tiny.draw(pipe, steps=steps), plain, rtol=0, atol=1e-5)
    tokenmerge.apply(pipe, techniques)
    torch.testing.assert_close(tiny.draw(pipe, steps=steps), expected, rtol=0, atol=1e-5)
    # Both sets of graphs are still there.
    assert counter.frame_count == graphs
    if how == "regional":
        tokenmerge.apply(pipe, [each.replace(ratio=0.75) if isinstance(each, Merge) else each for each in techniques])
        assert (tiny.draw(pipe, steps=steps) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("kind", "how"), [("flux", "whole"), ("sdxl", "regional")])
def test_a_window_takes_one_more_set_of_graphs(kind: str, how: str) -> None:
    pipe = apply(build(kind, how), start=0.25, stop=0.75)
    eager = tiny.draw(pipe, steps=8)
    counter = CompileCounterWithBackend("eager")
    compile_model(pipe, how, counter)
    torch.testing.assert_close(tiny.draw(pipe, steps=8), eager, rtol=0, atol=1e-5)
    first = counter.frame_count
    torch.testing.assert_close(tiny.draw(pipe, steps=8), eager, rtol=0, atol=1e-5)
    assert counter.frame_count == first


@pytest.mark.parametrize(("techniques", "graphs"), [([Merge()], 1), ([Merge(), BLOCKS], 2)], ids=told)
def test_true_guidance_shares_the_graphs_of_one_call(techniques: list[Any], graphs: int) -> None:
    pipe = tokenmerge.apply(build("flux", "whole"), techniques)
    negative = {
        "true_cfg_scale": 3.0,
        "negative_prompt_embeds": tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH, seed=50),
        "negative_pooled_prompt_embeds": tiny.noise(1, tiny.POOLED_WIDTH, seed=51),
    }
    eager = tiny.draw(pipe, steps=12, **negative)
    counter = CompileCounterWithBackend("eager")
    compile_model(pipe, "whole", counter)
    for _ in range(2):
        torch.testing.assert_close(tiny.draw(pipe, steps=12, **negative), eager, rtol=0, atol=1e-5)
        assert counter.frame_count == graphs


# Selection by position: Inductor rounds differently, which would decide between tied destinations.
SMOOTH = Merge(selection="uniform", temperature=0.1)


@pytest.mark.parametrize(
    ("kind", "techniques"),
    [
        ("sdxl", [SMOOTH.replace(sites="component")]),
        ("flux", [SMOOTH, Hold(every=3, start=0.0)]),
    ],
    ids=told,
)
# Adjacent, so that the second order reuses the code compiled for the first.
@pytest.mark.parametrize("first", ["compile", "apply"])
def test_compile_and_techniques_in_either_order(kind: str, techniques: list[Any], first: str) -> None:
    # The fewest blocks possible.
    pipe = build(kind, "whole")
    plain = tiny.draw(pipe)
    expected = tiny.draw(tokenmerge.apply(pipe, techniques))
    tokenmerge.remove(pipe)
    if first == "apply":
        tokenmerge.apply(pipe, techniques)
    tokenmerge.compile(pipe)
    if first == "compile":
        tokenmerge.apply(pipe, techniques)
    torch.testing.assert_close(tiny.draw(pipe), expected, rtol=0, atol=1e-3)
    assert "blocks, no CUDA graphs" in tokenmerge.summary(pipe).compiled
    tokenmerge.uncompile(tokenmerge.uncompile(pipe))
    assert torch.equal(tiny.draw(pipe), expected)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe), plain)
    assert all(module._compiled_call_impl is None for module in tiny.denoiser_of(pipe).modules())


def test_compile_leaves_what_others_compiled() -> None:
    pipe = build("sdxl")
    first, *others = [each for each in pipe.unet.modules() if type(each).__name__ == "BasicTransformerBlock"]
    first.compile(backend="eager")
    theirs = first._compiled_call_impl
    tokenmerge.compile(pipe)
    assert f"{len(others)} blocks" in tokenmerge.summary(pipe).compiled
    tokenmerge.uncompile(pipe)
    assert first._compiled_call_impl is theirs


@pytest.mark.parametrize("how", ["whole", "wrapped"])
def test_compile_refuses_a_denoiser_compiled_as_a_whole(how: str) -> None:
    pipe = build("sdxl")
    compile_model(pipe, how, "eager")
    with pytest.raises(tokenmerge.TokenMergeError, match="as a whole"):
        tokenmerge.compile(pipe)


def test_calls_that_are_never_recorded_are_told() -> None:
    """Methods that need the host in every call are never recorded; neither are calls on a CPU."""
    denoiser = tiny.denoiser_of(build("flux"))
    assert blocks.unrecorded(denoiser) == ()
    vars(denoiser)[blocks._COMPILED] = blocks._Compiled((), graphs.GraphedForward(denoiser, lambda _: None))
    with torch.inference_mode():
        denoiser(**family_of(denoiser).example(denoiser, 1, 16, 16))
    assert blocks.unrecorded(denoiser) == ("all of them need the host",)
    blocks.uncompile(denoiser)
    assert blocks.unrecorded(denoiser) == ()


def test_graphs_need_a_cuda_device() -> None:
    pipe = build("sdxl")
    with pytest.raises(tokenmerge.TokenMergeError, match="graphs=False"):
        tokenmerge.compile(pipe, graphs=True)
    assert tokenmerge.summary(pipe).compiled == "not by tokenmerge.compile"


def test_what_pipelines_leave_on_a_denoiser_does_not_forbid_graphs() -> None:
    """Flux pipelines leave an empty registry of hooks behind; a hook in it may move weights."""
    from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, ModelHook

    pipe = build("flux")
    tiny.draw(pipe)
    assert "_diffusers_hook" in vars(pipe.transformer)
    blocks._check_compilable(pipe, pipe.transformer, "cuda:0", graphs=True)
    pipe.transformer.enable_cache(FirstBlockCacheConfig())
    blocks._check_compilable(pipe, pipe.transformer, "cuda:0", graphs=True)
    HookRegistry.check_if_exists_or_initialize(pipe.transformer).register_hook(ModelHook(), "layerwise_casting")
    with pytest.raises(tokenmerge.TokenMergeError, match="use graphs=False"):
        blocks._check_compilable(pipe, pipe.transformer, "cuda:0", graphs=True)


def changes() -> dict[str, Any]:
    """Changes that a recorded denoiser call must notice, by name: how to build the pipeline, and how to change it."""
    from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache
    from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0
    from peft import LoraConfig

    def with_lora() -> Any:
        pipe = build("sdxl")
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
        return pipe

    def with_ip_adapter() -> Any:
        pipe = build("sdxl")
        pipe.unet.set_attn_processor(
            {
                name: IPAdapterAttnProcessor2_0(16, 16, num_tokens=(4,)) if "attn2" in name else AttnProcessor2_0()
                for name in pipe.unet.attn_processors
            }
        )
        return pipe

    def scale_lora(pipe: Any) -> None:
        next(module for module in pipe.unet.modules() if hasattr(module, "lora_A")).set_scale("default", 0.5)

    return {
        "fused LoRA": (with_lora, lambda pipe: pipe.unet.fuse_lora()),
        "scaled LoRA": (with_lora, scale_lora),
        "LoRA off": (with_lora, lambda pipe: pipe.unet.disable_adapters()),
        "new LoRA": (
            lambda: build("sdxl"),
            lambda pipe: pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"])),
        ),
        "scaled IP-Adapter": (with_ip_adapter, lambda pipe: pipe.set_ip_adapter_scale(0.1)),
        "FreeU": (lambda: build("sdxl"), lambda pipe: pipe.unet.enable_freeu(0.9, 0.2, 1.1, 1.2)),
        "fused QKV": (lambda: build("flux"), lambda pipe: pipe.transformer.fuse_qkv_projections()),
        # The default backend, because diffusers keeps the choice for the whole process.
        "a way of attention": (lambda: build("flux"), lambda pipe: pipe.transformer.set_attention_backend("native")),
        "merging": (lambda: build("sdxl"), apply),
        "other weights": (lambda: build("sdxl"), lambda pipe: pipe.unet.to(torch.float64)),
        "a cache": (
            lambda: build("sd3"),
            lambda pipe: apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.1)),
        ),
        "a hook": (
            lambda: build("sdxl"),
            lambda pipe: pipe.unet.mid_block.register_forward_hook(lambda *_: None),
        ),
    }


@pytest.mark.parametrize("name", changes())
def test_recordings_notice(name: str) -> None:
    make, change = changes()[name]
    pipe = make()
    denoiser = tiny.denoiser_of(pipe)
    before = graphs._state_of(denoiser)
    assert before == graphs._state_of(denoiser)
    change(pipe)
    assert before != graphs._state_of(denoiser)
    assert bool(graphs._obstacle(denoiser)) == (name in ("a cache", "a hook"))


def four_levels() -> Any:
    """A tiny SD 1.5 with four levels, all of which merge at the sizes drawn here."""
    return tiny.build("sd", unet=tiny.sd_unet(block_out_channels=(8, 16, 24, 24), norm_num_groups=8))


def test_graphs_of_many_shapes_and_kinds_of_step_are_kept() -> None:
    """All kinds of step at many shapes and levels need more graphs than the compiler keeps of a function by default."""
    shapes = [((128, 128), 1), ((128, 128), 2)]
    with torch._dynamo.config.patch(recompile_limit=8):
        pipe = tokenmerge.apply(four_levels(), [Merge(start=0.3), Hold(every=3, start=0.2, what="blocks")])
        eager = [tiny.draw(pipe, steps=6, size=size, batch=batch) for size, batch in shapes]
        assert tokenmerge.summary(pipe).steps.keys() == {"full", "merged", "held"}
        counter = CompileCounterWithBackend("eager")
        compile_model(pipe, "regional", counter)
        for (size, batch), expected in zip(shapes, eager, strict=True):
            drawn = tiny.draw(pipe, steps=6, size=size, batch=batch)
            torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-5)
        count = counter.frame_count
        for size, batch in shapes:
            tiny.draw(pipe, steps=6, size=size, batch=batch)
        assert counter.frame_count == count > 8
        tokenmerge.remove(pipe)


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_compiled_code_takes_what_a_recording_owns_for_what_was_given(made_in_inference_mode: bool) -> None:
    pipe = build("sdxl")
    counter = CompileCounterWithBackend("eager")
    compile_model(pipe, "regional", counter)
    denoiser = pipe.unet
    with torch.inference_mode(made_in_inference_mode):
        arguments = family_of(denoiser).example(denoiser, 2, 8, 8)
    with torch.inference_mode():
        denoiser(**arguments)
        compiled = counter.frame_count
        own = partial(graphs._owned, device=torch.device("cpu"))
        denoiser(**pytree.tree_map_only(torch.Tensor, own, arguments))
    assert counter.frame_count == compiled


@pytest.mark.parametrize("failures", [1, 2])
def test_a_call_that_could_not_be_recorded_has_all_it_was_given(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A UNet empties its list of T2I-Adapter features even if recording the call fails."""

    class Failing:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None:
            raise RuntimeError("capture failed")

    for name in ("CUDAGraph", "graph_pool_handle", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "graph", Failing)
    unet = tiny.short_sdxl_unet()
    given = family_of(unet).example(unet, 2, 8, 8)

    def arguments() -> dict[str, Any]:
        return {**given, "down_intrablock_additional_residuals": [tiny.noise(2, 8, 4, 4)]}

    expected = unet(**arguments()).sample
    assert not torch.equal(expected, unet(**given).sample)
    recorder = graphs.GraphedForward(unet, lambda _: None)
    for _ in range(failures):
        call: tuple[tuple[Any, ...], dict[str, Any]] = ((), arguments())
        leaves, structure = pytree.tree_flatten(call)
        output = recorder._record("key", None, leaves, structure, call, torch.device("cpu"))
        assert torch.equal(output.sample, expected)


def test_graphs_that_are_undone_let_go_of_what_was_merged() -> None:
    pipe = apply(build("sdxl"))
    recorder = graphs.GraphedForward(pipe.unet, lambda _: None)
    recorder._see_changes()
    gc.collect()
    gc.disable()
    try:
        state = weakref.ref(pipe.unet._tokenmerge.state)
        recorder.undo()
        tokenmerge.remove(pipe)
        assert state() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("technique", [Merge(), Hold(every=2, start=0.0)], ids=["merge", "hold"])
def test_recordings_go_with_the_tensors_that_they_read(technique: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A technique frees the tensors of sizes not used for a while; recordings must not keep them alive."""

    class Graph(contextlib.nullcontext[None]):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def replay(self) -> None: ...

    for name in ("CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, Graph)
    for name in ("graph_pool_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    unet = tokenmerge.apply(tiny.short_sdxl_unet(), technique)
    recorder = graphs.GraphedForward(unet, lambda _: None)
    state = unet._tokenmerge.state

    def image(side: int) -> dict[str, Any]:
        given = family_of(unet).example(unet, 2, side, side)
        # Starts above the last timestep of the previous image, so a new image begins.
        for timestep in (900.0, 800.0):
            unet(**{**given, "timestep": torch.tensor(timestep)})
        return given

    with torch.no_grad():
        call: tuple[tuple[Any, ...], dict[str, Any]] = ((), image(8))
        leaves, structure = pytree.tree_flatten(call)
        recorder._record("key", state, leaves, structure, call, torch.device("cpu"))
        image(16)
        recorder._drop_stale()
        assert recorder.recordings == 1
        for number in range(4):
            image(16 + 8 * number)
        recorder._drop_stale()
        assert recorder.recordings == 0

"""The contract of every family, on real pipelines with tiny random weights (`zoo.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tokenmerge
import zoo
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families import family_of
from tokenmerge.merging import groups, places
from tokenmerge.merging.grid import Layout, Partition, drawn_alone
from tokenmerge.merging.methods.base import Given, LinearMethod
from tokenmerge.merging.slots import Slot

STEPS = 6
HOLD = Hold(every=2, start=0.0)
BOTH = [Merge(), HOLD]
TECHNIQUES = {"merge": Merge(), "hold": HOLD, "both": BOTH}
# Merge sites of every denoiser: one per block. Each list of blocks has three.
SITES = dict.fromkeys(zoo.MODELS, 3) | dict.fromkeys(
    [name for name in zoo.MODELS if name.startswith(("flux", "chroma", "ovis", "longcat", "bria", "auraflow"))], 6
)
SITES |= dict.fromkeys(["hunyuanimage", "hunyuanvideo"], 6)
# UNets, whose blocks have no per-token arguments.
UNETS = {"kolors": 11, "svd": 7}
SITES |= UNETS
TRANSFORMERS = [name for name in zoo.MODELS if name not in UNETS]
# Models that share their blocks, and how they call them, with another model are left out.
COMPILED = [
    name
    for name in zoo.MODELS
    if name
    not in (
        *("flux2-klein", "flux2-klein-reference", "qwen-edit-2509", "zimage-turbo"),
        *("wan2.2-a14b", "wan2.2-ti2v", "pixart-sigma"),
    )
]


@pytest.fixture(params=zoo.MODELS, scope="module")
def name(request: Any) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str) -> zoo.Model:
    return zoo.MODELS[name]


@pytest.fixture(scope="module")
def built(model: zoo.Model) -> Any:
    return model.build()


@pytest.fixture
def pipe(built: Any) -> Iterator[Any]:
    scheduler = built.scheduler
    yield built
    tokenmerge.remove(built)
    built.scheduler = scheduler


def test_what_does_nothing_equals_plain_and_remove_is_exact(pipe: Any, model: zoo.Model) -> None:
    # For each denoiser, Hold runs two steps and holds one.
    steps = 3 * len(zoo.denoisers(pipe))
    plain = zoo.draw(pipe, model, steps=steps)
    attributes = [dict(vars(module)) for denoiser in zoo.denoisers(pipe) for module in denoiser.modules()]
    for nothing in (Merge(ratio=0.0), Hold(every=1)):
        tokenmerge.apply(pipe, nothing)
        assert torch.equal(zoo.draw(pipe, model, steps=steps), plain)
    for technique in TECHNIQUES.values():
        tokenmerge.apply(pipe, technique)
        first, second = (zoo.draw(pipe, model, steps=steps) for _ in range(2))
        assert torch.equal(first, second)
        assert torch.isfinite(first).all()
        assert not torch.equal(first, plain)
        tokenmerge.remove(pipe)
        assert torch.equal(zoo.draw(pipe, model, steps=steps), plain)
    assert [dict(vars(module)) for denoiser in zoo.denoisers(pipe) for module in denoiser.modules()] == attributes


def test_tables_name_the_pipelines_that_are_tested(built: Any) -> None:
    assert type(built).__name__ in family_of(zoo.denoisers(built)[0]).pipelines


def test_sites_and_kinds_of_step(pipe: Any, model: zoo.Model, name: str) -> None:
    tokenmerge.apply(pipe, BOTH)
    zoo.draw(pipe, model, steps=STEPS)
    summary = tokenmerge.summary(pipe)
    parts = [summary, *summary.others]
    assert len(parts) == len(zoo.denoisers(pipe))
    assert [len(part.plan.merged_sites) for part in parts] == [SITES[name]] * len(parts)
    assert sum(part.steps["merged"] for part in parts) in (3, 4)
    assert sum(part.steps["held"] for part in parts) in (2, 3)
    assert summary.residual_bytes > 0


def test_sizes_and_texts_take_turns(pipe: Any, model: zoo.Model) -> None:
    """Pictures do not depend on the sizes and text lengths drawn before."""
    kinds = [{"size": size, "text": 5 + number} for number, size in enumerate(model.sizes)]
    if model.guidance != "none":
        kinds += [{"guided": False}, {"negative_text": 9}]
    expected = []
    for kind in kinds:
        tokenmerge.apply(pipe, BOTH)
        expected.append(zoo.draw(pipe, model, steps=3, **kind))
    for kind, picture in [*zip(kinds, expected, strict=True)] * 2:
        assert torch.equal(zoo.draw(pipe, model, steps=3, **kind), picture)


def test_an_image_that_was_broken_off(pipe: Any, model: zoo.Model) -> None:
    tokenmerge.apply(pipe, BOTH)
    expected = zoo.draw(pipe, model, steps=STEPS)
    calls = 0

    def stop(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    handles = [denoiser.register_forward_hook(stop) for denoiser in zoo.denoisers(pipe)]
    with pytest.raises(KeyboardInterrupt):
        zoo.draw(pipe, model, steps=STEPS)
    for handle in handles:
        handle.remove()
    assert torch.equal(zoo.draw(pipe, model, steps=STEPS), expected)


def test_a_plan_needs_no_weights(pipe: Any, model: zoo.Model) -> None:
    """A plan takes a model on the meta device and predicts the token counts of a run."""
    tokenmerge.apply(pipe, Merge())
    zoo.draw(pipe, model, steps=2)
    ran = [group["tokens"] for group in tokenmerge.summary(pipe).groups]
    denoiser = zoo.denoisers(pipe)[0]
    with torch.device("meta"):
        empty = type(denoiser).from_config(denoiser.config)
    assert next(empty.parameters()).device.type == "meta"
    height, width = model.sizes[0]
    planned = tokenmerge.plan(pipe, Merge(), height=height, width=width, frames=model.frames)
    told = [f"{group.tokens} -> {group.merged}" for group in planned.groups]
    if "reference" not in model.name and "edit" not in model.name and "kontext" not in model.name:
        assert told == ran
    assert tokenmerge.plan(empty, Merge(), height=256, width=256, frames=model.frames).merged_sites


# The denoiser alone, called with a scheduler's timesteps but without a scheduler


def _time(given: dict[str, Any]) -> str:
    return "timestep" if "timestep" in given else "t"


@pytest.fixture(scope="module")
def rises(built: Any, model: zoo.Model) -> bool:
    """Whether the pipeline's times rise from step to step."""
    seen: list[float] = []

    def note(denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(inspect.signature(denoiser.forward).parameters, args, strict=False)), **kwargs}
        seen.append(float(torch.as_tensor(given[_time(given)]).max()))

    handles = [each.register_forward_pre_hook(note, with_kwargs=True) for each in zoo.denoisers(built)]
    zoo.draw(built, model, steps=2)
    for handle in handles:
        handle.remove()
    assert seen[0] != seen[-1]
    return seen[0] < seen[-1]


def _calls(denoiser: nn.Module, given: dict[str, Any], rises: bool, steps: int = 4) -> list[Tensor]:
    key, results = _time(given), []
    for step in range(steps):
        factor = 0.5 + step / 8 if rises else 1.0 - step / 8
        moved = {**given, key: given[key] * factor}
        with torch.no_grad():
            output = denoiser(**moved, return_dict=False)
        # Kandinsky 5 returns a bare tensor.
        output = output if isinstance(output, Tensor) else output[0]
        results += output if isinstance(output, list) else [output]
    return results


def _sample(given: Any, number: int) -> Any:
    """The arguments of one of two samples."""

    def picked(leaf: Any) -> Any:
        two = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == 2
        return leaf[number : number + 1] if two else leaf

    return {
        key: [value[number]] if isinstance(value, list) else pytree.tree_map(picked, value)
        for key, value in given.items()
    }


def _twice(given: Any) -> Any:
    def doubled(leaf: Any) -> Any:
        one = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == 1
        return torch.cat([leaf, leaf]) if one else leaf

    return {
        key: [*value, *value] if isinstance(value, list) else pytree.tree_map(doubled, value)
        for key, value in given.items()
    }


def _shared(denoiser: nn.Module) -> bool:
    """Whether the samples of a batch share destinations."""
    family = family_of(denoiser)
    return any(each.axis == 0 for block in family.blocks(denoiser) for each in block.kind.ports.per_token)


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
def test_a_batch_equals_its_singles(pipe: Any, rises: bool, technique: Any) -> None:
    denoiser = zoo.denoisers(pipe)[0]
    given = family_of(denoiser).example(denoiser, 2, 16, 16, 3)
    if technique is not HOLD and _shared(denoiser):
        given = _twice(_sample(given, 0))
    singles = []
    for number in range(2):
        tokenmerge.apply(denoiser, technique)
        singles.append(_calls(denoiser, _sample(given, number), rises))
    tokenmerge.apply(denoiser, technique)
    together = _calls(denoiser, given, rises)
    # The four calls are steps of one image, also where times rise.
    assert tokenmerge.summary(denoiser).steps.get("held", 0) == (0 if technique == Merge() else 2)
    # Z-Image returns a list of samples.
    if len(together) == len(singles[0]):
        expected = [torch.cat(pair) for pair in zip(*singles, strict=True)]
    else:
        expected = [each for pair in zip(*singles, strict=True) for each in pair]
    for mine, theirs in zip(together, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    tokenmerge.remove(denoiser)


class Permutation(LinearMethod):
    """Merges every token into itself alone, in a random order. This must not change pictures."""

    def partition(self, grids: Any, technique: Merge) -> Partition:
        # Only the drawn image merges, so that tokens before or after it that never merge are tested too.
        merged, before, after = drawn_alone(grids)
        return Partition(Layout(*[merged.count] * 4), None, None, "", (merged,), before, after)

    def select(self, given: Given) -> Tensor:
        count = given.partition.layout.tokens
        orders = [torch.randperm(count, generator=given.generator) for _ in range(given.samples)]
        return torch.stack(orders)[:, None]

    def weigh(self, given: Given, destinations: Tensor) -> tuple[Tensor, Tensor]:
        batch, count, _ = given.tokens.shape
        merge = torch.nn.functional.one_hot(destinations, count).to(given.tokens.dtype).expand(batch, -1, -1, -1)
        return merge, merge.transpose(-1, -2)


@pytest.mark.parametrize("name", TRANSFORMERS, indirect=True)
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_follow_their_tokens(pipe: Any, model: zoo.Model, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of rotary tables, masks and modulations follow their tokens in every sample, also with padded prompts."""
    # Lumina 2 cannot merge prompts of different lengths.
    even = model.name == "lumina2" and batch > 1
    options = {"steps": 2, "batch": batch, "text": 6, "negative_text": 9, "padding": 0 if even else 3}
    if model.name.startswith("zimage"):
        # Z-Image pads prompts to multiples of 32.
        options |= {"text": 40, "negative_text": 36, "padding": 10}
    plain = zoo.draw(pipe, model, **options)
    for module in (places, groups):
        monkeypatch.setattr(module, "method_for", lambda *_: Permutation(), raising=False)
    monkeypatch.setattr(Slot, "merges", property(lambda slot: True))
    tokenmerge.apply(pipe, Merge())
    if even:
        with pytest.raises(TokenMergeError, match="prompts of a batch have different lengths"):
            zoo.draw(pipe, model, **{**options, "padding": 3})
    merged = zoo.draw(pipe, model, **options)
    # Sums in another order round differently, and guidance amplifies that. Kandinsky 5 rounds to bfloat16 inside.
    most = 1e-3 if model.name == "kandinsky5" else 1e-5
    assert (merged - plain).norm() < most * plain.norm()


def _graphs(draw: Callable[[], Any]) -> int:
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    draw()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("name", COMPILED, indirect=True)
def test_blocks_are_compiled_once(pipe: Any, model: zoo.Model) -> None:
    """After the first image of a size nothing is recompiled, and pictures equal those of uncompiled blocks."""
    tokenmerge.apply(pipe, BOTH)
    expected = zoo.draw(pipe, model, steps=STEPS)
    blocks = [block.module for each in zoo.denoisers(pipe) for block in family_of(each).blocks(each)]
    torch._dynamo.reset()
    for block in blocks:
        block.compile(backend="eager", fullgraph=True)
    try:
        assert _graphs(lambda: zoo.draw(pipe, model, steps=STEPS)) > 0
        assert _graphs(lambda: zoo.draw(pipe, model, steps=STEPS, seed=1)) == 0
        torch.testing.assert_close(zoo.draw(pipe, model, steps=STEPS), expected, rtol=1e-4, atol=1e-5)
    finally:
        for block in blocks:
            block._compiled_call_impl = None


# Limits and refusals


# Variants that take a first frame, under the names of the models that do not.
CONDITIONED = {
    "kandinsky5": lambda: zoo._kandinsky5(visual_cond=True),
    "wan2.1": lambda: zoo._wan(in_channels=12),
    "cogvideox-2b": lambda: zoo._cogvideox(None, in_channels=8),
    "hunyuanvideo": lambda: zoo._hunyuanvideo(image_condition_type="latent_concat", in_channels=9),
    "hunyuanvideo15": lambda: zoo._hunyuanvideo15(task_type="i2v"),
}


@pytest.mark.parametrize("name", CONDITIONED)
def test_a_first_frame_that_may_be_given_merges_with_no_other(name: str) -> None:
    """Only a channel's values show whether a first frame is given, so variants that take one always keep it apart."""
    technique, told = Merge(regions="tile:3x4x4"), []
    for pipe in (zoo.MODELS[name].build(), CONDITIONED[name]()):
        transformer = pipe.transformer
        side = family_of(transformer).calls.unit(transformer, 8)
        given = family_of(transformer).example(transformer, 1, side, side, 3)
        tokenmerge.apply(transformer, technique)
        with torch.no_grad():
            transformer(**given)
        told.append(tokenmerge.summary(transformer).groups[0]["regions"])
        scales = {"vae_scale_factor": 1, "vae_scale_factor_temporal": 1}
        planned = tokenmerge.plan(transformer, technique, height=side, width=side, frames=3, **scales)
        assert planned.groups[0].regions == told[-1]
    assert told == ["4 tiles of 3x4x4", "2 tiles of 8x4, 4 tiles of 2x4x4"]


def test_sparse_attention_is_held_and_not_merged() -> None:
    """With sparse attention, Kandinsky 5 keeps tokens in blocks of its own order."""
    transformer = zoo.MODELS["kandinsky5"].build().transformer
    given = family_of(transformer).example(transformer, 1, 16, 16, 3) | {"sparse_params": {"to_fractal": False}}
    tokenmerge.apply(transformer, Merge())
    with pytest.raises(TokenMergeError, match="its sparse attention needs tokens in blocks of its own order"):
        transformer(**given)


def test_component_sites_are_refused_where_there_are_none() -> None:
    pipe = zoo.MODELS["qwen"].build()
    with pytest.raises(TokenMergeError, match="once per block"):
        tokenmerge.apply(pipe, "toma")
    assert tokenmerge.summary(pipe).plan is None


def test_a_refused_second_denoiser_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = zoo.MODELS["wan2.2-a14b"].build()
    pipe.transformer_2.blocks = nn.ModuleList()
    tokenmerge.apply(pipe.transformer, Hold(every=3, start=0.0))
    with pytest.raises(TokenMergeError, match="no transformer blocks"):
        tokenmerge.apply(pipe, Merge())
    assert tokenmerge.summary(pipe.transformer).plan.techniques.hold.every == 3
    assert tokenmerge.summary(pipe.transformer_2).plan is None

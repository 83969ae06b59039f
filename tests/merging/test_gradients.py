"""Gradients through merging are right: those of the operations, and those of whole denoisers in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families import family_of
from tokenmerge.families.calls import TokenGrid
from tokenmerge.merging.clustermap import RULES, ClusterMap
from tokenmerge.merging.grid import invert_order, partition_grids
from tokenmerge.merging.ops import reference
from tokenmerge.presets import preset

METHODS = {
    "toma": Merge(regions="tile:2x2"),
    "component": Merge(regions="tile:2x2", sites="component"),
    "random": Merge(method="random", regions="tile:2x2"),
    **{name: preset(name) for name in ("tomesd", "tofu", "todo", "pool")},
}
# SDXL takes every method. Flux adds rotary tables and blocks that are merged as a whole.
CASES = [("flux", "toma"), ("flux", "random"), ("flux", "tomesd"), *(("sdxl", name) for name in METHODS)]


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("regions", ["tile:2x2", "stripe:2", "whole"])
def test_the_reference_has_the_gradients_of_its_values(regions: str) -> None:
    partition = partition_grids((TokenGrid(4, 4),), Merge(regions=regions))
    layout, order = partition.layout, partition.merge_order
    inverse = None if order is None else invert_order(order)
    shape = (2, layout.merge_regions, layout.merge_count, layout.merge_size)
    weights = double(*shape).detach().softmax(-1)
    spread = double(*shape, seed=1).detach().softmax(-2).transpose(-1, -2)
    tokens, merged, entered = double(2, 16, 3), double(2, layout.merged, 3), double(2, layout.merged, 3, seed=2)

    assert torch.autograd.gradcheck(lambda tokens: reference.merge(tokens, order, weights), tokens)
    assert torch.autograd.gradcheck(
        lambda *given: reference.unmerge(given[0], order, inverse, spread, *given[1:]), (merged, tokens, entered)
    )


@pytest.mark.parametrize("rule", RULES)
def test_clusters_have_the_gradients_of_their_values(rule: str) -> None:
    destinations, sources = torch.tensor([[1, 4, 6]]), torch.tensor([[0, 2, 3, 5, 7]])
    places = torch.tensor([[0, 0, 1, 2, 1, 2, 2, 0], [1, 0, 2, 2, 1, 0, 2, 1]])
    clusters = ClusterMap(rule, destinations, sources, places)
    tokens = double(2, 8, 3)
    assert torch.autograd.gradcheck(clusters.merge, tokens)
    given = double(2, 3, 3), tokens, double(2, 3, 3, seed=1)
    assert torch.autograd.gradcheck(clusters.unmerge, given)


class Trained:
    """A denoiser in training, called with random inputs."""

    def __init__(self, kind: str, technique: Any = None) -> None:
        self.denoiser: nn.Module = tiny.denoiser_of(tiny.build(kind)).train().requires_grad_(True)
        if technique is not None:
            tokenmerge.apply(self.denoiser, technique)

    def call(self, seed: int = 0, timestep: float = 0.5) -> Tensor:
        """Mean square of the denoiser's output for random inputs."""
        torch.manual_seed(seed)
        given = family_of(self.denoiser).example(self.denoiser, 2, 16, 16)
        given = {
            name: torch.randn_like(value) if name in ("hidden_states", "sample", "encoder_hidden_states") else value
            for name, value in given.items()
        }
        given["timestep"] = torch.full_like(given["timestep"], timestep)
        return self.denoiser(**given, return_dict=False)[0].square().mean()

    @property
    def counts(self) -> list[tuple[int, int]]:
        """How often each group's map was selected and weighed in this image."""
        return [(group.selections, group.weighings) for group in self.denoiser._tokenmerge.merging.groups]

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        self.denoiser.zero_grad()
        loss.backward()
        return {name: each.grad.clone() for name, each in self.denoiser.named_parameters() if each.grad is not None}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    assert one
    for name, each in one.items():
        torch.testing.assert_close(other[name], each, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_checkpointed_gradients_are_those_of_plain_ones(kind: str, method: str) -> None:
    model = Trained(kind, METHODS[method])
    losses = [model.call(seed=1), model.call(seed=2)]
    plain = model.gradients(losses[0] + losses[1])
    model = Trained(kind, METHODS[method])
    model.denoiser.enable_gradient_checkpointing()
    again = [model.call(seed=1), model.call(seed=2)]
    assert [each.item() for each in again] == [each.item() for each in losses]
    counted = model.counts
    assert_equal(plain, model.gradients(again[0] + again[1]), rtol=1e-5, atol=1e-7)
    assert model.counts == counted, "blocks that ran again were counted again"


def test_blocks_in_a_backward_pass_do_what_their_own_call_did() -> None:
    """Checkpointed blocks run again in the backward pass. There they merge by the maps of their own call."""
    model = Trained("flux", METHODS["toma"])
    model.denoiser.enable_gradient_checkpointing()
    first = model.call(seed=1)
    kept = model.gradients(first)
    first = model.call(seed=1)
    with torch.no_grad():
        model.call(seed=3, timestep=0.9)
    model.denoiser.eval()
    with torch.no_grad():
        model.call(seed=2)
    assert_equal(kept, model.gradients(first), rtol=0.0, atol=0.0)
    # After the backward pass, a block that is called alone runs on all tokens.
    (block,) = model.denoiser.transformer_blocks[-1:]
    tokens, text = torch.zeros(1, 64, 16), torch.zeros(1, 5, 16)
    temb, rotary = torch.zeros(1, 16), tuple(torch.zeros(69, 8) for _ in range(2))
    merged = block(tokens, text, temb, rotary)
    tokenmerge.remove(model.denoiser)
    assert torch.equal(merged[1], block(tokens, text, temb, rotary)[1])


# Code compiled by inductor overwrites maps in place, so earlier blocks need checkpoints.
@pytest.mark.parametrize(("backend", "checkpointed"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)])
def test_compiled_blocks_have_the_same_gradients(backend: str, checkpointed: bool) -> None:
    model = Trained("flux", METHODS["toma"])
    plain = model.gradients(model.call(seed=1) + model.call(seed=2))
    torch.compiler.reset()
    joint, single = model.denoiser.transformer_blocks, model.denoiser.single_transformer_blocks
    # Inductor is slow and overwrites the same tensors in every kind of block, so one kind is enough.
    for block in single if backend == "inductor" else (*joint, *single):
        block.compile(backend=backend, fullgraph=True)
    if checkpointed:
        model.denoiser.enable_gradient_checkpointing()
    compiled = model.gradients(model.call(seed=1) + model.call(seed=2))
    assert_equal(plain, compiled, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_flow_under_autocast(checkpointed: bool) -> None:
    model = Trained("flux", METHODS["toma"])
    exact = model.gradients(model.call())
    if checkpointed:
        model.denoiser.enable_gradient_checkpointing()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.call()
    rounded = model.gradients(loss)
    assert exact.keys() == rounded.keys()
    one, other = (torch.cat([each.flatten() for each in found.values()]) for found in (exact, rounded))
    assert torch.cosine_similarity(one, other, dim=0) > 0.99


def test_every_call_of_training_is_a_picture_by_itself() -> None:
    model = Trained("flux", METHODS["toma"])
    for timestep in (0.9, 0.9, 0.5, 0.7):
        model.call(timestep=timestep)
    told = tokenmerge.summary(model.denoiser)
    assert (told.steps, [group["selected"] for group in told.groups]) == ({"merged": 1}, [1, 1])
    # Outside training, calls are steps of one picture and reuse its maps.
    model.denoiser.eval()
    with torch.no_grad():
        for timestep in (0.9, 0.5, 0.4):
            model.call(timestep=timestep)
    told = tokenmerge.summary(model.denoiser)
    assert (told.steps, [group["selected"] for group in told.groups]) == ({"merged": 3}, [1, 1])


def test_pictures_after_training_are_those_before_it() -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), [METHODS["toma"], Hold(every=2, start=0.0)])
    before = tiny.draw(pipe, steps=4)
    model = Trained("flux")
    model.denoiser = pipe.transformer.train().requires_grad_(True)
    for _ in range(6):
        model.gradients(model.call())
    told = tokenmerge.summary(pipe)
    assert told.steps == {"merged": 1}
    assert all(" -> " in group["tokens"] for group in told.groups), "a backward pass forgot the maps of its call"
    assert torch.equal(tiny.draw(pipe, steps=4), before)
    pipe.transformer.eval()
    assert torch.equal(tiny.draw(pipe, steps=4), before)


def test_inference_keeps_its_tensors() -> None:
    """Maps keep their addresses, because CUDA graphs read them there."""
    model = Trained("flux", METHODS["toma"])
    model.denoiser.eval()
    places = []
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            model.call()
        merging = model.denoiser._tokenmerge.merging
        places.append([tensor.data_ptr() for group in merging.groups for tensor in group.slot.map.tensors])
    assert places[0] == places[1] == places[2]


def test_a_window_is_refused_in_training() -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), Merge(regions="tile:2x2", start=0.2))
    model = Trained("flux")
    model.denoiser = pipe.transformer.train()
    with pytest.raises(TokenMergeError, match=r"belongs to no schedule.*start=0, stop=1"):
        model.call()

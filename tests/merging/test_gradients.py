"""Gradients through merged tokens: of the operations, and of whole denoisers in training."""

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
# Flux has one rotary table for queries and keys, and blocks that are merged as a whole.
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
    """A denoiser in training, and arguments of its calls."""

    def __init__(self, kind: str, technique: Any = None) -> None:
        self.denoiser: nn.Module = tiny.denoiser_of(tiny.build(kind)).train().requires_grad_(True)
        if technique is not None:
            tokenmerge.apply(self.denoiser, technique)

    def call(self, seed: int = 0, timestep: float = 0.5) -> Tensor:
        """The mean square of what the denoiser makes of random inputs."""
        torch.manual_seed(seed)
        given = family_of(self.denoiser).example(self.denoiser, 2, 16, 16)
        given = {
            name: torch.randn_like(value) if name in ("hidden_states", "sample", "encoder_hidden_states") else value
            for name, value in given.items()
        }
        given["timestep"] = torch.full_like(given["timestep"], timestep)
        return self.denoiser(**given, return_dict=False)[0].square().mean()

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
    assert_equal(plain, model.gradients(again[0] + again[1]), rtol=1e-5, atol=1e-7)

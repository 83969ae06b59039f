"""Compiled code sees no step: nothing is compiled again after the first image of a size, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tiny
import tokenmerge
from tokenmerge.api import compile_blocks

OPTIONS: dict[str, Any] = {"ratio": 0.5, "regions": "tile:4x4", "skip_first": 0}


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_regions(denoiser: nn.Module, backend: Any) -> None:
    """As diffusers does it, and by hand where it does not."""
    if getattr(denoiser, "_repeated_blocks", None):
        denoiser.compile_repeated_blocks(backend=backend, fullgraph=True)
    else:
        for block in denoiser.transformer_blocks:
            block.compile(backend=backend, fullgraph=True)


def compile_whole(denoiser: nn.Module, backend: Any) -> None:
    denoiser.compile(backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    ("kind", "sites"),
    [
        ("sd", "block"),
        ("sdxl", "component"),
        ("sdxl", "block"),
        ("sdxl", "span"),
        ("sd3", "component"),
        ("sd3", "block"),
        ("flux", "component"),
        ("flux", "block"),
        ("flux", "span"),
    ],
)
def test_regions_are_compiled_once_for_each_size(kind: str, sites: str) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), **OPTIONS, sites=sites)
    eager = {size: tiny.draw(pipe, steps=25, size=size) for size in ((64, 64), (96, 64))}
    counter = CompileCounterWithBackend("aot_eager")
    compile_regions(tiny.denoiser_of(pipe), counter)
    for size, expected in eager.items():
        torch.testing.assert_close(tiny.draw(pipe, steps=25, size=size), expected)
        graphs = counter.frame_count
        assert graphs > 0
        torch.testing.assert_close(tiny.draw(pipe, steps=25, size=size), expected)
        assert counter.frame_count == graphs
    torch.testing.assert_close(tiny.draw(pipe, steps=25), eager[64, 64])
    assert counter.frame_count == graphs


@pytest.mark.parametrize(("kind", "sites"), [("sdxl", "block"), ("sd3", "block"), ("flux", "component")])
def test_a_whole_model_is_compiled_once_for_each_size(kind: str, sites: str) -> None:
    pipe = tokenmerge.apply(tiny.build(kind), **OPTIONS, sites=sites)
    eager = {size: tiny.draw(pipe, steps=25, size=size) for size in ((64, 64), (96, 64))}
    counter = CompileCounterWithBackend("aot_eager")
    compile_whole(tiny.denoiser_of(pipe), counter)
    for size, expected in eager.items():
        torch.testing.assert_close(tiny.draw(pipe, steps=25, size=size), expected)
        graphs = counter.frame_count
        torch.testing.assert_close(tiny.draw(pipe, steps=25, size=size), expected)
        assert counter.frame_count == graphs


def test_a_wrapped_whole_model_is_merged_too() -> None:
    pipe = tiny.build("flux")
    expected = tiny.draw(tokenmerge.apply(tiny.build("flux"), **OPTIONS))
    pipe.transformer = torch.compile(pipe.transformer, backend="aot_eager", fullgraph=True)
    tokenmerge.apply(pipe, **OPTIONS)
    torch.testing.assert_close(tiny.draw(pipe), expected)
    assert tokenmerge.summary(pipe).groups[0]["selected"] == 1
    tokenmerge.remove(pipe)
    torch.testing.assert_close(tiny.draw(pipe), tiny.draw(tiny.build("flux")))


def test_a_window_costs_one_more_graph_of_each_kind_and_no_more() -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), **OPTIONS, start=0.2, stop=0.8)
    eager = tiny.draw(pipe, steps=10)
    counter = CompileCounterWithBackend("aot_eager")
    compile_regions(pipe.transformer, counter)
    torch.testing.assert_close(tiny.draw(pipe, steps=10), eager)
    graphs = counter.frame_count
    torch.testing.assert_close(tiny.draw(pipe, steps=10), eager)
    assert counter.frame_count == graphs


@pytest.mark.parametrize("compiled", [compile_regions, compile_whole])
@pytest.mark.parametrize(("kind", "sites"), [("sdxl", "component"), ("flux", "block")])
def test_apply_and_remove_take_effect_on_code_that_is_compiled_already(kind: str, sites: str, compiled: Any) -> None:
    merged = tiny.draw(tokenmerge.apply(tiny.build(kind), **OPTIONS, sites=sites))
    pipe = tiny.build(kind)
    compiled(tiny.denoiser_of(pipe), "aot_eager")
    unmerged = tiny.draw(pipe)
    tokenmerge.apply(pipe, **OPTIONS, sites=sites)
    torch.testing.assert_close(tiny.draw(pipe), merged)
    tokenmerge.remove(pipe)
    assert torch.equal(tiny.draw(pipe), unmerged)


@pytest.mark.parametrize("kind", ["sdxl", "sd3", "flux"])
def test_inductor_agrees_with_eager(kind: str) -> None:
    # Two tokens nearest to each other are a tie that rounding decides, so selection by position is compared.
    pipe = tokenmerge.apply(tiny.build(kind), **OPTIONS, selection="uniform")
    eager = tiny.draw(pipe)
    compile_blocks(pipe)
    torch.testing.assert_close(tiny.draw(pipe), eager, rtol=1e-3, atol=1e-3)

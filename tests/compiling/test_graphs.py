"""The replacement forward that replays CUDA graphs, as far as it can be tested without a GPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import tiny
from tokenmerge import TokenMergeError
from tokenmerge.compiling.graphs import GraphedForward


def test_recordings_go_with_their_model_at_once() -> None:
    """Recordings hold weights and results, which must not wait for the garbage collector."""
    denoiser = tiny.flux_transformer()
    graphed = weakref.ref(GraphedForward(denoiser, lambda _: None))
    gc.collect()
    gc.disable()
    try:
        assert graphed() is not None
        del denoiser
        assert graphed() is None
    finally:
        gc.enable()


def test_a_forward_that_stood_there_comes_back() -> None:
    module = torch.nn.Linear(2, 2)
    module.forward = before = torch.nn.Identity().forward
    GraphedForward(module, lambda _: None).undo()
    assert vars(module)["forward"] == before
    del module.forward
    GraphedForward(module, lambda _: None).undo()
    assert "forward" not in vars(module)


def test_a_forward_that_was_replaced_since_is_not_undone() -> None:
    module = torch.nn.Linear(2, 2)
    graphed = GraphedForward(module, lambda _: None)
    module.forward = wrapper = torch.nn.Identity().forward
    with pytest.raises(TokenMergeError, match="replaced after compile; undo that first"):
        graphed.undo()
    assert vars(module)["forward"] == wrapper

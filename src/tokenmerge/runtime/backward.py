"""Hear of backward passes: where gradients are checkpointed, blocks of an earlier call run once more in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.utils import _pytree as pytree


def at_backward(output: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call `begin` when a backward pass comes to what a call gave out, before any of its blocks runs once more, and
    `end` when the whole pass is over."""
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_begin, begin, end))


def _begin(begin: Callable[[], None], end: Callable[[], None], _: Tensor) -> None:
    begin()
    Variable._execution_engine.queue_callback(end)

"""Hooks around a backward pass. With gradient checkpointing, blocks of an earlier call run once more in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.utils import _pytree as pytree


def at_backward(output: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call `begin` when a backward pass reaches `output`, before any block runs once more, and `end` when it is over.

    output: whatever the denoiser returned.
    """
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_begin, begin, end))


def _begin(begin: Callable[[], None], end: Callable[[], None], _: Tensor) -> None:
    begin()
    Variable._execution_engine.queue_callback(end)

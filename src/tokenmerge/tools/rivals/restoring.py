"""Restore objects that a package has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_ABSENT = object()


@contextmanager
def unchanged(pipe: Any, denoiser: nn.Module) -> Iterator[None]:
    """Restore the attributes and submodules of a pipeline, its class and its denoiser's modules after a `with` block.

    Submodules keep their order. Packages leave forwards, flags and statistics behind when they are switched off.
    """
    modules = list(denoiser.modules())
    holders = [(holder, dict(vars(holder))) for holder in (pipe, type(pipe), *modules)]
    children = [(module, dict(module._modules)) for module in modules]
    try:
        yield
    finally:
        for holder, before in holders:
            _restore(holder, before)
        for module, before in children:
            if list(module._modules.items()) != list(before.items()):
                module._modules.clear()
                module._modules.update(before)


def _restore(holder: Any, before: dict[str, Any]) -> None:
    # vars() of a class is read-only, and setattr on a module would register some values as parameters.
    put = (lambda name, value: setattr(holder, name, value)) if isinstance(holder, type) else vars(holder).__setitem__
    drop = (lambda name: delattr(holder, name)) if isinstance(holder, type) else vars(holder).__delitem__
    for name in [name for name in vars(holder) if name not in before]:
        drop(name)
    for name, value in before.items():
        if vars(holder).get(name, _ABSENT) is not value:
            put(name, value)

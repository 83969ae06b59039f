"""Put objects back as they were, whatever a package has left on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_ABSENT = object()


@contextmanager
def unchanged(pipe: Any, denoiser: nn.Module) -> Iterator[None]:
    """Afterwards a pipeline, its class and all modules of its denoiser have the attributes and submodules that they had
    before, in the same order. Packages leave forwards, flags and statistics behind when they are switched off."""
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
    # The attributes of a class are not to be written in place, and modules would take some for parameters.
    put = (lambda name, value: setattr(holder, name, value)) if isinstance(holder, type) else vars(holder).__setitem__
    drop = (lambda name: delattr(holder, name)) if isinstance(holder, type) else vars(holder).__delitem__
    for name in [name for name in vars(holder) if name not in before]:
        drop(name)
    for name, value in before.items():
        if vars(holder).get(name, _ABSENT) is not value:
            put(name, value)

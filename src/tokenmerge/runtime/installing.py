"""Installs sites on the submodules of a model, and takes exactly that off again; and knows the hooks of others.

No forward is copied and no module replaced: a site takes the place of a module's forward and calls the original.
Compiled code notices a forward that was replaced, but not a hook that was added: with native hooks, `apply` after a
compiled run would be ignored in silence. Compiled code tells callables apart by identity, but bound methods by their
function: as bound methods, the sites of all blocks of a class share one graph.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..merging.sites import Site

# Hooks of diffusers' caches that see whole blocks from outside, and so full tokens; and of those that store what is
# inside, where tokens are merged.
OUTER_CACHES = ("fbc_", "mag_cache_")
INNER_CACHES = ("pyramid_attention_broadcast", "faster_cache_", "taylorseer_", "sea_cache_", "text_kv_cache_")
# Of a block that runs in every call and by its result decides whether the others do. MagCache decides before any runs.
_CACHE_LEADER = "fbc_leader"
_GROUP_OFFLOAD = "group_offloading"
# Graphs that the compiler may make of one function; its own limit is eight. A site's needs one for whole steps, one for
# anchors and one for merged steps, or six where it is held (first or last of a span, or inside of it): first for one
# size, then for any, for tiles that fit and that do not, for batches of one and of more, and for blocks that are given
# other strides.
_GRAPHS = 64


class _Placed:
    """A site in the place of the forward of one submodule of a block."""

    def __init__(self, site: Site, block: nn.Module, path: str) -> None:
        self.site = site
        self._block = block
        self._path = path
        self._place()

    def _place(self) -> None:
        self._module = self._block.get_submodule(self._path)
        self._before = vars(self._module).get("forward")
        self.site.original = self._module.forward
        run = _copied(type(self.site).run, f"run_{type(self._module).__name__}_{self.site.group.level}")
        self._forward = types.MethodType(run, self.site)
        self._module.forward = self._forward

    def _places(self) -> list[tuple[dict[str, Any], str]]:
        return [(holder, key) for holder, key in _forward_holders(self._module) if holder.get(key) is self._forward]

    def follow(self) -> None:
        """Take the place again if others have undone it: LoRA replaces linear layers, and whoever removes hooks of
        theirs restores an older forward. Merging must not stop in silence."""
        replaced = self._block.get_submodule(self._path) is not self._module
        if replaced or not (self._places() or self._is_wrapped()):
            self.undo()
            # A wrapper that does not tell what it wraps may still lead to the old site, which would then merge twice.
            lost, self.site = self.site, copy.copy(self.site)
            lost.retired = True
            self._place()

    @property
    def is_shared(self) -> bool:
        """Whether others see what enters or leaves, and may change it."""
        hooks = self._module._forward_hooks or self._module._forward_pre_hooks
        return bool(hooks) or vars(self._module).get("forward") is not self._forward

    def _is_wrapped(self) -> bool:
        """Whether a forward of somebody else's still leads here."""
        forward = vars(self._module).get("forward")
        while forward is not None and forward is not self._forward:
            forward = getattr(forward, "__wrapped__", None)
        return forward is not None

    def undo(self) -> None:
        for holder, key in self._places():
            if self._before is None and holder is vars(self._module) and key == "forward":
                del holder[key]
            else:
                holder[key] = self.site.original


class Installation:
    """What `apply` put on a model, and how to take exactly that off again."""

    def __init__(self) -> None:
        compiler = torch._dynamo.config
        compiler.recompile_limit = max(compiler.recompile_limit, _GRAPHS)
        self._placed: list[_Placed] = []
        self._observers: list[RemovableHandle] = []

    def observe_calls(
        self, module: nn.Module, before: Callable[..., None], after: Callable[..., None] | None = None
    ) -> None:
        """Call `before(module, args, kwargs)` at the start of every call, and `after(module, args, output)` at the end
        of those that do not fail."""
        # Native hooks: one of diffusers' on the root would vanish under model offload.
        self._observers.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            self._observers.append(module.register_forward_hook(after))

    def add(self, site: Site, block: nn.Module, path: str = "") -> None:
        """Put `site` in the place of the forward of the block, or of the submodule at `path` in it."""
        self._placed.append(_Placed(site, block, path))

    def follow(self) -> None:
        """Keep up with what others have done to the model."""
        for placed in self._placed:
            placed.follow()

    @property
    def is_shared(self) -> bool:
        """Whether code of others runs around a site."""
        return any(placed.is_shared for placed in self._placed)

    def uninstall(self) -> None:
        for observer in self._observers:
            observer.remove()
        self._observers.clear()
        for placed in reversed(self._placed):
            placed.undo()
        self._placed.clear()


@functools.cache
def _copied(function: types.FunctionType, name: str) -> types.FunctionType:
    """The same function of another name. The compiler looks for a graph among all that it made of a function, so
    classes of blocks, and levels of a UNet, have one each."""
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


def _forward_holders(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Every place that may hold a forward: the instance, accelerate's hook over it, and diffusers' hooks over it."""
    yield vars(module), "forward"
    yield vars(module), "_old_forward"
    registry = vars(module).get("_diffusers_hook")
    for reference in registry._fn_refs if registry is not None else ():
        yield vars(reference), "forward"
        yield vars(reference), "original_forward"


def cache_hooks(denoiser: nn.Module) -> list[str]:
    """Names of diffusers' caches on a denoiser, by their hooks: not every model knows which cache it has."""
    names = dict.fromkeys(name for module in denoiser.modules() for name in _hook_names(module))
    return [name for name in names if name.startswith(OUTER_CACHES + INNER_CACHES)]


def leads_cache(block: nn.Module) -> bool:
    """Whether a block also runs in calls in which a cache skips the others."""
    return any(name.startswith(_CACHE_LEADER) for name in _hook_names(block))


def is_group_offloaded(block: nn.Module) -> bool:
    """Whether diffusers brings a block's weights to the device when the first of its group runs."""
    return _GROUP_OFFLOAD in _hook_names(block)


def _hook_names(module: nn.Module) -> list[str]:
    """Of diffusers' hooks on a module."""
    registry = vars(module).get("_diffusers_hook")
    return [] if registry is None else list(registry.hooks)


def runs_as_made(module: nn.Module) -> bool:
    """Whether the forward of a module of diffusers is its own, or one around it that passes for it: not one that
    somebody has written in its place."""
    return str(getattr(module.forward, "__module__", "")).partition(".")[0] in ("diffusers", __package__)

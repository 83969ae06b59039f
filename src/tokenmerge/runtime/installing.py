"""Installs sites on the submodules of a model, and takes exactly that off again.

No forward is copied and no module replaced: a site takes the place of a module's forward and calls the original.
Compiled code notices a forward that was replaced, but not a hook that was added: with native hooks, `apply` after a
compiled run would be ignored in silence. Compiled code tells callables apart by identity, but bound methods by their
function: as bound methods, the sites of all blocks of a class share one graph.
"""

from __future__ import annotations

import functools
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import TokenMergeError
from .foreign import SHARDING, is_inside_offload

# Graphs that the compiler may make of one function; its own limit is eight. A site's needs one for each thing that its
# step may do, and more for the first, the last and the others of a held run: first for one size, then for any, for
# tiles that fit and that do not, for batches of one and of more, and for blocks that are given other strides.
_GRAPHS = 64
# Where CUDA graphs of a whole denoiser keep the forward that they stand in for.
_INNER = "inner_forward"


class Uncopied:
    """Part of what is applied to a model. In a copy of the model it would still lead to the original."""

    def __reduce__(self) -> Any:
        raise TokenMergeError("a model cannot be copied or pickled while a technique is applied; call remove first")


class Site(Uncopied, ABC):
    """Stands in for the forward of a module. Several may stand on one module, each inside of the next."""

    level: int = 0  # of a UNet; levels do not share compiled code
    retired = False  # another has taken its place
    holds = False  # whether it leaves its module out in some steps
    # What it stands in for: the forward of the module's class, or one of somebody else's, or of the site inside.
    _function: Callable[..., Any]
    _module: weakref.ref[nn.Module]
    _inner: Callable[..., Any] | None = None

    @abstractmethod
    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the forward, and calls `original`."""

    def original(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        # A strong reference would keep a deleted model's weights until the garbage collector comes.
        return self._function(self._module(), *args, **kwargs)

    def twin(self) -> Site:
        """The same site, to stand elsewhere."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def stand_on(self, module: nn.Module, inner: Callable[..., Any] | None) -> types.MethodType:
        """Take the place of a module's forward, or of `inner`; returns what to call instead."""
        self._module = weakref.ref(module)
        self._function = type(module).forward
        self._inner = inner
        run = _copied(type(self).run, f"run_{type(module).__name__}_{self.level}")
        return types.MethodType(run, self)


class Placement:
    """All sites on one submodule of a block, in the place of its forward."""

    def __init__(self, block: nn.Module, path: str, sites: Sequence[Site]) -> None:
        self.sites = list(sites)  # from the innermost
        self.block = block
        self._path = path
        self._place()

    def _place(self) -> None:
        self._module = self.block.get_submodule(self._path)
        # Inside of what shares tokens out among processes: all blocks then see those of their own.
        sharding = [(holder, "forward") for name, holder in _hooks(self._module) if name.startswith(SHARDING)]
        holder, key = (*sharding, _graphed(self._module) or (vars(self._module), "forward"))[0]
        self._before = holder.get(key)
        forward: Any = self._before
        for site in self.sites:
            forward = site.stand_on(self._module, forward)
        self._forward = holder[key] = forward

    def _places(self) -> list[tuple[dict[str, Any], str]]:
        return [(holder, key) for holder, key in _forward_holders(self._module) if holder.get(key) is self._forward]

    def follow(self) -> None:
        """Take the place again if others have undone it: LoRA replaces linear layers, and whoever removes hooks of
        theirs restores an older forward. A technique must not stop in silence. Group offload goes inside of what
        holds."""
        replaced = self.block.get_submodule(self._path) is not self._module
        if replaced or self._moves_for_nothing or not (self._places() or self._wrappers() is not None):
            self.undo()
            # A wrapper that does not tell what it wraps may still lead to the old sites, which would then act twice.
            lost, self.sites = self.sites, [site.twin() for site in self.sites]
            for site in lost:
                site.retired = True
            self._place()

    @property
    def is_shared(self) -> bool:
        """Whether others see what enters or leaves, and may change it; not those that have undone the place, which is
        taken again."""
        if self._module._forward_hooks or self._module._forward_pre_hooks:
            return True
        return any(not name.startswith(SHARDING) for name in self._wrappers() or ()) and not self._moves_for_nothing

    @property
    def _moves_for_nothing(self) -> bool:
        """Whether group offload, put around the sites, would move the weights of a module that does not run."""
        return self.sites[-1].holds and is_inside_offload(self._module, self._forward)

    def _wrappers(self) -> list[str] | None:
        """What stands around the sites: the names of diffusers' hooks, and "" for others; None if nothing that is
        called leads here."""
        forward, hooks, names = vars(self._module).get("forward"), _hooks(self._module), []
        while forward is not None and forward is not self._forward:
            # A hook that was removed from among others is still in the `__wrapped__` of those around it.
            hooked = hooks and getattr(getattr(forward, "func", None), "__module__", "") == "diffusers.hooks.hooks"
            name, holder = hooks.pop() if hooked else ("", {})
            names.append(name)
            inside = holder.get("original_forward") or holder.get("forward")
            forward = inside if hooked else getattr(forward, "__wrapped__", None)
        return None if forward is None else names

    def undo(self) -> None:
        for holder, key in self._places():
            if self._before is not None or key == _INNER:
                holder[key] = self._before
            elif holder is vars(self._module) and key == "forward":
                del holder[key]
            else:
                holder[key] = types.MethodType(type(self._module).forward, self._module)


class Installation:
    """What `apply` put on a model, and how to take exactly that off again."""

    def __init__(self) -> None:
        self._release = _raise_recompile_limit(self)
        self._sites: dict[tuple[nn.Module, str], list[Site]] = {}
        self._placements: list[Placement] = []
        self._undo_observing: Callable[[], None] = lambda: None

    def add(self, site: Site, block: nn.Module, path: str = "") -> None:
        """Put `site` around the forward of the block, or of the submodule at `path` in it, and sites added before."""
        self._sites.setdefault((block, path), []).append(site)

    def install(self, denoiser: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Put all sites in their places, and observe calls of the denoiser."""
        self.place()
        self._undo_observing = observe_calls(denoiser, before, after)

    def place(self) -> None:
        """Put sites that were added in their places."""
        for (block, path), sites in self._sites.items():
            self._placements.append(Placement(block, path, sites))
        self._sites.clear()

    def sites_on(self, modules: Iterable[nn.Module]) -> list[Site]:
        """All sites on some blocks and their submodules."""
        wanted = set(modules)
        return [site for placement in self._placements if placement.block in wanted for site in placement.sites]

    def follow(self) -> None:
        """Keep up with what others have done to the model."""
        for placement in self._placements:
            placement.follow()

    @property
    def is_shared(self) -> bool:
        """Whether code of others runs around a module that may be left out."""
        return any(placement.is_shared for placement in self._placements if placement.sites[-1].holds)

    def uninstall(self) -> None:
        self._undo_observing()
        for placement in reversed(self._placements):
            placement.undo()
        self._placements.clear()
        self._release()


def observe_calls(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None] | None = None
) -> Callable[[], None]:
    """Call `before(module, args, kwargs)` at the start of every call, and `after(module, args, output)` at the end of
    those that do not fail, until the returned function is called."""
    # Native hooks: one of diffusers' on the root would vanish under model offload.
    handles = [module.register_forward_pre_hook(before, with_kwargs=True)]
    if after is not None:
        handles.append(module.register_forward_hook(after))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class _Limit:
    """The compiler's limit of graphs per function, raised for as long as anything is applied."""

    before: int | None = None
    users = 0


def _raise_recompile_limit(user: object) -> Callable[[], None]:
    """Raise it until the returned function is called, or `user` is garbage-collected, and no other user is left."""
    compiler = torch._dynamo.config
    if not _Limit.users and compiler.recompile_limit < _GRAPHS:
        _Limit.before, compiler.recompile_limit = compiler.recompile_limit, _GRAPHS
    _Limit.users += 1
    # Runs once, whichever comes first.
    return weakref.finalize(user, _release_recompile_limit)


def _release_recompile_limit() -> None:
    _Limit.users -= 1
    compiler = torch._dynamo.config
    # Somebody else may have set another one since.
    if not _Limit.users and _Limit.before is not None:
        if compiler.recompile_limit == _GRAPHS:
            compiler.recompile_limit = _Limit.before
        _Limit.before = None


@functools.cache
def _copied(function: types.FunctionType, name: str) -> types.FunctionType:
    """The same function of another name. The compiler looks for a graph among all that it made of a function, so
    classes of blocks, and levels of a UNet, have one each."""
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


def _graphed(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Where CUDA graphs of a whole module keep its forward. Sites go inside: what is left out is not recorded."""
    graphs = getattr(vars(module).get("forward"), "__self__", None)
    return (vars(graphs), _INNER) if graphs is not None and _INNER in vars(graphs) else None


def _forward_holders(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Every place that may hold a forward: the instance, accelerate's hook over it, and diffusers' hooks over it."""
    yield vars(module), "forward"
    yield vars(module), "_old_forward"
    graphed = _graphed(module)
    if graphed is not None:
        yield graphed
    for _, holder in _hooks(module):
        yield holder, "forward"
        yield holder, "original_forward"


def _hooks(module: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """diffusers' hooks around a module's forward, from the innermost: their names, and what holds the forward inside
    of each."""
    registry = vars(module).get("_diffusers_hook")
    if registry is None:
        return []
    return [(name, vars(inside)) for name, inside in zip(registry._hook_order, registry._fn_refs, strict=True)]

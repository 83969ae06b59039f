"""Install sites on the submodules of a model, and take exactly those off again.

We copy no forward and replace no module: a site takes the place of a module's forward and calls the original. Native
hooks would not do: compiled code notices a replaced forward, but silently ignores hooks added after it was compiled.
Compiled code tells callables apart by identity, but bound methods by their function. So sites are bound methods, and
all blocks of a class share one graph.
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

# Graphs that the compiler may make of one function; its default is eight. A site needs one for each thing that a step
# may do, times its position in a held run (first, last, between). Each comes again for a fixed and any size, for tiles
# that fit or not, for batches of one and of more, and for other strides.
_GRAPHS = 64
# The attribute in which CUDA graphs of a whole denoiser keep the forward that they replace.
_INNER = "inner_forward"


class Uncopied:
    """Part of what is applied to a model. A copy of the model must not contain it: it would refer to the original."""

    def __reduce__(self) -> Any:
        raise TokenMergeError("a model cannot be copied or pickled while a technique is applied; call remove first")


class Site(Uncopied, ABC):
    """Stands in for the forward of a module. Several may stand on one module, each inside of the next."""

    level: int = 0  # of a UNet; levels do not share compiled code
    retired = False  # whether its twin has taken its place
    holds = False  # whether it skips its module in some steps
    _function: Callable[..., Any]  # the forward of the module's class
    _module: weakref.ref[nn.Module]
    _inner: Callable[..., Any] | None = None  # the site inside of it, or a third party's forward, if any

    @abstractmethod
    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of the forward, and calls `original` for it."""

    def original(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        # A strong reference to the module would keep a deleted model's weights until the garbage collector runs.
        return self._function(self._module(), *args, **kwargs)

    def twin(self) -> Site:
        """A copy of the site, to be installed anew."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def stand_on(self, module: nn.Module, inner: Callable[..., Any] | None) -> types.MethodType:
        """Stand in for `inner`, or without it for the forward of the module's class; returns the new forward."""
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
        # Inside of the hooks of context parallelism, where blocks see the tokens of their shard.
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
        """Install the sites again if others have undone them, since a technique must not stop silently.

        LoRA replaces linear layers, and removing third-party hooks restores an older forward. Group offload that wraps
        a held module would still move its weights, so the sites go around it.
        """
        replaced = self.block.get_submodule(self._path) is not self._module
        if replaced or self._moves_for_nothing or not (self._places() or self._wrappers() is not None):
            self.undo()
            # An opaque wrapper may still lead to the old sites, which would then act, too.
            lost, self.sites = self.sites, [site.twin() for site in self.sites]
            for site in lost:
                site.retired = True
            self._place()

    @property
    def is_shared(self) -> bool:
        """Whether third-party code wraps the sites, so that it may see or change what enters and leaves. Code that has
        undone the sites does not count: `follow` installs them around it."""
        if self._module._forward_hooks or self._module._forward_pre_hooks:
            return True
        return any(not name.startswith(SHARDING) for name in self._wrappers() or ()) and not self._moves_for_nothing

    @property
    def _moves_for_nothing(self) -> bool:
        """Whether group offload wraps the sites, and so would move the weights of a module that does not run."""
        return self.sites[-1].holds and is_inside_offload(self._module, self._forward)

    def _wrappers(self) -> list[str] | None:
        """The wrappers around the sites: names of diffusers' hooks, "" for others. None if the module's forward does
        not lead to the sites."""
        forward, hooks, names = vars(self._module).get("forward"), _hooks(self._module), []
        while forward is not None and forward is not self._forward:
            # Follow diffusers' registry, not `__wrapped__`, which may still contain a removed hook.
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
    """Everything that `apply` put on a model, and how to take exactly that off again."""

    def __init__(self) -> None:
        self._release = _raise_recompile_limit(self)
        self._sites: dict[tuple[nn.Module, str], list[Site]] = {}
        self._placements: list[Placement] = []
        self._undo_observing: Callable[[], None] = lambda: None

    def add(self, site: Site, block: nn.Module, path: str = "") -> None:
        """Plan `site` for the block, or for its submodule at `path`, around sites that were added there before."""
        self._sites.setdefault((block, path), []).append(site)

    def install(self, denoiser: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Install all planned sites, and observe the calls of the denoiser."""
        self.place()
        self._undo_observing = observe_calls(denoiser, before, after)

    def place(self) -> None:
        """Install the sites added since the last time."""
        for (block, path), sites in self._sites.items():
            self._placements.append(Placement(block, path, sites))
        self._sites.clear()

    def sites_on(self, modules: Iterable[nn.Module]) -> list[Site]:
        """All sites on these blocks and on their submodules."""
        wanted = set(modules)
        return [site for placement in self._placements if placement.block in wanted for site in placement.sites]

    def follow(self) -> None:
        """Install sites again that others have undone."""
        for placement in self._placements:
            placement.follow()

    @property
    def is_shared(self) -> bool:
        """Whether third-party code runs around a module that is held."""
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
    calls that do not fail, until the returned function is called."""
    # Native hooks, since model offload would remove a diffusers hook from the root.
    handles = [module.register_forward_pre_hook(before, with_kwargs=True)]
    if after is not None:
        handles.append(module.register_forward_hook(after))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class _Limit:
    """The compiler's limit of graphs per function, raised while anything is applied."""

    before: int | None = None
    users = 0


def _raise_recompile_limit(user: object) -> Callable[[], None]:
    """Raise the limit until the last user calls the returned function, or is garbage-collected."""
    compiler = torch._dynamo.config
    if not _Limit.users and compiler.recompile_limit < _GRAPHS:
        _Limit.before, compiler.recompile_limit = compiler.recompile_limit, _GRAPHS
    _Limit.users += 1
    # Runs once, whichever comes first.
    return weakref.finalize(user, _release_recompile_limit)


def _release_recompile_limit() -> None:
    _Limit.users -= 1
    compiler = torch._dynamo.config
    # Unless somebody else has changed the limit since.
    if not _Limit.users and _Limit.before is not None:
        if compiler.recompile_limit == _GRAPHS:
            compiler.recompile_limit = _Limit.before
        _Limit.before = None


@functools.cache
def _copied(function: types.FunctionType, name: str) -> types.FunctionType:
    """A copy of a function under another name. The compiler counts graphs per function, so every class of blocks and
    every UNet level gets its own."""
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


def _graphed(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Where CUDA graphs of a whole module keep its forward, if there are any. Sites go inside of them, so that nothing
    is recorded for modules that do not run."""
    graphs = getattr(vars(module).get("forward"), "__self__", None)
    return (vars(graphs), _INNER) if graphs is not None and _INNER in vars(graphs) else None


def _forward_holders(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """The dict and key of every place that may hold a forward: the instance, accelerate's and diffusers' hooks."""
    yield vars(module), "forward"
    yield vars(module), "_old_forward"
    graphed = _graphed(module)
    if graphed is not None:
        yield graphed
    for _, holder in _hooks(module):
        yield holder, "forward"
        yield holder, "original_forward"


def _hooks(module: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Diffusers' hooks around a module's forward, innermost first: their names, and the dicts that hold the forward
    inside of each."""
    registry = vars(module).get("_diffusers_hook")
    if registry is None:
        return []
    return [(name, vars(inside)) for name, inside in zip(registry._hook_order, registry._fn_refs, strict=True)]

"""CUDA graphs of whole denoiser calls: one for each kind of call, replayed without launches from the host.

On a fast GPU with a small batch, a denoiser waits for the host to launch its kernels. A graph is a recording of those
launches. It fixes what they do and where their tensors lie. So calls that do different work have different graphs: full
steps, full steps whose residuals are kept, held steps, and merged steps that select, reweigh or reuse maps.

The first call of a kind runs normally, which also compiles whatever needs compiling. The second call is recorded, and
later calls are replayed. Arguments are copied into the recording's tensors, and results out of them. Calls that cannot
be recorded run normally: calls with gradients, under autocast (which caches the weights it casts), with a cache that
decides by values, with forward hooks inside (which a replay would not run), and those whose maps need the host.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import TokenMergeError, first_line
from ..runtime.foreign import cache_hooks, casts_weights, shard_of

# Recordings kept per denoiser: image sizes times kinds of call. All share one memory pool.
_MAX_GRAPHS = 32
# After this many recordings were dropped to make room, record no more: an argument probably changes in every call.
_MAX_LOSSES = 64
# The number of kinds of call whose first occurrence is remembered.
_MAX_KINDS = 256
# Attributes that decide a module's work, besides its submodules and weights: FreeU's factors, a replaced forward, the
# attention processor, and whether adapters are on, off or fused.
_SETTINGS = ("s1", "s2", "b1", "b2", "forward", "processor", "_disable_adapters", "_active_adapter")
# An attention processor's choice of implementation, which is changed in place.
_BACKEND = "_attention_backend"
# Lists and mappings that are changed in place: strengths of IP-Adapters and LoRA, and adapters fused into weights.
_CONTENTS = ("scale", "scaling", "merged_adapters")
_WATCHED = frozenset((*_SETTINGS, *_CONTENTS, _BACKEND, "_diffusers_hook"))


class Recordable(Protocol):
    """What the applied techniques know about a call before it runs."""

    def kind(self) -> Hashable | None:
        """A key, equal for calls that launch the same work on the same tensors; None if the call cannot be recorded."""

    def done(self) -> Any:
        """What the call has renewed in its maps so far."""

    def set_done(self, done: Any) -> None:
        """Mark this as renewed, because a replay renews it."""

    def owners(self) -> list[Any]:
        """The objects that own the tensors which the call uses."""


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]
    structure: pytree.TreeSpec  # how to rebuild the call's result from `outputs`
    done: Any
    owners: list[weakref.ref[Any]]

    def replay(self, tensors: list[Tensor]) -> Any:
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        # The next replay overwrites the outputs, but guidance needs those of two calls.
        return pytree.tree_unflatten([output.clone() for output in self.outputs], self.structure)


class GraphedForward:
    """Replaces the forward of a denoiser, until `undo`."""

    def __init__(self, denoiser: nn.Module, state: Callable[[nn.Module], Recordable | None]) -> None:
        # A strong reference would keep a deleted model's weights in memory until the next garbage collection.
        self._model = weakref.ref(denoiser)
        self._applied = state
        self.inner_forward = vars(denoiser).get("forward")
        self._pool: Any = None
        self._state: tuple[Any, ...] = ()
        self._obstacle = ""  # why no call can be recorded in the model's present state
        self._losses = 0
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._failed: set[Hashable] = set()  # failed to record once; one more attempt is made
        self._refused: dict[Hashable, str] = {}
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        # Keep no reference to this method: a cycle would keep all recordings until the next garbage collection.
        denoiser.forward = types.MethodType(GraphedForward.run, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TokenMergeError("a model cannot be copied while it replays CUDA graphs; call uncompile first")

    def __reduce__(self) -> Any:
        raise TokenMergeError("a model cannot be pickled while it replays CUDA graphs; call uncompile first")

    @property
    def _denoiser(self) -> nn.Module:
        denoiser = self._model()
        assert denoiser is not None
        return denoiser

    def _original(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.inner_forward is not None:
            return self.inner_forward(*args, **kwargs)
        return type(self._denoiser).forward(self._denoiser, *args, **kwargs)

    @property
    def recordings(self) -> int:
        return len(self._recordings)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why some calls were not recorded."""
        return tuple(dict.fromkeys(each for each in (self._obstacle, *self._refused.values()) if each))

    def undo(self) -> None:
        if getattr(vars(self._denoiser).get("forward"), "__self__", None) is not self:
            raise TokenMergeError("the denoiser's forward was replaced after compile; undo that first, then uncompile")
        if self.inner_forward is None:
            del self._denoiser.forward
        else:
            self._denoiser.forward = self.inner_forward
        self._forget()

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        device = next(self._denoiser.parameters()).device
        if torch.is_grad_enabled() or device.type != "cuda" or torch.is_autocast_enabled("cuda"):
            return self._original(*args, **kwargs)
        self._see_changes()
        self._drop_stale()
        state = self._applied(self._denoiser)
        kind = state.kind() if state is not None else ()
        leaves, structure = pytree.tree_flatten((args, kwargs))
        others = tuple("tensor" if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        plain = all(isinstance(leaf, bool | int | float | str | None) for leaf in others)
        if kind is None or self._obstacle or not plain:
            return self._original(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = tuple((tuple(each.shape), each.dtype, each.device) for each in tensors)
        key = (kind, str(structure), others, shapes, torch.is_inference_mode_enabled())
        # Recording and replaying use the current device, which may not be the model's.
        with torch.cuda.device(device):
            if key in self._recordings:
                self._recordings.move_to_end(key)
                recording = self._recordings[key]
                if state is not None:
                    state.set_done(recording.done)
                return recording.replay(tensors)
            if key in self._refused or not self._is_known(key):
                return self._original(*args, **kwargs)
            return self._record(key, state, leaves, structure, (args, kwargs), device)

    def _is_known(self, key: Hashable) -> bool:
        """Whether a call of this kind has run before. From now on it counts as known."""
        known = key in self._seen
        self._seen[key] = None
        while len(self._seen) > _MAX_KINDS:
            self._seen.popitem(last=False)
        return known

    def _record(
        self,
        key: Hashable,
        state: Recordable | None,
        leaves: list[Any],
        structure: pytree.TreeSpec,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        device: torch.device,
    ) -> Any:
        self._make_room()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inputs = [_owned(each, device) for each in tensors]
        own = iter(inputs)
        own_leaves = [next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(own_leaves, structure)
        before = state.done() if state is not None else None
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        try:
            # Only this thread must avoid forbidden calls during capture: another one may be loading an image.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self._original(*args, **kwargs)
        except RuntimeError as error:
            # No kernel has run. A capture that fails at its end leaves its stream current and its pool unusable.
            torch.cuda.set_stream(stream)
            self._pool = None
            if state is not None:
                state.set_done(before)
            if key in self._failed:
                self._refused[key] = first_line(_cause(error))
                return self._original(*call[0], **call[1])
            # Blocks may have to be compiled again for the recording's own tensors, which cannot happen in a capture. It
            # happens in a normal call with these tensors.
            self._failed.add(key)
            # The denoiser may have emptied a list among its arguments, such as a T2I-Adapter's features.
            args, kwargs = pytree.tree_unflatten(own_leaves, structure)
            return self._original(*args, **kwargs)
        outputs, output_structure = pytree.tree_flatten(output)
        done, owners = (state.done(), state.owners()) if state is not None else (None, [])
        recording = _Recording(graph, inputs, outputs, output_structure, done, list(map(weakref.ref, owners)))
        self._recordings[key] = recording
        return recording.replay(tensors)

    def _drop_stale(self) -> None:
        """Drop recordings for image sizes whose tensors a technique has released."""
        for key, recording in list(self._recordings.items()):
            if any(owner() is None for owner in recording.owners):
                del self._recordings[key]

    def _make_room(self) -> None:
        """Drop the least recently used recordings."""
        while len(self._recordings) >= _MAX_GRAPHS:
            self._recordings.popitem(last=False)
            self._losses += 1
        if self._losses > _MAX_LOSSES:
            self._obstacle = f"there are more kinds of call than the {_MAX_GRAPHS} graphs that can be kept"

    def _see_changes(self) -> None:
        """Forget everything when modules, weights, buffers or adapters change: recordings use their old addresses."""
        state = _state_of(self._denoiser)
        if state == self._state:
            return
        self._forget()
        self._state = state
        self._obstacle = _obstacle(self._denoiser)

    def _forget(self) -> None:
        """Release recordings and all that refers to them: they keep maps and residuals of removed sites in memory."""
        self._state, self._obstacle, self._losses = (), "", 0
        self._recordings.clear()
        self._failed.clear()
        self._refused.clear()
        self._seen.clear()


def _owned(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor for a recording. It is an inference tensor only if the original is: otherwise compiled code
    would be compiled again for it."""
    with torch.inference_mode(tensor.is_inference()):
        own = torch.empty_like(tensor, device=device)
    return own.copy_(tensor)


def _cause(error: BaseException) -> BaseException:
    """The error that ended a capture. Ending the capture then fails too, and that error hides the first."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _obstacle(denoiser: nn.Module) -> str:
    """Why no call of the denoiser can be recorded in its present state; empty if calls can be."""
    caches = cache_hooks(denoiser)
    if caches:
        return f"a cache ({caches[0]}) decides what runs by the values of tensors"
    if casts_weights(denoiser):
        return "layerwise casting makes new weights in every call"
    if shard_of(denoiser) is not None:
        return "processes that share a picture (context parallel) wait for each other during a call"
    inner = (module for module in denoiser.modules() if module is not denoiser)
    if any(module._forward_hooks or module._forward_pre_hooks for module in inner):
        return "a replay would not run the forward hooks of submodules"
    return ""


def _state_of(denoiser: nn.Module) -> tuple[Any, ...]:
    """Everything whose replacement would change a call. It holds the objects themselves: ids may be used again."""
    # A loop of our own with one test for rare attributes, because this runs in every call.
    state: list[Any] = []
    stack = list(denoiser._modules.values())
    while stack:
        module = stack.pop()
        if module is None:
            continue
        state.append(module)
        state += _addresses(module._parameters.values())
        if module._buffers:
            state += _addresses(module._buffers.values())
        values = module.__dict__
        if module._forward_hooks or module._forward_pre_hooks or not values.keys().isdisjoint(_WATCHED):
            state += _rare(module)
        stack += module._modules.values()
    return tuple(state)


def _addresses(tensors: Iterable[Tensor | None]) -> Iterator[int]:
    """The addresses of tensors. A quantised weight may have no address itself, but wrap tensors that have one."""
    for tensor in tensors:
        if tensor is None:
            continue
        address = tensor.data_ptr()
        if address or not hasattr(tensor, "__tensor_flatten__"):
            yield address
        else:
            names, _ = tensor.__tensor_flatten__()
            yield from _addresses(getattr(tensor, name) for name in names)


def _rare(module: nn.Module) -> Iterator[Any]:
    """The rarer things that decide a module's work: hooks, settings and contents."""
    values = vars(module)
    yield tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
    yield from (values[name] for name in _SETTINGS if name in values)
    # A processor that is a module is among the submodules; a plain object is only found here.
    for holder in (values, vars(values["processor"]) if values.get("processor") is not None else {}):
        for content in (holder[name] for name in _CONTENTS if name in holder):
            own = content.values() if isinstance(content, dict) else content
            yield tuple(own) if isinstance(content, dict | list) else own
        yield holder.get(_BACKEND)
    if "_diffusers_hook" in values:
        yield tuple(values["_diffusers_hook"].hooks)

"""CUDA graphs of whole denoiser calls: one for each phase, replayed without the host launching anything.

On a fast GPU a denoiser at a small batch waits for the host to launch its kernels. A graph is a recording of those
launches; it fixes what they do and where their tensors lie. So calls that do different work have graphs of their own:
steps that select, that only weigh, that reuse maps, and that do not merge at all.

The first call of a kind runs as it is, which also compiles what is to be compiled; the second is recorded; later ones
are replayed. Arguments are copied into the recording's tensors, and results out of them. What cannot be recorded runs
as it is.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .config import TokenMergeError

# Recordings kept for each denoiser: sizes of image times phases. All share one pool of memory.
_MAX_GRAPHS = 16
# Kinds of call whose first occurrence is remembered.
_MAX_KINDS = 256
# What else decides a module's work, beside its submodules and weights: FreeU's factors and adapters' scales.
_SETTINGS = ("s1", "s2", "b1", "b2", "processor", "_disable_adapters", "_active_adapter", "forward")


class Phases(Protocol):
    """What a model's merging tells about a call before it runs."""

    def kind(self) -> Hashable | None:
        """Equal for calls that launch the same work on the same tensors; None if a call must not be recorded."""

    def done(self) -> Any:
        """What the call has renewed so far."""

    def set_done(self, done: Any) -> None:
        """Take it that the call has renewed this."""

    def keep_alive(self) -> Any:
        """Whatever owns the tensors that recorded work reads and writes."""


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]
    structure: pytree.TreeSpec  # of the outputs
    done: Any
    kept: Any

    def replay(self, tensors: list[Tensor]) -> Any:
        for held, given in zip(self.inputs, tensors, strict=True):
            held.copy_(given, non_blocking=True)
        self.graph.replay()
        # The next replay overwrites the results, and guidance needs two at once.
        return pytree.tree_unflatten([output.clone() for output in self.outputs], self.structure)


class GraphedForward:
    """Stands in for the forward of a denoiser, until `undo`."""

    def __init__(self, denoiser: nn.Module, phases: Callable[[], Phases | None]) -> None:
        self._denoiser = denoiser
        self._phases = phases
        self._before = vars(denoiser).get("forward")
        self._original = denoiser.forward
        self._pool: Any = None
        self._state: tuple[Any, ...] = ()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._refused: dict[Hashable, str] = {}
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._forward = types.MethodType(GraphedForward.run, self)
        denoiser.forward = self._forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TokenMergeError("a model cannot be copied while it replays CUDA graphs; call uncompile first")

    def __reduce__(self) -> Any:
        raise TokenMergeError("a model cannot be pickled while it replays CUDA graphs; call uncompile first")

    @property
    def recordings(self) -> int:
        return len(self._recordings)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why some calls were not recorded."""
        return tuple(dict.fromkeys(self._refused.values()))

    def undo(self) -> None:
        if vars(self._denoiser).get("forward") is not self._forward:
            raise TokenMergeError("the denoiser's forward was replaced after compile; undo that first, then uncompile")
        if self._before is None:
            del self._denoiser.forward
        else:
            self._denoiser.forward = self._before
        self._recordings.clear()

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        phases = self._phases()
        kind = phases.kind() if phases is not None else ()
        if kind is None or torch.is_grad_enabled() or getattr(self._denoiser, "is_cache_enabled", False):
            return self._original(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = tuple("tensor" if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if not all(isinstance(leaf, bool | int | float | str | None) for leaf in others):
            return self._original(*args, **kwargs)
        self._forget_if_changed()
        shapes = tuple((tuple(each.shape), each.dtype, each.device) for each in tensors)
        key = (kind, str(structure), others, shapes, torch.is_autocast_enabled(), torch.is_inference_mode_enabled())
        if key in self._recordings:
            self._recordings.move_to_end(key)
            recording = self._recordings[key]
            if phases is not None:
                phases.set_done(recording.done)
            return recording.replay(tensors)
        if key in self._refused or not self._is_known(key):
            return self._original(*args, **kwargs)
        return self._record(key, phases, leaves, structure, tensors, (args, kwargs))

    def _is_known(self, key: Hashable) -> bool:
        """Whether a call of this kind has run; if not, it is known from now on."""
        known = key in self._seen
        self._seen[key] = None
        while len(self._seen) > _MAX_KINDS:
            self._seen.popitem(last=False)
        return known

    def _record(
        self,
        key: Hashable,
        phases: Phases | None,
        leaves: list[Any],
        structure: pytree.TreeSpec,
        tensors: list[Tensor],
        call: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> Any:
        while len(self._recordings) >= _MAX_GRAPHS:
            self._recordings.popitem(last=False)
        device = next(self._denoiser.parameters()).device
        inputs = [torch.empty_like(each, device=device).copy_(each) for each in tensors]
        held = iter(inputs)
        args, kwargs = pytree.tree_unflatten(
            [next(held) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )
        before = phases.done() if phases is not None else None
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Not all of a process need keep still: another thread may load an image meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self._original(*args, **kwargs)
        except RuntimeError as error:
            # Nothing has run; the call is made as it is, now and from now on.
            self._refused[key] = str(error).strip().splitlines()[0]
            if phases is not None:
                phases.set_done(before)
            return self._original(*call[0], **call[1])
        outputs, output_structure = pytree.tree_flatten(output)
        recording = _Recording(
            graph,
            inputs,
            outputs,
            output_structure,
            phases.done() if phases is not None else None,
            phases.keep_alive() if phases is not None else None,
        )
        self._recordings[key] = recording
        return recording.replay(tensors)

    def _forget_if_changed(self) -> None:
        """Recorded work reads weights where they lay: forget it when modules, weights or adapters were exchanged."""
        state = tuple(_state_of(self._denoiser))
        if state != self._state:
            self._state = state
            self._recordings.clear()
            self._refused.clear()
            self._seen.clear()


def _state_of(denoiser: nn.Module) -> Iterator[Any]:
    """Everything whose exchange would change a call: the objects themselves, so that none is taken for a dead one."""
    # By hand: `nn.Module.modules` takes several times as long, and this runs at every call.
    stack = list(denoiser._modules.values())
    while stack:
        module = stack.pop()
        if module is None:
            continue
        yield module
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter.data_ptr()
        values = module.__dict__
        for name in _SETTINGS:
            if name in values:
                yield values[name]
        if "scaling" in values and isinstance(values["scaling"], dict):
            yield tuple(values["scaling"].values())
        stack.extend(module._modules.values())

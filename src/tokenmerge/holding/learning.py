"""Learn from one full call which blocks of a denoiser follow each other with nothing between them.

A run is a maximal chain: each block receives exactly what the last one returned, and only blocks of the chain read it.
We observe this and do not guess: sites compare tensors by identity, and a dispatch mode sees every read between blocks.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import TokenMergeError
from ..families.base import Block
from ..runtime.installing import Placement, Site

# The position of an argument, or its name.
Key = int | str
# A tensor and its `_state`, by which `_is_written` finds out whether it was written to since.
Given = tuple[Tensor, "int | Tensor"]
# The form of a block's output. For every item: (True, number of the stream) or (False, the item itself).
Form = tuple[tuple[bool, Any], ...]


@dataclass(frozen=True)
class LearnedPorts:
    """What a block changes, as one call showed it. Has the interface of `Ports`."""

    keys: tuple[Key, ...]  # the arguments that it changes
    form: Form | None  # of its output; None for a single tensor
    listed: bool = False  # whether the output is a list
    in_place: ClassVar[bool] = False  # blocks that write to their arguments are not held
    text: ClassVar[str] = ""  # unknown: where text tokens lie

    @property
    def streams(self) -> int:
        return len(self.keys)

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        return tuple(_argument(key, args, kwargs) for key in self.keys)

    def fits(self, output: Any) -> bool:
        """Whether an output has the form of the first call."""
        if self.form is None:
            return isinstance(output, Tensor)
        if not isinstance(output, list if self.listed else tuple) or len(output) != len(self.form):
            return False
        pairs = zip(output, self.form, strict=True)
        return all(isinstance(item, Tensor) if is_stream else item == known for item, (is_stream, known) in pairs)

    def leaving(self, output: Any) -> tuple[Tensor, ...]:
        if self.form is None:
            return (output,)
        return tuple(output[number] for number, (is_stream, _) in enumerate(self.form) if is_stream)

    def output(self, streams: tuple[Tensor | None, ...]) -> Any:
        if self.form is None:
            return streams[0]
        items = [streams[item] if is_stream else item for is_stream, item in self.form]
        return items if self.listed else tuple(items)


def _argument(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if key in kwargs if isinstance(key, str) else key < len(args):
        return kwargs[key] if isinstance(key, str) else args[key]
    position = f"argument {key!r}" if isinstance(key, str) else f"positional argument {key}"
    raise TokenMergeError(
        f"a held block did not receive its tokens as {position}, unlike in the first call; call the denoiser as "
        "before, or call remove first"
    )


@dataclass
class _Seen:
    """One run of one block in the watched call."""

    block: Block
    shapes: dict[Key, tuple[int, ...]]  # of the tensors among its arguments
    before: list[Given]  # all tensors in its arguments; only while it runs
    out: list[weakref.ref[Tensor]] = field(default_factory=list)  # the tensors of its output
    out_shapes: list[tuple[int, ...]] = field(default_factory=list)
    form: Form | None = None  # see `LearnedPorts`
    listed: bool = False
    fits: bool = False  # whether it returned tensors, and wrote to none of its arguments
    links: tuple[Key, ...] | None = None  # the arguments of the next block that take all of this one's output
    leaks: bool = False  # whether something that always runs reads its output
    reads: list[_Seen] = field(default_factory=list)  # blocks whose output it receives, e.g. by a skip connection
    # If a run may begin or end here, its tensors, until the end of the call.
    entered: dict[Key, Given] = field(default_factory=dict)
    left: list[Given] = field(default_factory=list)
    next: _Seen | None = None  # the block that ran next

    def end_here(self) -> None:
        """A run may end with this block, and another one begin with the next: keep the tensors between them."""
        tensors = [tensor for each in self.out if (tensor := each()) is not None]
        if len(tensors) == len(self.out) and not self.left:
            self.left = [(each, _state(each)) for each in tensors]
            if self.next is not None and self.links is not None:
                self.next.entered = dict(zip(self.links, self.left, strict=True))


@dataclass(frozen=True)
class LearnedRun:
    """Blocks that follow each other, with the ports of each."""

    blocks: tuple[Block, ...]
    ports: tuple[LearnedPorts, ...]
    entered: tuple[Tensor, ...]  # what entered the first block in the watched call; empty if gone or overwritten
    left: tuple[Tensor, ...]  # what left the last block; empty if gone or overwritten


class Learner:
    """Finds out in the first call of a denoiser which of its blocks can be held, and hands the runs to `learned`."""

    def __init__(self, blocks: Sequence[Block], learned: Callable[[list[LearnedRun]], None]) -> None:
        self._blocks = list(blocks)
        self._learned = learned

    def watch(self, denoiser: nn.Module) -> None:
        """Watch the call that is about to start. Stops at its end, even if it fails."""
        watcher = _Watcher(self._blocks)

        def stop(module: nn.Module, _: Any, output: Any) -> None:
            handle.remove()
            watcher.stop()
            if output is not None:
                self._learned(watcher.runs(type(module).__name__, output))

        handle = denoiser.register_forward_hook(stop, always_call=True)


class _Watcher(TorchDispatchMode):
    """Watches one call of a denoiser, until `stop`. As a dispatch mode it is active between blocks, not inside them."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.seen: list[_Seen] = []  # in the order they ran
        self._inside = 0  # nesting depth of running blocks
        self._owners: dict[int, _Seen] = {}  # by the id of every living tensor that a block returned: that block
        self._undo: list[Callable[[], None]] = []
        for block in blocks:
            self._watch(block)
        self.__enter__()

    def stop(self) -> None:
        if not self._inside:
            self.__exit__(None, None, None)
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _watch(self, block: Block) -> None:
        module: Any = block.module
        compiled = module._compiled_call_impl
        if compiled is not None:
            # Inside compiled code, our site would not see the tensors.
            module._compiled_call_impl = None
        placement = Placement(module, "", [_WatchedSite(self, block)])

        def undo() -> None:
            if compiled is not None:
                module._compiled_call_impl = compiled
            placement.undo()

        self._undo.append(undo)

    # Stays out of the graph if the whole denoiser is compiled.
    @torch.compiler.disable
    def entered(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._inside:
            # Compiled code inside a block cannot run under a dispatch mode.
            self.__exit__(None, None, None)
            self._enter(block, args, kwargs)
        self._inside += 1

    @torch.compiler.disable
    def left(self, output: Any) -> None:
        self._inside -= 1
        if not self._inside:
            self._leave(output)
            self.__enter__()

    def _enter(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: dict[Key, Any] = dict([*enumerate(args), *kwargs.items()])
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        deeper = pytree.tree_leaves([value for key, value in given.items() if key not in tensors])
        now = _Seen(
            block,
            {key: tuple(value.shape) for key, value in tensors.items()},
            [(each, _state(each)) for each in (*tensors.values(), *deeper) if isinstance(each, Tensor)],
        )
        # A held block cannot pass on tensors inside a list or mapping, so these count as read by others.
        for leaf in deeper:
            self._leak(leaf)
        before = self.seen[-1] if self.seen else None
        now.reads = [self._owners[id(value)] for value in tensors.values() if id(value) in self._owners]
        goes_on = False
        if before is not None:
            before.next = now
            if before.fits:
                keys = [_key_of(each, tensors) for each in before.out]
                before.links = None if None in keys else tuple(key for key in keys if key is not None)
            again = any(seen.block is before.block for seen in self.seen[:-1])
            goes_on = bool(before.links) and not before.leaks and not again and _alike(before, now)
        if before is not None and goes_on:
            before.left = []
        else:
            now.entered = dict(zip(tensors, now.before, strict=False))
        for owner in now.reads:
            # If the reader is not held, the run must end where the skip connection starts, whose tensor still exists.
            if owner is not before:
                owner.end_here()
        self.seen.append(now)

    def _leave(self, output: Any) -> None:
        now = self.seen[-1]
        several = type(output) in (tuple, list)
        items = output if several else (output,)
        tensors = [item for item in items if isinstance(item, Tensor)]
        others = [item for item in items if not isinstance(item, Tensor)]
        plain = all(item is None or isinstance(item, bool | int | float) for item in others)
        # A block that writes to an argument, such as its tokens or a cache, must always run.
        now.fits = bool(tensors) and plain and not any(_is_written(*each) for each in now.before)
        now.before = []
        now.listed = isinstance(output, list)
        if several and plain:
            numbers = iter(range(len(tensors)))
            now.form = tuple((True, next(numbers)) if isinstance(item, Tensor) else (False, item) for item in items)
        now.out = [weakref.ref(each) for each in tensors]
        now.out_shapes = [tuple(each.shape) for each in tensors]
        now.left = [(each, _state(each)) for each in tensors]
        before = self.seen[-2] if len(self.seen) > 1 else None
        goes_on = now.fits and before is not None and (before.form, before.out_shapes) == (now.form, now.out_shapes)
        if before is not None and not goes_on:
            # The output of the block before still exists as this block's arguments.
            before.end_here()
        for each in tensors:
            self._owners[id(each)] = now
            weakref.finalize(each, self._owners.pop, id(each), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            self._leak(leaf)
        return func(*args, **(kwargs or {}))

    def _leak(self, value: Any) -> None:
        if isinstance(value, Tensor) and id(value) in self._owners:
            owner = self._owners[id(value)]
            owner.leaks = True
            # The copies that `end_here` makes must not count as reads.
            with _disable_current_modes():
                owner.end_here()

    def runs(self, name: str, output: Any) -> list[LearnedRun]:
        """All runs of at least two blocks; raises if there are none. name, output: of the denoiser."""
        if not self.seen:
            raise TokenMergeError(
                f"no block of {name} was called as a module, so none can be held; take torch.compile off the denoiser, "
                "or call remove first"
            )
        for leaf in pytree.tree_leaves(output):
            self._leak(leaf)
        found = self._found()
        # A block that is not held must not read what a block inside a run returns. Cutting the run may show more leaks.
        while leaks := self._leaks(found):
            for seen in leaks:
                seen.leaks = True
            found = self._found()
        if not found:
            raise TokenMergeError(
                f"{name} cannot be held: of its {len(self.seen)} blocks no two follow each other with nothing between "
                "them that reads or changes what they pass on; call remove first"
            )
        return [_learned(run) for run in found]

    def _found(self) -> list[list[_Seen]]:
        """Runs of at least two blocks, given the leaks that are known so far."""
        # A block that runs twice in a call would need two residuals, so it is not held.
        times = Counter(seen.block.name for seen in self.seen)
        chains: list[list[_Seen]] = [[]]
        for before, now in itertools.pairwise([None, *self.seen]):
            assert now is not None
            if before is None or before.links is None or before.leaks or not chains[-1]:
                chains.append([])
            if now.fits and times[now.block.name] == 1:
                chains[-1].append(now)
            else:
                chains.append([])
        return [run for chain in chains if chain for run in _joined(chain)]

    def _leaks(self, found: list[list[_Seen]]) -> list[_Seen]:
        """Blocks inside runs whose output is read by a block that is not held with them."""
        held = {id(seen): number for number, run in enumerate(found) for seen in run}
        inner = {id(seen) for run in found for seen in run[:-1]}
        return [
            owner
            for seen in self.seen
            for owner in seen.reads
            if id(owner) in inner and held.get(id(seen)) != held[id(owner)] and not owner.leaks
        ]


class _WatchedSite(Site):
    """Shows the calls of a block to the watcher, from where a held site would stand."""

    def __init__(self, watcher: _Watcher, block: Block) -> None:
        self._watcher = watcher
        self._block = block

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        self._watcher.entered(self._block, args, kwargs)
        output = self.original(*args, **kwargs)
        self._watcher.left(output)
        return output


def _state(tensor: Tensor) -> int | Tensor:
    """A value that shows whether a tensor is written to later: its version, or a copy in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor._version


def _is_written(tensor: Tensor, before: int | Tensor) -> bool:
    return tensor._version != before if isinstance(before, int) else not torch.equal(tensor, before)


def _key_of(reference: weakref.ref[Tensor], tensors: dict[Key, Tensor]) -> Key | None:
    wanted = reference()
    return next((key for key, value in tensors.items() if value is wanted), None)


def _alike(one: _Seen, other: _Seen) -> bool:
    return type(one.block.module) is type(other.block.module)


def _joined(chain: list[_Seen]) -> list[list[_Seen]]:
    """The runs of a chain: its segments, with neighbours joined if they have the same streams."""
    runs: list[list[_Seen]] = []
    last: _Seen | None = None  # the last block of the segment before, if it is part of a run
    for segment in _segments(chain):
        whole = len(segment) > 1
        kept = _begun(segment) if whole else []
        if last is not None and whole and last.links == segment[0].links and last.out_shapes == segment[0].out_shapes:
            runs[-1] += segment
        elif len(kept) > 1:
            runs.append(kept)
        last = segment[-1] if runs and runs[-1][-1] is segment[-1] else None
    return runs


def _segments(chain: list[_Seen]) -> list[list[_Seen]]:
    """Cut a chain into segments of one class of block, with tokens in the same arguments."""
    segments = [[chain[0]]]
    for before, now in itertools.pairwise(chain):
        segment = segments[-1]
        goes_on = _alike(before, now) and before.out_shapes == now.out_shapes and before.form == now.form
        if goes_on and before.links == segment[0].links:
            segment.append(now)
        else:
            segments.append([now])
    return segments


def _begun(segment: list[_Seen]) -> list[_Seen]:
    """The segment, without its first block if that takes its tokens as other arguments than the rest."""
    first, keys = segment[0], segment[0].links or ()
    return segment if [first.shapes.get(key) for key in keys] == first.out_shapes else segment[1:]


def _learned(run: list[_Seen]) -> LearnedRun:
    first, last = run[0], run[-1]
    keys = [first.links or (), *(before.links or () for before in run[:-1])]
    ports = [LearnedPorts(each, seen.form, seen.listed) for each, seen in zip(keys, run, strict=True)]
    entered = [first.entered[key] for key in keys[0]] if first.entered else []
    ends = [
        () if any(_is_written(*each) for each in end) else tuple(each for each, _ in end)
        for end in (entered, last.left)
    ]
    return LearnedRun(tuple(seen.block for seen in run), tuple(ports), *ends)

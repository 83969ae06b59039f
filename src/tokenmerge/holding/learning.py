"""Learn from one full call which blocks of a denoiser follow each other with nothing between them.

A run is a maximal chain in which each block is given exactly what the last gave out, and nothing but blocks of the
chain reads what is given on. This is seen, not guessed: hooks record tensors by identity, and a dispatch mode sees
whatever reads them between blocks.
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

# Where an argument stands: its position, or its name.
Key = int | str


# A tensor, and by what one can tell that it was written to since.
Given = tuple[Tensor, "int | Tensor"]
# What a block returned: for every item whether it is a stream, and which, or the item as it was.
Form = tuple[tuple[bool, Any], ...]


@dataclass(frozen=True)
class LearnedPorts:
    """What a block changes, as one call has shown it: the same interface as a table's ports."""

    keys: tuple[Key, ...]  # of the arguments that it changes
    form: Form | None  # None for a tensor by itself
    listed: bool = False  # whether the items come in a list
    in_place: ClassVar[bool] = False  # blocks that write to what they are given are not held

    @property
    def streams(self) -> int:
        return len(self.keys)

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        return tuple(_argument(key, args, kwargs) for key in self.keys)

    def fits(self, output: Any) -> bool:
        """Whether a block returned what it did when it was learned, but for the tensors."""
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

    def output(self, streams: tuple[Tensor, ...]) -> Any:
        if self.form is None:
            return streams[0]
        items = [streams[item] if is_stream else item for is_stream, item in self.form]
        return items if self.listed else tuple(items)


def _argument(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if key in kwargs if isinstance(key, str) else key < len(args):
        return kwargs[key] if isinstance(key, str) else args[key]
    told = f"by the name {key!r}" if isinstance(key, str) else f"as argument {key}"
    raise TokenMergeError(
        f"a held block was not given its tokens {told}, unlike in the first call; call the denoiser as before, or "
        "remove first"
    )


@dataclass
class _Seen:
    """One block in one call."""

    block: Block
    given: dict[Key, weakref.ref[Tensor]]  # tensors among its arguments
    shapes: dict[Key, tuple[int, ...]]
    before: list[Given]  # while it runs: all tensors that it was given
    out: list[weakref.ref[Tensor]] = field(default_factory=list)
    out_shapes: list[tuple[int, ...]] = field(default_factory=list)
    form: Form | None = None
    listed: bool = False
    fits: bool = False  # whether what it returns is a tensor or some, and what it was given is as before
    links: tuple[Key, ...] | None = None  # where the next block takes what this one gave out
    leaks: bool = False  # whether something that always runs reads what it gave out
    reads: list[_Seen] = field(default_factory=list)  # blocks whose output it is given, as by a skip connection
    # Where a run may begin or end: kept until the call has shown whether one does.
    entered: dict[Key, Given] = field(default_factory=dict)
    left: list[Given] = field(default_factory=list)
    next: _Seen | None = None

    def end_here(self) -> None:
        """A run may end with this block, and another begin with the next: keep what is passed on, if it is there."""
        tensors = [tensor for each in self.out if (tensor := each()) is not None]
        if len(tensors) == len(self.out) and not self.left:
            self.left = [(each, _state(each)) for each in tensors]
            if self.next is not None and self.links is not None:
                self.next.entered = dict(zip(self.links, self.left, strict=True))


@dataclass(frozen=True)
class LearnedRun:
    """Blocks that follow each other, and the ports of each. Of the call that showed them: what entered the first and
    left the last, or nothing where that is gone."""

    blocks: tuple[Block, ...]
    ports: tuple[LearnedPorts, ...]
    entered: tuple[Tensor, ...]
    left: tuple[Tensor, ...]


class Learner:
    """Lets the first call of a denoiser show which of its blocks can be held."""

    def __init__(self, blocks: Sequence[Block], learned: Callable[[list[LearnedRun]], None]) -> None:
        self._blocks = list(blocks)
        self._learned = learned

    def watch(self, denoiser: nn.Module) -> None:
        """At the start of a call, until its end, also where that fails."""
        recorder = Recorder(self._blocks)

        def stop(module: nn.Module, _: Any, output: Any) -> None:
            handle.remove()
            recorder.stop()
            if output is not None:
                self._learned(recorder.runs(type(module).__name__, output))

        handle = denoiser.register_forward_hook(stop, always_call=True)


class Recorder(TorchDispatchMode):
    """Records one call of a denoiser, until `stop`."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.seen: list[_Seen] = []
        self._inside = 0
        self._watched: dict[int, _Seen] = {}  # by id of a tensor that a block gave out, while it lives
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
            # Compiled code would not show its tensors.
            module._compiled_call_impl = None

        placement = Placement(module, "", [_WatchedSite(self, block)])

        def undo() -> None:
            if compiled is not None:
                module._compiled_call_impl = compiled
            placement.undo()

        self._undo.append(undo)

    # What is recorded is no part of what torch.compile would make of a whole denoiser.
    @torch.compiler.disable
    def entered(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._inside:
            # What is compiled by itself inside of a block would not run in a mode.
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
            {key: weakref.ref(value) for key, value in tensors.items()},
            {key: tuple(value.shape) for key, value in tensors.items()},
            [(each, _state(each)) for each in (*tensors.values(), *deeper) if isinstance(each, Tensor)],
        )
        # What lies deeper, in a list or mapping, cannot be passed on.
        for leaf in deeper:
            self._leak(leaf)
        before = self.seen[-1] if self.seen else None
        now.reads = [self._watched[id(value)] for value in tensors.values() if id(value) in self._watched]
        if before is not None and before.fits:
            keys = [_key_of(each, tensors) for each in before.out]
            before.links = None if None in keys else tuple(key for key in keys if key is not None)
        if before is not None:
            before.next = now
        again = any(before is not seen and before is not None and seen.block is before.block for seen in self.seen)
        if before is not None and before.links and not before.leaks and not again and _alike(before, now):
            before.left = []
        else:
            now.entered = dict(zip(tensors, now.before, strict=False))
        for owner in now.reads:
            # A skip connection is still there, and what reads it may not be held.
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
        # A block that writes to what it was given, be it its tokens or a cache, cannot be left out.
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
            # What it was given is still there.
            before.end_here()
        for each in tensors:
            self._watched[id(each)] = now
            weakref.finalize(each, self._watched.pop, id(each), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            self._leak(leaf)
        return func(*args, **(kwargs or {}))

    def _leak(self, value: Any) -> None:
        if isinstance(value, Tensor) and id(value) in self._watched:
            self._watched[id(value)].leaks = True
            # Not by an operation that would be seen as another reader.
            with _disable_current_modes():
                self._watched[id(value)].end_here()

    def runs(self, name: str, output: Any = None) -> list[LearnedRun]:
        """All runs of two blocks and more; raises if there are none. output: of the denoiser."""
        if not self.seen:
            raise TokenMergeError(
                f"no block of {name} ran by itself, so that none can be held: take torch.compile off the denoiser, or "
                "remove first"
            )
        for leaf in pytree.tree_leaves(output):
            self._leak(leaf)
        found = self._found()
        # What is not held always runs, and must not read what held blocks give on.
        while leaks := self._leaks(found):
            for seen in leaks:
                seen.leaks = True
            found = self._found()
        if not found:
            raise TokenMergeError(
                f"{name} cannot be held: of its {len(self.seen)} blocks no two follow each other with nothing between "
                "them that reads or changes what they give on; remove first"
            )
        return [_learned(run) for run in found]

    def _found(self) -> list[list[_Seen]]:
        # A block that runs twice in a call has two residuals: it is left to run.
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
        """Blocks inside of runs whose output is read by a block that is not held with them."""
        held = {id(seen): number for number, run in enumerate(found) for seen in run}
        inner = {id(seen) for run in found for seen in run[:-1]}
        return [
            owner
            for seen in self.seen
            for owner in seen.reads
            if id(owner) in inner and held.get(id(seen)) != held[id(owner)] and not owner.leaks
        ]


class _WatchedSite(Site):
    """A block whose calls are recorded, where a site will see them that holds it."""

    def __init__(self, recorder: Recorder, block: Block) -> None:
        self._recorder = recorder
        self._block = block

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        self._recorder.entered(self._block, args, kwargs)
        output = self.original(*args, **kwargs)
        self._recorder.left(output)
        return output


def _state(tensor: Tensor) -> int | Tensor:
    """By which a tensor that is written to can be told; those of inference mode count no versions."""
    return tensor.clone() if tensor.is_inference() else tensor._version


def _is_written(tensor: Tensor, before: int | Tensor) -> bool:
    return tensor._version != before if isinstance(before, int) else not torch.equal(tensor, before)


def _key_of(reference: weakref.ref[Tensor], tensors: dict[Key, Tensor]) -> Key | None:
    wanted = reference()
    return next((key for key, value in tensors.items() if value is wanted), None)


def _alike(one: _Seen, other: _Seen) -> bool:
    return type(one.block.module) is type(other.block.module)


def _joined(chain: list[_Seen]) -> list[list[_Seen]]:
    """The runs of a chain: segments of it that go on in the same streams."""
    runs: list[list[_Seen]] = []
    last: _Seen | None = None  # of the segment before, if that is a run
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
    """Blocks of one class, which all take what they change at the same place."""
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
    """Without its first block, if that was not given what it changes where the second was."""
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

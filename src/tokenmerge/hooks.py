"""Sites: places where tokens are merged and later unmerged. The only file that touches a module.

A component site is a pair of native hooks; it sees normed tokens before, and its output goes to the residual add after:
the paper's form. A block site wraps the forward of one block, or of a span of blocks, and unmerges only the change the
block made, so that the residual stream stays exact. No forward is copied and no module replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import TokenMergeError
from .state import MergeGroup, MergeState, Slot, refresh

# The arguments of a call.
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Argument:
    """An argument of a forward, by name or by position."""

    name: str
    position: int

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.name in kwargs:
            return kwargs[self.name]
        return args[self.position] if len(args) > self.position else None

    def write(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.name in kwargs:
            return args, {**kwargs, self.name: value}
        return (*args[: self.position], value, *args[self.position + 1 :]), kwargs


@dataclass(frozen=True)
class Ports:
    """Where a module takes image tokens in and gives them out."""

    tokens: Argument = Argument("hidden_states", 0)
    outputs: tuple[int, ...] | None = None  # places in the returned tuple; None if the output is the tokens
    text_first: bool = False  # whether text tokens precede the image tokens in the same sequence
    rotary: Argument | None = None

    def outgoing(self, output: Any) -> list[Tensor]:
        return [output] if self.outputs is None else [output[place] for place in self.outputs if place < len(output)]

    def replaced(self, output: Any, tokens: list[Tensor]) -> Any:
        if self.outputs is None:
            return tokens[0]
        pairs = dict(zip(self.outputs, tokens, strict=False))
        return tuple(pairs.get(place, value) for place, value in enumerate(output))


class _Site:
    """What both kinds of site share: the group's maps, and how to put merged tokens into a call."""

    def __init__(self, name: str, state: MergeState, group: MergeGroup, ports: Ports) -> None:
        self.name = name
        self.state = state
        self.group = group
        self.ports = ports

    @property
    def slot(self) -> Slot:
        if self.group.slot is None:
            raise TokenMergeError(
                f"{self.name!r} was called outside of its denoiser; call the denoiser, or remove first"
            )
        return self.group.slot

    @property
    def idle(self) -> bool:
        """Whether tokens pass whole: in a step outside of the schedule's window, or where none would be removed."""
        return self.state.mode == "full" or self.slot.map.merged_count == self.slot.map.token_count

    def merge(self, tokens: Tensor, tables: list[Tensor]) -> Tensor:
        """Refresh what is due, then [B, (T +) N, C] to [B, (T +) M, C]; text tokens pass unmerged."""
        slot = self.slot
        text = tokens.shape[1] - slot.map.token_count
        if text < 0 or (text > 0 and not self.ports.text_first):
            raise TokenMergeError(
                f"{self.name!r} was given {tokens.shape[1]} tokens, not the {slot.map.token_count} of its grid; "
                "chunked feed-forward and other splits of the sequence cannot be merged: disable them, or remove first"
            )
        image = tokens[:, text:] if text else tokens
        refresh(image.detach(), tables, self.state.thread, self.group.handle, slot.map.tensors, slot.rotary)
        merged = slot.map.merge(image)
        return torch.cat([tokens[:, :text], merged], dim=1) if text else merged

    def unmerge(self, tokens: Tensor) -> Tensor:
        """[B, (T +) M, C] to [B, (T +) N, C]."""
        text = tokens.shape[1] - self.slot.map.merged_count
        if not text:
            return self.slot.map.unmerge(tokens)
        return torch.cat([tokens[:, :text], self.slot.map.unmerge(tokens[:, text:])], dim=1)

    def tables(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        rotary = self.ports.rotary.read(args, kwargs) if self.ports.rotary else None
        return [] if rotary is None else list(rotary)

    def with_rotary(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with the rotary tables of the merged sequence."""
        if self.ports.rotary is None or self.ports.rotary.read(args, kwargs) is None:
            return args, kwargs
        return self.ports.rotary.write(args, kwargs, tuple(self.slot.rotary))


class ComponentSite(_Site):
    """Merges what enters one submodule and unmerges what leaves it, or another one."""

    def __init__(
        self,
        name: str,
        state: MergeState,
        group: MergeGroup,
        ports: Ports,
        *,
        enters: bool = True,
        leaves: bool = True,
    ) -> None:
        super().__init__(name, state, group, ports)
        self.enters = enters
        self.leaves = leaves
        self.original: Callable[..., Any] = _not_installed

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        # IP-Adapter masks are resized to the number of queries, which merged queries no longer tell.
        if self.idle or kwargs.get("ip_adapter_masks") is not None:
            return self.original(*args, **kwargs)
        if self.enters:
            merged = self.merge(self.ports.tokens.read(args, kwargs), self.tables(args, kwargs))
            args, kwargs = self.with_rotary(*self.ports.tokens.write(args, kwargs, merged))
        output = self.original(*args, **kwargs)
        if not self.leaves:
            return output
        return self.ports.replaced(output, [self.unmerge(tokens) for tokens in self.ports.outgoing(output)])


class Span:
    """What the blocks of one span hand on: the tokens that entered it, whole and merged."""

    entered: tuple[Tensor, Tensor] | None = None


class BlockSite(_Site):
    """One block of a span of one or more. The first merges, the last unmerges the change, all run on merged tokens."""

    def __init__(
        self,
        name: str,
        state: MergeState,
        group: MergeGroup,
        ports: Ports,
        span: Span,
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__(name, state, group, ports)
        self.span = span
        self.first = first
        self.last = last
        self.original: Callable[..., Any] = _not_installed


def _not_installed(*args: Any, **kwargs: Any) -> Any:
    raise TokenMergeError("this site is not installed; call apply first")


def _run_block(site: BlockSite, /, *args: Any, **kwargs: Any) -> Any:
    if site.idle:
        return site.original(*args, **kwargs)
    entered = None
    if site.first:
        tokens = site.ports.tokens.read(args, kwargs)
        merged = site.merge(tokens, site.tables(args, kwargs))
        entered = (tokens, merged)
        args, kwargs = site.ports.tokens.write(args, kwargs, merged)
    args, kwargs = site.with_rotary(args, kwargs)
    output = site.original(*args, **kwargs)
    if not site.last:
        if entered is not None:
            site.span.entered = entered
        return output
    if entered is None:
        entered = site.span.entered
        site.span.entered = None
    if entered is None:
        raise TokenMergeError(
            f"{site.name!r} ends a span whose first block did not run; skipped layers need sites='block'"
        )
    tokens, merged = entered
    (left,) = site.ports.outgoing(output)
    return site.ports.replaced(output, [site.slot.map.unmerge(left - merged, residual=tokens)])


class Installation:
    """What `apply` put on a model, and how to take exactly that off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._wrapped: list[tuple[str, nn.Module, Callable[..., Any]]] = []

    def observe_calls(self, denoiser: nn.Module, observer: Callable[..., None]) -> None:
        """Call `observer(module, args, kwargs)` before every forward of the denoiser."""
        # A native hook: one of diffusers' on the root would vanish under model offload.
        self._undo.append(denoiser.register_forward_pre_hook(observer, with_kwargs=True).remove)

    def add_component(self, site: ComponentSite, module: nn.Module) -> None:
        self._wrap(site, module, site.run)

    def add_block(self, site: BlockSite, block: nn.Module) -> None:
        self._wrap(site, block, functools.update_wrapper(functools.partial(_run_block, site), block.forward))

    def _wrap(self, site: Any, block: nn.Module, wrapper: Any) -> None:
        before = vars(block).get("forward")
        site.original = block.forward
        block.forward = wrapper
        self._wrapped.append((site.name, block, wrapper))

        def undo() -> None:
            for holder, key in _forward_holders(block):
                if holder.get(key) is not wrapper:
                    continue
                if key == "forward" and holder is vars(block) and before is None:
                    del holder[key]
                else:
                    holder[key] = site.original

        self._undo.append(undo)

    def check(self) -> None:
        """Raise if something else has taken our wrapper off a block: merging must not stop in silence."""
        for name, block, wrapper in self._wrapped:
            if all(holder.get(key) is not wrapper for holder, key in _forward_holders(block)):
                raise TokenMergeError(
                    f"merging was taken off {name!r} by whatever restored its forward (removing offload hooks, say); "
                    "call apply again after such changes"
                )

    def uninstall(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._wrapped.clear()


def _forward_holders(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Every place that may hold a forward: the instance, accelerate's hook over it, and diffusers' hooks over it."""
    yield vars(module), "forward"
    yield vars(module), "_old_forward"
    registry = vars(module).get("_diffusers_hook")
    for reference in registry._fn_refs if registry is not None else ():
        yield vars(reference), "forward"
        yield vars(reference), "original_forward"

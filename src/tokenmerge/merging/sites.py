"""Sites: places where tokens are merged and later unmerged, or blocks held. The only file that calls a block.

A component site merges the normed tokens that enter a submodule, and unmerges what goes to the residual add after it:
the paper's form. A block site merges what enters one block, or a span of blocks, and unmerges only the change the block
made, so that the residual stream stays exact. Where a method matches the tokens that enter a block, an entry site does
that for the block's component sites. A held site leaves its block out between anchors, a held stage all layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import TokenMergeError
from ..holding.residuals import Gap, GapMemory
from .groups import MergeGroup, refresh
from .slots import Slot
from ..runtime.state import MergeState

_FP16_MAX = torch.finfo(torch.float16).max
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
    text_tokens: Argument | None = None  # text that enters beside the image tokens, where as much is given out
    rotary: Argument | None = None

    def outgoing(self, output: Any) -> list[Tensor]:
        return [output] if self.outputs is None else [output[place] for place in self.outputs if place < len(output)]

    def text(self, output: Any) -> Tensor | None:
        """What a block gives out beside its image tokens."""
        if self.outputs is None:
            return None
        others = [value for place, value in enumerate(output) if place not in self.outputs]
        return others[0] if others else None

    def with_text(self, output: Any, text: Tensor) -> Any:
        """The output with other text tokens."""
        assert self.outputs is not None
        return tuple(value if place in self.outputs else text for place, value in enumerate(output))

    def replaced(self, output: Any, tokens: list[Tensor]) -> Any:
        if self.outputs is None:
            return tokens[0]
        pairs = dict(zip(self.outputs, tokens, strict=False))
        return tuple(pairs.get(place, value) for place, value in enumerate(output))


class Site(ABC):
    """What all kinds of site share: the group's maps, and how to put merged tokens into a call."""

    original: Callable[..., Any]  # the forward it stands in for

    def __init__(
        self, name: str, state: MergeState, group: MergeGroup, ports: Ports, *, first: bool = True, last: bool = True
    ) -> None:
        self.name = name
        self.state = state
        self.group = group
        self.ports = ports
        self.first = first  # of the modules that a site runs through: merges
        self.last = last  # unmerges
        self.retired = False  # another has taken its place

    @abstractmethod
    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the forward of a module, and calls `original`."""

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
        return self.retired or self.state.mode == "full" or not self.slot.merges

    def split(self, tokens: Tensor) -> tuple[Tensor | None, Tensor]:
        """Text tokens [B, T, C], if there are any, and image tokens [B, N, C]; raises where those are not the map's."""
        slot = self.slot
        text = tokens.shape[1] - slot.map.token_count
        if text < 0 or (text > 0 and not self.ports.text_first):
            raise TokenMergeError(
                f"{self.name!r} was given {tokens.shape[1]} tokens, not the {slot.map.token_count} of its grid; "
                "chunked feed-forward and other splits of the sequence cannot be merged: disable them, or remove first"
            )
        if tokens.device != slot.map.destinations.device:
            raise TokenMergeError(
                f"{self.name!r} runs on {tokens.device}, its denoiser was called on {slot.map.destinations.device}; "
                "a denoiser spread over devices cannot be merged: put it on one"
            )
        return (tokens[:, :text], tokens[:, text:]) if text else (None, tokens)

    def refresh(self, image: Tensor, tables: list[Tensor]) -> None:
        """Bring the maps up to date with image tokens [B, N, C]."""
        slot = self.slot
        if torch.compiler.is_compiling():
            refresh(image.detach(), tables, self.group.handle, slot.map.tensors, slot.rotary)
        elif self.group.has_due(tables):
            # Not through the dispatcher, which takes as long as several launches.
            self.group.refresh(image.detach(), tables, slot.map.tensors, slot.rotary)

    def merge(self, text: Tensor | None, image: Tensor) -> Tensor:
        """[B, (T +) N, C] to [B, (T +) M, C]; text tokens pass unmerged."""
        merged = self.slot.map.merge(image)
        return merged if text is None else torch.cat([text, merged], dim=1)

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


class ComponentSite(Site):
    """A submodule, or two where tokens enter one and leave another. What leaves is unmerged as it is; what leaves a
    projection to keys or values, which is no `last`, stays merged."""

    def __init__(self, *arguments: Any, refreshes: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.refreshes = refreshes  # or an entry site does

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        # IP-Adapter masks are resized to the number of queries, which merged queries no longer tell. Self-attention is
        # given them too, and ignores them.
        masked = kwargs.get("ip_adapter_masks") is not None and kwargs.get("encoder_hidden_states") is not None
        if self.idle or masked:
            return self.original(*args, **kwargs)
        if self.first:
            text, image = self.split(self.ports.tokens.read(args, kwargs))
            if self.refreshes:
                self.refresh(image, self.tables(args, kwargs))
            args, kwargs = self.with_rotary(*self.ports.tokens.write(args, kwargs, self.merge(text, image)))
        output = self.original(*args, **kwargs)
        if not self.last:
            return output
        return self.ports.replaced(output, [self.unmerge(tokens) for tokens in self.ports.outgoing(output)])


class EntrySite(Site):
    """A block whose component sites share the map that is made from the tokens entering it. They pass whole."""

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.idle:
            _, image = self.split(self.ports.tokens.read(args, kwargs))
            self.refresh(image, self.tables(args, kwargs))
        return self.original(*args, **kwargs)


class Span:
    """What the blocks of one span hand on: the tokens that entered it, whole and merged."""

    entered: tuple[Tensor, Tensor] | None = None


class BlockSite(Site):
    """One block of a span of one or more. All run on merged tokens; of what leaves the last, the change is unmerged.

    With a memory, a block by itself also runs whole at anchors; between them it adds the gap that was seen there, to
    as much of its change as is trusted.
    """

    def __init__(self, *arguments: Any, span: Span, memory: GapMemory | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.span = span
        self.memory = memory
        self.trust = self.state.config.trust if memory is not None else 1.0

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.idle:
            return self.original(*args, **kwargs)
        gap = self.memory.current if self.memory is not None else None
        if gap is None:
            return self.run_merged(args, kwargs, None)
        if self.state.mode == "anchor":
            whole = self.original(*args, **kwargs)
            self.remember(gap, whole, self.run_merged(args, kwargs, None))
            return whole
        output = self.run_merged(args, kwargs, gap.image_now())
        text, missing = self.ports.text(output), gap.text_now()
        return output if text is None or missing is None else self.ports.with_text(output, _clipped(text + missing))

    def remember(self, gap: Gap, whole: Any, merged: Any) -> None:
        """Keep what the block gave out on all tokens beyond what it gave on merged ones."""
        (image,), (merged_image,) = self.ports.outgoing(whole), self.ports.outgoing(merged)
        text, merged_text = self.ports.text(whole), self.ports.text(merged)
        missing = None if text is None or merged_text is None else (text - merged_text).detach()
        gap.keep((image - merged_image).detach(), missing)

    def run_merged(self, args: tuple[Any, ...], kwargs: dict[str, Any], gap: Tensor | None) -> Any:
        """The block on merged tokens, with the gap [B, N, C] added to what it changes."""
        entered = None
        if self.first:
            tokens = self.ports.tokens.read(args, kwargs)
            text, image = self.split(tokens)
            self.refresh(image, self.tables(args, kwargs))
            merged = self.merge(text, image)
            entered = (tokens, merged)
            args, kwargs = self.ports.tokens.write(args, kwargs, merged)
        args, kwargs = self.with_rotary(args, kwargs)
        output = self.original(*args, **kwargs)
        if not self.last:
            if entered is not None:
                self.span.entered = entered
            return output
        if entered is None:
            entered = self.span.entered
            self.span.entered = None
        if entered is None:
            raise TokenMergeError(
                f"{self.name!r} ends a span whose first block did not run; "
                "skipped layers and gradient checkpointing need sites='block'"
            )
        tokens, merged = entered
        (left,) = self.ports.outgoing(output)
        if self.trust < 1.0:
            left = torch.lerp(merged, left, self.trust)
        return self.ports.replaced(output, [self.slot.map.unmerge(left, residual=tokens, entered=merged, gap=gap)])


class HeldSite(Site):
    """A block that runs at anchors alone. Between them the first of a span gives out what entered, changed as the span
    did at the last anchors, and the others pass it on. Where something acts between blocks, each is a span `alone`."""

    def __init__(self, *arguments: Any, span: GapMemory, alone: GapMemory, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.span = span
        self.alone = alone

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.idle:
            return self.original(*args, **kwargs)
        alone = self.alone.current is not None
        memory = self.alone if alone else self.span
        gap, first, last = memory.current, alone or self.first, alone or self.last
        if gap is None:
            return self.original(*args, **kwargs)
        tokens = self.ports.tokens.read(args, kwargs)
        text = self.ports.text_tokens.read(args, kwargs) if self.ports.text_tokens else None
        if self.state.mode == "anchor":
            if first:
                memory.entered = tokens.detach(), None if text is None else text.detach()
            output = self.original(*args, **kwargs)
            # There is no map to make; this says that the anchor has run.
            self.refresh(self.split(tokens)[1], [])
            if last:
                self.remember(memory, gap, output)
            return output
        if first:
            tokens, change = _clipped(tokens + gap.image_now()), gap.text_now()
            text = text if text is None or change is None else _clipped(text + change)
        return tokens if self.ports.outputs is None else (text, tokens)

    def remember(self, memory: GapMemory, gap: Gap, output: Any) -> None:
        """Keep what a span has changed, of which this is the last block."""
        if memory.entered is None:
            raise TokenMergeError(
                f"{self.name!r} ran without the first of the blocks that are held with it; skipped layers and gradient "
                "checkpointing need span=1"
            )
        (tokens, text), memory.entered = memory.entered, None
        (image,), text_out = self.ports.outgoing(output), self.ports.text(output)
        change = None if text is None or text_out is None else _clipped(text_out.detach() - text)
        gap.keep(_clipped(image.detach() - tokens), change)


class HeldStage(Site):
    """A stage of a UNet, with all its layers, that runs at anchors alone. Between them the last stage gives out what
    entered the first, changed as all of them did at the last anchors; what the others give out is not read."""

    def __init__(self, *arguments: Any, memory: GapMemory, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memory = memory
        self.skips: int | None = None  # of a stage that also gives out what skip connections take: how many

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        gap = self.memory.current
        if self.idle or gap is None:
            return self.original(*args, **kwargs)
        features = self.ports.tokens.read(args, kwargs)
        if self.first:
            self.memory.entered = features.detach(), None
        if self.state.mode == "anchor":
            output = self.original(*args, **kwargs)
            self.skips = len(output[1]) if isinstance(output, tuple) else None
            if self.last:
                self.remember(gap, output.detach())
            return output
        if self.last:
            entered = self.take_entered()
            return _clipped(entered + gap.image_now().view(entered.shape))
        # As many as always, of a shape that whatever a ControlNet adds goes with.
        nothing = features.new_empty(())
        return nothing if self.skips is None else (nothing, (nothing,) * self.skips)

    def remember(self, gap: Gap, features: Tensor) -> None:
        """Keep what all stages have changed, [B, C, H, W], in the order it has."""
        change = _clipped(features - self.take_entered())
        # There is no map to make; this says that the anchor has run.
        self.refresh(features.flatten(2).transpose(1, 2), [])
        gap.keep(change.reshape(gap.image.values.shape), None)

    def take_entered(self) -> Tensor:
        """What entered the first stage in this call, which is kept no longer."""
        if self.memory.entered is None:
            raise TokenMergeError(f"{self.name!r} ran without the first of the stages that are held; use preset='hold'")
        (features, _), self.memory.entered = self.memory.entered, None
        return features


def _clipped(tokens: Tensor) -> Tensor:
    """Within what fp16 can hold, as diffusers' blocks keep what they give out."""
    return tokens.clip(-_FP16_MAX, _FP16_MAX) if tokens.dtype == torch.float16 else tokens

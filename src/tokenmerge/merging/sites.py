"""Sites where tokens merge and are unmerged.

A component site merges the normed tokens that enter a submodule, and unmerges what goes to the residual add after it:
the paper's form. A block site merges what enters a block, and unmerges only the change the block made, so that the
residual stream stays exact. Where a method matches the tokens that enter a block, an entry site does that for the
block's component sites.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import TokenMergeError
from ..families.base import Call, Ports
from ..runtime.installing import Site
from .controller import Merging
from .groups import MergeGroup, refresh
from .slots import Slot


class MergeSite(Site):
    """What all kinds of merge site share: the group's maps, and how to put merged tokens into a call."""

    visits = True  # whether it asks for a refresh when it runs

    def __init__(self, name: str, merging: Merging, group: MergeGroup, ports: Ports) -> None:
        self.name = name
        self.merging = merging
        self.group = group
        self.ports = ports
        self.level = group.level

    @property
    def slot(self) -> Slot:
        if self.group.slot is None:
            raise TokenMergeError(
                f"{self.name!r} was called outside of its denoiser; call the denoiser, or remove first"
            )
        return self.group.slot

    @property
    def idle(self) -> bool:
        """Whether tokens pass whole: in a step that does not merge, or where none would be removed."""
        return self.retired or not self.merging.acts or not self.slot.merges

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
        elif self.group.visit(tables):
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


class ComponentSite(MergeSite):
    """A submodule, or two where tokens enter one (`first`) and leave another (`last`). What leaves is unmerged as it
    is; what leaves a projection to keys or values, which is no `last`, stays merged."""

    def __init__(self, *arguments: Any, first: bool, last: bool, refreshes: bool) -> None:
        super().__init__(*arguments)
        self.first = first
        self.last = last
        self.visits = first and refreshes  # or an entry site does

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        # IP-Adapter masks are resized to the number of queries, which merged queries no longer tell. Self-attention is
        # given them too, and ignores them.
        masked = kwargs.get("ip_adapter_masks") is not None and kwargs.get("encoder_hidden_states") is not None
        if self.idle or masked:
            return self.original(*args, **kwargs)
        if self.first:
            text, image = self.split(self.ports.tokens.read(args, kwargs))
            if self.visits:
                self.refresh(image, self.tables(args, kwargs))
            args, kwargs = self.with_rotary(*self.ports.tokens.write(args, kwargs, self.merge(text, image)))
        output = self.original(*args, **kwargs)
        if not self.last:
            return output
        return self.ports.replaced(output, [self.unmerge(tokens) for tokens in self.ports.outgoing(output)])


class EntrySite(MergeSite):
    """A block whose component sites share the map that is made from the tokens entering it. They pass whole."""

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.idle:
            _, image = self.split(self.ports.tokens.read(args, kwargs))
            self.refresh(image, self.tables(args, kwargs))
        return self.original(*args, **kwargs)


class BlockSite(MergeSite):
    """One block. It runs on merged tokens, and what it changed in them is unmerged."""

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.idle:
            return self.original(*args, **kwargs)
        tokens = self.ports.tokens.read(args, kwargs)
        text, image = self.split(tokens)
        self.refresh(image, self.tables(args, kwargs))
        merged = self.merge(text, image)
        args, kwargs = self.with_rotary(*self.ports.tokens.write(args, kwargs, merged))
        output = self.original(*args, **kwargs)
        (left,) = self.ports.outgoing(output)
        return self.ports.replaced(output, [self.slot.map.unmerge(left, residual=tokens, entered=merged)])

"""Sites where tokens merge and are unmerged.

A component site has the paper's form: it merges the normed tokens that enter a submodule, and unmerges what goes to
the residual add after it. A block site merges the tokens that enter a block and unmerges only the block's change, so
that the residual stream stays exact. Some methods match the tokens that enter a block: an entry site then makes the map
for the block's component sites.
"""

from __future__ import annotations

from functools import partial
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
    """The base of all merge sites: the group's maps, and how to put merged tokens into a call."""

    visits = True  # whether this site asks for a refresh when it runs

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
                f"{self.name!r} was called outside of its denoiser; call the denoiser, or call remove first"
            )
        return self.group.slot

    @property
    def idle(self) -> bool:
        """Whether tokens pass unmerged: the step does not merge, or no token would be removed."""
        return self.retired or not self.merging.acts or not self.slot.merges

    def split(self, tokens: Tensor, count: int) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The `count` image tokens that merge, [B, N, C], between the tokens that precede and follow them, if any."""
        others = tokens.shape[1] - count
        if not others:
            return None, tokens, None
        text_after = self.ports.text == "after"
        after = others - self.slot.before.shape[0] if text_after else self.slot.after.shape[0]
        first = others - after
        return (
            tokens[:, :first] if first else None,
            tokens[:, first : first + count],
            tokens[:, first + count :] if after else None,
        )

    def split_whole(self, tokens: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """`split` of tokens that enter the site; raises if they do not fit the map."""
        count, whole = self.slot.map.token_count, self.slot.before.shape[0] + self.slot.after.shape[0]
        others = tokens.shape[1] - count
        if others < whole or (others > whole and not self.ports.text):
            raise TokenMergeError(
                f"{self.name!r} received {tokens.shape[1]} tokens, not the {count + whole} of its grid; chunked "
                "feed-forward and other splits of the sequence cannot be merged: disable them, or call remove first"
            )
        device = self.slot.map.destinations.device
        if tokens.device != device:
            raise TokenMergeError(
                f"{self.name!r} runs on {tokens.device}, but its denoiser was called on {device}; a denoiser spread "
                "over several devices cannot be merged: put it on one"
            )
        return self.split(tokens, count)

    def refresh(self, image: Tensor) -> None:
        """Bring the maps up to date with image tokens [B, N, C]."""
        if torch.compiler.is_compiling():
            refresh(image.detach(), self.group.handle, self.slot.map.tensors)
        elif self.group.visit():
            # A direct call, because the dispatcher takes as long as several kernel launches.
            self.group.refresh(image.detach(), self.group.writable)

    def unmerge(self, tokens: Tensor) -> Tensor:
        """Unmerge what leaves the site: its merged tokens, [B, M, C], become [B, N, C]."""
        first, merged, after = self.split(tokens, self.slot.map.merged_count)
        return _joined(first, self.slot.map.unmerge(merged), after)

    def merged_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor) -> Call:
        """The call with merged tokens, and per-token arguments reduced to the rows of their destinations."""
        args, kwargs = self.ports.tokens.write(args, kwargs, tokens)
        for each in self.ports.per_token:
            value = each.argument.read(args, kwargs)
            rows = each.rows(value)
            if rows is None:
                continue
            gather = partial(self.gather, axis=each.axis % rows.ndim, text=each.text)
            # Compiled code fuses the gather into its consumer.
            picked = gather(rows) if torch.compiler.is_compiling() else self.group.gathered(rows, gather)
            args, kwargs = each.argument.write(args, kwargs, each.replaced(value, picked))
        return args, kwargs

    def gather(self, table: Tensor, *, axis: int, text: str) -> Tensor:
        """Reduce a table with a row per token along `axis` to the rows of the merged sequence."""
        destinations, count = self.slot.map.destinations, self.slot.map.token_count
        # CogView4 makes its rotary tables on the CPU, whatever device it runs on.
        table = table.to(destinations.device)
        others = table.shape[axis] - count
        first = others - self.slot.after.shape[0] if text == "first" else self.slot.before.shape[0]
        samples = destinations.shape[0]
        if samples > 1 and table.shape[0] == 1:
            table = table.expand(samples, *table.shape[1:])
        image = table.narrow(axis, first, count)
        if samples == 1:
            picked = image.index_select(axis, destinations[0])
        else:
            shape = [samples, *(-1 if number == axis else 1 for number in range(1, table.ndim))]
            picked = image.take_along_dim(destinations.view(shape), axis)
        if not others:
            return picked
        after = table.narrow(axis, first + count, others - first)
        return torch.cat([table.narrow(axis, 0, first), picked, after], axis)


def _joined(first: Tensor | None, image: Tensor, after: Tensor | None) -> Tensor:
    parts = [each for each in (first, image, after) if each is not None]
    return image if len(parts) == 1 else torch.cat(parts, dim=1)


class ComponentSite(MergeSite):
    """One submodule, or one of two: tokens enter the `first` and leave the `last`, where the whole output is unmerged.

    A projection to keys or values is never `last`, so its output stays merged.
    """

    def __init__(self, *arguments: Any, first: bool, last: bool, refreshes: bool) -> None:
        super().__init__(*arguments)
        self.first = first
        self.last = last
        self.visits = first and refreshes  # otherwise an entry site asks

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        # diffusers resizes IP-Adapter masks to a grid of all queries, and merged queries lie on none. Self-attention
        # receives masks too, and ignores them.
        masked = kwargs.get("ip_adapter_masks") is not None and kwargs.get("encoder_hidden_states") is not None
        if self.idle or masked:
            return self.original(*args, **kwargs)
        if self.first:
            first, image, after = self.split_whole(self.ports.tokens.read(args, kwargs))
            if self.visits:
                self.refresh(image)
            args, kwargs = self.merged_call(args, kwargs, _joined(first, self.slot.map.merge(image), after))
        output = self.original(*args, **kwargs)
        if not self.last:
            return output
        return self.ports.replaced(output, [self.unmerge(tokens) for tokens in self.ports.outgoing(output)])


class EntrySite(MergeSite):
    """A block whose component sites share one map, made from the tokens that enter the block. These pass unmerged."""

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self.idle:
            _, image, _ = self.split_whole(self.ports.tokens.read(args, kwargs))
            self.refresh(image)
        return self.original(*args, **kwargs)


class BlockSite(MergeSite):
    """A block that runs on merged tokens. Its change to them is unmerged."""

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.idle:
            return self.original(*args, **kwargs)
        first, image, after = self.split_whole(self.ports.tokens.read(args, kwargs))
        self.refresh(image)
        merged = self.slot.map.merge(image)
        args, kwargs = self.merged_call(args, kwargs, _joined(first, merged, after))
        entered = merged.clone() if self.ports.in_place else merged
        output = self.original(*args, **kwargs)
        (left,) = self.ports.outgoing(output)
        first, changed, after = self.split(left, self.slot.map.merged_count)
        changed = self.slot.map.unmerge(changed, residual=image, entered=entered)
        return self.ports.replaced(output, [_joined(first, changed, after)])

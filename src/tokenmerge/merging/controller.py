"""Merging: the groups of one `apply`, and what every denoiser call does with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..config import Merge
from ..errors import TokenMergeError
from ..families.base import Family
from ..families.calls import DenoiserCall, grids_at_level, grids_of_ids
from ..runtime.clock import MAX_CALLS, Clock
from ..runtime.timeline import HELD, MERGED, Step
from .groups import MergeGroup, Past
from .methods import Method


class Merging:
    """Prepares every group of layers for a call, and tells sites whether tokens merge in it."""

    def __init__(self, technique: Merge, clock: Clock) -> None:
        self.technique = technique
        self.groups: list[MergeGroup] = []
        # Whether tokens merge in this call. Before the first call blocks have no maps, and refuse to run alone.
        self.acts = True
        self._clock = clock
        self._begins = True  # whether the next call is the first of an image
        # Moves the LoRA, if there is one, to the device and dtype of a call.
        self.adapt: Callable[[torch.device, torch.dtype], None] | None = None

    def add_group(self, name: str, level: int, method: Method[Any], *, shared: bool) -> MergeGroup:
        group = MergeGroup(name, len(self.groups), method, self.technique, self._clock, level, shared)
        self.groups.append(group)
        return group

    def check_call(self, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse arguments of a denoiser call that merged tokens cannot follow."""
        reason = family.unmergeable_call(args, kwargs)
        if reason:
            raise TokenMergeError(f"{reason}; use Hold, or call remove first")
        for argument in family.masks:
            if argument.read(args, kwargs) is not None:
                raise TokenMergeError(
                    f"{argument.name} masks image tokens in self-attention, which merged tokens cannot follow; "
                    "leave it out, or call remove first"
                )
        if family.attention_kwargs is None:
            return
        extra = family.attention_kwargs.read(args, kwargs) or {}
        for name in ("attention_mask", "gligen"):
            if extra.get(name) is not None:
                raise TokenMergeError(
                    f"{family.attention_kwargs.name} has {name!r}, which needs every image token in its place; "
                    "leave it out, or call remove first"
                )
        if extra.get("ip_adapter_masks") is not None and self.technique.sites != "component":
            raise TokenMergeError(
                "IP-Adapter masks need cross-attention over all image tokens; use Merge(sites='component'), which "
                "does not merge masked cross-attention, or Hold, or leave the masks out"
            )

    def begin_image(self) -> None:
        self._begins = True
        for group in self.groups:
            group.selections = group.weighings = 0

    def enter(self, call: DenoiserCall, step: Step, *, waits: bool) -> None:
        """Learn the token grids, and prepare every group for them. waits: whether calls wait for the device anyway."""
        self.acts = step.kind == MERGED
        if step.kind == HELD:
            return
        self._learn_grids(call, waits)
        if self.adapt is not None:
            self.adapt(call.device, call.dtype)
        for group in self.groups:
            group.enter(call)
        if not any(group.slot is not None and group.slot.merges for group in self.groups):
            raise TokenMergeError(
                f"at this size, ratio {self.technique.ratio} removes no token in regions {self.technique.regions!r}; "
                "use larger regions or a larger image, or call remove first"
            )
        self._begins = False

    def _learn_grids(self, call: DenoiserCall, waits: bool) -> None:
        """Give every group the grids of its image tokens."""
        if call.ids is None:
            for group in self.groups:
                group.grids = grids_at_level(call, group.level)
            return
        # Once per image, because reading ids waits for the device.
        known = self.groups[0].grids
        anew = self._begins or waits or self._clock.call >= MAX_CALLS
        if anew or sum(grid.count for grid in known) != call.tokens:
            known = grids_of_ids(call.ids)
            for group in self.groups:
                group.grids = known

    def leave(self) -> None:
        """The end of a call that did not fail."""
        if self.acts:
            for group in self.groups:
                group.note()
        # Blocks that are called alone do not merge.
        self.acts = False

    def close(self) -> None:
        self.acts = False

    def past(self) -> list[Past] | None:
        """What this call does, for `recall` when a backward pass runs its blocks again; None if it does not merge."""
        return [group.past() for group in self.groups] if self.acts else None

    def recall(self, past: list[Past] | None) -> None:
        """Do the same again, until `close`. Nothing is decided or selected anew."""
        self.acts = past is not None
        for group, each in zip(self.groups, past or (), strict=False):
            group.recall(each)

    @property
    def visits(self) -> int:
        """How many merged layers ran in this call."""
        return sum(group.visits for group in self.groups)

    @property
    def renews(self) -> bool:
        """Whether this call changes a map."""
        return any(group.renews for group in self.groups)

    # For CUDA graphs of calls.

    def kind(self) -> Hashable | None:
        kinds = tuple(group.kind() for group in self.groups)
        return None if None in kinds else kinds

    def done(self) -> list[tuple[int, int]]:
        return [group.done for group in self.groups]

    def set_done(self, done: list[tuple[int, int]]) -> None:
        for group, each in zip(self.groups, done, strict=True):
            group.done = each

    def owners(self) -> list[Any]:
        return [group.slot for group in self.groups]

"""The places of a model that could merge, one for every component or block, and why some do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..config import Merge
from ..errors import TokenMergeError
from ..families.base import Block, Component, Family
from ..runtime.installing import Installation
from ..runtime.timeline import ALWAYS
from .controller import Merging
from .groups import MergeGroup
from .lora import Adaptation, Lora, install_lora
from .methods import method_for
from .sites import BlockSite, ComponentSite, EntrySite


@dataclass(frozen=True)
class MergePlace:
    """A component or block that could merge."""

    name: str
    block: Block
    component: str  # a component's name, or "block"
    group: str  # name of the group whose maps it uses
    depth: float  # share of the model's blocks that run before it
    part: Component | None = None
    skipped: str = ""  # why it does not merge, if it does not


def merge_places(denoiser: nn.Module, family: Family, technique: Merge) -> tuple[MergePlace, ...]:
    """Every place of a denoiser, in running order. Raises if none would merge although the ratio asks for it."""
    blocks = family.blocks(denoiser)
    _check_method(denoiser, family, blocks, technique)
    places = tuple(_places(blocks, technique))
    if technique.ratio and all(place.skipped for place in places):
        if not places:
            raise TokenMergeError(
                f"{type(denoiser).__name__} has no transformer blocks to merge; use Hold(what='stages'), with a "
                "scheduler that adds no noise, such as DDIMScheduler"
            )
        reasons = "; ".join(f"{count} x {reason}" for reason, count in skip_reasons(places).items())
        raise TokenMergeError(
            f"no site of {type(denoiser).__name__} would merge ({reasons}); change levels, components, skip_first or "
            "skip_last"
        )
    return places


def skip_reasons(places: Iterable[MergePlace]) -> dict[str, int]:
    return dict(Counter(place.skipped for place in places if place.skipped))


def shares_destinations(places: Iterable[MergePlace]) -> bool:
    """Whether all samples of a batch must have the same destinations: a positional table that they share can be
    gathered for one set only."""
    return any(each.axis == 0 for place in places for each in place.block.kind.ports.per_token)


def install_merging(
    places: Sequence[MergePlace], merging: Merging, installation: Installation, lora: Lora | None = None
) -> None:
    """Put sites on all places, and on the layers that a LoRA changes."""
    adaptation = Adaptation(lora) if lora is not None else None
    merging.adapt = adaptation.enter if adaptation is not None else None
    shared = shares_destinations(places)
    groups: dict[str, MergeGroup] = {}
    entered: set[str] = set()
    adapted: set[str] = set()
    for place in places:
        method, block = method_for(merging.technique, place.depth), place.block
        if place.group not in groups:
            groups[place.group] = merging.add_group(place.group, block.level, method, shared=shared)
        group, ports = groups[place.group], block.kind.ports
        # Sites added first are innermost, so a LoRA sees the merged tokens that reach its layers.
        if adaptation is not None and block.name not in adapted:
            adapted.add(block.name)
            install_lora(adaptation, block, merging, group, installation)
        if place.part is None:
            installation.add(BlockSite(place.name, merging, group, ports), block.module)
            continue
        always = method.RENEWS == ALWAYS
        if always and block.name not in entered:
            entered.add(block.name)
            installation.add(EntrySite(block.name, merging, group, ports), block.module)
        entry, leave = place.part.entry, place.part.leave or place.part.entry
        for name in dict.fromkeys((entry, leave)):
            ends = {"first": name == entry, "last": name == leave and not method.KEYS_VALUES}
            site = ComponentSite(place.name, merging, group, place.part.ports, **ends, refreshes=not always)
            installation.add(site, block.module, name)


def _check_method(denoiser: nn.Module, family: Family, blocks: list[Block], technique: Merge) -> None:
    """Refuse what the model or the method cannot do."""
    obstacle = family.unmergeable(denoiser)
    if obstacle:
        way_out = "use Hold, unless its first call is refused too" if family.learned else "use Hold"
        raise TokenMergeError(f"{type(denoiser).__name__} cannot be merged: {obstacle}; {way_out}")
    if blocks and technique.sites == "component" and not any(block.kind.components for block in blocks):
        raise TokenMergeError(
            f"{type(denoiser).__name__} merges once per block, not per component; use sites='block', or the preset "
            "'toma-once' or 'dit'"
        )
    if technique.levels is not None and family.name != "unet":
        raise TokenMergeError(f"levels chooses among a UNet's resolutions; {type(denoiser).__name__} has only one")
    method = method_for(technique)
    method.effective(technique)
    method.check_read(technique)
    if technique.sites not in method.SITES:
        raise TokenMergeError(
            f"method {technique.method!r} cannot be applied at sites={technique.sites!r}; "
            f"use sites={method.SITES[0]!r}, or the preset {technique.method!r}"
        )
    if method.KEYS_VALUES and not any(block.kind.keys_values for block in blocks):
        raise TokenMergeError(
            f"method {technique.method!r} leaves fewer keys than queries, but {type(denoiser).__name__} rotates both "
            "by the same rotary table; use another method, such as 'pool'"
        )


def _skipped_blocks(blocks: list[Block], technique: Merge) -> dict[str, str]:
    """Why blocks are skipped, by block name."""
    if not technique.ratio:
        return {block.name: "ratio 0 keeps every token" for block in blocks}
    reasons: dict[str, str] = {}
    for group in dict.fromkeys(block.group for block in blocks):
        members = [block for block in blocks if block.group == group]
        first = _count(technique.skip_first, len(members))
        last = _count(technique.skip_last, len(members))
        for position, block in enumerate(members):
            if technique.levels is not None and 2**block.level not in technique.levels:
                reasons[block.name] = f"{group} is not among levels {technique.levels}"
            elif position < first:
                reasons[block.name] = f"{_among('first', first)} of {group} (skip_first)"
            elif position >= len(members) - last:
                reasons[block.name] = f"{_among('last', last)} of {group} (skip_last)"
    return reasons


def _among(which: str, count: int) -> str:
    return f"the {which} block" if count == 1 else f"one of the {which} {count} blocks"


def _count(skip: int | float, members: int) -> int:
    """Blocks to skip: a number as it is, a share of the members rounded."""
    return skip if isinstance(skip, int) else round(skip * members)


def _places(blocks: list[Block], technique: Merge) -> Iterator[MergePlace]:
    skipped = _skipped_blocks(blocks, technique)
    for number, block in enumerate(blocks):
        depth = number / len(blocks)
        method = method_for(technique, depth)
        group = " ".join(word for word in (block.group, method.label) if word)
        if technique.sites == "block":
            yield MergePlace(block.name, block, "block", group, depth, None, skipped.get(block.name, ""))
            continue
        inside = dict(block.module.named_modules(remove_duplicate=False))
        components = {"self_attention": block.kind.keys_values} if method.KEYS_VALUES else block.kind.components
        for name, parts in components.items():
            reason = skipped.get(block.name, "" if name in technique.components else f"{name} is not in components")
            for part in parts:
                # Some blocks lack optional components.
                if part.entry in inside:
                    yield MergePlace(f"{block.name}.{part.entry}", block, name, group, depth, part, reason)

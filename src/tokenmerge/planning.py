"""Plans: which sites merge, over which grids, from how many tokens to how many, and what that saves. No tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from .adapters import Block, Component, Family
from .config import MergeConfig, TokenMergeError
from .grid import Layout, TokenGrid, partition_grids
from .state import DenoiserCall, grid_at_level
from .tables import table

# How the paper's 7 d^2 N + 2 d N^2 multiplications of a block divide over its components: (d^2 N, d N^2).
_SHARES = {"self_attention": (3, 2), "cross_attention": (2, 0), "mlp": (2, 0)}


@dataclass(frozen=True)
class PlannedSite:
    """One place that could be merged, and why it is not if it is not."""

    name: str
    block: Block
    component: str  # a component's name, or "block", or "span"
    part: Component | None = None
    skipped: str = ""
    first: bool = True  # of its span
    last: bool = True
    leader: str = ""  # group whose maps a span uses: that of its first block

    @property
    def group(self) -> str:
        return self.leader or self.block.group


@dataclass(frozen=True)
class PlannedGroup:
    """The layers that share one map, at one size of image."""

    name: str
    blocks: int
    merged_blocks: int
    merges: int  # times tokens are merged and unmerged in one denoiser call
    width: int
    grid: TokenGrid
    layout: Layout
    regions: str
    saved: float  # multiplications of one denoiser call, by the paper's cost model
    spent: float
    total: float


@dataclass(frozen=True)
class Plan:
    """What `apply` will do to a model, and at a given size what that comes to."""

    model: str
    family: str
    config: MergeConfig
    sites: tuple[PlannedSite, ...]
    groups: tuple[PlannedGroup, ...] = ()

    @property
    def merged_sites(self) -> tuple[PlannedSite, ...]:
        return tuple(site for site in self.sites if not site.skipped)

    @property
    def saved(self) -> float:
        """Share of the transformer blocks' multiplications that merging removes."""
        return sum(group.saved for group in self.groups) / self._total

    @property
    def spent(self) -> float:
        """Share of the transformer blocks' multiplications that merging itself costs."""
        return sum(group.spent for group in self.groups) / self._total

    @property
    def _total(self) -> float:
        return sum(group.total for group in self.groups) or 1.0

    def to_dict(self) -> dict[str, object]:
        return {
            "model": self.model,
            "family": self.family,
            "config": self.config.to_dict(),
            "sites": [
                {"name": site.name, "component": site.component, "group": site.group, "skipped": site.skipped}
                for site in self.sites
            ],
            "groups": [
                {
                    "name": group.name,
                    "grid": str(group.grid),
                    "regions": group.regions,
                    "tokens": group.layout.tokens,
                    "merged": group.layout.merged,
                    "blocks": group.blocks,
                    "merged_blocks": group.merged_blocks,
                    "merges": group.merges,
                    "saved": group.saved,
                    "spent": group.spent,
                    "total": group.total,
                }
                for group in self.groups
            ],
            "saved": self.saved,
            "spent": self.spent,
        }

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.family}): {self._headline()}"]
        if self.groups:
            rows = [
                [
                    group.name,
                    f"{group.merged_blocks} of {group.blocks}",
                    str(group.grid),
                    f"{group.layout.tokens} -> {group.layout.merged if group.merges else group.layout.tokens}",
                    group.regions if group.merges else "not merged",
                    f"{group.saved / self._total:.1%}",
                    f"{group.spent / self._total:.1%}",
                ]
                for group in self.groups
            ]
            lines += ["", table(["group", "blocks merged", "grid", "tokens", "regions", "saved", "spent"], rows)]
            lines += [
                "",
                f"Multiplications in transformer blocks, by the paper's cost model: merging saves {self.saved:.1%}",
            ]
            lines[-1] += f" and spends {self.spent:.1%}."
        reasons = skip_reasons(self.sites)
        if reasons:
            lines += ["", "Not merged:", *(f"  {count} x {reason}" for reason, count in reasons.items())]
        return "\n".join(lines)

    def _headline(self) -> str:
        how = {"component": "once per component", "block": "once per block", "span": "once per span of blocks"}
        counts = f"{len(self.merged_sites)} of {len(self.sites)} sites"
        return f"{self.config.method} at ratio {self.config.ratio:g}, {how[self.config.sites]}, {counts}"


def skip_reasons(sites: Iterable[PlannedSite]) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for site in sites:
        if site.skipped:
            reasons[site.skipped] = reasons.get(site.skipped, 0) + 1
    return reasons


def plan_model(denoiser: nn.Module, family: Family, config: MergeConfig, call: DenoiserCall | None = None) -> Plan:
    """The plan for a denoiser; with the call that an image of some size leads to, also its groups and costs."""
    blocks = family.blocks(denoiser)
    if config.levels is not None and family.name != "unet":
        raise TokenMergeError(f"levels chooses among a UNet's resolutions; {type(denoiser).__name__} has only one")
    skipped = _skipped_blocks(blocks, config)
    list_sites = _component_sites if config.sites == "component" else _block_sites
    sites = list_sites(blocks, skipped, config)
    if config.method != "none" and config.ratio > 0 and not any(not site.skipped for site in sites):
        reasons = "; ".join(f"{count} x {reason}" for reason, count in skip_reasons(sites).items())
        raise TokenMergeError(
            f"no site of {type(denoiser).__name__} would be merged ({reasons or 'it has no transformer blocks'}); "
            "change levels, components, skip_first or skip_last"
        )
    groups = () if call is None else tuple(_planned_groups(blocks, sites, config, call))
    return Plan(type(denoiser).__name__, family.name, config, tuple(sites), groups)


def _skipped_blocks(blocks: list[Block], config: MergeConfig) -> dict[str, str]:
    """Reasons to leave blocks alone, by block name."""
    reasons: dict[str, str] = {}
    if config.method == "none" or config.ratio == 0.0:
        why = "method 'none' merges nothing" if config.method == "none" else "ratio 0 keeps every token"
        return {block.name: why for block in blocks}
    for group in dict.fromkeys(block.group for block in blocks):
        members = [block for block in blocks if block.group == group]
        first = _number(config.skip_first, len(members))
        last = _number(config.skip_last, len(members))
        for place, block in enumerate(members):
            if config.levels is not None and 2**block.level not in config.levels:
                reasons[block.name] = f"{group} is not among levels {config.levels}"
            elif place < first:
                reasons[block.name] = f"one of the first {first} blocks of {group} (skip_first)"
            elif place >= len(members) - last:
                reasons[block.name] = f"one of the last {last} blocks of {group} (skip_last)"
    return reasons


def _number(skip: int | float, members: int) -> int:
    return skip if isinstance(skip, int) else round(skip * members)


def _component_sites(blocks: list[Block], skipped: dict[str, str], config: MergeConfig) -> list[PlannedSite]:
    sites = []
    for block in blocks:
        for name, parts in block.kind.components.items():
            for part in parts:
                # Optional submodules are None in blocks that lack them.
                if getattr(block.module, part.entry, None) is None:
                    continue
                reason = skipped.get(block.name) or (
                    "" if name in config.components else f"{name} is not in components"
                )
                sites.append(PlannedSite(f"{block.name}.{part.entry}", block, name, part, reason))
    return sites


def _block_sites(blocks: list[Block], skipped: dict[str, str], config: MergeConfig) -> list[PlannedSite]:
    """One site per block; with sites="span", runs of unskipped blocks of one line become spans."""
    sites: list[PlannedSite] = []
    limit = 1 if config.sites == "block" else config.span or len(blocks)
    length, leader, line = 0, "", None
    for place, block in enumerate(blocks):
        reason = skipped.get(block.name, "")
        starts = length == 0 or length == limit or block.line != line
        length = 0 if reason else (1 if starts else length + 1)
        line = block.line
        leader = block.group if starts else leader
        following = blocks[place + 1] if place + 1 < len(blocks) else None
        ends = length == limit or following is None or following.line != line or following.name in skipped
        sites.append(PlannedSite(block.name, block, config.sites, None, reason, starts, ends, "" if reason else leader))
    return sites


def _planned_groups(
    blocks: list[Block], sites: list[PlannedSite], config: MergeConfig, call: DenoiserCall
) -> Iterable[PlannedGroup]:
    for name in dict.fromkeys(block.group for block in blocks):
        members = [block for block in blocks if block.group == name]
        merged = [site for site in sites if site.block.group == name and not site.skipped]
        grid = TokenGrid(*grid_at_level(call, members[0].level))
        partition = partition_grids((grid,), config)
        layout, width = partition.layout, members[0].width
        saved = spent = 0.0
        if layout.merged < layout.tokens:
            saved = sum(_saved(site, layout, width) for site in merged)
            spent = _spent(merged, layout, width, config)
        yield PlannedGroup(
            name,
            len(members),
            len({site.block.name for site in merged}),
            sum(site.first for site in merged),
            width,
            grid,
            layout,
            partition.description,
            saved,
            spent,
            len(members) * _work(tuple(_SHARES), layout.tokens, width),
        )


def _work(components: tuple[str, ...], tokens: int, width: int) -> float:
    """Multiplications of these components of a block on `tokens` tokens."""
    linear = sum(_SHARES[component][0] for component in components)
    square = sum(_SHARES[component][1] for component in components)
    return linear * width**2 * tokens + square * width * tokens**2


def _saved(site: PlannedSite, layout: Layout, width: int) -> float:
    components = (site.component,) if site.component in _SHARES else tuple(_SHARES)
    return _work(components, layout.tokens, width) - _work(components, layout.merged, width)


def _spent(sites: list[PlannedSite], layout: Layout, width: int, config: MergeConfig) -> float:
    """Multiplications of selection and weights, spread over their intervals, and of every merge and unmerge."""
    if not sites:
        return 0.0
    apply_map = layout.tokens * layout.merge_count * width
    selection = layout.tokens * layout.select_size * width / config.schedule.destinations_every
    weights = (apply_map + layout.tokens * width) / config.schedule.weights_every
    merges = sum(site.first for site in sites)
    return selection + weights + 2 * merges * apply_map

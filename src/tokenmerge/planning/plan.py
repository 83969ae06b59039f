"""Plans: which sites merge, over which grids, from how many tokens to how many, and what that saves. No tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ..families import Block, Component, Family
from ..families.calls import DenoiserCall, grid_at_level
from ..config import MergeConfig
from ..errors import TokenMergeError
from ..merging.grid import Layout, TokenGrid
from ..merging.methods import method_for
from .tables import table

# How the paper's 7 d^2 N + 2 d N^2 multiplications of a block divide over its components: (d^2 N, d N^2).
_SHARES = {"self_attention": (3, 2), "cross_attention": (2, 0), "mlp": (2, 0)}


@dataclass(frozen=True)
class PlannedSite:
    """One place that could be merged, and why it is not if it is not."""

    name: str
    block: Block
    component: str  # a component's name, or "block", "span" or "stage"
    group: str  # whose maps it uses: in a span those of its first block
    depth: float  # share of the model's blocks that run before it
    ratio: float
    part: Component | None = None
    skipped: str = ""
    first: bool = True  # of its span
    last: bool = True


@dataclass(frozen=True)
class PlannedGroup:
    """The layers that share one map, at one size of image."""

    name: str
    blocks: int
    merged_blocks: int
    merges: int  # times tokens are merged and unmerged in one denoiser call
    width: int
    grid: TokenGrid
    layouts: tuple[Layout, ...]  # one for each part of the schedule that has its own ratio; none if nothing is merged
    regions: str
    saved: float  # multiplications of one denoiser call, by the paper's cost model, on average over steps
    spent: float
    total: float

    @property
    def merged(self) -> tuple[int, ...]:
        """Tokens after merging, by part of the schedule."""
        return tuple(layout.merged for layout in self.layouts) or (self.grid.count,)


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
                    "tokens": group.grid.count,
                    "merged": list(group.merged),
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
        done, doing = ("held", "holding") if self.config.holds else ("merged", "merging")
        lines = [f"{self.model} ({self.family}): {self._headline()}"]
        if self.groups:
            rows = [
                [
                    group.name,
                    f"{group.merged_blocks} of {group.blocks}",
                    str(group.grid),
                    f"{group.grid.count} -> {', '.join(map(str, group.merged))}",
                    group.regions if group.layouts else f"not {done}",
                    f"{group.saved / self._total:.1%}",
                    f"{group.spent / self._total:.1%}",
                ]
                for group in self.groups
            ]
            header = ["group", f"blocks {done}", "grid", "tokens", "regions", "saved", "spent"]
            # What is held is neither cut into regions nor spends anything.
            shown = [0, 1, 2, 5] if self.config.holds else range(len(header))
            header, *rows = [[row[place] for place in shown] for row in (header, *rows)]
            lines += ["", table(header, rows)]
            lines += [
                "",
                f"Multiplications in transformer blocks, by the paper's cost model: {doing} saves {self.saved:.1%}",
            ]
            most = "" if self.config.coverage is None else f" at ratio {self.config.ratio:g}, the most that is removed"
            spent = "" if self.config.holds else f" and spends {self.spent:.1%}"
            lines[-1] += f"{spent}{most}.{_exceptions(self.config)}"
            if self.config.sites == "stage":
                lines[-1] += " All other layers of the stages are held with them, and not counted."
            if self.merged_sites and self.saved <= self.spent:
                more = " or anchor_every" if self.config.schedule.anchor_every else ""
                lines.append(f"By this count the model would be slower merged than unmerged; raise the ratio{more}.")
        reasons = skip_reasons(self.sites)
        if reasons:
            lines += ["", f"Not {done}:", *(f"  {count} x {reason}" for reason, count in reasons.items())]
        return "\n".join(lines)

    def _headline(self) -> str:
        how = {"component": "once per component", "block": "once per block", "span": "once per span of blocks"}
        places = "stages" if self.config.sites == "stage" else "sites"
        counts = f"{len(self.merged_sites)} of {len(self.sites)} {places}"
        if self.config.holds:
            return f"hold, {counts}"
        ratios = ", ".join(f"{ratio:g}" for ratio in self.config.ratios)
        over = " over steps" if self.config.step_ratios else " over blocks" if self.config.block_ratios else ""
        if self.config.coverage is not None:
            ratios, over = f"{self.config.ratio:g} or less", f" for a coverage of {self.config.coverage:g}"
        return f"{self.config.method} at ratio {ratios}{over}, {how[self.config.sites]}, {counts}"


def _exceptions(config: MergeConfig) -> str:
    """Which steps do not merge, or not only."""
    schedule = config.schedule
    whole = {"first": schedule.start, "last": 1 - schedule.stop}
    told = [f"the {which} {share:.0%} of the steps run whole" for which, share in whole.items() if share]
    if schedule.anchor_every:
        rest = "those that merge runs whole as well"
        if config.holds:
            rest = "the others runs whole, and between those blocks do not run"
        told.append(f"about one in {schedule.anchor_every} of {rest}")
    return f" That is on average over steps: {', '.join(told)}." if told else ""


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
    _check_method(denoiser, blocks, config)
    skipped = _skipped_blocks(blocks, config)
    list_sites = _component_sites if config.sites == "component" else _block_sites
    parts = _parts(blocks, skipped, config)
    sites = list_sites(blocks, skipped, parts, config)
    groups = () if call is None else tuple(_planned_groups(blocks, sites, parts, config, call))
    if config.sites == "stage":
        # With the transformer blocks in them, if there are any, by which work is counted.
        sites = _stage_sites(denoiser, family, config)
    if config.method != "none" and any(config.ratios) and not any(not site.skipped for site in sites):
        reasons = "; ".join(f"{count} x {reason}" for reason, count in skip_reasons(sites).items())
        way_out = "change levels, components, skip_first or skip_last"
        if not sites:
            reasons = "it has no transformer blocks"
            way_out = f"use preset={family.defaults.holding!r}, under a scheduler that adds no noise"
        raise TokenMergeError(f"no site of {type(denoiser).__name__} would be merged ({reasons}); {way_out}")
    return Plan(type(denoiser).__name__, family.name, config, tuple(sites), groups)


def _check_method(denoiser: nn.Module, blocks: list[Block], config: MergeConfig) -> None:
    """Refuse what the method cannot do."""
    method = method_for(config)
    for ratio in config.ratios:
        method.settle(config.replace(ratio=ratio, step_ratios=None, block_ratios=None))
    if config.schedule.anchor_every and method.PER_BLOCK:
        raise TokenMergeError(
            f"anchors remember the gap of a map, and method {config.method!r} makes another map at every step; "
            "use anchor_every=0, or method='toma'"
        )
    if config.sites not in method.SITES:
        raise TokenMergeError(
            f"method {config.method!r} cannot be applied at sites={config.sites!r}; "
            f"use sites={method.SITES[0]!r}, or preset={config.method!r}"
        )
    if method.KEYS_VALUES and not any(block.kind.keys_values for block in blocks):
        raise TokenMergeError(
            f"method {config.method!r} leaves fewer keys than queries, and {type(denoiser).__name__} turns both by the "
            "same rotary table; use another method, such as 'pool'"
        )


def _skipped_blocks(blocks: list[Block], config: MergeConfig) -> dict[str, str]:
    """Reasons to leave blocks alone, by block name."""
    reasons: dict[str, str] = {}
    if config.method == "none" or not any(config.ratios):
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
                reasons[block.name] = f"{_among('first', first)} of {group} (skip_first)"
            elif place >= len(members) - last:
                reasons[block.name] = f"{_among('last', last)} of {group} (skip_last)"
    return reasons


def _among(which: str, count: int) -> str:
    return f"the {which} block" if count == 1 else f"one of the {which} {count} blocks"


def _number(skip: int | float, members: int) -> int:
    return skip if isinstance(skip, int) else round(skip * members)


def _parts(blocks: list[Block], skipped: dict[str, str], config: MergeConfig) -> dict[str, int]:
    """Which of the block ratios each block has: equal parts of the merged blocks of a group."""
    count = len(config.block_ratios or (config.ratio,))
    parts = {}
    for group in dict.fromkeys(block.group for block in blocks):
        members = [block for block in blocks if block.group == group]
        merged = sum(block.name not in skipped for block in members)
        before = 0
        for block in members:
            parts[block.name] = min(count - 1, before * count // max(1, merged))
            before += block.name not in skipped
    return parts


def _component_sites(
    blocks: list[Block], skipped: dict[str, str], parts: dict[str, int], config: MergeConfig
) -> list[PlannedSite]:
    sites = []
    for place, block in enumerate(blocks):
        depth = place / len(blocks)
        group, ratio = _group(block, depth, parts, config), _ratio(block, parts, config)
        shortened = {"self_attention": block.kind.keys_values}
        for name, components in (shortened if method_for(config).KEYS_VALUES else block.kind.components).items():
            for part in components:
                # Optional submodules are None in blocks that lack them.
                if _submodule(block.module, part.entry) is None:
                    continue
                reason = skipped.get(block.name) or (
                    "" if name in config.components else f"{name} is not in components"
                )
                sites.append(PlannedSite(f"{block.name}.{part.entry}", block, name, group, depth, ratio, part, reason))
    return sites


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _group(block: Block, depth: float, parts: dict[str, int], config: MergeConfig) -> str:
    words = [
        block.group,
        method_for(config, depth).label,
        f"part {parts[block.name] + 1}" if config.block_ratios else "",
    ]
    return " ".join(word for word in words if word)


def _ratio(block: Block, parts: dict[str, int], config: MergeConfig) -> float:
    return config.block_ratios[parts[block.name]] if config.block_ratios else config.ratio


def _block_sites(
    blocks: list[Block], skipped: dict[str, str], parts: dict[str, int], config: MergeConfig
) -> list[PlannedSite]:
    """One site per block; with sites="span", and where blocks are held, runs of unskipped blocks of one line become
    spans."""
    sites: list[PlannedSite] = []
    limit = 1 if config.sites == "block" and not config.holds else config.span or len(blocks)
    length, leader, line, part = 0, "", "", 0
    for place, block in enumerate(blocks):
        depth = place / len(blocks)
        reason = skipped.get(block.name, "")
        starts = length == 0 or length == limit or (block.line, parts[block.name]) != (line, part)
        length = 0 if reason else (1 if starts else length + 1)
        line, part = block.line, parts[block.name]
        leader = _group(block, depth, parts, config) if starts else leader
        following = blocks[place + 1] if place + 1 < len(blocks) else None
        ends = (
            length == limit
            or following is None
            or (following.line, parts[following.name]) != (line, part)
            or following.name in skipped
        )
        # Blocks that are held have no maps to share.
        group = _group(block, depth, parts, config) if reason or config.holds else leader
        ratio = _ratio(block, parts, config)
        sites.append(PlannedSite(block.name, block, config.sites, group, depth, ratio, None, reason, starts, ends))
    return sites


def _stage_sites(denoiser: nn.Module, family: Family, config: MergeConfig) -> list[PlannedSite]:
    if family.stages is None:
        raise TokenMergeError(
            f"sites='stage' holds the stages of a UNet, and {type(denoiser).__name__} has none; use preset='hold', "
            "which holds all its blocks"
        )
    stages = family.stages(denoiser)
    sites = []
    for place, stage in enumerate(stages):
        ends = {"first": place == 0, "last": place == len(stages) - 1}
        depth = place / len(stages)
        sites.append(PlannedSite(stage.name, stage, config.sites, stage.group, depth, config.ratio, None, "", **ends))
    return sites


def _planned_groups(
    blocks: list[Block], sites: list[PlannedSite], parts: dict[str, int], config: MergeConfig, call: DenoiserCall
) -> Iterable[PlannedGroup]:
    method = method_for(config)
    share = config.schedule.stop - config.schedule.start  # of the steps, that merge
    for name, part in dict.fromkeys((block.group, parts[block.name]) for block in blocks):
        members = [block for block in blocks if (block.group, parts[block.name]) == (name, part)]
        inside = {block.name for block in members}
        merged = [site for site in sites if site.block.name in inside and not site.skipped]
        grid, width = TokenGrid(*grid_at_level(call, members[0].level)), members[0].width
        merges, merged_blocks = sum(site.first for site in merged), len({site.block.name for site in merged})
        total = len(members) * _work(tuple(_SHARES), grid.count, width)
        layouts, saved, spent, regions = [], 0.0, 0.0, ""
        ratios = config.step_ratios or (_ratio(members[0], parts, config),)
        # Where nothing is merged a grid need not be one that could be.
        for ratio in ratios if merged else ():
            settled = method.settle(config.replace(ratio=ratio, step_ratios=None, block_ratios=None))
            partition = method.partition((grid,), settled)
            layout, regions = partition.layout, partition.description
            layouts.append(layout)
            if layout.merged == layout.tokens:
                continue
            saved += sum(_saved(site, layout, width, keys_values=method.KEYS_VALUES) for site in merged)
            if config.schedule.anchor_every:
                # An anchor also runs blocks whole.
                saved -= len(merged) * _work(tuple(_SHARES), layout.tokens, width) / config.schedule.anchor_every
            # A span has many blocks and merges once; a block has many components that merge, with one map.
            spent += method.spent(layout, width, settled, blocks=min(merges, merged_blocks), merges=merges)
        label = f"{name} part {part + 1}" if config.block_ratios else name
        yield PlannedGroup(
            label,
            len(members),
            merged_blocks,
            merges,
            width,
            grid,
            tuple(layouts),
            regions,
            saved * share / len(ratios),
            spent * share / len(ratios),
            total,
        )


def _work(components: tuple[str, ...], tokens: int, width: int) -> float:
    """Multiplications of these components of a block on `tokens` tokens."""
    linear = sum(_SHARES[component][0] for component in components)
    square = sum(_SHARES[component][1] for component in components)
    return linear * width**2 * tokens + square * width * tokens**2


def _saved(site: PlannedSite, layout: Layout, width: int, *, keys_values: bool) -> float:
    if keys_values:
        # Of keys or of values: a projection, and one of attention's two products, with all queries.
        return (width**2 + width * layout.tokens) * (layout.tokens - layout.merged)
    components = (site.component,) if site.component in _SHARES else tuple(_SHARES)
    return _work(components, layout.tokens, width) - _work(components, layout.merged, width)

"""apply, applied, remove, plan, summary: a model and a config become a plan, and the plan becomes hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .families import Family, denoiser_of, families, family_of
from .presets import DEFAULT, default_preset, load_preset
from .compiling.blocks import compiled_state
from .config import MergeConfig
from .errors import TokenMergeError
from .merging.grid import TokenGrid
from .merging.groups import MergeGroup
from .runtime.installing import INNER_CACHES, Installation, cache_hooks, is_group_offloaded, leads_cache, runs_as_made
from .merging.methods import method_for
from .planning.plan import Plan, plan_model
from .merging.sites import BlockSite, ComponentSite, EntrySite, HeldSite, HeldStage, Site, Span
from .runtime.state import RECORD, MergeState, check_levels
from .planning.tables import table

Model = TypeVar("Model")


@dataclass(frozen=True)
class _Applied:
    plan: Plan
    state: MergeState
    installation: Installation
    scheduler_of: Callable[[], Any]


@dataclass(frozen=True)
class Summary:
    """What is merged where, and what ran. Print it, or take `to_dict()`."""

    plan: Plan | None
    groups: tuple[dict[str, Any], ...] = ()
    compiled: str = "not by tokenmerge.compile"
    gap_bytes: int = 0  # of anchored merging and held blocks
    steps: dict[str, int] = field(default_factory=dict)  # of the last image: full, anchor, merged, skipped

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_dict() if self.plan else None,
            "groups": list(self.groups),
            "compiled": self.compiled,
            "gap_bytes": self.gap_bytes,
            "steps": self.steps,
        }

    def __str__(self) -> str:
        compiled = f"Compiled: {self.compiled}."
        if self.plan is None:
            return f"Merging is not applied.\n{compiled}"
        lines = [str(self.plan), compiled]
        if self.gap_bytes:
            lines.append(f"Anchors keep {self.gap_bytes / 2**20:.1f} MiB of gaps.")
        if self.steps.keys() - {"merged"}:
            lines.append(told_steps(self.steps, held=self.plan.config.holds))
        if self.groups:
            columns = ["group", "sites", "grid", "tokens", "regions", "selected", "weighed", "backend"]
            if self.plan.config.coverage is not None:
                columns[4:4] = ["ratio", "coverage"]
            if self.plan.config.holds:
                columns = columns[:3]
            lines += ["", table(columns, [[_cell(group[column]) for column in columns] for group in self.groups])]
        return "\n".join(lines)


def apply(
    model: Model,
    config: MergeConfig | None = None,
    *,
    preset: str | None = None,
    scheduler: Any = None,
    **options: Any,
) -> Model:
    """Hold blocks or merge tokens in a pipeline or its denoiser, until `remove`.

    config: a whole `MergeConfig`; or preset: the name of one, or a YAML or JSON file. Without either blocks are held,
    or a UNet's stages; where options speak of merging, tokens are merged by the preset of the model's family, or
    `method`'s own.
    options: fields of `MergeConfig` or `Schedule` that change it. `schedule` may be a mapping, of those of its fields
    that change, or a whole `Schedule`, which replaces all: one without `anchor_every` has no anchors, and merges.
    scheduler: for a bare denoiser, the scheduler that drives it. Without one steps are told apart by their timesteps,
    which waits for the device at every call.
    A model that has merging already gets the new config instead. If anything is wrong the model is left as it was.
    """
    denoiser = denoiser_of(model)
    family = family_of(denoiser)
    scheduler_of = _scheduler_source(model, scheduler)
    config = resolve_config(family, config, preset, options, scheduler_of())
    _check_applicable(denoiser, family, config, scheduler_of())
    _apply_plan(denoiser, family, plan_model(denoiser, family, config), scheduler_of)
    return model


def remove(model: Model) -> Model:
    """Take merging off a pipeline or denoiser, which is then exactly as before `apply`. Safe to call twice."""
    denoiser = denoiser_of(model)
    record = vars(denoiser).get(RECORD)
    if record is not None:
        record.installation.uninstall()
        record.state.close()
        delattr(denoiser, RECORD)
    return model


@contextmanager
def applied(model: Model, config: MergeConfig | None = None, **options: Any) -> Iterator[Model]:
    """Merge inside a `with` block; afterwards the model has what it had before, be it merging or none."""
    record = vars(denoiser_of(model)).get(RECORD)
    # Not the record itself, whose maps and gaps would be kept for as long.
    before = (record.plan, record.scheduler_of) if record is not None else None
    del record
    apply(model, config, **options)
    try:
        yield model
    finally:
        denoiser = denoiser_of(model)
        remove(denoiser)
        if before is not None:
            _apply_plan(denoiser, family_of(denoiser), *before)


def plan(
    model: Any,
    config: MergeConfig | None = None,
    *,
    height: int,
    width: int,
    preset: str | None = None,
    vae_scale_factor: int | None = None,
    **options: Any,
) -> Plan:
    """What `apply` would do at `height` x `width` pixels, without doing it. The model may be on the meta device."""
    denoiser = denoiser_of(model)
    family = family_of(denoiser)
    config = resolve_config(family, config, preset, options, _scheduler_source(model, None)())
    scale: int = vae_scale_factor or getattr(model, "vae_scale_factor", None) or 8
    if min(height, width) < scale:
        raise TokenMergeError(f"{height}x{width} pixels are less than one {scale}-pixel latent; give a larger size")
    call = family.plan_call(denoiser, height // scale, width // scale)
    if min(call.height, call.width) < 1:
        side = family.unit(denoiser, scale)
        raise TokenMergeError(f"{height}x{width} pixels are less than one token of {side}x{side}; give a larger size")
    return plan_model(denoiser, family, config, call)


def summary(model: Any) -> Summary:
    """What is merged in a pipeline or denoiser, and how often selection and weights have run."""
    denoiser = denoiser_of(model)
    record = vars(denoiser).get(RECORD)
    if record is None:
        return Summary(None, compiled=compiled_state(denoiser))
    groups = []
    for group in record.state.groups:
        partition = group.partition if group.has_maps else None
        groups.append(
            {
                "group": group.name,
                "sites": sum(site.group == group.name for site in record.plan.merged_sites),
                "grid": " + ".join(map(str, group.grids)) or "not run yet",
                "ratio": group.ratio if partition else None,
                "coverage": group.coverage,
                "tokens": f"{partition.layout.tokens} -> {partition.layout.merged}" if partition else "not run yet",
                "regions": partition.description if partition else "not run yet",
                "selected": group.selections,
                "weighed": group.weighings,
                "backend": group.backend,
            }
        )
    state = record.state
    return Summary(record.plan, tuple(groups), compiled_state(denoiser), state.anchors.nbytes, dict(state.steps))


@dataclass(frozen=True)
class TokenMap:
    """What merged into what in one group, for the first sample of the last call."""

    group: str
    grid: TokenGrid
    owners: Tensor  # [N] the destination that a token merges into most, as a token index
    regions: Tensor  # [N] the number of a token's region


def token_maps(model: Any) -> list[TokenMap]:
    """The maps of a model that has run with merging, one for each group that has one, without reference images."""
    record = vars(denoiser_of(model)).get(RECORD)
    maps = []
    for group in record.state.groups if record is not None and not record.plan.config.holds else ():
        if group.partition is None or group.slot is None or not group.has_maps:
            continue
        grid, layout = group.grids[0], group.partition.layout
        places = group.partition.order if group.partition.order is not None else torch.arange(layout.tokens)
        regions = torch.empty(layout.tokens, dtype=torch.int64)
        regions[places.cpu()] = torch.arange(layout.tokens) // layout.select_size
        maps.append(TokenMap(group.name, grid, group.slot.map.owners()[: grid.count].cpu(), regions[: grid.count]))
    return maps


def supported_models() -> tuple[str, ...]:
    """Class names of the denoisers that `apply` takes, by themselves or inside a pipeline."""
    return tuple(family.denoiser.__name__ for family in families())


def config_for(model: Any, preset: str | None = None, **options: Any) -> MergeConfig:
    """The config that `apply` would use for a model."""
    return resolve_config(family_of(denoiser_of(model)), None, preset, options, _scheduler_source(model, None)())


def resolve_config(
    family: Family, config: MergeConfig | None, preset: str | None, options: dict[str, Any], scheduler: Any
) -> MergeConfig:
    if config is not None and not isinstance(config, MergeConfig):
        raise TypeError(f"config is a {type(config).__name__}; give a MergeConfig, or options by name")
    if config is not None and preset is not None:
        raise TokenMergeError("both a config and a preset were given; give one of them")
    if config is None:
        if preset is None or preset == DEFAULT:
            preset = default_preset(options, family.defaults_under(scheduler))
        config = load_preset(preset)
    return config.changed(**options) if options else config


def told_steps(steps: dict[str, int], *, held: bool = False) -> str:
    """What the steps of an image did, where they did different things. held: whether blocks run at anchors alone."""
    named = {"full": "whole", "anchor": "whole and merged (anchors)", "merged": "merged"}
    named |= {"skipped": "skipped by a cache"}
    if held:
        named |= {"anchor": "whole (anchors)", "merged": "held"}
    told = ", ".join(f"{steps[mode]} {name}" for mode, name in named.items() if steps.get(mode))
    if steps.get("merged"):
        return f"Steps of the last image: {told}."
    way_out = "merge at every one: start=0, anchor_every=0"
    # A single step would be an anchor, wherever blocks begin to be held.
    if held and sum(steps.values()) > 1:
        way_out = f"begin at once, with start=0, or {way_out}"
    saved = "merging saved nothing" if steps.get("skipped") else "nothing was saved"
    return f"Steps of the last image: {told}: {saved}. For so few steps, at more drift, {way_out}."


def _cell(value: Any) -> str:
    if value is None:
        return "not run yet"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _apply_plan(denoiser: nn.Module, family: Family, plan_: Plan, scheduler_of: Callable[[], Any]) -> None:
    """Replace what is applied to the denoiser; if that fails, what was applied stays."""
    before = vars(denoiser).get(RECORD)
    remove(denoiser)
    state, installation = None, Installation()
    try:
        # Reads the scheduler, which may be anybody's.
        source = scheduler_of if plan_.merged_sites else lambda: None
        state = MergeState(plan_.config, source, family.way_out_of_noise(plan_.config))
        if plan_.merged_sites:
            _install(denoiser, family, plan_, state, installation)
    except BaseException:
        installation.uninstall()
        if state is not None:
            state.close()
        if before is not None:
            _apply_plan(denoiser, family, before.plan, before.scheduler_of)
        raise
    setattr(denoiser, RECORD, _Applied(plan_, state, installation, scheduler_of))


def _install(denoiser: nn.Module, family: Family, plan_: Plan, state: MergeState, installation: Installation) -> None:
    groups: dict[str, MergeGroup] = {}
    entered: set[str] = set()
    span, held = Span(), None
    for site in plan_.merged_sites:
        method = method_for(plan_.config, site.depth)
        if site.group not in groups:
            groups[site.group] = state.add_group(
                site.group, site.block.level, method, ratio=site.ratio, shared=family.shared
            )
        group, block, ports = groups[site.group], site.block, site.block.kind.ports
        if site.part is None:
            span = Span() if site.first else span
            ends = {"first": site.first, "last": site.last}
            remember = partial(state.anchors.add_memory, group, block.width, has_text=ports.outputs is not None)
            place: Site
            if plan_.config.sites == "stage":
                held = held or remember()
                place = HeldStage(site.name, state, group, ports, memory=held, **ends)
            elif plan_.config.holds:
                held = remember(apart=False) if held is None or site.first else held
                place = HeldSite(site.name, state, group, ports, span=held, alone=remember(apart=True), **ends)
            else:
                memory = remember() if state.anchors.exist else None
                place = BlockSite(site.name, state, group, ports, span=span, memory=memory, **ends)
            installation.add(place, block.module)
            continue
        if method.PER_BLOCK and block.name not in entered:
            entered.add(block.name)
            installation.add(EntrySite(block.name, state, group, ports), block.module)
        entry, leave = site.part.entry, site.part.leave or site.part.entry
        for name in dict.fromkeys((entry, leave)):
            last = name == leave and not method.KEYS_VALUES
            part = ComponentSite(
                site.name, state, group, site.part.ports, first=name == entry, last=last, refreshes=not method.PER_BLOCK
            )
            installation.add(part, block.module, name)

    # Kept by the state, so it must not name it: both would live until the garbage collector comes.
    def at_image_start() -> bool:
        _check_caches(denoiser, plan_)
        _check_fused(denoiser, plan_.config)
        _check_offload(plan_)
        installation.follow()
        return bool(cache_hooks(denoiser))

    state.at_image_start = at_image_start
    observer = _Observer(denoiser, family, plan_, state, installation)
    installation.observe_calls(denoiser, observer.enter, observer.leave)


class _Observer:
    """Sees every call of the denoiser: refuses what merging cannot serve, and tells the state of the rest."""

    def __init__(
        self, denoiser: nn.Module, family: Family, plan_: Plan, state: MergeState, installation: Installation
    ) -> None:
        self._plan = plan_
        self._state = state
        self._family = family
        self._installation = installation
        blocks = [site.block for site in plan_.merged_sites]
        self._first_block = blocks[0].module
        # The modules that run blocks one after the other: those that have the lists which have the blocks.
        names = dict.fromkeys(".".join(block.name.split(".")[:-2]) for block in blocks)
        self._loops = [denoiser.get_submodule(name) for name in names]

    # Outside of compiled code, which would be compiled again for every size of image.
    @torch.compiler.disable
    def enter(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._family.read(denoiser, args, kwargs)
        stages = self._state.config.sites == "stage"
        if self._state.config.holds:
            # Blocks that run whole or not at all take what merged tokens cannot follow.
            between = self._family.between_blocks(args, kwargs)
            apart = between or self._installation.is_shared or not all(map(runs_as_made, self._loops))
            if stages and apart:
                _check_offload(self._plan)
                raise TokenMergeError(
                    "a hook or a forward of others acts between the stages of the UNet, which are held all together; "
                    "use preset='hold', which holds blocks"
                )
            call = call._replace(apart=bool(apart))
        else:
            self._family.refuse(self._state.config, args, kwargs)
            _check_chunks(self._first_block)
        self._state.enter(call)
        if stages and self._state.mode == "merged":
            # What was added at the anchor is held with the stages.
            self._family.between_stages(args, kwargs).clear()

    @torch.compiler.disable
    def leave(self, *_: Any) -> None:
        self._state.leave()


def _check_applicable(denoiser: nn.Module, family: Family, config: MergeConfig, scheduler: Any) -> None:
    """Refuse what would not work, before anything is touched."""
    caches = cache_hooks(denoiser)
    if caches:
        raise TokenMergeError(
            f"a cache ({caches[0]}) is enabled already; a cache must come after merging: "
            "call disable_cache(), apply, then enable_cache(...)"
        )
    if config.needs_length and scheduler is None:
        window = f"a merging window of {config.schedule.start} to {config.schedule.stop}"
        raise TokenMergeError(
            f"{window if config.schedule.windowed else 'step_ratios'} needs to know how many steps there are; "
            "apply to the pipeline, or give scheduler=..."
        )
    check_levels(config, scheduler)
    _check_fused(denoiser, config)
    blocks = family.blocks(denoiser)
    if blocks and not config.holds:
        _check_chunks(blocks[0].module)


def _check_fused(denoiser: nn.Module, config: MergeConfig) -> None:
    """Refuse fused projections where keys and values must be apart from queries."""
    if not method_for(config).KEYS_VALUES:
        return
    processors = {type(getattr(module, "processor", None)).__name__ for module in denoiser.modules()}
    if any(name.startswith("Fused") for name in processors):
        raise TokenMergeError(
            f"fused projections make keys and values together with queries, and method {config.method!r} gives them "
            "other tokens; call unfuse_qkv_projections() first"
        )


def _check_offload(plan_: Plan) -> None:
    """Refuse weights that come and go with the blocks of a group, where some of those do not run."""
    if plan_.config.holds and any(is_group_offloaded(site.block.module) for site in plan_.merged_sites):
        raise TokenMergeError(
            "group offload moves weights when blocks run, and held blocks do not; use enable_model_cpu_offload() or "
            "enable_sequential_cpu_offload(), or give a ratio, which merges instead"
        )


def _check_chunks(block: nn.Module) -> None:
    """Refuse chunked feed-forward, which can be switched on between calls."""
    if getattr(block, "_chunk_size", None) is not None:
        raise TokenMergeError(
            f"chunked feed-forward ({block._chunk_size} at a time) splits what merging joins; "
            "call disable_forward_chunking(), or set_chunk_feed_forward(None) on its blocks, first"
        )


def _check_caches(denoiser: nn.Module, plan_: Plan) -> None:
    """Refuse caches, enabled since `apply`, that merging does not go with."""
    config = plan_.config
    for name in cache_hooks(denoiser):
        if config.holds:
            raise TokenMergeError(
                f"a cache ({name}) skips steps, and between anchors blocks are held already; use one of both: call "
                "disable_cache(), or give a ratio, which merges instead"
            )
        if name.startswith(INNER_CACHES):
            raise TokenMergeError(
                f"a cache ({name}) stores tensors inside of blocks, where tokens are merged; "
                "use FirstBlockCache or MagCache, call disable_cache(), or remove merging"
            )
        if config.sites == "span":
            raise TokenMergeError(
                f"a cache ({name}) compares tokens between blocks, where a span has merged ones; "
                "use sites='block', or call disable_cache()"
            )
    if config.schedule.anchor_every:
        for site in plan_.merged_sites:
            if leads_cache(site.block.module):
                raise TokenMergeError(
                    f"a cache runs {site.name!r} in every call and may skip all blocks after it, so its anchors would "
                    "not be theirs; use skip_first=1 or more, which leaves it whole, anchor_every=0, or MagCache"
                )


def _scheduler_source(model: Any, scheduler: Any) -> Callable[[], Any]:
    """A function that gives the scheduler in use now, and keeps neither pipeline nor scheduler alive."""
    if scheduler is not None:
        return weakref.ref(scheduler)
    if isinstance(model, nn.Module):
        return lambda: None
    pipeline = weakref.ref(model)
    return lambda: getattr(pipeline(), "scheduler", None)

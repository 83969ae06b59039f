"""apply, applied, remove, plan, summary: techniques and a model become a plan, and the plan becomes sites."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .compiling import compiled_state
from .config import Hold, Merge, Techniques
from .errors import TokenMergeError
from .families import Family, denoiser_of, families, family_of
from .families.calls import TokenGrid
from .holding.controller import Holding
from .holding.sites import check_holdable, install_holding
from .merging.checks import check_mergeable, check_places
from .merging.controller import Merging
from .merging.places import install_merging
from .planning import Plan, Summary, make_plan
from .planning.plan import check_steps, timeline_of
from .presets import resolve
from .runtime.foreign import cache_hooks, leads_cache
from .runtime.installing import Installation
from .runtime.noise import adds_noise
from .runtime.observing import Observer
from .runtime.scheduler import Follower, check_levels, scheduler_source
from .runtime.state import APPLIED, State

Model = TypeVar("Model")
# What `apply` takes as a technique.
Asked = Merge | Hold | list[Merge | Hold] | Techniques | str | Path | None


@dataclass(frozen=True)
class _Applied:
    plan: Plan
    state: State
    installation: Installation
    scheduler_of: Callable[[], Any]
    merging: Merging | None
    holding: Holding | None


def apply(model: Model, technique: Asked = None, *, scheduler: Any = None, **fields: Any) -> Model:
    """Apply techniques to a pipeline or its denoiser, until `remove`.

    technique: a `Merge`, a `Hold`, a list of one of each, the name of a preset, or the path of a JSON or YAML file;
    without one, what is recommended for the model.
    scheduler: for a bare denoiser, the scheduler that drives it. Without one steps are told apart by their timesteps,
    which waits for the device at every call.
    fields: of a preset, to change it: `apply(pipe, "toma", ratio=0.25)`.
    A model that has techniques already gets the new ones instead. If anything is wrong the model is left as it was.
    """
    techniques = resolve(technique, fields)
    denoiser = denoiser_of(model)
    family = family_of(denoiser)
    scheduler_of = scheduler_source(model, scheduler)
    techniques = decided(family, techniques, scheduler_of())
    plan_ = make_plan(denoiser, family, techniques)
    caches = cache_hooks(denoiser)
    if caches and plan_.runs:
        check_holdable(denoiser, plan_.runs)
    if caches:
        raise TokenMergeError(
            f"a cache ({caches[0]}) is enabled already; a cache must come after a technique: "
            "call disable_cache(), apply, then enable_cache(...)"
        )
    _check_scheduler(plan_, scheduler_of())
    if techniques.merge is not None:
        check_mergeable(denoiser, techniques.merge)
        if plan_.merged_sites:
            check_places(plan_.merged_sites)
    _apply_plan(denoiser, family, plan_, scheduler_of)
    return model


def remove(model: Model) -> Model:
    """Take all techniques off a pipeline or denoiser, which is then exactly as before `apply`. Safe to call twice."""
    denoiser = denoiser_of(model)
    known = vars(denoiser).get(APPLIED)
    if known is not None:
        known.installation.uninstall()
        known.state.close()
        delattr(denoiser, APPLIED)
    return model


@contextmanager
def applied(model: Model, technique: Asked = None, *, scheduler: Any = None, **fields: Any) -> Iterator[Model]:
    """`apply` inside a `with` block; afterwards the model has what it had before, be it techniques or none."""
    denoiser = denoiser_of(model)
    known = vars(denoiser).get(APPLIED)
    # Not all that is known, whose maps and residuals would be kept for as long.
    before = (known.plan, known.scheduler_of) if known is not None else None
    del known
    apply(model, technique, scheduler=scheduler, **fields)
    try:
        yield model
    finally:
        # Not that of the model now: somebody may have put another one in.
        remove(denoiser)
        if before is not None:
            _apply_plan(denoiser, family_of(denoiser), *before)


def plan(
    model: Any,
    technique: Asked = None,
    *,
    height: int,
    width: int,
    steps: int = 30,
    vae_scale_factor: int | None = None,
    **fields: Any,
) -> Plan:
    """What `apply` would do at `height` x `width` pixels in so many steps, without doing it. The model may be on the
    meta device."""
    techniques = resolve(technique, fields)
    check_steps(steps)
    denoiser = denoiser_of(model)
    family = family_of(denoiser)
    techniques = decided(family, techniques, scheduler_source(model, None)())
    scale: int = vae_scale_factor or getattr(model, "vae_scale_factor", None) or 8
    if min(height, width) < scale:
        raise TokenMergeError(f"{width}x{height} pixels are less than one {scale}-pixel latent; give a larger size")
    call = family.plan_call(denoiser, height // scale, width // scale)
    if min(call.height, call.width) < 1:
        side = family.unit(denoiser, scale)
        raise TokenMergeError(f"{width}x{height} pixels are less than one token of {side}x{side}; give a larger size")
    return make_plan(denoiser, family, techniques, call, steps)


def summary(model: Any) -> Summary:
    """What is applied to a pipeline or denoiser, and what its last image did."""
    denoiser = denoiser_of(model)
    known = vars(denoiser).get(APPLIED)
    if known is None:
        return Summary(None, compiled=compiled_state(denoiser))
    groups = []
    for group in known.merging.groups if known.merging is not None else ():
        partition = group.partition if group.has_maps else None
        groups.append(
            {
                "group": group.name,
                "sites": sum(site.group == group.name for site in known.plan.merged_sites),
                "grid": " + ".join(map(str, group.grids)) or "not run yet",
                "tokens": f"{partition.layout.tokens} -> {partition.layout.merged}" if partition else "not run yet",
                "regions": partition.description if partition else "not run yet",
                "selected": group.selections,
                "weighed": group.weighings,
                "backend": group.backend,
            }
        )
    kept = known.holding.nbytes if known.holding is not None else 0
    return Summary(known.plan, tuple(groups), compiled_state(denoiser), kept, dict(known.state.steps))


@dataclass(frozen=True)
class TokenMap:
    """What merged into what in one group, for the first sample of the last call."""

    group: str
    grid: TokenGrid
    owners: Tensor  # [N] the destination that a token merges into most, as a token index
    regions: Tensor  # [N] the number of a token's region


def token_maps(model: Any) -> list[TokenMap]:
    """The maps of a model that has run with merging, one for each group that has one, without reference images."""
    known = vars(denoiser_of(model)).get(APPLIED)
    maps = []
    for group in known.merging.groups if known is not None and known.merging is not None else ():
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


def decided(family: Family, techniques: Techniques, scheduler: Any) -> Techniques:
    """Techniques with what `auto` stands for: a UNet's stages, unless the scheduler adds noise, which only layers that
    still run would see."""
    hold = techniques.hold
    if hold is None or hold.what != "auto":
        return techniques
    stages = family.stages is not None and (scheduler is None or not adds_noise(scheduler))
    return techniques._replace(hold=hold.replace(what="stages" if stages else "blocks"))


def _check_scheduler(plan_: Plan, scheduler: Any) -> None:
    """Refuse windows without a known number of steps, and noise levels that no scheduler tells."""
    merge, hold = plan_.techniques
    # What does nothing needs to know nothing.
    acting = (merge if plan_.merged_sites else None, hold if plan_.runs else None)
    for each in acting:
        if each is not None and each.windowed and scheduler is None:
            raise TokenMergeError(
                f"{type(each).__name__}'s window of {each.start} to {each.stop} needs to know how many steps there "
                "are; apply to the pipeline, or give scheduler=..."
            )
    check_levels(acting[1], scheduler)


def _way_out_of_noise(denoiser: nn.Module, family: Family, plan_: Plan) -> str:
    """What to do under a scheduler that adds noise, where nothing in a held step would see it; else nothing."""
    if not plan_.runs:
        return ""
    if family.stages is None:
        return "use another scheduler, or apply a Merge"
    if not family.blocks(denoiser):
        return "use a scheduler that adds none, such as DDIMScheduler"
    return "use Hold(what='blocks'), or another scheduler" if plan_.runs[0].stages else ""


def _apply_plan(denoiser: nn.Module, family: Family, plan_: Plan, scheduler_of: Callable[[], Any]) -> None:
    """Replace what is applied to the denoiser; if that fails, what was applied stays."""
    acts = bool(plan_.merged_sites or plan_.runs)
    merge = plan_.techniques.merge if plan_.merged_sites else None
    timeline = timeline_of(merge, plan_.techniques.hold if plan_.runs else None)
    # Reads the scheduler, which may be anybody's, before anything is touched.
    way_out = _way_out_of_noise(denoiser, family, plan_)
    follower = Follower(timeline, scheduler_of if acts else lambda: None, way_out)
    merging = Merging(merge, follower.clock) if merge is not None else None
    holding = Holding(follower.clock) if plan_.runs else None
    state = State(timeline, follower, merging, holding)
    before = vars(denoiser).get(APPLIED)
    remove(denoiser)
    installation = Installation()
    try:
        if acts:
            _install(denoiser, family, plan_, state, installation, merging, holding)
    except BaseException:
        installation.uninstall()
        follower.close()
        if before is not None:
            _apply_plan(denoiser, family, before.plan, before.scheduler_of)
        raise
    setattr(denoiser, APPLIED, _Applied(plan_, state, installation, scheduler_of, merging, holding))


def _install(
    denoiser: nn.Module,
    family: Family,
    plan_: Plan,
    state: State,
    installation: Installation,
    merging: Merging | None,
    holding: Holding | None,
) -> None:
    # The first technique on a module is the inner one: what is held is held with its merging.
    if merging is not None:
        install_merging(plan_.merged_sites, merging, installation, shared=family.shares_positions)
    if holding is not None:
        install_holding(plan_.runs, holding, installation)
    check = partial(check_holdable, runs=plan_.runs)
    weak = weakref.ref(denoiser)

    # Kept by the state, so it must not keep the denoiser.
    def at_image_start() -> int | None:
        model = weak()
        assert model is not None
        if merging is not None:
            check_mergeable(model, merging.technique)
            check_places(plan_.merged_sites)
        if holding is not None:
            check(model)
        installation.follow()
        if not cache_hooks(model):
            return None
        leading = [site.block.module for site in plan_.merged_sites if leads_cache(site.block.module)]
        return sum(getattr(site, "visits", False) for site in installation.sites_on(leading))

    state.at_image_start = at_image_start
    observer = Observer(
        family,
        state,
        installation,
        check=partial(merging.check_call, family) if merging is not None else None,
        held=[block.name for run in plan_.runs for block in run.blocks],
        stages=any(run.stages for run in plan_.runs),
        check_held=check,
    )
    installation.install(denoiser, observer.enter, observer.leave)

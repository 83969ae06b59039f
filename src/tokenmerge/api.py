"""apply, applied, remove, plan, summary: techniques and a model become a plan, and the plan becomes sites."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .compiling import compiled_state
from .config import Hold, Merge, Techniques
from .errors import TokenMergeError, check_whole
from .families import Family, denoiser_of, denoisers_of, families, family_of
from .families.calls import TokenGrid
from .families.reading import first_apart
from .families.scales import latent_scales
from .holding.controller import Holding
from .holding.learning import LearnedRun, Learner
from .holding.prediction import DenoiserSite, Predicting, not_predicted
from .holding.sites import LearnedSite, check_holdable, install_holding, install_learned
from .merging.checks import check_mergeable, check_places
from .merging.controller import Merging
from .merging.grid import drawn_alone
from .merging.places import install_merging
from .planning import Drift, Plan, Summary, make_plan
from .planning.drift import was_compared
from .planning.plan import timeline_of
from .planning.tables import counted
from .presets import resolve
from .runtime.foreign import cache_hooks, leads_cache, shard_of
from .runtime.installing import Installation
from .runtime.levels import planned_levels
from .runtime.noise import adds_noise
from .runtime.observing import Observer
from .runtime.prediction import form_of
from .runtime.scheduler import Follower, scheduler_source
from .runtime.sigmas import SigmaFollower
from .runtime.state import APPLIED, Host, State
from .runtime.timeline import Timeline

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
    scheduler_of = scheduler_source(model, scheduler)
    denoisers = denoisers_of(model)
    # All are checked before any is touched.
    plans = [_checked_plan(denoiser, techniques, scheduler_of()) for denoiser in denoisers]
    _apply_plans([(denoiser, plan_, scheduler_of) for denoiser, plan_ in zip(denoisers, plans, strict=True)])
    return model


def _checked_plan(denoiser: nn.Module, techniques: Techniques, scheduler: Any) -> Plan:
    """The plan for a denoiser; raises where it cannot be applied."""
    predicts = partial(_predicts, scheduler)
    plan_ = hosted_plan(denoiser, family_of(denoiser), techniques, partial(_adds_noise, scheduler), predicts)
    _check_scheduler(plan_, scheduler)
    return plan_


def hosted_plan(
    denoiser: nn.Module,
    family: Family,
    techniques: Techniques,
    noisy: Callable[[], bool],
    predicts: Callable[[], bool] = lambda: False,
) -> Plan:
    """The plan for a denoiser of any host; raises where it cannot be applied.

    noisy: whether noise is added at steps. predicts: whether clean predictions can be held.
    """
    techniques = decided(denoiser, family, techniques, noisy, predicts)
    plan_ = make_plan(denoiser, family, techniques)
    check_holdable(denoiser, plan_.runs)
    caches = cache_hooks(denoiser)
    if caches:
        raise TokenMergeError(
            f"a cache ({caches[0]}) is enabled already; a cache must come after a technique: "
            "call disable_cache(), apply, then enable_cache(...)"
        )
    if techniques.merge is not None:
        check_mergeable(denoiser, techniques.merge)
        if plan_.merged_sites:
            check_places(plan_.merged_sites)
    return plan_


def remove(model: Model) -> Model:
    """Take all techniques off a pipeline or denoiser, which is then exactly as before `apply`. Safe to call twice."""
    for denoiser in denoisers_of(model):
        _remove(denoiser)
    return model


def _remove(denoiser: nn.Module) -> None:
    known = vars(denoiser).get(APPLIED)
    if known is not None:
        known.installation.uninstall()
        known.state.close()
        delattr(denoiser, APPLIED)


@contextmanager
def applied(model: Model, technique: Asked = None, *, scheduler: Any = None, **fields: Any) -> Iterator[Model]:
    """`apply` inside a `with` block; afterwards the model has what it had before, be it techniques or none."""
    denoisers = denoisers_of(model)
    before = [_known(denoiser) for denoiser in denoisers]
    apply(model, technique, scheduler=scheduler, **fields)
    try:
        yield model
    finally:
        # Not those of the model now: somebody may have put another one in.
        for denoiser in denoisers:
            _remove(denoiser)
        _apply_plans([each for each in before if each is not None])


def plan(
    model: Any,
    technique: Asked = None,
    *,
    height: int,
    width: int,
    frames: int | None = None,
    steps: int = 30,
    vae_scale_factor: int | None = None,
    vae_scale_factor_temporal: int | None = None,
    **fields: Any,
) -> Plan:
    """What `apply` would do in so many steps at `height` x `width` pixels, without doing it.

    frames: of a video; without it, as many as models of its family usually make.
    vae_scale_factor, vae_scale_factor_temporal: pixels along a side and frames that a latent stands for; a pipeline
    knows its own. The model may be on the meta device.
    """
    techniques = resolve(technique, fields)
    check_whole(height=height, width=width, steps=steps)
    scales = {"vae_scale_factor": vae_scale_factor, "vae_scale_factor_temporal": vae_scale_factor_temporal}
    check_whole(**{name: scale for name, scale in scales.items() if scale is not None})
    denoiser = denoiser_of(model)
    family = family_of(denoiser)
    scheduler = scheduler_source(model, None)()
    techniques = decided(denoiser, family, techniques, partial(_adds_noise, scheduler), partial(_predicts, scheduler))
    known_scale, known_frames = _known_scales(model, family)
    scale = vae_scale_factor or known_scale
    if min(height, width) < scale:
        raise TokenMergeError(f"{width}x{height} pixels are less than one {scale}-pixel latent; give a larger size")
    latents = latent_frames(family, frames, vae_scale_factor_temporal or known_frames)
    call = family.plan_call(denoiser, height // scale, width // scale, latents)._replace(shard=shard_of(denoiser))
    # Such a pipeline gives every token a timestep (Wan 2.2 TI2V), which a denoiser does not know.
    if getattr(getattr(model, "config", None), "expand_timesteps", False):
        call = call._replace(grids=first_apart(call.grids))
    if call.grids and not call.tokens:
        side = family.unit(denoiser, scale)
        raise TokenMergeError(f"{width}x{height} pixels are less than one token of {side}x{side}; give a larger size")
    return make_plan(denoiser, family, techniques, call, steps, planned_levels(scheduler, steps))


def latent_frames(family: Family, frames: int | None, scale: int) -> int:
    """Latents in time of a video of so many frames, or of the usual number. scale: frames that one stands for."""
    if frames is None:
        frames = family.frames
    check_whole(frames=frames)
    if frames > 1 and family.frames == 1:
        raise TokenMergeError(
            f"frames is {frames}, and {family.denoiser.__name__} makes single images; leave frames out"
        )
    return (frames - 1) // scale + 1


def _known_scales(model: Any, family: Family) -> tuple[int, int]:
    """Pixels along a side and frames that a latent stands for, as the decoder of a pipeline says, or as usual."""
    decoder = getattr(model, "vae", None)
    scale, frames = latent_scales(decoder.config) if decoder is not None else (None, None)
    # Decoders in the place of a model's own need not say it.
    return scale or getattr(model, "vae_scale_factor", None) or family.scales[0], frames or family.scales[1]


def summary(model: Any) -> Summary:
    """What is applied to a pipeline or denoiser, and what its last image did."""
    first, *others = map(_summary, denoisers_of(model))
    return replace(first, others=tuple(others))


def _summary(denoiser: nn.Module) -> Summary:
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
    holding = known.holding
    return Summary(
        known.plan,
        tuple(groups),
        compiled_state(denoiser),
        residual_bytes=holding.nbytes if holding is not None else 0,
        held=_held(known.plan, known.installation),
        steps=dict(known.state.steps),
        nonsense=holding.errors.nonsense if holding is not None else 0,
        drift=_drift(denoiser, known),
    )


def _drift(denoiser: nn.Module, known: _Applied) -> Drift | None:
    """Of the last image; None where nothing was held, or nothing that was held had a measured error. What Merge changes
    no error of Hold tells."""
    hold = known.plan.techniques.hold
    drift = known.holding.drift if known.holding is not None and known.merging is None else None
    if hold is None or drift is None or not math.isfinite(drift):
        return None
    return Drift.of(drift, calibrated=was_compared(denoiser, known.state.follower.scheduler, hold.what))


def _held(plan_: Plan, installation: Installation) -> str:
    """What is held where no table says it."""
    if not any(run.generic for run in plan_.runs):
        return ""
    blocks = [block.module for run in plan_.runs for block in run.blocks]
    runs: list[list[str]] = []
    for site in installation.sites_on(blocks):
        if isinstance(site, LearnedSite):
            if site.first:
                runs.append([])
            runs[-1].append(site.name)
    if not runs:
        return "The first call will show which blocks can be held."
    told = ", ".join(f"{run[0]} to {run[-1]}" for run in runs)
    held = sum(map(len, runs))
    return f"Held without a table: {held} of {len(blocks)} blocks, in {counted(len(runs), 'run')} ({told})."


@dataclass(frozen=True)
class TokenMap:
    """What merged into what in one group, for the first sample of the last call."""

    group: str
    grid: TokenGrid
    owners: Tensor  # [N] the destination that a token merges into most, as a token index
    regions: Tensor  # [N] the number of a token's region


def token_maps(model: Any) -> list[TokenMap]:
    """The maps of a model that has run with merging, one for each group that has one, without reference images."""
    denoiser = denoiser_of(model)
    known = vars(denoiser).get(APPLIED)
    if known is not None and known.merging is not None and shard_of(denoiser) is not None:
        raise TokenMergeError("each process has the map of its own tokens alone; draw the picture in one process")
    maps = []
    for group in known.merging.groups if known is not None and known.merging is not None else ():
        if group.partition is None or group.slot is None or not group.has_maps:
            continue
        merging, layout = group.partition.grids, group.partition.layout
        grid, begin, _ = drawn_alone(merging)
        image = slice(begin, begin + grid.count)
        places = group.partition.order if group.partition.order is not None else torch.arange(layout.tokens)
        regions = torch.empty(layout.tokens, dtype=torch.int64)
        regions[places.cpu()] = torch.arange(layout.tokens) // layout.select_size
        maps.append(TokenMap(group.name, grid, group.slot.map.owners()[image].cpu() - begin, regions[image]))
    return maps


def supported_models() -> dict[str, str]:
    """The denoisers that can be merged and held: the names of their classes in diffusers, each with the models that
    have it, as people call them. Most other denoisers can be held."""
    return {family.denoiser.__name__: family.title for family in families()}


def decided(
    denoiser: nn.Module,
    family: Family,
    techniques: Techniques,
    noisy: Callable[[], bool],
    predicts: Callable[[], bool],
) -> Techniques:
    """Techniques with what `auto` stands for: a UNet's stages, or blocks. Where noise is added at steps, which only
    layers that still run would see, those of a UNet see it; elsewhere the clean prediction is held, if it is known."""
    hold = techniques.hold
    if hold is None or hold.what != "auto":
        return techniques
    what = "blocks" if family.stages is None else "stages"
    if noisy():
        sees = family.stages is not None and bool(family.blocks(denoiser))
        what = "blocks" if sees or not predicts() else "prediction"
    return techniques._replace(hold=hold.replace(what=what))


def _adds_noise(scheduler: Any) -> bool:
    return scheduler is not None and adds_noise(scheduler)


def _predicts(scheduler: Any) -> bool:
    return scheduler is not None and form_of(scheduler) is not None


def _check_scheduler(plan_: Plan, scheduler: Any) -> None:
    """Refuse windows without a known number of steps, and noise levels that no scheduler tells."""
    merge, hold = plan_.techniques
    # What does nothing needs to know nothing.
    acting = (merge if plan_.merged_sites else None, hold if plan_.runs else None)
    for each in acting:
        if each is not None and each.windowed and scheduler is None:
            raise TokenMergeError(
                f"{type(each).__name__}'s window of {each.window[0]} to {each.window[1]} needs to know how many steps "
                "there are; apply to the pipeline, or give scheduler=..."
            )
    if (
        plan_.runs
        and scheduler is not None
        and not any(hasattr(scheduler, name) for name in ("timesteps", "set_timesteps"))
    ):
        raise TokenMergeError(
            f"{type(scheduler).__name__} has no timesteps, by which Hold knows the steps; give the scheduler that "
            "drives the denoiser, or apply a Merge"
        )
    if any(run.whole for run in plan_.runs) and (scheduler is None or form_of(scheduler) is None):
        raise not_predicted(scheduler)


def way_out_of_noise(family: Family, plan_: Plan) -> str:
    """What to do under a scheduler that adds noise, where nothing in a held step would see it; else nothing."""
    if not plan_.runs or plan_.runs[0].whole or (family.stages is not None and not plan_.runs[0].stages):
        return ""
    return "use Hold(what='prediction'), or another scheduler"


# What is applied to one denoiser, without its maps and residuals, which would be kept for as long.
_Known = tuple[nn.Module, Plan, Callable[[], Any]]


def _known(denoiser: nn.Module) -> _Known | None:
    known = vars(denoiser).get(APPLIED)
    return None if known is None else (denoiser, known.plan, known.scheduler_of)


def _apply_plans(wanted: list[_Known]) -> None:
    """Apply to all denoisers of a pipeline; if one fails, all have what they had before."""
    done: list[tuple[nn.Module, _Known | None]] = []
    try:
        for each in wanted:
            before = each[0], _known(each[0])
            _apply_plan(*each)
            done.append(before)
    except BaseException:
        for denoiser, known in done:
            _remove(denoiser)
            if known is not None:
                _apply_plan(*known)
        raise


def _apply_plan(denoiser: nn.Module, plan_: Plan, scheduler_of: Callable[[], Any]) -> None:
    """Replace what is applied to the denoiser; if that fails, what was applied stays."""
    family = family_of(denoiser)
    acts = bool(plan_.merged_sites or plan_.runs)
    # Reads the scheduler, which may be anybody's, before anything is touched.
    way_out = way_out_of_noise(family, plan_)
    follower = Follower(_timeline(plan_), scheduler_of if acts else lambda: None, way_out)
    before = _known(denoiser)
    _remove(denoiser)
    try:
        _attach(denoiser, family, plan_, follower, scheduler_of)
    except BaseException:
        if before is not None:
            _apply_plan(*before)
        raise


@contextmanager
def hosted(denoiser: nn.Module, family: Family, plan_: Plan, follower: Host) -> Iterator[Callable[[], Summary]]:
    """A plan on a denoiser for one picture of a host that is not diffusers; afterwards it is exactly as before. Gives a
    function that tells what has been done.

    family: the host's own table. follower: keeps the clock by what the host tells.
    """
    _attach(denoiser, family, plan_, follower, lambda: None)
    try:
        yield partial(_summary, denoiser)
    finally:
        _remove(denoiser)


def _attach(denoiser: nn.Module, family: Family, plan_: Plan, follower: Host, scheduler_of: Callable[[], Any]) -> None:
    """Put a plan on a denoiser that has none; if that fails, it is as it was."""
    merge = plan_.techniques.merge if plan_.merged_sites else None
    merging = Merging(merge, follower.clock) if merge is not None else None
    whole = any(run.whole for run in plan_.runs)
    holding = (Predicting if whole else Holding)(follower.clock) if plan_.runs else None
    state = State(_timeline(plan_), follower, merging, holding)
    installation = Installation()
    try:
        if isinstance(holding, Predicting) and isinstance(follower, Follower):
            follower.predict(holding)
        if isinstance(holding, Predicting) and isinstance(follower, SigmaFollower):
            follower.predict(holding, state.leaves_out)
        if merging is not None or holding is not None:
            _install(denoiser, family, plan_, state, installation, merging, holding)
    except BaseException:
        installation.uninstall()
        follower.close()
        raise
    setattr(denoiser, APPLIED, _Applied(plan_, state, installation, scheduler_of, merging, holding))


def _timeline(plan_: Plan) -> Timeline:
    """Of the techniques that act somewhere."""
    merge, hold = plan_.techniques
    return timeline_of(merge if plan_.merged_sites else None, hold if plan_.runs else None)


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
        install_merging(plan_.merged_sites, merging, installation, plan_.lora)
    learner = None
    if holding is not None and any(run.generic for run in plan_.runs):
        learner = _learner(plan_, holding, installation)
    elif isinstance(holding, Predicting):
        # Another host does not make the calls at all.
        if isinstance(state.follower, Follower):
            installation.add(DenoiserSite(holding), denoiser)
    elif holding is not None:
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
        held=[block.name for run in plan_.runs if not run.whole for block in run.blocks],
        stages=any(run.stages for run in plan_.runs),
        check_held=check,
        watch=learner.watch if learner is not None else None,
    )
    installation.install(denoiser, observer.enter, observer.leave)


def _learner(plan_: Plan, holding: Holding, installation: Installation) -> Learner:
    """Installs sites once a call has shown what can be held."""
    holding.learning = True

    def learned(runs: list[LearnedRun]) -> None:
        install_learned(runs, holding, installation)
        holding.learning = False

    return Learner(plan_.runs[0].blocks, learned)

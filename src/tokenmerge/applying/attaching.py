"""A plan onto a denoiser and off again: all of a pipeline's denoisers get theirs, or none does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..families import Family, family_of
from ..holding.controller import Holding
from ..holding.learning import LearnedRun, Learner
from ..holding.prediction import DenoiserSite, Predicting
from ..holding.sites import check_holdable, install_holding, install_learned
from ..merging.checks import check_mergeable, check_places
from ..merging.controller import Merging
from ..merging.places import install_merging
from ..planning import Plan
from ..planning.plan import timeline_of
from ..runtime.foreign import cache_hooks, leads_cache
from ..runtime.installing import Installation
from ..runtime.observing import Observer
from ..runtime.scheduler import Follower
from ..runtime.sigmas import SigmaFollower
from ..runtime.state import APPLIED, Host, State
from ..runtime.timeline import Timeline
from .plans import way_out_of_noise

# A denoiser, its plan, and how to get the scheduler that drives it. Without maps and residuals, which would be kept for
# as long.
Wanted = tuple[nn.Module, Plan, Callable[[], Any]]


@dataclass(frozen=True)
class Applied:
    """What lies on a denoiser that has a plan."""

    plan: Plan
    state: State
    installation: Installation
    scheduler_of: Callable[[], Any]
    merging: Merging | None
    holding: Holding | None


def applied_to(denoiser: nn.Module) -> Applied | None:
    return vars(denoiser).get(APPLIED)


def apply_plans(wanted: list[Wanted]) -> None:
    """Apply to all denoisers of a pipeline; if one fails, all have what they had before."""
    done: list[tuple[nn.Module, Wanted | None]] = []
    try:
        for each in wanted:
            before = each[0], plan_on(each[0])
            _apply_plan(*each)
            done.append(before)
    except BaseException:
        for denoiser, known in done:
            detach(denoiser)
            if known is not None:
                _apply_plan(*known)
        raise


def _apply_plan(denoiser: nn.Module, plan: Plan, scheduler_of: Callable[[], Any]) -> None:
    """Replace what is applied to the denoiser; if that fails, what was applied stays."""
    family = family_of(denoiser)
    acts = bool(plan.merged_sites or plan.runs)
    # Reads the scheduler, which may be anybody's, before anything is touched.
    way_out = way_out_of_noise(family, plan)
    follower = Follower(_timeline(plan), scheduler_of if acts else lambda: None, way_out)
    before = plan_on(denoiser)
    detach(denoiser)
    try:
        attach(denoiser, family, plan, follower, scheduler_of)
    except BaseException:
        if before is not None:
            _apply_plan(*before)
        raise


def detach(denoiser: nn.Module) -> None:
    """Take its plan off a denoiser, if it has one, which is then exactly as before."""
    known = applied_to(denoiser)
    if known is not None:
        known.installation.uninstall()
        known.state.close()
        delattr(denoiser, APPLIED)


def plan_on(denoiser: nn.Module) -> Wanted | None:
    """The plan that a denoiser has now."""
    known = applied_to(denoiser)
    return None if known is None else (denoiser, known.plan, known.scheduler_of)


def attach(denoiser: nn.Module, family: Family, plan: Plan, follower: Host, scheduler_of: Callable[[], Any]) -> None:
    """Put a plan on a denoiser that has none; if that fails, it is as it was."""
    merge = plan.techniques.merge if plan.merged_sites else None
    merging = Merging(merge, follower.clock) if merge is not None else None
    whole = any(run.whole for run in plan.runs)
    holding = (Predicting if whole else Holding)(follower.clock) if plan.runs else None
    state = State(_timeline(plan), follower, merging, holding)
    installation = Installation()
    try:
        if isinstance(holding, Predicting) and isinstance(follower, Follower):
            follower.predict(holding)
        if isinstance(holding, Predicting) and isinstance(follower, SigmaFollower):
            follower.predict(holding, state.leaves_out)
        if merging is not None or holding is not None:
            _install(denoiser, family, plan, state, installation, merging, holding)
    except BaseException:
        installation.uninstall()
        follower.close()
        raise
    setattr(denoiser, APPLIED, Applied(plan, state, installation, scheduler_of, merging, holding))


def _timeline(plan: Plan) -> Timeline:
    """Of the techniques that act somewhere."""
    merge, hold = plan.techniques
    return timeline_of(merge if plan.merged_sites else None, hold if plan.runs else None)


def _install(
    denoiser: nn.Module,
    family: Family,
    plan: Plan,
    state: State,
    installation: Installation,
    merging: Merging | None,
    holding: Holding | None,
) -> None:
    # The first technique on a module is the inner one: what is held is held with its merging.
    if merging is not None:
        install_merging(plan.merged_sites, merging, installation, plan.lora)
    learner = None
    if holding is not None and any(run.generic for run in plan.runs):
        learner = _learner(plan, holding, installation)
    elif isinstance(holding, Predicting):
        # Another host does not make the calls at all.
        if isinstance(state.follower, Follower):
            installation.add(DenoiserSite(holding), denoiser)
    elif holding is not None:
        install_holding(plan.runs, holding, installation)
    check = partial(check_holdable, runs=plan.runs)
    weak = weakref.ref(denoiser)

    # Kept by the state, so it must not keep the denoiser.
    def at_image_start() -> int | None:
        model = weak()
        assert model is not None
        if merging is not None:
            check_mergeable(model, merging.technique)
            check_places(plan.merged_sites)
        if holding is not None:
            check(model)
        installation.follow()
        if not cache_hooks(model):
            return None
        leading = [site.block.module for site in plan.merged_sites if leads_cache(site.block.module)]
        return sum(getattr(site, "visits", False) for site in installation.sites_on(leading))

    state.at_image_start = at_image_start
    observer = Observer(
        family,
        state,
        installation,
        check=partial(merging.check_call, family) if merging is not None else None,
        held=[block.name for run in plan.runs if not run.whole for block in run.blocks],
        stages=any(run.stages for run in plan.runs),
        check_held=check,
        watch=learner.watch if learner is not None else None,
    )
    installation.install(denoiser, observer.enter, observer.leave)


def _learner(plan: Plan, holding: Holding, installation: Installation) -> Learner:
    """Installs sites once a call has shown what can be held."""
    holding.learning = True

    def learned(runs: list[LearnedRun]) -> None:
        install_learned(runs, holding, installation)
        holding.learning = False

    return Learner(plan.runs[0].blocks, learned)

"""Put plans on denoisers and take them off again. All denoisers of a pipeline get their plans, or none does."""

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
from .plans import way_out_of_noise

# A denoiser, its plan, and how to get the scheduler that drives it: enough to apply the plan again, without keeping
# maps and residuals in memory.
Assignment = tuple[nn.Module, Plan, Callable[[], Any]]


@dataclass(frozen=True)
class Applied:
    """What `apply` put on a denoiser."""

    plan: Plan
    state: State
    installation: Installation
    scheduler_of: Callable[[], Any]
    merging: Merging | None
    holding: Holding | None


def applied_to(denoiser: nn.Module) -> Applied | None:
    return vars(denoiser).get(APPLIED)


def apply_plans(assignments: list[Assignment]) -> None:
    """Apply plans to all denoisers of a pipeline. If one fails, all get back what they had before."""
    touched: list[tuple[nn.Module, Assignment | None]] = []
    try:
        for denoiser, plan, scheduler_of in assignments:
            family = family_of(denoiser)
            acts = bool(plan.merged_sites or plan.runs)
            # Reading a third-party scheduler may fail: do it before touching the denoiser.
            way_out = way_out_of_noise(family, plan)
            follower = Follower(timeline_of(*plan.acting), scheduler_of if acts else lambda: None, way_out)
            touched.append((denoiser, plan_on(denoiser)))
            detach(denoiser)
            attach(denoiser, family, plan, follower, scheduler_of)
    except BaseException:
        for denoiser, _ in touched:
            detach(denoiser)
        apply_plans([before for _, before in touched if before is not None])
        raise


def detach(denoiser: nn.Module) -> None:
    """Take the plan off a denoiser, if it has one, and leave the denoiser exactly as before."""
    applied = applied_to(denoiser)
    if applied is not None:
        applied.installation.uninstall()
        applied.state.close()
        delattr(denoiser, APPLIED)


def plan_on(denoiser: nn.Module) -> Assignment | None:
    """The plan that is on a denoiser now."""
    applied = applied_to(denoiser)
    return None if applied is None else (denoiser, applied.plan, applied.scheduler_of)


def attach(denoiser: nn.Module, family: Family, plan: Plan, follower: Host, scheduler_of: Callable[[], Any]) -> None:
    """Put a plan on a denoiser that has none. If that fails, the denoiser is left as it was."""
    merge, _ = plan.acting
    merging = Merging(merge, follower.clock) if merge is not None else None
    whole = any(run.whole for run in plan.runs)
    holding = (Predicting if whole else Holding)(follower.clock) if plan.runs else None
    state = State(timeline_of(*plan.acting), follower, merging, holding)
    applied = Applied(plan, state, Installation(), scheduler_of, merging, holding)
    try:
        if isinstance(holding, Predicting) and isinstance(follower, Follower):
            follower.predict(holding)
        if isinstance(holding, Predicting) and isinstance(follower, SigmaFollower):
            follower.predict(holding, state.leaves_out)
        if merging is not None or holding is not None:
            _install(denoiser, family, applied)
    except BaseException:
        applied.installation.uninstall()
        follower.close()
        raise
    setattr(denoiser, APPLIED, applied)


def _install(denoiser: nn.Module, family: Family, applied: Applied) -> None:
    """Install the sites of all techniques, and observe every call of the denoiser."""
    plan, state, installation = applied.plan, applied.state, applied.installation
    merging, holding = applied.merging, applied.holding
    # The technique added first is the inner one: a held block is held together with its merging.
    if merging is not None:
        install_merging(plan.merged_sites, merging, installation, plan.lora)
    learner = None
    if holding is not None and any(run.generic for run in plan.runs):
        learner = _learner(plan, holding, installation)
    elif isinstance(holding, Predicting):
        # Hosts other than diffusers skip held calls themselves.
        if isinstance(state.follower, Follower):
            installation.add(DenoiserSite(holding), denoiser)
    elif holding is not None:
        install_holding(plan.runs, holding, installation)
    check_held = partial(check_holdable, runs=plan.runs)
    weak = weakref.ref(denoiser)

    # The state keeps this function, so it must refer neither to the state nor strongly to the denoiser.
    def at_image_start() -> int | None:
        model = weak()
        assert model is not None
        if merging is not None:
            check_mergeable(model, merging.technique)
            check_places(plan.merged_sites)
        if holding is not None:
            check_held(model)
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
        check_held=check_held,
        watch=learner.watch if learner is not None else None,
    )
    installation.install(denoiser, observer.enter, observer.leave)


def _learner(plan: Plan, holding: Holding, installation: Installation) -> Learner:
    """A learner that installs holding once a call has shown which blocks can be held."""
    holding.learning = True

    def learned(runs: list[LearnedRun]) -> None:
        install_learned(runs, holding, installation)
        holding.learning = False

    return Learner(plan.runs[0].blocks, learned)

"""The plan for a denoiser: what techniques will do to it, or why they cannot be applied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..config import Techniques
from ..errors import TokenMergeError
from ..families import Family, family_of
from ..holding.prediction import not_predicted
from ..holding.sites import check_holdable
from ..merging.checks import check_mergeable, check_places
from ..planning import Plan, make_plan
from ..runtime.foreign import cache_hooks
from ..runtime.noise import adds_noise
from ..runtime.prediction import form_of


def checked_plan(denoiser: nn.Module, techniques: Techniques, scheduler: Any) -> Plan:
    """The plan for a denoiser; raises where it cannot be applied."""
    plan = hosted_plan(denoiser, family_of(denoiser), techniques, *asked_of(scheduler))
    _check_scheduler(plan, scheduler)
    return plan


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
    plan = make_plan(denoiser, family, techniques)
    check_holdable(denoiser, plan.runs)
    caches = cache_hooks(denoiser)
    if caches:
        raise TokenMergeError(
            f"a cache ({caches[0]}) is enabled already; a cache must come after a technique: "
            "call disable_cache(), apply, then enable_cache(...)"
        )
    if techniques.merge is not None:
        check_mergeable(denoiser, techniques.merge)
        if plan.merged_sites:
            check_places(plan.merged_sites)
    return plan


def asked_of(scheduler: Any) -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Whether a scheduler adds noise at steps, and whether clean predictions can be held under it."""
    if scheduler is None:
        return (lambda: False), (lambda: False)
    return partial(adds_noise, scheduler), lambda: form_of(scheduler) is not None


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


def _check_scheduler(plan: Plan, scheduler: Any) -> None:
    """Refuse windows without a known number of steps, and noise levels that no scheduler tells."""
    merge, hold = plan.techniques
    # What does nothing needs to know nothing.
    acting = (merge if plan.merged_sites else None, hold if plan.runs else None)
    for each in acting:
        if each is not None and each.windowed and scheduler is None:
            raise TokenMergeError(
                f"{type(each).__name__}'s window of {each.window[0]} to {each.window[1]} needs to know how many steps "
                "there are; apply to the pipeline, or give scheduler=..."
            )
    if (
        plan.runs
        and scheduler is not None
        and not any(hasattr(scheduler, name) for name in ("timesteps", "set_timesteps"))
    ):
        raise TokenMergeError(
            f"{type(scheduler).__name__} has no timesteps, by which Hold knows the steps; give the scheduler that "
            "drives the denoiser, or apply a Merge"
        )
    if any(run.whole for run in plan.runs) and (scheduler is None or form_of(scheduler) is None):
        raise not_predicted(scheduler)


def way_out_of_noise(family: Family, plan: Plan) -> str:
    """What to do under a scheduler that adds noise, where nothing in a held step would see it; else nothing."""
    if not plan.runs or plan.runs[0].whole or (family.stages is not None and not plan.runs[0].stages):
        return ""
    return "use Hold(what='prediction'), or another scheduler"

"""Make the plan for a denoiser, or raise an error that says why techniques cannot be applied to it."""

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
    """The plan for a denoiser of diffusers. Raises if it cannot be applied."""
    plan = hosted_plan(denoiser, family_of(denoiser), techniques, *scheduler_checks(scheduler))
    _check_scheduler(plan, scheduler)
    return plan


def hosted_plan(
    denoiser: nn.Module,
    family: Family,
    techniques: Techniques,
    noisy: Callable[[], bool],
    predicts: Callable[[], bool] = lambda: False,
) -> Plan:
    """The plan for a denoiser of any host. Raises if it cannot be applied.

    noisy: whether the solver adds noise at its steps. predicts: whether clean predictions can be held.
    """
    techniques = resolve_auto(denoiser, family, techniques, noisy, predicts)
    plan = make_plan(denoiser, family, techniques)
    check_holdable(denoiser, plan.runs)
    caches = cache_hooks(denoiser)
    if caches:
        raise TokenMergeError(
            f"a cache ({caches[0]}) is already enabled, but a cache must come after a technique: "
            "call disable_cache(), apply, then enable_cache(...)"
        )
    if techniques.merge is not None:
        check_mergeable(denoiser, techniques.merge)
        if plan.merged_sites:
            check_places(plan.merged_sites)
    return plan


def scheduler_checks(scheduler: Any) -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Two functions: whether a scheduler adds noise at steps, and whether clean predictions can be held under it."""
    if scheduler is None:
        return (lambda: False), (lambda: False)
    return partial(adds_noise, scheduler), lambda: form_of(scheduler) is not None


def resolve_auto(
    denoiser: nn.Module,
    family: Family,
    techniques: Techniques,
    noisy: Callable[[], bool],
    predicts: Callable[[], bool],
) -> Techniques:
    """Replace `what="auto"` of Hold: by the stages of a UNet, or by the blocks of other models.

    In a held step, layers that are not held must see noise that the scheduler added. A UNet whose blocks are held has
    such layers. For other models the clean prediction is held instead, where that is possible.
    """
    hold = techniques.hold
    if hold is None or hold.what != "auto":
        return techniques
    what = "blocks" if family.stages is None else "stages"
    if noisy():
        sees = family.stages is not None and bool(family.blocks(denoiser))
        what = "blocks" if sees or not predicts() else "prediction"
    return techniques._replace(hold=hold.replace(what=what))


def _check_scheduler(plan: Plan, scheduler: Any) -> None:
    """Refuse windows without a known number of steps, and Hold where the scheduler does not show what it needs."""
    for technique in plan.acting:
        if technique is not None and technique.windowed and scheduler is None:
            start, stop = technique.window
            raise TokenMergeError(
                f"{type(technique).__name__}'s window of {start} to {stop} needs the number of steps; apply to the "
                "pipeline, or give scheduler=..."
            )
    timed = hasattr(scheduler, "timesteps") or hasattr(scheduler, "set_timesteps")
    if plan.runs and scheduler is not None and not timed:
        raise TokenMergeError(
            f"{type(scheduler).__name__} has no timesteps, by which Hold knows the steps; give the scheduler that "
            "drives the denoiser, or apply Merge instead"
        )
    if any(run.whole for run in plan.runs) and (scheduler is None or form_of(scheduler) is None):
        raise not_predicted(scheduler)


def way_out_of_noise(family: Family, plan: Plan) -> str:
    """What errors advise under a scheduler that adds noise; empty if held steps leave none of it in the picture."""
    if not plan.runs or plan.runs[0].whole or (family.stages is not None and not plan.runs[0].stages):
        return ""
    return "use Hold(what='prediction'), or another scheduler"

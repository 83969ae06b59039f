"""Applying: make the plan for a denoiser, put its sites on and take them off, and report what they did."""

from .attaching import apply_plans, detach, plan_on
from .hosting import hosted
from .plans import checked_plan, hosted_plan, resolve_auto, scheduler_checks, way_out_of_noise
from .reporting import summary_of, token_maps

__all__ = [
    "apply_plans",
    "checked_plan",
    "detach",
    "hosted",
    "hosted_plan",
    "plan_on",
    "resolve_auto",
    "scheduler_checks",
    "summary_of",
    "token_maps",
    "way_out_of_noise",
]

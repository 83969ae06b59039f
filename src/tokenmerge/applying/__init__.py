"""Applying: the plan for a denoiser, its sites put on and taken off again, and what they tell."""

from .attaching import apply_plans, detach, plan_on
from .hosting import hosted
from .plans import asked_of, checked_plan, decided, hosted_plan, way_out_of_noise
from .telling import summary_of, token_maps

__all__ = [
    "apply_plans",
    "asked_of",
    "checked_plan",
    "decided",
    "detach",
    "hosted",
    "hosted_plan",
    "plan_on",
    "summary_of",
    "token_maps",
    "way_out_of_noise",
]

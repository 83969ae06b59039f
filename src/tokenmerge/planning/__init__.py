"""Plans: what techniques will do to a model, what that saves, and how people are told."""

from .costs import PlannedGroup
from .plan import Plan, make_plan
from .summary import Drift, Summary, told_steps

__all__ = ["Drift", "Plan", "PlannedGroup", "Summary", "make_plan", "told_steps"]

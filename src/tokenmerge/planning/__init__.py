"""Plans: what techniques will do to a model, what that saves, and how people are told."""

from .drift import Drift
from .plan import Plan, make_plan
from .summary import Summary, told_steps

__all__ = ["Drift", "Plan", "Summary", "make_plan", "told_steps"]

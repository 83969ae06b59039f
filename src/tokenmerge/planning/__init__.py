"""Plans: what techniques will do to a model, what that saves, and how this is presented to people."""

from .drift import Drift
from .plan import Plan, make_plan
from .summary import Summary, describe_steps

__all__ = ["Drift", "Plan", "Summary", "describe_steps", "make_plan"]

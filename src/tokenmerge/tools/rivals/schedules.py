"""Other schedules for the plain model: fewer steps of its own scheduler, or a better solver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ...errors import TokenMergeError
from ..loading import Outline
from ..solvers import solver_for
from .base import Field, Kind, Run


class Schedule(Kind):
    """A number of steps, and perhaps another scheduler."""

    noun = "schedule"
    counted_by: str  # the field that gives the number of steps


class FewerSteps(Schedule):
    name = "steps"
    example = "steps:count=14"
    counted_by = "count"

    def fields(self) -> Mapping[str, Field]:
        return {"count": Field(int, least=1)}

    def check(self, model: Outline, values: Mapping[str, Any], steps: int) -> None:
        super().check(model, values, steps)
        if values["count"] == steps:
            raise TokenMergeError(f"the plain schedule has {steps} steps too; use another count")

    def enabled(self, pipe: Any, values: Mapping[str, Any], run: Run) -> AbstractContextManager[None]:
        # The number of steps is an argument of every pipeline call.
        return nullcontext()


class Solver(Schedule):
    """A solver class of diffusers, made from the config of the pipeline's scheduler."""

    counted_by = "steps"

    def __init__(self, name: str, scheduler: str, orders: int) -> None:
        self.name = name
        self.example = f"{name}:steps=14"
        self._scheduler, self._orders = scheduler, orders

    def fields(self) -> Mapping[str, Field]:
        return {"steps": Field(int, least=1), "order": Field(int, 2, least=1, most=self._orders)}

    @contextmanager
    def enabled(self, pipe: Any, values: Mapping[str, Any], run: Run) -> Iterator[None]:
        own = pipe.scheduler
        pipe.scheduler = solver_for(own, self._scheduler, self.name, solver_order=values["order"])
        try:
            yield
        finally:
            pipe.scheduler = own


SCHEDULES = (
    FewerSteps(),
    Solver("unipc", "UniPCMultistepScheduler", 3),
    Solver("dpm++", "DPMSolverMultistepScheduler", 3),
)

"""Other schedules for the plain model: fewer steps of its own scheduler, or a better solver."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import diffusers

from ...errors import TokenMergeError
from ..loading import Outline
from .base import Field, Kind, Run


class Schedule(Kind):
    """A number of steps, and perhaps another scheduler. counted_by: the field that gives the number."""

    noun = "schedule"
    counted_by: str


class FewerSteps(Schedule):
    name = "steps"
    example = "steps:count=14"
    counted_by = "count"

    def fields(self) -> Mapping[str, Field]:
        return {"count": Field(int, least=1)}

    def check(self, model: Outline, values: Mapping[str, Any], steps: int) -> None:
        super().check(model, values, steps)
        if values["count"] == steps:
            raise TokenMergeError(f"the plain schedule has {steps} steps too; ask for another count")

    def enabled(self, pipe: Any, values: Mapping[str, Any], run: Run) -> AbstractContextManager[None]:
        # The number of steps is an argument of every call.
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
        pipe.scheduler = self._made(own, values["order"])
        try:
            yield
        finally:
            pipe.scheduler = own

    def _made(self, own: Any, order: int) -> Any:
        config = own.config
        changes: dict[str, Any] = {"solver_order": order}
        # Schedulers of flow models know one prediction alone, and do not name it.
        if "prediction_type" not in config:
            if config.get("use_dynamic_shifting") and config.get("time_shift_type") != "exponential":
                raise TokenMergeError(
                    f"{self._scheduler} shifts times exponentially, and the model's {type(own).__name__} by "
                    f"{config.get('time_shift_type')!r}; leave out {self.name}"
                )
            # Where the shift goes by the size of a picture, pipelines give it with every call.
            changes |= {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": config["shift"]}
        solver = getattr(diffusers, self._scheduler)
        # diffusers would warn of all that the solver has no place for.
        known = inspect.signature(solver.__init__).parameters
        return solver.from_config({name: value for name, value in config.items() if name in known}, **changes)


SCHEDULES = (
    FewerSteps(),
    Solver("unipc", "UniPCMultistepScheduler", 3),
    Solver("dpm++", "DPMSolverMultistepScheduler", 3),
)

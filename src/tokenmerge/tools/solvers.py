"""Solvers: schedulers of diffusers made from the config of a pipeline's own, and those by name that take its place."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import TokenMergeError

_KARRAS = "-karras"
# By name: the class for models that predict noise or its like. Flows have a class of their own for Euler.
_CLASSES = {
    "euler": "EulerDiscreteScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
}
_FLOW_EULER = "FlowMatchEulerDiscreteScheduler"
# What pipelines read from a scheduler's config to shift by the size of a picture. Solvers themselves do not know it.
_SHIFTS = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
# What people choose from; with Karras' sigmas, or as the model's own scheduler spaces its steps.
SCHEDULERS = tuple(f"{name}{ending}" for name in _CLASSES for ending in ("", _KARRAS))


def solver_for(own: Any, scheduler: str, name: str, **changes: Any) -> Any:
    """A solver class of diffusers, made from the config of the pipeline's own scheduler. name: as it was typed."""
    # Names alone are needed by --help, which is not to wait for it.
    import diffusers

    config = own.config
    solver = getattr(diffusers, scheduler)
    if _flows(config) and scheduler != _FLOW_EULER:
        if config.get("use_dynamic_shifting") and config.get("time_shift_type") != "exponential":
            raise TokenMergeError(
                f"{scheduler} shifts times exponentially, and the model's {type(own).__name__} by "
                f"{config.get('time_shift_type')!r}; leave out {name}"
            )
        changes |= {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": config["shift"]}
    # diffusers would warn of fields that the solver does not know.
    known = inspect.signature(solver.__init__).parameters
    made = solver.from_config({name: value for name, value in config.items() if name in known}, **changes)
    made.register_to_config(**{name: config[name] for name in _SHIFTS if name in config})
    return made


def scheduler_named(name: str, own: Any) -> Any:
    """One of `SCHEDULERS`, in the place of a pipeline's own."""
    plain = name.removesuffix(_KARRAS)
    flows, karras = _flows(own.config), name != plain
    if flows and karras and plain != "euler":
        raise TokenMergeError(
            f"scheduler {name} has no Karras sigmas for flows, as the model of {type(own).__name__} is one; choose "
            f"euler{_KARRAS} or {plain}"
        )
    scheduler = _FLOW_EULER if flows and plain == "euler" else _CLASSES[plain]
    return solver_for(own, scheduler, name, **({"use_karras_sigmas": True} if karras else {}))


def _flows(config: Any) -> bool:
    """Schedulers of flow models know one prediction alone, and do not name it."""
    return "prediction_type" not in config

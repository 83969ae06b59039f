"""Solvers: diffusers schedulers that replace a pipeline's own and are made from its config."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import TokenMergeError

_KARRAS = "-karras"
# Scheduler classes by name. Flow models have an Euler class of their own.
_CLASSES = {
    "euler": "EulerDiscreteScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
}
_FLOW_EULER = "FlowMatchEulerDiscreteScheduler"
# Pipelines read these from the scheduler's config to shift times by picture size. Solvers do not accept them.
_SHIFTS = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
# The names to choose from, with Karras sigmas or with the spacing of the model's own scheduler.
SCHEDULERS = tuple(f"{name}{ending}" for name in _CLASSES for ending in ("", _KARRAS))


def solver_for(own: Any, scheduler: str, name: str, **changes: Any) -> Any:
    """A scheduler class of diffusers, made from the config of the pipeline's own. name: as typed, for errors."""
    # --help needs only the names above and must not wait for diffusers.
    import diffusers

    config = own.config
    solver = getattr(diffusers, scheduler)
    if _flows(config) and scheduler != _FLOW_EULER:
        if config.get("use_dynamic_shifting") and config.get("time_shift_type") != "exponential":
            raise TokenMergeError(
                f"{scheduler} shifts times exponentially, but the model's {type(own).__name__} shifts by "
                f"{config.get('time_shift_type')!r}; leave out {name}"
            )
        changes |= {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": config["shift"]}
    # diffusers would warn about fields that the solver does not accept.
    known = inspect.signature(solver.__init__).parameters
    made = solver.from_config({name: value for name, value in config.items() if name in known}, **changes)
    made.register_to_config(**{name: config[name] for name in _SHIFTS if name in config})
    return made


def scheduler_named(name: str, own: Any) -> Any:
    """The scheduler with this name from `SCHEDULERS`, to replace a pipeline's own."""
    plain = name.removesuffix(_KARRAS)
    flows, karras = _flows(own.config), name != plain
    if flows and karras and plain != "euler":
        raise TokenMergeError(
            f"{plain} has no Karras sigmas for flow models, and this is one (its scheduler is {type(own).__name__}); "
            f"choose euler{_KARRAS} or {plain}"
        )
    scheduler = _FLOW_EULER if flows and plain == "euler" else _CLASSES[plain]
    return solver_for(own, scheduler, name, **({"use_karras_sigmas": True} if karras else {}))


def _flows(config: Any) -> bool:
    """Whether the config is a flow model's. Those have one prediction type and do not name it."""
    return "prediction_type" not in config

"""Training-free token merging for diffusers pipelines: ToMA and beyond."""

from typing import TYPE_CHECKING, Any

from .presets import presets
from .config import MergeConfig, Schedule
from .errors import TokenMergeError

if TYPE_CHECKING:
    from .api import Summary, applied, apply, plan, remove, summary, supported_models
    from .compiling.blocks import compile, uncompile
    from .planning.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "MergeConfig",
    "Plan",
    "Schedule",
    "Summary",
    "TokenMergeError",
    "applied",
    "apply",
    "compile",
    "plan",
    "presets",
    "remove",
    "summary",
    "supported_models",
    "uncompile",
]

_LAZY = {"Plan": "planning", "Summary": "api", **dict.fromkeys(("applied", "apply", "plan"), "api")}
_LAZY |= dict.fromkeys(("compile", "uncompile"), "compiling")
_LAZY |= dict.fromkeys(("remove", "summary", "supported_models"), "api")


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use, so that `import tokenmerge` is fast everywhere."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)

"""Faster diffusers pipelines without training: Merge runs steps on fewer tokens, Hold runs fewer steps."""

from typing import TYPE_CHECKING, Any

from .config import Hold, Merge
from .errors import TokenMergeError
from .presets import presets

if TYPE_CHECKING:
    from .api import applied, apply, plan, remove, summary, supported_models
    from .compiling import compile, uncompile
    from .planning import Plan, Summary

__version__ = "0.2.0"

__all__ = [
    "Hold",
    "Merge",
    "Plan",
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

_LAZY = {
    "Plan": "planning",
    "Summary": "planning",
    **dict.fromkeys(("applied", "apply", "plan", "remove", "summary", "supported_models"), "api"),
    **dict.fromkeys(("compile", "uncompile"), "compiling"),
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use, so that `import tokenmerge` is fast everywhere."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)

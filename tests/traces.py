"""Records everything that could be left on a pipeline, and compares the records."""

from __future__ import annotations

import types
from typing import Any

import tiny


def attributes(pipe: Any) -> dict[str, dict[str, Any]]:
    """Every attribute of the denoiser's modules and of the scheduler, dictionaries one level deep."""
    owners = dict(tiny.denoiser_of(pipe).named_modules()) | {"scheduler": pipe.scheduler}
    return {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(owner).items()}
        for name, owner in owners.items()
    }


def same(first: Any, second: Any) -> bool:
    """Whether two records hold the same objects under the same names."""
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    # Every access to a method makes a new object.
    return first == second if isinstance(first, types.MethodType) else first is second

"""What `--compile` means on a device."""

from __future__ import annotations

from typing import TypeVar

import torch

from ..compiling import compile
from ..errors import TokenMergeError

Model = TypeVar("Model")


def way_on(device: torch.device, way: str | None) -> str | None:
    """What --compile can do on a device: blocks, graphs, both or nothing. Without CUDA, both means blocks."""
    if device.type == "cuda" or way is None:
        return way
    if way == "graphs":
        raise TokenMergeError(f"--compile graphs needs a CUDA device, but this is {device}; use --compile blocks")
    return "blocks"


def warm_ups(way: str | None) -> int:
    """How many pictures to draw before one is timed.

    A graph is recorded at the second call of its kind, and some kinds come once per picture.
    """
    return 2 if way in ("graphs", "both") else 1


def check_compiled_cache(way: str | None) -> None:
    """Refuse a step cache together with compiled blocks."""
    if way not in (None, "graphs"):
        raise TokenMergeError(
            "a step cache decides between blocks which of them run, but compiled blocks do not ask it; leave out "
            "--compile, or use --compile graphs, which does not record calls with a cache"
        )


def compile_as(model: Model, way: str) -> Model:
    """Compile a model in the way that `way_on` returned."""
    return compile(model, blocks=way != "graphs", graphs=way != "blocks")

"""What `--compile` means on a device."""

from __future__ import annotations

from typing import TypeVar

import torch

from ..compiling import compile
from ..errors import TokenMergeError

Model = TypeVar("Model")


def way_on(device: torch.device, way: str | None) -> str | None:
    """What --compile comes to on a device: blocks, graphs, both or nothing."""
    if device.type == "cuda" or way is None:
        return way
    if way == "graphs":
        raise TokenMergeError(f"--compile graphs needs a CUDA device, and this is {device}; use --compile blocks")
    return "blocks"


def warm_ups(way: str | None) -> int:
    """Pictures to draw before one is timed. A graph is recorded in the second call of its kind, and some kinds come
    once in a picture."""
    return 2 if way in ("graphs", "both") else 1


def check_compiled_cache(way: str | None) -> None:
    """Refuse a step cache on blocks that --compile compiles."""
    if way not in (None, "graphs"):
        raise TokenMergeError(
            "a step cache decides between blocks which of them run, and compiled blocks do not ask it; leave out "
            "--compile, or use --compile graphs, where calls with a cache run as they are"
        )


def compile_as(model: Model, way: str) -> Model:
    """`compile`, by one of the ways that `way_on` gives."""
    return compile(model, blocks=way != "graphs", graphs=way != "blocks")

"""Time of a callable on any device, and a record of where it was measured."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

_PACKAGES = ("tokenmerge", "torch", "diffusers", "transformers", "triton")


def timed(function: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """The result and the seconds it took, work queued on the device included."""
    _wait(device)
    start = time.perf_counter()
    result = function()
    _wait(device)
    return result, time.perf_counter() - start


def forget_peak_memory(device: torch.device) -> None:
    """Begin `peak_memory` anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes of the device's memory in use at once since `forget_peak_memory`; None where it cannot be known."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def environment(device: torch.device) -> dict[str, str]:
    """What a figure depends on: hardware and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    record = {"device": name, "python": platform.python_version(), "threads": str(torch.get_num_threads())}
    for package in _PACKAGES:
        try:
            record[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return record


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()

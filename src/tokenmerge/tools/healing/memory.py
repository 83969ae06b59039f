"""Checks that the pictures of a call fit into memory, by one trial step with a single picture."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...errors import TokenMergeError
from ..measure import forget_peak_memory, free_memory, peak_memory
from .data import BLANK
from .training import Trainer

# Share of free memory that can be used; fragmentation takes the rest.
_USABLE = 0.9
_GIB = 2**30
_PROCESS = Path("/proc/self")


@contextmanager
def explain_memory(device: torch.device) -> Iterator[None]:
    """Say what to do where not even one picture fits."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TokenMergeError(
            f"{device} has too little memory to train on even one picture; use a smaller --size or --rank"
        ) from error


def check_memory(trainer: Trainer, device: torch.device) -> None:
    """Refuse more pictures per call than fit, and say how many do. Passes where memory cannot be measured."""
    per_picture, free = bytes_of_one(trainer, device), _free_bytes(device)
    if per_picture is None or free is None:
        return
    # Each weight has a gradient, and AdamW keeps two more numbers.
    kept = 3 * sum(weight.numel() * weight.element_size() for weight in trainer.adapter.weights.values())
    needed, usable = kept + trainer.at_once * per_picture, _USABLE * free
    if needed <= usable:
        return
    fits = int((usable - kept) / per_picture)
    way_out = f"use --at-once {fits}" if fits >= 1 else "use a smaller --size or --rank"
    raise TokenMergeError(
        f"training on {trainer.at_once} pictures at once takes about {needed / _GIB:.1f} GiB, and {device} has "
        f"{free / _GIB:.1f} GiB free; {way_out}"
    )


def bytes_of_one(trainer: Trainer, device: torch.device) -> int | None:
    """Bytes that a step with a single picture adds at its peak; None where they cannot be measured."""
    calls = trainer.calls([BLANK], random.Random(0))
    free_memory(device)
    before = _used(device)
    trainer.rehearse(calls)
    after = peak_memory(device) if device.type == "cuda" else _proc_bytes(_PROCESS / "status", "VmHWM")
    return None if before is None or after is None else max(1, after - before)


def _used(device: torch.device) -> int | None:
    """Memory in use now. Resets the peak."""
    if device.type == "cuda":
        forget_peak_memory(device)
        return peak_memory(device)
    try:
        # Memory that malloc keeps after a free would hide new allocations of that size.
        ctypes.CDLL(None).malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _proc_bytes(_PROCESS / "status", "VmRSS")


def _free_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None where it cannot be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _proc_bytes(Path("/proc/meminfo"), "MemAvailable") if device.type == "cpu" else None


def _proc_bytes(file: Path, name: str) -> int | None:
    """A figure from a file of /proc, in bytes; None where there is no such file."""
    if not file.is_file():
        return None
    lines = dict(line.split(":", 1) for line in file.read_text(encoding="utf-8").splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024

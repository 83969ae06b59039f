"""Whether the pictures of a call fit into memory, from one trial step with a single picture."""

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

# Of what is free, that may be used: what lies between kept tensors is not.
_USABLE = 0.9
_GIB = 2**30
_PROCESS = Path("/proc/self")


@contextmanager
def told_memory(device: torch.device) -> Iterator[None]:
    """Tell what to do where not even one picture fits."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TokenMergeError(
            f"{device} has too little memory to train with a single picture; use a smaller --size or --rank"
        ) from error


def check_memory(trainer: Trainer, device: torch.device) -> None:
    """Refuse more pictures at once than fit, with how many do; where memory can be told."""
    each, free = bytes_of_one(trainer, device), _free_bytes(device)
    if each is None or free is None:
        return
    # The optimizer keeps two numbers for every weight, beside its gradient.
    kept = 3 * sum(weight.numel() * weight.element_size() for weight in trainer.adapter.weights.values())
    needed, usable = kept + trainer.at_once * each, _USABLE * free
    if needed <= usable:
        return
    fits = int((usable - kept) / each)
    way_out = f"use --at-once {fits}" if fits >= 1 else "use a smaller --size or --rank"
    raise TokenMergeError(
        f"training with {trainer.at_once} at once takes about {needed / _GIB:.1f} GiB, and {device} has "
        f"{free / _GIB:.1f} GiB free; {way_out}"
    )


def bytes_of_one(trainer: Trainer, device: torch.device) -> int | None:
    """What a step takes for a single picture, at its peak; None where it cannot be known."""
    calls = trainer.calls([BLANK], random.Random(0))
    free_memory(device)
    before = _used(device)
    trainer.rehearse(calls)
    after = peak_memory(device) if device.type == "cuda" else _kilobytes(_PROCESS / "status", "VmHWM")
    return None if before is None or after is None else max(1, after - before)


def _used(device: torch.device) -> int | None:
    """What is in use now. The peak begins anew."""
    if device.type == "cuda":
        forget_peak_memory(device)
        return peak_memory(device)
    try:
        # What was freed and kept for later would hide as much of what comes.
        ctypes.CDLL(None).malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _kilobytes(_PROCESS / "status", "VmRSS")


def _free_bytes(device: torch.device) -> int | None:
    """Of the device's memory; None where it cannot be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable") if device.type == "cpu" else None


def _kilobytes(file: Path, name: str) -> int | None:
    """A figure of Linux, in bytes."""
    if not file.is_file():
        return None
    lines = dict(line.split(":", 1) for line in file.read_text(encoding="utf-8").splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024

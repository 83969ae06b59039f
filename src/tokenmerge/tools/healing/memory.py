"""Whether a batch fits into memory, from one trial step with a single picture."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...errors import TokenMergeError
from ..measure import forget_peak_memory, free_memory, peak_memory
from .noising import NoisedCall
from .training import Trainer

# Of what is free, that may be used: what lies between kept tensors is not.
_USABLE = 0.9
_GIB = 2**30


def check_memory(trainer: Trainer, call: NoisedCall, batch: int, device: torch.device) -> None:
    """Refuse a batch that would not fit, with one that does. call: of a single picture."""
    try:
        each = _bytes_of_one(trainer, call, device)
    except torch.OutOfMemoryError as error:
        raise TokenMergeError(
            f"{device} has too little memory to train with a single picture; use a smaller --size or --rank"
        ) from error
    # The optimizer keeps two numbers for every weight, beside its gradient.
    kept = 3 * sum(weight.numel() * weight.element_size() for weight in trainer.adapter.weights.values())
    free = _free_bytes(device)
    if free is None or kept + batch * each <= _USABLE * free:
        return
    fits = int((_USABLE * free - kept) / each)
    needs, there = ((kept + batch * each) / _GIB, free / _GIB)
    way_out = f"use --batch {fits}" if fits >= 1 else "use a smaller --size or --rank"
    raise TokenMergeError(
        f"--batch {batch} takes about {needs:.1f} GiB to train, and {device} has {there:.1f} GiB free; {way_out}"
    )


def _bytes_of_one(trainer: Trainer, call: NoisedCall, device: torch.device) -> int:
    """What a step takes for a single picture: measured on a GPU, elsewhere counted from what a backward pass keeps."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    free_memory(device)
    forget_peak_memory(device)
    before = peak_memory(device)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        trainer.rehearse(call)
    after = peak_memory(device)
    return sum(kept.values()) if before is None or after is None else after - before


def _free_bytes(device: torch.device) -> int | None:
    """Of the device's memory; None where it cannot be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    told = Path("/proc/meminfo")
    if device.type != "cpu" or not told.is_file():
        return None
    lines = dict(line.split(":", 1) for line in told.read_text(encoding="utf-8").splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024

"""Time, memory and operations of what runs on any device, and a record of where it was measured."""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Result = TypeVar("Result")

_PACKAGES = ("tokenmerge", "torch", "diffusers", "transformers", "triton", "tomesd", "cache-dit", "DeepCache")


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


class Stopwatch:
    """Times calls that follow each other without waiting for the device in between, as a denoising loop makes them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: torch.cuda.Event | float | None = None
        self._laps: list[tuple[torch.cuda.Event | float, torch.cuda.Event | float]] = []

    def lap(self, function: Callable[[], object]) -> None:
        self.start()
        function()
        self.stop()

    def start(self) -> None:
        """Begin a lap; one that was begun and never ended is dropped."""
        self._start = self._now()

    def stop(self) -> None:
        """End the lap."""
        assert self._start is not None
        self._laps.append((self._start, self._now()))
        self._start = None

    @property
    def laps(self) -> int:
        """How many there were so far."""
        return len(self._laps)

    def _now(self) -> torch.cuda.Event | float:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            # Not on the current device, which need not be this.
            event.record(torch.cuda.current_stream(self._device))
            return event
        _wait(self._device)
        return time.perf_counter()

    def milliseconds(self) -> list[float]:
        """Of every lap so far."""
        _wait(self._device)
        return [
            start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else (end - start) * 1e3  # type: ignore[arg-type, operator]
            for start, end in self._laps
        ]


def captured(function: Callable[[], object]) -> Callable[[], None]:
    """What replays, as a CUDA graph, the launches of a function that has run before; it may not need the host."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


@contextmanager
def timed_calls(module: nn.Module, device: torch.device) -> Iterator[Stopwatch]:
    """A stopwatch with a lap for every call of a module, whoever makes it, its other hooks included."""
    watch = Stopwatch(device)
    before = module.register_forward_pre_hook(lambda *_: watch.start(), prepend=True)
    after = module.register_forward_hook(lambda *_: watch.stop())
    try:
        yield watch
    finally:
        before.remove()
        after.remove()


class Counter(TorchDispatchMode):
    """Counts the floating-point operations of products, convolutions and attention that run while it is on. What runs
    inside of a kernel of our own is not seen. torch's own counter does not stand modules that contain themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is None:
            # Of what it is made of, if it is made of others.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if formula is not None:
            self.operations += formula(*args, **kwargs, out_val=result)
        return result


_FORMULAS = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
}


@contextmanager
def counted_calls(module: nn.Module) -> Iterator[Counter]:
    """A counter that is on in every call of a module, whoever makes it."""
    counter = Counter()
    before = module.register_forward_pre_hook(lambda *_: counter.__enter__() and None)
    after = module.register_forward_hook(lambda *_: counter.__exit__(None, None, None), always_call=True)
    try:
        yield counter
    finally:
        before.remove()
        after.remove()


def environment(device: torch.device) -> dict[str, str]:
    """What a figure depends on: hardware, versions, and the commit where the package is a checkout."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    record = {"device": name, "python": platform.python_version(), "threads": str(torch.get_num_threads())}
    for package in _PACKAGES:
        try:
            record[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # What runs, where that is not an installed distribution.
    record["torch"] = torch.__version__
    if device.type == "cuda" and torch.version.cuda:
        record["cuda"] = torch.version.cuda
    commit = _commit()
    return {**record, "commit": commit} if commit else record


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more. Pipelines that have drawn refer to themselves."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _commit() -> str | None:
    """Of this code. An installed copy may lie inside of somebody else's repository, which does not know it."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        known = subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True)
        told = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return told.stdout.strip() or None if known.returncode == 0 else None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()

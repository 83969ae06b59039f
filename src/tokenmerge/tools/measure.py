"""Time, memory and operations on any device, and a record of where they were measured."""

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
    """The result of a function and its seconds, including work that it queued on the device."""
    _wait(device)
    start = time.perf_counter()
    result = function()
    _wait(device)
    return result, time.perf_counter() - start


def forget_peak_memory(device: torch.device) -> None:
    """Reset `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes of device memory in use since `forget_peak_memory`; None where this cannot be measured."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class Stopwatch:
    """Times successive calls without waiting for the device between them, as in a denoising loop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: torch.cuda.Event | float | None = None
        self._laps: list[tuple[torch.cuda.Event | float, torch.cuda.Event | float]] = []

    def lap(self, function: Callable[[], object]) -> None:
        self.start()
        function()
        self.stop()

    def start(self) -> None:
        """Begin a lap. A lap that was begun before and never ended is dropped."""
        self._start = self._now()

    def stop(self) -> None:
        """End the lap."""
        assert self._start is not None
        self._laps.append((self._start, self._now()))
        self._start = None

    @property
    def laps(self) -> int:
        """How many laps have ended."""
        return len(self._laps)

    def _now(self) -> torch.cuda.Event | float:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            # The current device may be another one.
            event.record(torch.cuda.current_stream(self._device))
            return event
        _wait(self._device)
        return time.perf_counter()

    def milliseconds(self) -> list[float]:
        """The time of every lap."""
        _wait(self._device)
        return [
            start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else (end - start) * 1e3  # type: ignore[arg-type, operator]
            for start, end in self._laps
        ]


def captured(function: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of a function's launches, as a function that replays it. The function may not need the host."""
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
    """A stopwatch with a lap for every call of a module, including the module's other hooks."""
    watch = Stopwatch(device)
    before = module.register_forward_pre_hook(lambda *_: watch.start(), prepend=True)
    after = module.register_forward_hook(lambda *_: watch.stop())
    try:
        yield watch
    finally:
        before.remove()
        after.remove()


class Counter(TorchDispatchMode):
    """Counts the floating-point operations of matrix products, convolutions and attention while it is on.

    It does not see inside our own kernels. torch's own counter fails on modules that contain themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is None:
            # Count the operations that a composite one consists of.
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
    """A counter that is on during every call of a module."""
    counter = Counter()
    before = module.register_forward_pre_hook(lambda *_: counter.__enter__() and None)
    after = module.register_forward_hook(lambda *_: counter.__exit__(None, None, None), always_call=True)
    try:
        yield counter
    finally:
        before.remove()
        after.remove()


def environment(device: torch.device) -> dict[str, str]:
    """What measurements depend on: hardware, versions, and the commit if the package is a checkout."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    record = {"device": name, "python": platform.python_version(), "threads": str(torch.get_num_threads())}
    for package in _PACKAGES:
        try:
            record[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # The torch that runs need not be an installed distribution.
    record["torch"] = torch.__version__
    if device.type == "cuda" and torch.version.cuda:
        record["cuda"] = torch.version.cuda
    commit = _commit()
    return {**record, "commit": commit} if commit else record


def free_memory(device: torch.device) -> None:
    """Free unreferenced memory. Pipelines that have drawn hold cycles of references."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _commit() -> str | None:
    """The commit of this code; None for an installed copy, even inside another git repository."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        known = subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True)
        named = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return named.stdout.strip() or None if known.returncode == 0 else None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()

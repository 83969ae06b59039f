"""Times single operations: kernels against the reference, the real `tomesd` package and the memory floor.

    python benchmarks/ops.py --out ops.jsonl              # every image, on a GPU
    python benchmarks/ops.py --cases sdxl --regions tile:8x8 --ratios 0.5
    python benchmarks/ops.py --cases wan-720p --regions tile:2x4x4 --dtype bfloat16
    TRITON_INTERPRET=1 python benchmarks/ops.py --smoke   # shows that it runs; the times mean nothing

If an operation's result is wrong, the run stops. Inputs rotate through more memory than the L2 cache holds, unless
--warm. In mode `graph` calls are captured once and replayed, in mode `eager` they are launched one by one. The floor is
the least number of bytes over the bandwidth of a large copy on the same device. No launch is that fast at these sizes,
so a copy of as many bytes is timed beside each operation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmerge import Merge
from tokenmerge.merging.grid import Partition, TokenGrid, invert_order, partition_grids, split_regions
from tokenmerge.merging.ops import backend_for, reference
from tokenmerge.planning.tables import markdown
from tokenmerge.tools.measure import captured, environment

# Batch, grid and channels of a layer.
CASES = {
    "sdxl": (2, TokenGrid(64, 64), 640),
    "sdxl-deep": (2, TokenGrid(32, 32), 1280),
    "flux": (1, TokenGrid(64, 64), 3072),
    # Wan 14B with 81 frames. Not a default: with anything but small tiles it does not fit into memory.
    "wan-720p": (1, TokenGrid(45, 80, 21), 5120),
    "smoke": (2, TokenGrid(8, 8), 24),
    "smoke-video": (1, TokenGrid(4, 4, 3), 24),
}
REGIONS = ("tile:4x4", "tile:8x8", "tile:16x16", "whole")
RATIOS = (0.5, 0.75)
TEMPERATURE = 0.001
USUAL = ("sdxl", "sdxl-deep", "flux")
OPERATIONS = ("select", "weigh", "build", "merge", "unmerge")
# The most calls that are timed together.
CALLS = 16
# Calls slower than this are timed one by one, a few times.
SLOW_MS = 20.0


class WrongResult(Exception):
    """An operation's result is wrong, so it must not be timed."""


@dataclass
class Inputs:
    """One set of inputs; calls rotate through several."""

    tokens: Tensor
    destinations: Tensor
    merge_weights: Tensor
    unmerge_weights: Tensor
    merged: Tensor


@dataclass
class Problem:
    """One layer, cut into regions, with its inputs."""

    name: str
    regions: str
    ratio: float
    partition: Partition
    inverse: Tensor | None
    sets: list[Inputs]

    def call(self, ops: Any, operation: str, inputs: Inputs) -> Any:
        layout, order = self.partition.layout, self.partition.order
        if operation in ("select", "build"):
            chosen = ops.select(inputs.tokens, order, layout.select_regions, layout.select_count)
            return chosen if operation == "select" else ops.weigh(inputs.tokens, order, chosen, temperature=TEMPERATURE)
        if operation == "weigh":
            return ops.weigh(inputs.tokens, order, inputs.destinations, temperature=TEMPERATURE)
        if operation == "merge":
            return ops.merge(inputs.tokens, order, inputs.merge_weights)
        return ops.unmerge(inputs.merged, order, self.inverse, inputs.unmerge_weights, inputs.tokens)

    def bytes(self, operation: str) -> int:
        """Each input read once, each output written once."""
        first = self.sets[0]
        tokens, merged, weights = (
            each.numel() * each.element_size() for each in (first.tokens, first.merged, first.merge_weights)
        )
        order = 0 if self.partition.order is None else self.partition.order.numel() * 8
        chosen = first.destinations.numel() * 8
        return (
            order
            + {
                "select": tokens + chosen,
                "weigh": tokens + chosen + 2 * weights,
                "build": tokens + 2 * weights,
                "merge": tokens + weights + merged,
                "unmerge": merged + weights + 2 * tokens,
            }[operation]
        )


def build_problem(
    name: str, regions: str, ratio: float, dtype: torch.dtype, device: torch.device, sets: int
) -> Problem:
    batch, grid, channels = CASES[name]
    partition = partition_grids((grid,), Merge(ratio=ratio, regions=regions)).to(device)
    layout, order = partition.layout, partition.order
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for _ in range(sets):
        tokens = torch.randn(batch, grid.count, channels, generator=generator, device=device).to(dtype)
        # Evenly spaced, so that making inputs does not depend on the timed operation.
        chosen = reference.select(tokens, order, layout.select_regions, layout.select_count, selection="uniform")
        merge, unmerge = reference.weigh(tokens, order, chosen.contiguous())
        merged = reference.merge(tokens, order, merge)
        made.append(Inputs(tokens, chosen.contiguous(), merge, unmerge, merged))
    return Problem(name, regions, ratio, partition, None if order is None else invert_order(order), made)


def check(problem: Problem, operation: str, ops: Any) -> None:
    """Raise if a result's error exceeds twice the reference's error in this dtype, plus a rounding."""
    inputs = problem.sets[0]
    layout, order = problem.partition.layout, problem.partition.order
    result = problem.call(ops, operation, inputs)
    if operation == "select":
        if not bool((result.sort(-1).values.diff(dim=-1) > 0).all()):
            raise WrongResult(f"select in {problem.regions} of {problem.name} chose a destination twice")
        if layout.select_size > 1024:
            return
        pairs = reference.pairwise_similarity(split_regions(inputs.tokens, order, layout.select_regions), "cosine")
        best = problem.call(reference, operation, inputs)
        values = []
        for chosen in (result, best):
            places = chosen if problem.inverse is None else problem.inverse[chosen]
            values.append(reference.coverage(pairs, places % layout.select_size).sum())
        if not values[0] >= values[1] * 0.999:
            raise WrongResult(
                f"select in {problem.regions} of {problem.name} covers {values[0]:.6g}, not {values[1]:.6g}"
            )
        return
    if operation == "build":
        return
    exact_inputs = Inputs(*(each.double() if each.is_floating_point() else each for each in vars(inputs).values()))
    plain = problem.call(reference, operation, inputs)
    exact = problem.call(reference, operation, exact_inputs)
    if operation != "weigh":
        result, plain, exact = (result,), (plain,), (exact,)
    rounding = torch.finfo(inputs.tokens.dtype).eps
    # Similarities have a rounding error of fp32, which the softmax divides by the temperature.
    floor = torch.finfo(torch.float32).eps / TEMPERATURE if operation == "weigh" else 0.0
    for mine, theirs, true in zip(result, plain, exact, strict=True):
        error, allowed = ((each.double() - true).abs().max().item() for each in (mine, theirs))
        if not error <= 2 * allowed + rounding * max(1.0, true.abs().max().item()) + floor:
            where = f"{operation} in {problem.regions} of {problem.name}"
            raise WrongResult(f"{where} is off by {error:.3g}, the reference by {allowed:.3g}")


def tomesd_calls(problem: Problem) -> dict[str, Callable[[Inputs], Any]]:
    """ToMeSD's own functions on the same tokens and ratio; it has no regions."""
    from tomesd.merge import bipartite_soft_matching_random2d

    grid = CASES[problem.name][1]
    removed = int(grid.count * problem.ratio)

    def build(inputs: Inputs) -> Any:
        return bipartite_soft_matching_random2d(inputs.tokens, grid.width, grid.height, 2, 2, removed, no_rand=True)

    merge, unmerge = build(problem.sets[0])
    constant = torch.full_like(problem.sets[0].tokens, 3.0)
    if not torch.allclose(unmerge(merge(constant)), constant, rtol=1e-2):
        raise WrongResult("tomesd does not return a constant unchanged")
    merged = merge(problem.sets[0].tokens)
    return {
        "build": build,
        "merge": lambda inputs: merge(inputs.tokens),
        "unmerge": lambda inputs: inputs.tokens + unmerge(merged),
    }


def copy_call(problem: Problem, operation: str) -> Callable[[Inputs], Any]:
    """A plain copy that moves as many bytes as the operation must."""
    size, device = problem.bytes(operation) // 2, problem.sets[0].tokens.device
    buffers = {id(inputs): torch.zeros(2, size, dtype=torch.uint8, device=device) for inputs in problem.sets}
    return lambda inputs: buffers[id(inputs)][1].copy_(buffers[id(inputs)][0])


def time_calls(
    call: Callable[[Inputs], Any], sets: list[Inputs], mode: str, warmups: int, repeats: int
) -> dict[str, Any]:
    """Median milliseconds of a call, with the 10th and 90th percentile of the repeats."""
    if sets[0].tokens.device.type != "cuda":
        return _summary([_host_ms(lambda: call(sets[0])) for _ in range(repeats)], repeats, 1, "interpreted")
    # The first call also compiles.
    if min(_device_ms(lambda: call(sets[0])) for _ in range(2)) > SLOW_MS:
        return _summary([_device_ms(lambda: call(sets[0])) for _ in range(3)], 3, 1, "eager")

    def run() -> None:
        for inputs in sets:
            call(inputs)

    if mode == "graph":
        run = captured(run)
    for _ in range(warmups):
        run()
    return _summary([_device_ms(run) / len(sets) for _ in range(repeats)], repeats, len(sets), mode)


def _device_ms(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _host_ms(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _summary(times: list[float], repeats: int, calls: int, mode: str) -> dict[str, Any]:
    ordered = sorted(times)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return {
        "ms": statistics.median(ordered),
        "low_ms": low,
        "high_ms": high,
        "repeats": repeats,
        "calls_per_repeat": calls,
        "mode": mode,
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.zeros(2**29 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timer = _device_ms if device.type == "cuda" else _host_ms
    best = min(timer(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.numel() / (best * 1e-3)


def measure(arguments: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    kernels, _ = backend_for("triton", device)
    bandwidth = copy_bandwidth(device)
    common = {**environment(device), "copy_gb_per_s": round(bandwidth / 1e9, 1), "warmups": arguments.warmups}
    dtype = getattr(torch, arguments.dtype)
    for name in arguments.cases:
        batch, grid, channels = CASES[name]
        # Enough sets that every call finds the cache full of other inputs.
        cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
        token_bytes = batch * grid.count * channels * dtype.itemsize
        sets = 1 if arguments.warm else max(1, min(CALLS, math.ceil(2 * cache / token_bytes)))
        for regions in arguments.regions:
            for ratio in arguments.ratios:
                problem = build_problem(name, regions, ratio, dtype, device, sets if regions != "whole" else 2)
                case = {
                    "case": name,
                    "batch": batch,
                    "grid": str(grid),
                    "channels": channels,
                    "dtype": arguments.dtype,
                    "regions": regions,
                    "ratio": ratio,
                    "cold": len(problem.sets) * token_bytes > cache,
                }
                for operation, implementation, call in _calls(problem, kernels, arguments):
                    rotation = problem.sets * CALLS if arguments.warm else problem.sets
                    for mode in arguments.modes:
                        timed = time_calls(call, rotation, mode, arguments.warmups, arguments.repeats)
                        floor = problem.bytes(operation) / bandwidth * 1e3
                        yield {
                            "operation": operation,
                            "implementation": implementation,
                            **case,
                            **timed,
                            "bytes": problem.bytes(operation),
                            "floor_ms": floor,
                            **common,
                        }


def _calls(
    problem: Problem, kernels: Any, arguments: argparse.Namespace
) -> Iterator[tuple[str, str, Callable[[Inputs], Any]]]:
    for operation in arguments.operations:
        check(problem, operation, kernels)
        for implementation, ops in (("kernel", kernels), ("reference", reference)):
            yield operation, implementation, lambda inputs, ops=ops, op=operation: problem.call(ops, op, inputs)
        yield operation, "copy", copy_call(problem, operation)
    if find_spec("tomesd") is None:
        print("tomesd is not installed; its column stays empty", file=sys.stderr)
    # tomesd has no notion of frames.
    elif CASES[problem.name][1].frames == 1 and problem.regions == arguments.regions[0]:
        for operation, call in tomesd_calls(problem).items():
            if operation in arguments.operations:
                yield operation, "tomesd", call


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, with a row for each operation of a case. ToMeSD's times repeat in the rows of every kind of region."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    tomesd: dict[tuple[Any, ...], float] = {}
    for record in records:
        layer = f"{record['batch']} x {record['grid']} x {record['channels']} {record['dtype']}"
        key = (layer, record["ratio"], record["mode"], record["operation"])
        if record["implementation"] == "tomesd":
            tomesd[key] = record["ms"]
        else:
            found.setdefault((*key, record["regions"]), {})[record["implementation"]] = record
    heads = ["layer", "regions", "ratio", "operation", "mode", "kernel ms (10-90%)"]
    heads += ["reference", "tomesd", "floor", "kernel / floor", "copy", "kernel / copy"]
    rows = []
    for (layer, ratio, mode, operation, regions), timed in found.items():
        kernel, plain, copy = (timed.get(name) for name in ("kernel", "reference", "copy"))
        if not kernel and not plain:
            # Both were too slow for this mode and have another row.
            continue
        other = tomesd.get((layer, ratio, mode, operation))
        spread = f"{kernel['ms']:.4f} ({kernel['low_ms']:.4f}-{kernel['high_ms']:.4f})" if kernel else ""
        floor = (kernel or plain)["floor_ms"]
        cells = [
            layer,
            regions,
            f"{ratio:g}",
            operation,
            mode,
            spread,
            f"{plain['ms']:.4f}" if plain else "",
            f"{other:.4f}" if other is not None else "",
            f"{floor:.4f}",
            f"{kernel['ms'] / floor:.2f}" if kernel else "",
            f"{copy['ms']:.4f}" if copy else "",
            f"{kernel['ms'] / copy['ms']:.2f}" if kernel and copy else "",
        ]
        rows.append(cells)
    return markdown(heads, rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(USUAL))
    parser.add_argument("--regions", nargs="+", default=list(REGIONS))
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--modes", nargs="+", choices=["graph", "eager"], default=["graph"])
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--warm", action="store_true", help="use one set of inputs, which the L2 cache may hold")
    parser.add_argument("--warmups", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--smoke", action="store_true", help="a tiny case, without a GPU in Triton's interpreter")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.cases, arguments.ratios, arguments.dtype = ["smoke", "smoke-video"], [0.5], "float32"
        arguments.regions, arguments.warmups, arguments.repeats = ["tile:2x4x4", "whole"], 0, 1
    device = torch.device("cpu" if arguments.smoke and not torch.cuda.is_available() else "cuda")
    records = []
    for record in measure(arguments, device):
        records.append(record)
        shown = ("case", "regions", "ratio", "operation", "implementation", "mode", "ms")
        print(*(record[key] for key in shown), file=sys.stderr)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    print(table(records))


if __name__ == "__main__":
    with torch.no_grad():
        main()

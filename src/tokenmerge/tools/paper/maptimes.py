"""Times making maps, merging and unmerging, by method and ratio (tables 4 and 5)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...config import Merge
from ...families.calls import TokenGrid
from ...merging.mergemap import MapSpace
from ...merging.methods import Given, method_for
from ...merging.ops import backend_for
from ...planning.tables import markdown
from ...presets import preset
from ..files import write_text
from ..loading import best_device, dtype_on
from ..measure import Stopwatch, captured, environment
from .studies import Finding

# The two levels of SDXL with transformer blocks, at 1024 pixels: token grid and token width.
LAYERS = {"table4": (TokenGrid(64, 64), 640), "table5": (TokenGrid(32, 32), 1280)}
_PRESETS = ("toma", "toma-stripe", "toma-tile", "tomesd")
_OPERATIONS = ("select", "reweigh", "merge", "unmerge")
# Operations that one CUDA graph repeats, and how often.
_REPLAYED, _CALLS = ("merge", "unmerge"), 16
# Samples per picture, with guidance.
_SAMPLES = 2
_WARM_UPS = 3


def time_maps(
    name: str, ratios: Sequence[float], *, batch: int, repeats: int, device: str | None, dtype: str | None, out: Path
) -> Finding:
    """Median milliseconds of every operation, on random tokens of `batch` pictures.

    On CUDA, graphs replay merging and unmerging, as such small work would wait for its launch. Making maps is rare, and
    runs without graphs.
    """
    place = best_device(device)
    grid, width = LAYERS[name]
    kind = dtype_on(place, dtype)
    samples = _SAMPLES * batch
    tokens = torch.randn(samples, grid.count, width, generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(place, getattr(torch, kind))
    records: list[dict[str, Any]] = []
    for chosen in _PRESETS:
        for ratio in ratios:
            technique = preset(chosen)
            assert isinstance(technique, Merge)
            times = _time(technique.replace(ratio=ratio), grid, tokens, repeats)
            record = {"preset": chosen, "ratio": ratio, "tokens": grid.count, "width": width, "batch": samples}
            records.append({**record, "dtype": kind, **times, "environment": environment(place)})
    text = map_table(records)
    write_text(out / "table.md", f"{text}\n")
    return Finding(text, records, out / "table.md")


def map_table(records: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, with its conditions below."""
    header = ["preset", "ratio", *(f"{operation}, ms" for operation in _OPERATIONS)]
    rows = [
        [record["preset"], f"{record['ratio']:g}", *(f"{record[operation]:.4g}" for operation in _OPERATIONS)]
        for record in records
    ]
    first = records[0]
    return (
        f"{markdown(header, rows)}\n\n{first['batch']} x {first['tokens']} tokens of width {first['width']}, "
        f"{first['dtype']}, on {first['environment']['device']}"
        f"{'; merge and unmerge replayed as CUDA graphs' if 'cuda' in first['environment'] else ''}."
    )


def _time(technique: Merge, grid: TokenGrid, tokens: torch.Tensor, repeats: int) -> dict[str, float]:
    method = method_for(technique)
    technique = method.effective(technique)
    partition = method.partition((grid,), technique).to(tokens.device)
    ops, _ = backend_for(technique.backend, tokens.device)
    space = MapSpace(len(tokens), shared=False, dtype=tokens.dtype, device=tokens.device)
    merge_map = method.empty_map(partition.layout, ops, technique, space)
    generator = torch.Generator().manual_seed(0)

    def renew(phase: str) -> None:
        method.renew(merge_map, phase, Given(tokens, partition, technique, generator, shared=False, ops=ops))

    renew("select")
    merged = merge_map.merge(tokens)
    work = {
        "select": lambda: renew("select"),
        "reweigh": lambda: renew("reweigh"),
        "merge": lambda: merge_map.merge(tokens),
        "unmerge": lambda: merge_map.unmerge(merged),
    }
    times = {}
    for operation, function in work.items():
        if tokens.device.type == "cuda" and operation in _REPLAYED:
            times[operation] = _median_ms(_many(function), tokens.device, repeats) / _CALLS
        else:
            times[operation] = _median_ms(function, tokens.device, repeats)
    return times


def _median_ms(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    for _ in range(min(_WARM_UPS, repeats)):
        function()
    watch = Stopwatch(device)
    for _ in range(repeats):
        watch.lap(function)
    return statistics.median(watch.milliseconds())


def _many(function: Callable[[], object]) -> Callable[[], None]:
    """Many calls as one CUDA graph. Launched one by one, they would only show how long the host takes to launch."""

    def many() -> None:
        for _ in range(_CALLS):
            function()

    function()
    return captured(many)

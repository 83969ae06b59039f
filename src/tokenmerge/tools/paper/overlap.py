"""Do destinations stay? Selects at every step, and compares with the first step of the interval (figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ...config import Merge
from ...merging.grid import Partition, partition_grids
from ...merging.ops import backend_for
from ...planning.tables import table
from ..drawing.studio import Studio
from ..evaluation.plots import BESIDE, new_plot, save_plot
from .hidden import Hidden, watch
from .studies import Finding


def measure_overlap(
    studio: Studio, technique: Merge, prompts: Sequence[str], seeds: Sequence[int], out: Path
) -> Finding:
    """Select in every block at every step of plain pictures. Compare with the first step of the interval over which
    merging would keep its destinations."""
    interval = technique.destinations_every
    shares: dict[tuple[str, int], list[float]] = {}
    chances: dict[str, float] = {}
    for prompt in prompts:
        for seed in seeds:
            selector = _Selector(technique)

            def see(hidden: Hidden, selector: _Selector = selector) -> None:
                share, chance = selector.compare(hidden, hidden.step % interval == 0)
                shares.setdefault((hidden.block, hidden.step), []).append(share)
                chances[hidden.block] = chance

            watch(studio, prompt, seed, see)
    records: list[dict[str, Any]] = [
        {
            "block": block,
            "step": step,
            "overlap": fmean(found),
            "chance": chances[block],
            "count": len(found),
        }
        for (block, step), found in shares.items()
    ]
    save_plot(_draw(records, interval, technique), out / "figure.png")
    return Finding(table(*overlap_cells(records, interval)), records, out / "figure.png")


def overlap_cells(records: Sequence[dict[str, Any]], interval: int) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the means per block, over all steps but the first of every interval."""
    rows = []
    for block in dict.fromkeys(record["block"] for record in records):
        mine = [record for record in records if record["block"] == block]
        later = [record["overlap"] for record in mine if record["step"] % interval]
        mean = f"{fmean(later):.3f}" if later else ""
        rows.append([block, mean, f"{mine[0]['chance']:.3f}"])
    return ["block", "overlap after the first step", "by chance"], rows


class _Selector:
    """Selects for one picture, and remembers the destinations at the first step of the interval."""

    def __init__(self, technique: Merge) -> None:
        self._technique = technique
        self._partitions: dict[object, Partition] = {}
        self._first: dict[str, Tensor] = {}

    def compare(self, hidden: Hidden, begins: bool) -> tuple[float, float]:
        """The share of destinations already chosen at the first step of the interval, and the share by chance."""
        device = hidden.tokens.device
        if hidden.grid not in self._partitions:
            self._partitions[hidden.grid] = partition_grids((hidden.grid,), self._technique).to(device)
        layout = self._partitions[hidden.grid].layout
        ops, _ = backend_for(self._technique.backend, device)
        found = ops.select(
            hidden.tokens[None],
            self._partitions[hidden.grid].order,
            layout.select_regions,
            layout.select_count,
            selection=self._technique.selection,
            similarity=self._technique.similarity,
            shared=False,
            generator=torch.Generator().manual_seed(self._technique.seed),
        )
        chosen = torch.zeros(layout.tokens, dtype=torch.bool, device=device)
        chosen[found.flatten()] = True
        if begins:
            self._first[hidden.block] = chosen
        share = (chosen & self._first[hidden.block]).sum() / chosen.sum()
        return share.item(), layout.select_count / layout.select_size


def _draw(records: Sequence[dict[str, Any]], interval: int, technique: Merge) -> Any:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    drawn, axes = new_plot(8.6)
    blocks = list(dict.fromkeys(record["block"] for record in records))
    for place, block in enumerate(blocks):
        shares = {record["step"]: record["overlap"] for record in records if record["block"] == block}
        colour = colormaps["viridis"](place / max(1, len(blocks) - 1) * 0.9)
        for begin in range(0, max(shares) + 1, interval):
            steps = [step for step in shares if begin <= step < begin + interval]
            heights = [shares[step] for step in steps]
            label = block if begin == 0 else None
            axes.plot(steps, heights, color=colour, linewidth=1.2, marker=".", label=label)
    axes.axhline(records[0]["chance"], color="#777777", linestyle="--", linewidth=1, label="by chance")
    axes.set_ylim(0, 1.02)
    # Steps are whole numbers.
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"step; destinations are compared with those of the first of every {interval} steps")
    axes.set_ylabel("share of the same destinations")
    title = f"Do destinations stay? {technique.selection} in {technique.regions}, ratio {technique.ratio:g}"
    axes.set_title(title, fontsize=10, loc="left")
    columns = 1 + len(blocks) // 24
    axes.legend(fontsize=6, frameon=False, ncols=columns, **BESIDE)
    return drawn

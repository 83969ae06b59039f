"""Are neighbours alike? Colours hidden states by k-means cluster, over blocks and steps (figures 3 and 9)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageColor
from torch import Tensor

from ...families.calls import TokenGrid
from ...planning.tables import table
from ..drawing.pictures import Panel, save_picture, strip, to_picture
from ..drawing.studio import Studio
from .hidden import Hidden, watch
from .studies import Finding

CLUSTERS = 8
_ITERATIONS = 20
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#F0E442")
# The most blocks and steps that fit on a page.
_MOST_BLOCKS, _MOST_STEPS = 8, 5


def recolour(studio: Studio, prompts: Sequence[str], seeds: Sequence[int], out: Path) -> Finding:
    """Draw the figure of the first prompt and seed. Measure in all pictures how often neighbours share a cluster."""
    steps = _spread(studio.request.steps, _MOST_STEPS)
    records: list[dict[str, Any]] = []
    coloured: dict[str, list[Panel]] = {}
    for prompt in prompts:
        for seed in seeds:
            seen: list[Hidden] = []
            # Keep only the steps that are shown: the tokens of all steps would fill the memory.
            picture = watch(studio, prompt, seed, partial(_keep, steps, seen))
            first = not records
            for hidden in seen:
                labels = cluster(hidden.tokens, CLUSTERS)
                alike, chance = neighbours_alike(labels, hidden.grid)
                where = {"prompt": prompt, "seed": seed, "block": hidden.block, "step": hidden.step}
                records.append({**where, "alike": alike, "chance": chance})
                if first:
                    panel = Panel(
                        coloured_labels(labels, hidden.grid),
                        f"step {hidden.step}",
                        f"{hidden.block}\nneighbours alike {alike:.0%}, by chance {chance:.0%}",
                    )
                    coloured.setdefault(hidden.block, []).append(panel)
            if first:
                blocks = list(coloured)
                rows = [coloured[blocks[place]] for place in _spread(len(blocks), _MOST_BLOCKS)]
                rows.append([Panel(picture, "picture", prompt)])
                save_picture(strip(rows, heading=f"Hidden states in {CLUSTERS} clusters: {prompt}"), out / "figure.png")
    return Finding(table(*locality_cells(records)), records, out / "figure.png")


def locality_cells(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the means per block."""
    rows = []
    for block in dict.fromkeys(record["block"] for record in records):
        mine = [record for record in records if record["block"] == block]
        rows.append([block, *(f"{fmean(record[key] for record in mine):.3f}" for key in ("alike", "chance"))])
    return ["block", "neighbours alike", "by chance"], rows


def cluster(tokens: Tensor, count: int) -> Tensor:
    """Cluster numbers [N] of tokens [N, C], by k-means on their directions.

    The first centre is the token most like the mean. Each further one is the token least like all centres before it.
    Nothing is random, so clusters repeat.
    """
    directions = F.normalize(tokens, dim=-1)
    likeness = directions @ F.normalize(directions.mean(0), dim=0)
    chosen = [int(likeness.argmax())]
    nearest = directions @ directions[chosen[0]]
    while len(chosen) < count:
        chosen.append(int(nearest.argmin()))
        nearest = torch.maximum(nearest, directions @ directions[chosen[-1]])
    centres = directions[chosen]
    for _ in range(_ITERATIONS):
        labels = (directions @ centres.T).argmax(-1)
        sums = torch.zeros_like(centres).index_add_(0, labels, directions)
        # A centre without tokens stays where it was.
        centres = torch.where(sums.norm(dim=-1, keepdim=True) > 0, F.normalize(sums, dim=-1), centres)
    return (directions @ centres.T).argmax(-1)


def neighbours_alike(labels: Tensor, grid: TokenGrid) -> tuple[float, float]:
    """The shares of pairs in one cluster: of neighbours, side by side or one above the other, and of any two tokens."""
    square = labels.view(grid.height, grid.width)
    across, down = square[:, 1:] == square[:, :-1], square[1:] == square[:-1]
    alike = torch.cat([across.flatten(), down.flatten()]).float().mean().item()
    shares = labels.bincount().float() / len(labels)
    return alike, shares.square().sum().item()


def coloured_labels(labels: Tensor, grid: TokenGrid) -> Image.Image:
    """A picture with a coloured square per token. The largest cluster has the first colour."""
    order = labels.bincount(minlength=CLUSTERS).argsort(descending=True).argsort()
    colours = torch.tensor([ImageColor.getrgb(colour) for colour in _COLOURS], dtype=torch.uint8)
    small = to_picture(colours[order[labels].cpu()].view(grid.height, grid.width, 3))
    scale = max(1, 256 // max(grid.height, grid.width))
    return small.resize((grid.width * scale, grid.height * scale), Image.Resampling.NEAREST)


def _keep(steps: Sequence[int], seen: list[Hidden], hidden: Hidden) -> None:
    if hidden.step in steps:
        seen.append(hidden)


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly spread from the first to the last."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]

"""What a denoiser that has techniques tells: a summary, its maps, and how far its last image drifted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compiling import compiled_state
from ..errors import TokenMergeError
from ..families import denoiser_of
from ..families.calls import TokenGrid
from ..holding.sites import LearnedSite
from ..merging.grid import drawn_alone
from ..planning import Drift, Plan, Summary
from ..planning.drift import was_compared
from ..planning.tables import counted
from ..runtime.foreign import shard_of
from ..runtime.installing import Installation
from .attaching import Applied, applied_to


def summary_of(denoiser: nn.Module) -> Summary:
    known = applied_to(denoiser)
    if known is None:
        return Summary(None, compiled=compiled_state(denoiser))
    groups = []
    for group in known.merging.groups if known.merging is not None else ():
        partition = group.partition if group.has_maps else None
        groups.append(
            {
                "group": group.name,
                "sites": sum(site.group == group.name for site in known.plan.merged_sites),
                "grid": " + ".join(map(str, group.grids)) or "not run yet",
                "tokens": f"{partition.layout.tokens} -> {partition.layout.merged}" if partition else "not run yet",
                "regions": partition.description if partition else "not run yet",
                "selected": group.selections,
                "weighed": group.weighings,
                "backend": group.backend,
            }
        )
    holding = known.holding
    return Summary(
        known.plan,
        tuple(groups),
        compiled_state(denoiser),
        residual_bytes=holding.nbytes if holding is not None else 0,
        held=_held(known.plan, known.installation),
        steps=dict(known.state.steps),
        nonsense=holding.errors.nonsense if holding is not None else 0,
        drift=_drift(denoiser, known),
    )


def _drift(denoiser: nn.Module, known: Applied) -> Drift | None:
    """Of the last image; None where nothing was held, or nothing that was held had a measured error. What Merge changes
    no error of Hold tells."""
    hold = known.plan.techniques.hold
    drift = known.holding.drift if known.holding is not None and known.merging is None else None
    if hold is None or drift is None or not math.isfinite(drift):
        return None
    return Drift.of(drift, calibrated=was_compared(denoiser, known.state.follower.scheduler, hold.what))


def _held(plan: Plan, installation: Installation) -> str:
    """What is held where no table says it."""
    if not any(run.generic for run in plan.runs):
        return ""
    blocks = [block.module for run in plan.runs for block in run.blocks]
    runs: list[list[str]] = []
    for site in installation.sites_on(blocks):
        if isinstance(site, LearnedSite):
            if site.first:
                runs.append([])
            runs[-1].append(site.name)
    if not runs:
        return "The first call will show which blocks can be held."
    told = ", ".join(f"{run[0]} to {run[-1]}" for run in runs)
    held = sum(map(len, runs))
    return f"Held without a table: {held} of {len(blocks)} blocks, in {counted(len(runs), 'run')} ({told})."


@dataclass(frozen=True)
class TokenMap:
    """What merged into what in one group, for the first sample of the last call."""

    group: str
    grid: TokenGrid
    owners: Tensor  # [N] the destination that a token merges into most, as a token index
    regions: Tensor  # [N] the number of a token's region


def token_maps(model: Any) -> list[TokenMap]:
    """The maps of a model that has run with merging, one for each group that has one, without reference images."""
    denoiser = denoiser_of(model)
    known = applied_to(denoiser)
    if known is not None and known.merging is not None and shard_of(denoiser) is not None:
        raise TokenMergeError("each process has the map of its own tokens alone; draw the picture in one process")
    maps = []
    for group in known.merging.groups if known is not None and known.merging is not None else ():
        if group.partition is None or group.slot is None or not group.has_maps:
            continue
        merging, layout = group.partition.grids, group.partition.layout
        grid, begin, _ = drawn_alone(merging)
        image = slice(begin, begin + grid.count)
        places = group.partition.order if group.partition.order is not None else torch.arange(layout.tokens)
        regions = torch.empty(layout.tokens, dtype=torch.int64)
        regions[places.cpu()] = torch.arange(layout.tokens) // layout.select_size
        maps.append(TokenMap(group.name, grid, group.slot.map.owners()[image].cpu() - begin, regions[image]))
    return maps

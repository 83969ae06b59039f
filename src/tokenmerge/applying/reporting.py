"""Report on a denoiser with techniques: its summary, its maps, and the drift of its last image."""

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
    applied = applied_to(denoiser)
    if applied is None:
        return Summary(None, compiled=compiled_state(denoiser))
    groups = []
    for group in applied.merging.groups if applied.merging is not None else ():
        partition = group.partition if group.has_maps else None
        groups.append(
            {
                "group": group.name,
                "sites": sum(site.group == group.name for site in applied.plan.merged_sites),
                "grid": " + ".join(map(str, group.grids)) or "not run yet",
                "tokens": f"{partition.layout.tokens} -> {partition.layout.merged}" if partition else "not run yet",
                "regions": partition.description if partition else "not run yet",
                "selected": group.selections,
                "weighed": group.weighings,
                "backend": group.backend,
            }
        )
    holding = applied.holding
    return Summary(
        applied.plan,
        tuple(groups),
        compiled_state(denoiser),
        residual_bytes=holding.nbytes if holding is not None else 0,
        held=_held(applied.plan, applied.installation),
        steps=dict(applied.state.steps),
        nonsense=holding.errors.nonsense if holding is not None else 0,
        drift=_drift(denoiser, applied),
    )


def _drift(denoiser: nn.Module, applied: Applied) -> Drift | None:
    """The drift of the last image; None if nothing was held, if it is unknown, or if tokens merge: Hold's errors miss
    the drift of merging."""
    hold = applied.plan.techniques.hold
    drift = applied.holding.drift if applied.holding is not None and applied.merging is None else None
    if hold is None or drift is None or not math.isfinite(drift):
        return None
    return Drift.of(drift, calibrated=was_compared(denoiser, applied.state.follower.scheduler, hold.what))


def _held(plan: Plan, installation: Installation) -> str:
    """A sentence on what is held in a model without a table; empty for other models."""
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
    ranges = ", ".join(f"{run[0]} to {run[-1]}" for run in runs)
    held = sum(map(len, runs))
    return f"Held without a table: {held} of {len(blocks)} blocks, in {counted(len(runs), 'run')} ({ranges})."


@dataclass(frozen=True)
class TokenMap:
    """Which tokens merged into which in one group, for the first sample of the last call."""

    group: str
    grid: TokenGrid
    owners: Tensor  # [N] for each token, the index of the destination it mainly merges into
    regions: Tensor  # [N] for each token, the number of its region


def token_maps(model: Any) -> list[TokenMap]:
    """The maps of a model that has run with merging, one per group that has one. Reference images are left out."""
    denoiser = denoiser_of(model)
    applied = applied_to(denoiser)
    if applied is None or applied.merging is None:
        return []
    if shard_of(denoiser) is not None:
        raise TokenMergeError("each process has only the map of its own tokens; draw the picture in one process")
    maps = []
    for group in applied.merging.groups:
        if group.partition is None or group.slot is None or not group.has_maps:
            continue
        layout, order = group.partition.layout, group.partition.order
        grid, begin, _ = drawn_alone(group.partition.grids)
        image = slice(begin, begin + grid.count)
        places = order if order is not None else torch.arange(layout.tokens)
        regions = torch.empty(layout.tokens, dtype=torch.int64)
        regions[places.cpu()] = torch.arange(layout.tokens) // layout.select_size
        maps.append(TokenMap(group.name, grid, group.slot.map.owners()[image].cpu() - begin, regions[image]))
    return maps

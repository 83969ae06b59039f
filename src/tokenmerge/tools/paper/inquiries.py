"""Tables and figures of the paper that look inside of a model instead of at its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ...config import Merge
from ...errors import TokenMergeError
from ...presets import preset
from ..drawing.studio import Setup, Studio
from ..evaluation.plots import check_plots
from .locality import recolour
from .maptimes import LAYERS, time_maps
from .overlap import measure_overlap
from .studies import Finding, Inquiry

# The variant of the paper whose selection is local, at its usual ratio.
OVERLAP_PRESET = "toma-tile"


def inquire(
    inquiry: Inquiry,
    setup: Setup,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    batch: int,
    repeats: int,
    ratios: Sequence[float],
    out: Path,
) -> Finding:
    """Make what `inquiry` is about, in the folder `out`."""
    check_plots()
    name = inquiry.names[0]
    if name in LAYERS:
        if repeats < 1:
            raise TokenMergeError(f"--repeats is {repeats}; {name} is about time and needs 1 or more")
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        return time_maps(name, ratios, batch=batch, repeats=repeats, device=setup.device, dtype=setup.dtype, out=out)
    studio = Studio(setup)
    studio.pipe.set_progress_bar_config(disable=True)
    if name == "fig3":
        return recolour(studio, prompts, seeds, out)
    technique = preset(OVERLAP_PRESET)
    assert isinstance(technique, Merge)
    return measure_overlap(studio, technique, prompts, seeds, out)

"""Makes the tables and figures of the paper that look inside a model instead of at its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ...config import Merge
from ...errors import TokenMergeError
from ...presets import preset
from ..drawing.studio import Setup, Studio
from ..evaluation.plots import check_plots
from ..files import to_json, write_text
from .locality import recolour
from .maptimes import LAYERS, time_maps
from .overlap import measure_overlap
from .studies import Finding, Inquiry

# The variant in the paper with local selection, at its usual ratio.
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
    """Make the table or figure of `inquiry` in the folder `out`, and write its records to `values.jsonl`."""
    check_plots()
    name = inquiry.names[0]
    if name in LAYERS:
        if repeats < 1:
            raise TokenMergeError(f"--repeats is {repeats}; {name} measures time and needs 1 or more")
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        finding = time_maps(name, ratios, batch=batch, repeats=repeats, device=setup.device, dtype=setup.dtype, out=out)
    else:
        studio = Studio(setup)
        studio.pipe.set_progress_bar_config(disable=True)
        if name == "fig3":
            finding = recolour(studio, prompts, seeds, out)
        else:
            technique = preset(OVERLAP_PRESET)
            assert isinstance(technique, Merge)
            finding = measure_overlap(studio, technique, prompts, seeds, out)
    write_text(out / "values.jsonl", "".join(map(to_json, finding.records)))
    return finding

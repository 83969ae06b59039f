"""Tables and figures of the paper that look inside of a model instead of at its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ...presets import load_preset
from ...errors import TokenMergeError
from ..typed import check_counts
from .finding import Finding
from .hidden import load_subject
from .locality import recolour
from .maptimes import LAYERS, time_maps
from .overlap import measure_overlap
from ..evaluation.plots import check_plots
from .studies import Inquiry

# The variant of the paper whose selection is local, at its usual ratio.
OVERLAP_PRESET = "toma-tile"


def inquire(
    inquiry: Inquiry,
    model: str,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int | None,
    guidance: float | None,
    size: str | None,
    batch: int,
    repeats: int,
    ratios: Sequence[float],
    threads: int,
    device: str | None,
    dtype: str | None,
    out: Path,
) -> Finding:
    """Make what `inquiry` is about, in the folder `out`."""
    check_plots()
    check_counts(threads=threads)
    torch.set_num_threads(threads)
    name = inquiry.names[0]
    if name in LAYERS:
        for option, given in (("batch", batch), ("repeats", repeats)):
            if given < 1:
                raise TokenMergeError(f"--{option} is {given}; {name} is about time and needs 1 or more")
        return time_maps(name, ratios, batch=batch, repeats=repeats, device=device, dtype=dtype, out=out)
    subject = load_subject(model, size=size, steps=steps, guidance=guidance, device=device, dtype=dtype)
    if name == "fig3":
        return recolour(subject, prompts, seeds, out)
    return measure_overlap(subject, load_preset(OVERLAP_PRESET), prompts, seeds, out)

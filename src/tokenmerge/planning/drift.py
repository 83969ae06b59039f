"""Drift: how far a picture is from the plain one, as Hold's own errors tell, and where that was compared."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import nn

# The PSNR of a drift of 1, and how far two thirds of the pictures lie from what is told (benchmarks/drift.py).
_LEVEL, SPREAD = 17.3, 3.0
# What makes a solver another one, beside its class. Other schedules of one class were not compared.
_TRAITS = ("solver_order", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_flow_sigmas")
# What a figure with a mark means, where there is no room beside it.
UNCALIBRATED = (
    "~: the estimated PSNR is uncalibrated, as it was never compared with true ones for these weights under this "
    "scheduler."
)
# Types that weights are kept in round the norm of one by less.
_SAME = 2e-3


class _Compared(NamedTuple):
    """A denoiser whose pictures the estimate was fitted to. Its weights tell it: a file may be moved or copied."""

    parameters: int
    norm: float  # of the last of its weights that is a matrix
    what: str
    solvers: tuple[tuple[str, dict[str, Any]], ...]  # the class, and what is set of its traits


_COMPARED = {
    "FluxTransformer2DModel": _Compared(
        9069592,
        2.24392,
        "blocks",
        (
            ("FlowMatchEulerDiscreteScheduler", {}),
            ("UniPCMultistepScheduler", {"solver_order": 2, "use_flow_sigmas": True}),
        ),
    ),
    "UNet2DConditionModel": _Compared(
        7495414,
        2.03601,
        "stages",
        (
            ("EulerDiscreteScheduler", {}),
            ("DPMSolverMultistepScheduler", {"solver_order": 2, "use_karras_sigmas": True}),
        ),
    ),
}


class Drift(NamedTuple):
    """How far the last image is from the plain one, as the errors of Hold tell without a plain one."""

    psnr: float  # in dB
    spread: float  # of that
    calibrated: bool  # whether figures of these weights under this solver, with the same held, were compared

    @classmethod
    def of(cls, drift: float, *, calibrated: bool) -> Drift:
        return cls(round(_LEVEL - 20.0 * math.log10(drift), 1), SPREAD, calibrated)

    @property
    def told(self) -> str:
        """The figure alone, for tables; `UNCALIBRATED` says what its mark means."""
        return f"{self.psnr:.0f}" if self.calibrated else f"~{self.psnr:.0f}"

    def __str__(self) -> str:
        told = f"Estimated PSNR to the plain image: {self.psnr:.0f} dB"
        if self.calibrated:
            return f"{told}, give or take {self.spread:.0f}."
        return f"{told} (uncalibrated: never compared with true ones for these weights under this scheduler)."


def was_compared(denoiser: nn.Module, scheduler: Any, what: str) -> bool:
    """Whether estimates were compared with true figures: of these weights under this solver, with the same held. what:
    is held, as in `Hold`, without `auto`."""
    known = _COMPARED.get(type(denoiser).__name__)
    if known is None or known.what != what or _solver(scheduler) not in known.solvers:
        return False
    parameters = list(denoiser.parameters())
    matrices = [each for each in parameters if each.ndim > 1]
    # The count first: norms of large models would take time, and those on no device have none.
    if sum(each.numel() for each in parameters) != known.parameters or not matrices or matrices[-1].is_meta:
        return False
    return math.isclose(float(matrices[-1].detach().float().norm()), known.norm, rel_tol=_SAME)


def _solver(scheduler: Any) -> tuple[str, dict[str, Any]]:
    config = getattr(scheduler, "config", None) or {}
    return type(scheduler).__name__, {name: config[name] for name in _TRAITS if config.get(name)}

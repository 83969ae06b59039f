"""Drift: estimate from Hold's errors how far a picture is from the plain one, and know where that was calibrated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import nn

# The PSNR at a drift of 1. Two thirds of the pictures lie within SPREAD dB of the estimate (benchmarks/drift.py).
_LEVEL, SPREAD = 17.3, 3.0
# Settings that distinguish solvers of one class, because the estimate was compared for some of them only.
_TRAITS = ("solver_order", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_flow_sigmas")
# A footnote for tables that mark uncalibrated estimates with a tilde.
UNCALIBRATED = (
    "~: the estimated PSNR is uncalibrated: it was never compared with true PSNRs for these weights under this "
    "scheduler."
)
# Storing weights in another dtype changes their norm by less than this.
_SAME = 2e-3


class _Compared(NamedTuple):
    """A denoiser whose pictures the estimate was fitted to. Recognised by its weights, because files may be moved."""

    parameters: int
    norm: float  # of its last weight matrix
    what: str
    solvers: tuple[tuple[str, dict[str, Any]], ...]  # the class, and those of its `_TRAITS` that are set


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
    """How far the last image is from the plain one, estimated from Hold's errors without drawing the plain one."""

    psnr: float  # in dB
    spread: float  # in dB
    calibrated: bool  # whether estimates were compared with true PSNRs, see `was_compared`

    @classmethod
    def of(cls, drift: float, *, calibrated: bool) -> Drift:
        return cls(round(_LEVEL - 20.0 * math.log10(drift), 1), SPREAD, calibrated)

    @property
    def short(self) -> str:
        """The number alone, for tables. `UNCALIBRATED` explains its tilde."""
        return f"{self.psnr:.0f}" if self.calibrated else f"~{self.psnr:.0f}"

    def __str__(self) -> str:
        estimate = f"Estimated PSNR to the plain image: {self.psnr:.0f} dB"
        if self.calibrated:
            return f"{estimate}, give or take {self.spread:.0f}."
        return f"{estimate} (uncalibrated: never compared with true PSNRs for these weights under this scheduler)."


def was_compared(denoiser: nn.Module, scheduler: Any, what: str) -> bool:
    """Whether estimates were compared with true PSNRs for these weights, this solver and this choice of what is held.

    what: as in `Hold`, but never `auto`.
    """
    known = _COMPARED.get(type(denoiser).__name__)
    if known is None or known.what != what or _solver(scheduler) not in known.solvers:
        return False
    parameters = list(denoiser.parameters())
    matrices = [each for each in parameters if each.ndim > 1]
    # Compare counts first: computing norms of large models takes time, and weights on the meta device have none.
    if sum(each.numel() for each in parameters) != known.parameters or not matrices or matrices[-1].is_meta:
        return False
    return math.isclose(float(matrices[-1].detach().float().norm()), known.norm, rel_tol=_SAME)


def _solver(scheduler: Any) -> tuple[str, dict[str, Any]]:
    config = getattr(scheduler, "config", None) or {}
    return type(scheduler).__name__, {name: config[name] for name in _TRAITS if config.get(name)}

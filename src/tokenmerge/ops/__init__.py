"""The only dispatch: one name per operation, run by the reference or, where there is one, by a kernel."""

from __future__ import annotations

from types import ModuleType

import torch

from ..config import TokenMergeError
from . import reference


def backend_for(name: str, device: torch.device) -> tuple[ModuleType, str]:
    """The module whose functions run on `device`, and why it was chosen."""
    if name == "triton":
        raise TokenMergeError(
            "backend='triton' has no kernels in this version; use backend='auto' or backend='reference'"
        )
    return reference, "reference" if name == "reference" else f"reference (no kernels for {device.type})"

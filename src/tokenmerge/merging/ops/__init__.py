"""The choice of backend. Every operation has one name, in the reference and, where there is one, as a kernel."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from ...errors import TokenMergeError
from . import reference

# The oldest GPUs with tensor cores for bf16, and that Triton compiles for.
_LEAST_CAPABILITY = (8, 0)


def backend_for(name: str, device: torch.device) -> tuple[ModuleType, str]:
    """The module whose functions run on `device`, and its name, with the reason if kernels cannot run."""
    if name == "reference":
        return reference, "reference"
    obstacle = _obstacle(device, os.environ.get("TRITON_INTERPRET") == "1" and name == "triton")
    if name == "triton" and obstacle:
        raise TokenMergeError(
            f"backend='triton' cannot run here: {obstacle}; use backend='auto' or backend='reference'"
        )
    if obstacle:
        return reference, f"reference ({obstacle})"
    return import_module(".kernels", __name__), "triton"


@cache
def _obstacle(device: torch.device, interpreted: bool) -> str | None:
    """Why kernels cannot run on `device`; None if they can."""
    if device.type != "cuda" and not interpreted:
        return f"no kernels for {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if not interpreted and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "kernels need compute capability {}.{}".format(*_LEAST_CAPABILITY)
    return None

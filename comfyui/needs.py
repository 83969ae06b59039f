"""Checks what the nodes need, and says how to install it. Installing is left to the owner of the ComfyUI."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import torch

# As the library's own metadata has it.
LEAST_TORCH = (2, 7)
# The library, where these nodes lie in a checkout.
_LIBRARY = Path(__file__).resolve().parent.parent


def check_needs() -> None:
    check_torch(torch.__version__)
    if importlib.util.find_spec("tokenmerge") is None:
        source = f'"{_LIBRARY}"' if (_LIBRARY / "src" / "tokenmerge").is_dir() else "PATH_OF_ITS_CHECKOUT"
        raise ImportError(
            "the library tokenmerge is not installed in ComfyUI's Python, and these nodes need it: run "
            f'"{sys.executable}" -m pip install --no-deps {source}, and start ComfyUI again'
        )


def check_torch(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ImportError(
            f"torch {version} is older than {least}, which tokenmerge needs; update torch as ComfyUI's own "
            "instructions say for your GPU, or remove the folder of these nodes from custom_nodes"
        )

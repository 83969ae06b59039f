"""What the nodes need is there, or is told in words. Nothing is installed here: that is for the owner of a ComfyUI."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import torch

# As the library says in its own metadata.
LEAST_TORCH = (2, 7)
# Where the library lies in a checkout.
_LIBRARY = Path(__file__).resolve().parent.parent


def check_needs() -> None:
    check_torch(torch.__version__)
    if importlib.util.find_spec("tokenmerge") is None:
        given = f'"{_LIBRARY}"' if (_LIBRARY / "src" / "tokenmerge").is_dir() else "PATH_OF_ITS_CHECKOUT"
        raise ImportError(
            "the library tokenmerge is not installed in the Python of this ComfyUI; the nodes are its front end: run "
            f'"{sys.executable}" -m pip install --no-deps {given}, and start ComfyUI again'
        )


def check_torch(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ImportError(
            f"torch {version} is older than {least}, which tokenmerge needs; update torch as ComfyUI's own "
            "instructions say for your GPU, or take the folder of these nodes out of custom_nodes"
        )

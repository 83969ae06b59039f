"""Apply a plan to a denoiser of a host other than diffusers, while that host draws one picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from ..families import Family
from ..planning import Plan, Summary
from ..runtime.state import Host
from .attaching import attach, detach
from .reporting import summary_of


@contextmanager
def hosted(denoiser: nn.Module, family: Family, plan: Plan, follower: Host) -> Iterator[Callable[[], Summary]]:
    """Apply a plan for one picture of a host other than diffusers. Afterwards the denoiser is exactly as before.

    family: the host's own table. follower: keeps the clock from what the host reports. Yields a function that returns
    the summary of the picture so far.
    """
    attach(denoiser, family, plan, follower, lambda: None)
    try:
        yield partial(summary_of, denoiser)
    finally:
        detach(denoiser)

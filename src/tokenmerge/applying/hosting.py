"""A plan on a denoiser of another host than diffusers, for as long as that draws one picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from ..families import Family
from ..planning import Plan, Summary
from ..runtime.state import Host
from .attaching import attach, detach
from .telling import summary_of


@contextmanager
def hosted(denoiser: nn.Module, family: Family, plan: Plan, follower: Host) -> Iterator[Callable[[], Summary]]:
    """A plan on a denoiser for one picture of a host that is not diffusers; afterwards it is exactly as before. Gives a
    function that tells what has been done.

    family: the host's own table. follower: keeps the clock by what the host tells.
    """
    attach(denoiser, family, plan, follower, lambda: None)
    try:
        yield partial(summary_of, denoiser)
    finally:
        detach(denoiser)

"""Observer: reads every denoiser call, refuses what Merge and Hold cannot follow, and passes the rest to the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import TokenMergeError
from ..families.base import Family
from .backward import at_backward
from .foreign import is_tracked, runs_as_made, shard_of
from .installing import Installation, Uncopied
from .state import State
from .timeline import HELD

Check = Callable[[tuple[Any, ...], dict[str, Any]], None]


class Observer(Uncopied):
    """Runs before and after every call. The denoiser refers to it, so it must not refer to the denoiser."""

    def __init__(
        self,
        family: Family,
        state: State,
        installation: Installation,
        *,
        check: Check | None = None,  # of a call's arguments
        held: Sequence[str] = (),  # names of the blocks or stages that are held
        stages: bool = False,
        check_held: Callable[[nn.Module], None] = lambda denoiser: None,
        watch: Callable[[nn.Module], None] | None = None,  # learns from a call what can be held
    ) -> None:
        self._family = family
        self._state = state
        self._installation = installation
        self._check = check
        self._stages = stages
        self._check_held = check_held
        self._watch = watch
        self._holds = bool(held)
        self._tracked = False  # whether group offload removed its tracking hooks after the last call
        # The modules whose forwards loop over held blocks: the owners of their lists. Learned runs need no check: they
        # have been observed.
        loops = (".".join(name.split(".")[:-2]) for name in held) if watch is None else ()
        self._loops = tuple(dict.fromkeys(loops))

    # Traced, it would recompile for every image size.
    @torch.compiler.disable
    def enter(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._family.calls.read(denoiser, args, kwargs)._replace(shard=shard_of(denoiser))
        if self._tracked:
            self._installation.follow()
        self._tracked = is_tracked(denoiser)
        if denoiser.training and torch.is_grad_enabled():
            call = call._replace(trains=True)
        if self._holds:
            apart = self._acts_between(denoiser, args, kwargs)
            if self._stages and apart:
                self._check_held(denoiser)
                raise TokenMergeError(
                    "a third-party hook or forward acts between the stages of the UNet, which can only be held all "
                    "together; use Hold(what='blocks')"
                )
            call = call._replace(apart=apart)
        if self._check is not None:
            self._check(args, kwargs)
        self._state.enter(call)
        if self._watch is not None and self._state.holding is not None and self._state.holding.learning:
            self._watch(denoiser)
        if self._stages and self._state.step.kind == HELD:
            # The residual already contains what was added between stages at the full step.
            self._family.between_stages(args, kwargs).clear()

    @torch.compiler.disable
    def leave(self, denoiser: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        merging = self._state.merging
        if merging is not None and torch.is_grad_enabled():
            at_backward(output, partial(merging.recall, merging.past()), merging.close)
        self._state.leave()

    def _acts_between(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether something acts between held blocks in this call: an argument, a hook, or a replaced forward."""
        if any(argument.read(args, kwargs) is not None for argument in self._family.between_blocks):
            return True
        loops = (denoiser.get_submodule(name) for name in self._loops)
        return self._installation.is_shared or not all(map(runs_as_made, loops))

"""Hold the clean prediction: full steps show the clean picture that their output stands for.

In a held step the denoiser does not run. The scheduler is given the output that stands for that picture, extrapolated,
by the sample it has. So noise that it added is known, and taken out again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import TokenMergeError
from ..families.calls import DenoiserCall
from ..runtime.clock import Clock
from ..runtime.installing import Site
from ..runtime.prediction import Form, form_of
from ..runtime.timeline import HELD, Step
from .controller import HOLD, RUN, Holding
from .residuals import Residual, Run


class Predicting(Holding):
    """Holds one clean prediction for a step, whatever its calls are: guidance has been applied to it already."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        # The picture, and what else an output has in its channels.
        self._run = self.add_run(Run(2))
        self._form: Form | None = None
        self._first: list[DenoiserCall] = []  # the step's first call, or what a host told of all of them
        self._told = False  # whether a host did
        self._step_act = RUN
        self._turn: Hashable = ()
        self._trust: Tensor | None = None  # whether the last slope came true, of every picture
        self._blanks: dict[Hashable, tuple[list[Any], pytree.TreeSpec]] = {}  # outputs of calls, without values

    def follow(self, scheduler: Any) -> None:
        self._form = form_of(scheduler)
        if self._form is None:
            raise not_predicted(scheduler)

    def begin(self, form: Form, whole: DenoiserCall) -> None:
        self._form, self._first, self._told = form, [whole], True

    def enter(self, call: DenoiserCall, step: Step, *, restart: bool) -> None:
        self._turn = call.size, self._clock.call
        if self._clock.call == 0:
            super().enter(call, step, restart=restart)
            self._step_act = self.act
        else:
            self._restart |= restart
            self.act = HOLD if step.kind == HELD else RUN

    def leave(self) -> None:
        # It is kept when the scheduler steps.
        self.act = RUN

    def _parts(self, call: DenoiserCall) -> list[tuple[Hashable, DenoiserCall]]:
        # A host may share a step out among other calls than those of the step before.
        if self._clock.call == 0 and not self._told:
            self._first = [call]
        return [(0, each) for each in self._first]

    def _drop_failed(self) -> None:
        if self._clock.call == 0:
            super()._drop_failed()

    # Of the denoiser's calls. Compiled code must see none of it.

    @torch.compiler.disable
    def blank(self) -> Any:
        """What a call that is left out gives out: nothing in the shape of something. The scheduler is given another."""
        if self._turn not in self._blanks:
            return None
        leaves, structure = self._blanks[self._turn]
        zeros = [
            torch.zeros(*leaf[:1], dtype=leaf[1], device=leaf[2]) if type(leaf) is tuple else leaf for leaf in leaves
        ]
        return pytree.tree_unflatten(zeros, structure)

    @torch.compiler.disable
    def note(self, output: Any) -> None:
        """See what a call gives out."""
        leaves, structure = pytree.tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len({tensor.shape for tensor in tensors}) != 1:
            raise TokenMergeError(
                f"the denoiser gives out {len(tensors)} tensors of several shapes, and the clean prediction is held of "
                "one; use another what, or a Merge"
            )
        blank = [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._blanks[self._turn] = blank, structure

    # Of the scheduler's steps.

    def step(self, output: Tensor, sample: Tensor, level: float) -> Tensor:
        """At a full step, keep the clean prediction; at a held one, give the output that stands for it."""
        act, self._step_act = self._step_act, RUN
        residual, form = self._run.current, self._form
        if act == RUN or not isinstance(residual, Residual) or form is None:
            return output
        mix, channels = form.mix(level), sample.shape[1]
        if output.shape[:1] + output.shape[2:] != sample.shape[:1] + sample.shape[2:] or output.shape[1] < channels:
            raise TokenMergeError(
                f"the scheduler was given an output {tuple(output.shape)} for a sample {tuple(sample.shape)}, of which "
                "no clean prediction can be held; use another what, or a Merge"
            )
        if act == HOLD:
            _, rest = residual.now()
            clean = self._extrapolated(residual)
            held = mix.output_for(clean, sample).to(output.dtype)
            return held if rest is None else torch.cat([held, rest], 1)
        # Some models predict a variance as well.
        picture, rest = output[:, :channels], output[:, channels:]
        clean = mix.clean(sample, picture)
        trust = self._trusted(residual, clean)
        if residual.squares.shape[1] != len(clean):
            residual.squares = torch.zeros(2, len(clean), device=clean.device)
        residual.keep((clean, rest.clone() if rest.shape[1] else None))
        residual.leave_inference()
        if self._keeping is not None:
            self._note()
        self._trust = trust
        return output

    def _extrapolated(self, residual: Residual) -> Tensor:
        """The clean prediction of a held step."""
        stream, trust = residual.streams[0], 1.0 if self._trust is None else self._trust
        assert stream.value is not None, "a prediction was held before it was kept"
        assert stream.change is not None
        line = stream.change * residual.ahead
        # After the first kept step of an image the change is one from the image before.
        return stream.value + torch.where(residual.ahead == 0, 0.0, trust * line)

    def _trusted(self, residual: Residual, clean: Tensor) -> Tensor | None:
        """Whether the slope before a full step came true in it: 1 or 0, of every picture. Where every step begins
        from new noise, predictions jump about, and a line through two of them leads nowhere."""
        stream, before = residual.streams[0], self._trust
        if self._keeping is None or len(self._now[0].steps) < 2 or stream.value is None or stream.change is None:
            return None
        line, came = (each.flatten(1) for each in (stream.change * residual.ahead, clean - stream.value))
        if before is not None:
            # The error is that of what was extrapolated.
            stream.change.mul_(before)
        return ((came * line).sum(1) > 0).float().view(-1, *[1] * (clean.ndim - 1))

    # For CUDA graphs of calls.

    def kind(self) -> Hashable | None:
        """Held calls have nothing to record."""
        return None if self.act == HOLD else ()

    def owners(self) -> list[Any]:
        return []


class DenoiserSite(Site):
    """A denoiser that does not run in held steps."""

    def __init__(self, predicting: Predicting) -> None:
        self.predicting = predicting

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.retired or self.predicting.act != HOLD:
            output = self.original(*args, **kwargs)
            if not self.retired:
                self.predicting.note(output)
            return output
        blank = self.predicting.blank()
        return self.original(*args, **kwargs) if blank is None else blank


def not_predicted(scheduler: Any) -> TokenMergeError:
    told = "no scheduler is known" if scheduler is None else f"{type(scheduler).__name__} does not tell"
    return TokenMergeError(
        f"{told} how samples and outputs are made of picture and noise, so that no clean prediction can be held; use "
        "another scheduler, what='blocks' under one that adds no noise, or a Merge"
    )

"""Hold the clean prediction: a full step keeps the clean picture that its output implies.

In a held step the denoiser does not run. We extrapolate the clean picture, and give the scheduler the output that
implies it for the current sample. So noise that the scheduler has added since is seen, and removed.
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
    """Holds one clean prediction per step, after guidance, whatever calls the step has."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        # Two streams: the clean picture, and further output channels such as a variance.
        self._run = self.add_run(Run(2))
        self._form: Form | None = None
        self._first: list[DenoiserCall] = []  # the step's first call, or the host's stand-in for all of them
        self._hosted = False  # whether it is a host's stand-in
        self._step_act = RUN  # what the scheduler's next step does
        self._turn: Hashable = ()
        self._trust: Tensor | None = None  # per picture, 1 if the last slope came true, else 0; None: trust all
        # By size and number of a call: its output, with (shape, dtype, device) in place of tensors.
        self._blanks: dict[Hashable, tuple[list[Any], pytree.TreeSpec]] = {}

    def follow(self, scheduler: Any) -> None:
        self._form = form_of(scheduler)
        if self._form is None:
            raise not_predicted(scheduler)

    def begin(self, form: Form, whole: DenoiserCall) -> None:
        self._form, self._first, self._hosted = form, [whole], True

    def enter(self, call: DenoiserCall, step: Step, *, restart: bool) -> None:
        self._turn = call.size, self._clock.call
        if self._clock.call == 0:
            super().enter(call, step, restart=restart)
            self._step_act = self.act
        else:
            self._restart |= restart
            self.act = HOLD if step.kind == HELD else RUN

    def leave(self) -> None:
        # The prediction is kept later, in the scheduler's step.
        self.act = RUN

    def _parts(self, call: DenoiserCall) -> list[tuple[Hashable, DenoiserCall]]:
        # The first call names the part: the number of calls may change from step to step.
        if self._clock.call == 0 and not self._hosted:
            self._first = [call]
        return [(0, each) for each in self._first]

    def _drop_failed(self) -> None:
        if self._clock.call == 0:
            super()._drop_failed()

    # Calls of the denoiser, hidden from compiled code.

    @torch.compiler.disable
    def blank(self) -> Any:
        """Zeros in the form of this call's output; None if it is unknown. The scheduler never gets them, see `step`."""
        if self._turn not in self._blanks:
            return None
        leaves, structure = self._blanks[self._turn]
        zeros = [
            torch.zeros(leaf[0], dtype=leaf[1], device=leaf[2]) if type(leaf) is tuple else leaf for leaf in leaves
        ]
        return pytree.tree_unflatten(zeros, structure)

    @torch.compiler.disable
    def note(self, output: Any) -> None:
        """Remember the form of a call's output, for `blank`."""
        leaves, structure = pytree.tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len({tensor.shape for tensor in tensors}) != 1:
            raise TokenMergeError(
                f"the denoiser returns {len(tensors)} tensors of different shapes, but only one clean prediction can "
                "be held; use another what=..., or Merge"
            )
        blank = [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._blanks[self._turn] = blank, structure

    # Steps of the scheduler.

    def step(self, output: Tensor, sample: Tensor, level: float) -> Tensor:
        """The output to step with. At a full step it is `output`, whose clean picture is kept; at a held step it is the
        output that implies the extrapolated clean picture. level: noise to signal of `sample`."""
        act, self._step_act = self._step_act, RUN
        residual, form = self._run.current, self._form
        if act == RUN or not isinstance(residual, Residual) or form is None:
            return output
        mix, channels = form.mix(level), sample.shape[1]
        if output.shape[:1] + output.shape[2:] != sample.shape[:1] + sample.shape[2:] or output.shape[1] < channels:
            raise TokenMergeError(
                f"the scheduler was given an output {tuple(output.shape)} for a sample {tuple(sample.shape)}, but a "
                "clean prediction needs outputs like samples; use another what=..., or Merge"
            )
        if act == HOLD:
            _, rest = residual.now()
            clean = self._extrapolated(residual)
            held = mix.output_for(clean, sample).to(output.dtype)
            return held if rest is None else torch.cat([held, rest], 1)
        # Some models also predict a variance.
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
        """The clean prediction of a held step: value + trust * change * ahead."""
        stream, trust = residual.streams[0], 1.0 if self._trust is None else self._trust
        assert stream.value is not None, "a prediction was held before it was kept"
        assert stream.change is not None
        line = stream.change * residual.ahead
        # After the first kept step of an image, `ahead` is 0 and the change is from the last image, perhaps not finite.
        return stream.value + torch.where(residual.ahead == 0, 0.0, trust * line)

    def _trusted(self, residual: Residual, clean: Tensor) -> Tensor | None:
        """Whether the prediction moved the way of its slope up to this full step: 1 or 0 for every picture.

        If every step starts from new noise, predictions jump about, and a line through two of them leads nowhere.
        """
        stream, before = residual.streams[0], self._trust
        if self._keeping is None or len(self._now[0].steps) < 2 or stream.value is None or stream.change is None:
            return None
        expected, actual = (each.flatten(1) for each in (stream.change * residual.ahead, clean - stream.value))
        if before is not None:
            # Errors must refer to what `_extrapolated` returned.
            stream.change.mul_(before)
        return ((actual * expected).sum(1) > 0).float().view(-1, *[1] * (clean.ndim - 1))

    # For CUDA graphs.

    def kind(self) -> Hashable | None:
        """Held calls are not recorded, since nothing runs in them."""
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
    fact = "no scheduler is known that says" if scheduler is None else f"{type(scheduler).__name__} does not say"
    return TokenMergeError(
        f"{fact} how samples and outputs are made of picture and noise, so no clean prediction can be held; use "
        "another scheduler, what='blocks' under one that adds no noise, or Merge"
    )

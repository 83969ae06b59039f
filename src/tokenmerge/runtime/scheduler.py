"""Follow a diffusers scheduler: its calls count the steps of a denoising loop, and denoiser calls show the rest."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TokenMergeError
from ..families.calls import DenoiserCall
from .clock import MAX_CALLS, Clock
from .levels import clips, error_gain, noise_levels, output_length, sample_levels
from .listening import listen
from .noise import adds_noise
from .prediction import Predictor
from .timeline import Timeline

# Arguments of `step` that make a scheduler add noise which by default adds none.
_NOISE_ARGUMENTS = ("eta", "s_churn")


class Follower:
    """Keeps the clock of one `apply`, from the calls of its scheduler and its denoiser."""

    def __init__(self, timeline: Timeline, scheduler: Callable[[], Any], way_out_of_noise: str = "") -> None:
        self.clock = Clock()
        self._timeline = timeline
        self._way_out_of_noise = way_out_of_noise  # if set, schedulers that add noise are refused, with this advice
        self._scheduler = scheduler
        self._stop_listening: Callable[[], None] | None = None
        self._followed: Callable[[], Any] = lambda: None
        self._timestep: Tensor | None = None  # of the first call of the step
        self._place: int | None = None  # index of that timestep in the scheduler's timesteps, if known
        self._stepped: Any = None  # the timestep of the scheduler's last step
        self._predictor: Predictor | None = None
        self._sample_levels: list[float] = []  # for the predictor: noise to signal at every timestep
        self._predicted: Any = None  # the timestep of the predictor's last step
        try:
            self.follow()
        except BaseException:
            self.close()
            raise

    def predict(self, predictor: Predictor) -> None:
        """From now on let `predictor` see and replace the outputs that the scheduler steps with."""
        predictor.follow(self._followed())
        self._predictor = predictor
        self._sample_levels = sample_levels(self._followed()) or []

    @property
    def scheduler(self) -> Any:
        """The scheduler that drove the last call; None if it is gone or unknown."""
        return self._followed()

    @property
    def waits(self) -> bool:
        """Whether every call reads its timestep, which waits for the device."""
        return self._followed() is None

    def enter(self, call: DenoiserCall) -> None:
        """At the start of a denoiser call: bring the clock up to date."""
        self.follow()
        scheduler = self._followed()
        if call.trains:
            if self._timeline.needs_length:
                raise TokenMergeError(
                    "a call with gradients in training mode belongs to no schedule, but the window of a technique "
                    "depends on the number of steps; train with a window of all steps (start=0, stop=1), or call "
                    "eval() first"
                )
            self.clock.start_training()
        elif scheduler is None:
            if self._timeline.needs_length:
                raise TokenMergeError(
                    "the scheduler that drove this denoiser is gone, but the window of a technique depends on the "
                    "number of steps; apply to the pipeline that runs"
                )
            self.clock.follow_timestep(float(call.timestep.flatten()[0]))
        else:
            self._see_call(scheduler, call)
        self.clock.begin_call()

    def follow(self) -> None:
        """Listen to the scheduler in use, even after the user has put another one into the pipeline."""
        scheduler = self._scheduler()
        # None if the pipeline is gone. Its denoiser and scheduler may live on in another one.
        if scheduler is None or scheduler is self._followed():
            return
        if self._way_out_of_noise and adds_noise(scheduler):
            raise self._noisy(scheduler)
        if self._predictor is not None:
            self._predictor.follow(scheduler)
        self.close()
        self._followed = weakref.ref(scheduler)
        self._stop_listening = listen(scheduler, self)
        self.timesteps_set(scheduler)
        # A technique may be applied in the middle of a picture, e.g. by a callback of the pipeline.
        self.clock.begin = getattr(scheduler, "begin_index", None) or 0
        self.clock.step = max(0, (getattr(scheduler, "step_index", None) or 0) - self.clock.begin)

    def close(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    # Calls of the scheduler: this class is a `Listener`.

    def timesteps_set(self, scheduler: Any, *_: Any, **__: Any) -> None:
        self._place, self._stepped, self._predicted = None, None, None
        timesteps = getattr(scheduler, "timesteps", None)
        total = None if timesteps is None else len(timesteps)
        if self._timeline.hold is None:
            # Only Hold needs the noise. Some schedulers keep sigmas on the device, so that reading them waits.
            self.clock.start_image(total)
        else:
            levels, gain, length = noise_levels(scheduler), error_gain(scheduler), output_length(scheduler)
            self.clock.start_image(total, levels, gain=gain, length=length, clips=clips(scheduler))
        if self._predictor is not None:
            self._sample_levels = sample_levels(scheduler) or []

    def begin_set(self, scheduler: Any, *_: Any, **__: Any) -> None:
        self.clock.begin = scheduler.begin_index or 0

    def stepping(self, scheduler: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = _given(scheduler, arguments, named)
        timestep = given.get("timestep")
        if self._predictor is None or self.clock.call < 0:
            if _is_same(timestep, self._predicted):
                raise TokenMergeError(
                    f"{type(scheduler).__name__} was stepped twice after one call, but only one clean prediction is "
                    "held; draw one picture at a time, use another what=..., or call remove first"
                )
            return arguments, named
        place = _place_in(scheduler.timesteps, timestep, 0) if isinstance(timestep, Tensor) else None
        place = self.clock.begin + self.clock.step if place is None else place
        if place >= len(self._sample_levels) or given.get("per_token_timesteps") is not None:
            raise TokenMergeError(
                f"{type(scheduler).__name__} has no single noise level at this step, which holding a clean prediction "
                "needs; use another what=..., or Merge"
            )
        self._predicted = timestep
        output = self._predictor.step(given["model_output"], given["sample"], self._sample_levels[place])
        if "model_output" in named:
            return arguments, {**named, "model_output": output}
        first = list(given).index("model_output")
        return (*arguments[:first], output, *arguments[first + 1 :]), named

    def stepped(self, scheduler: Any, *arguments: Any, **named: Any) -> None:
        given = _given(scheduler, arguments, named)
        # Most schedulers take it second, even if a wrapper hides the names.
        timestep = given.get("timestep", arguments[1] if len(arguments) > 1 else None)
        # A step without a call of this denoiser belongs to another denoiser, of this pipeline or of one that shares the
        # scheduler.
        ours = self.clock.call >= 0
        if _is_same(timestep, self._stepped):
            if ours:
                raise TokenMergeError(
                    "the scheduler was stepped twice from one timestep: several pictures, or parts of one, take turns, "
                    "and their calls cannot be told apart; denoise all of them in one call (view_batch_size), or "
                    "call remove first"
                )
            # One call served a whole batch, and the scheduler steps each sample by itself.
            return
        if ours and self._way_out_of_noise and any(given.get(name) for name in _NOISE_ARGUMENTS):
            raise self._noisy(scheduler)
        self._stepped = timestep
        self.clock.next_step()

    # Calls of the denoiser, which show what the scheduler does not.

    def _see_call(self, scheduler: Any, call: DenoiserCall) -> None:
        if self.clock.is_over:
            # A hand-written loop may set the timesteps once for many images.
            self.timesteps_set(scheduler)
        if self.clock.call >= 0 and self._place is not None:
            # The last image was abandoned between a call and its step, and the timesteps were set for many images.
            place = _place_in(scheduler.timesteps, call.timestep, self._place)
            if place is not None and place < self._place:
                self.timesteps_set(scheduler)
        if self.clock.call < 0:
            self._see_place(scheduler, call.timestep)
            self._timestep = call.timestep
            if self.clock.step == 0:
                self.clock.begin = self._begin(scheduler, call.timestep)
        elif self.clock.call >= MAX_CALLS - 1 and not _same_time(call.timestep, self._timestep):
            # The first calls are not checked, since reading timesteps waits for the device.
            raise _driven_by_another(f"{MAX_CALLS + 1} calls came without a step of the given scheduler")

    def _see_place(self, scheduler: Any, timestep: Tensor) -> None:
        """Check by the timestep of a step's first call whether the loop still draws the same image."""
        timesteps = getattr(scheduler, "timesteps", None)
        before = self._place
        place = _place_in(timesteps, timestep, 0 if before is None else before + 1)
        if before is not None and place is not None and place <= before:
            # The loop went back, or repeats a timestep: the last image was abandoned, and the timesteps were set for
            # many. But after step 1 a repeated timestep may mean parts of a picture that take turns, which `stepped`
            # must still refuse.
            stepped = self._stepped if place == before and self.clock.step > 1 else None
            self.timesteps_set(scheduler)
            self._stepped = stepped
        elif before is not None and place is None and isinstance(timesteps, Tensor):
            following = timesteps[before + 1 : before + 2]
            if not len(following) or not _same_time(timestep, following):
                raise _driven_by_another("a call came that is no step of the given scheduler")
        elif place is not None:
            # A scheduler may have the same timestep twice in a row.
            self._stepped = None
        self._place = place

    def _begin(self, scheduler: Any, timestep: Tensor) -> int:
        """The step of the schedule that an image begins with. Old schedulers do not say, so we look up the timestep."""
        if hasattr(scheduler, "begin_index"):
            return scheduler.begin_index or 0
        if self._timeline.hold is None and not self._timeline.needs_length:
            return 0
        places = (scheduler.timesteps.cpu() == timestep.flatten()[0].cpu()).nonzero()
        return int(places[0]) if len(places) else 0

    def _noisy(self, scheduler: Any) -> TokenMergeError:
        return TokenMergeError(
            f"{type(scheduler).__name__} adds noise at its steps, which held steps would leave in the picture; "
            f"{self._way_out_of_noise}"
        )


def _given(scheduler: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a scheduler's step, by name."""
    names = list(inspect.signature(scheduler.step).parameters)
    if "model_output" not in names:
        # A third-party wrapper hides them.
        names = list(inspect.signature(type(scheduler).step).parameters)[1:]
    return {**dict(zip(names, arguments, strict=False)), **named}


def scheduler_source(model: Any, scheduler: Any) -> Callable[[], Any]:
    """A function that returns the scheduler in use, and keeps neither pipeline nor scheduler alive."""
    if scheduler is not None:
        if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
            kind = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else f"a {type(scheduler).__name__}"
            raise TokenMergeError(f"scheduler is {kind}; give the scheduler object that drives the denoiser")
        return weakref.ref(scheduler)
    if isinstance(model, nn.Module):
        return lambda: None
    try:
        pipeline = weakref.ref(model)
    except TypeError:
        # A third-party host without support for weak references.
        return scheduler_source(nn.Module(), getattr(model, "scheduler", None))
    return lambda: getattr(pipeline(), "scheduler", None)


def _place_in(timesteps: Any, timestep: Tensor, likely: int) -> int | None:
    """The index of a timestep in the scheduler's timesteps; None if unknown. likely: preferred if a timestep repeats.

    Pipelines pass a view of the scheduler's tensor, so the index follows from its memory offset, without waiting for
    the device. Hand-written loops may pass a number, which families read as a float64 tensor; that is looked up.
    """
    if not isinstance(timesteps, Tensor):
        return None
    if timestep.ndim == 0 and timestep.dtype == torch.float64 and timestep.device.type == "cpu":
        value = float(timestep)
        near = [place for place, time in enumerate(timesteps.tolist()) if abs(time - value) < 1.0]
        return likely if likely in near else next(iter(near), None)
    if timesteps.device != timestep.device:
        return None
    if timesteps.untyped_storage().data_ptr() != timestep.untyped_storage().data_ptr():
        return None
    return int(timestep.storage_offset()) - int(timesteps.storage_offset())


def _driven_by_another(fact: str) -> TokenMergeError:
    return TokenMergeError(
        f"{fact}: another loop drives this denoiser; apply to the pipeline that runs, give scheduler=..., or apply to "
        "the denoiser alone, with techniques whose window is all steps"
    )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arguments of a scheduler are the same timestep: equal numbers, or the same place in memory. Comparing
    the values of tensors would wait for the device."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.device == other.device and one.data_ptr() == other.data_ptr())
    return one is not None and not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


def _same_time(one: Tensor, other: Tensor | None) -> bool:
    """Whether two calls have equal timesteps. Each may be given once or per sample of the batch."""
    return other is not None and one.device == other.device and bool(one.flatten()[0] == other.flatten()[0])

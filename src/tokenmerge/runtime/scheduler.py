"""Follow a scheduler: it tells which step a denoising loop has come to, and calls of the denoiser tell the rest."""

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

# Of a scheduler's step: how much noise it adds, where it adds none by itself.
_NOISE_ARGUMENTS = ("eta", "s_churn")


class Follower:
    """Keeps the clock of one `apply`, from what its scheduler and its denoiser are told."""

    def __init__(self, timeline: Timeline, scheduler: Callable[[], Any], way_out_of_noise: str = "") -> None:
        self.clock = Clock()
        self._timeline = timeline
        self._way_out_of_noise = way_out_of_noise  # where a scheduler that adds noise is refused
        self._scheduler = scheduler
        self._stop_listening: Callable[[], None] | None = None
        self._followed: Callable[[], Any] = lambda: None
        self._timestep: Tensor | None = None  # of the first call of the step
        self._place: int | None = None  # of that timestep among the scheduler's, where it is known
        self._stepped: Any = None  # the timestep that the scheduler stepped from last
        self._predictor: Predictor | None = None
        self._sample_levels: list[float] = []  # for it
        self._predicted: Any = None  # the timestep of its last step
        self._inside = False  # whether a call has begun and not ended: one that fails does not
        try:
            self.follow()
        except BaseException:
            self.close()
            raise

    def predict(self, predictor: Predictor) -> None:
        """From now on let `predictor` see and change what the scheduler is given."""
        predictor.follow(self._followed())
        self._predictor = predictor
        self._sample_levels = sample_levels(self._followed()) or []

    @property
    def scheduler(self) -> Any:
        """The one that drove the last call; None if it is gone, or none is known."""
        return self._followed()

    @property
    def waits(self) -> bool:
        """Whether steps are told apart by reading timesteps, which waits for the device."""
        return self._followed() is None

    def enter(self, call: DenoiserCall) -> None:
        """At the start of a denoiser call: bring the clock up to date."""
        self.follow()
        scheduler = self._followed()
        if call.trains:
            if self._timeline.needs_length:
                raise TokenMergeError(
                    "a call with gradients in training mode is no step of a schedule, and what steps do depends on how "
                    "many there are; train with a window of all steps (start=0, stop=1), or call eval() first"
                )
            self.clock.start_training()
        elif scheduler is None:
            if self._timeline.needs_length:
                raise TokenMergeError(
                    "the scheduler that drove this denoiser is gone, and what a step does depends on how many there "
                    "are; apply to the pipeline that runs"
                )
            self.clock.follow_timestep(float(call.timestep.flatten()[0]))
        else:
            self._see_call(scheduler, call)
        # One that failed may be made again, and is the same call of its step.
        self.clock.call += self.clock.call < 0 or not self._inside
        self._inside = True

    def leave(self) -> None:
        """At the end of a call that did not fail."""
        self._inside = False

    def follow(self) -> None:
        """Listen to the scheduler in use, also after the user has put another one into the pipeline."""
        scheduler = self._scheduler()
        # A pipeline may be gone and its denoiser and scheduler live on in another one.
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
        # A technique may be applied on the way, as by a callback of a pipeline.
        self.clock.begin = getattr(scheduler, "begin_index", None) or 0
        self.clock.step = max(0, (getattr(scheduler, "step_index", None) or 0) - self.clock.begin)

    def close(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None

    # What a scheduler was told.

    def timesteps_set(self, scheduler: Any, *_: Any, **__: Any) -> None:
        self._place, self._stepped, self._predicted = None, None, None
        timesteps = getattr(scheduler, "timesteps", None)
        total = None if timesteps is None else len(timesteps)
        # Some schedulers keep sigmas on the device, for which reading them waits.
        levels = noise_levels(scheduler) if self._timeline.hold is not None else None
        gain, length = error_gain(scheduler), output_length(scheduler)
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
                    f"{type(scheduler).__name__} was stepped twice after one call; what is held is one clean "
                    "prediction: draw one picture at a time, use another what, or remove first"
                )
            return arguments, named
        place = _place_in(scheduler.timesteps, timestep, 0) if isinstance(timestep, Tensor) else None
        place = self.clock.begin + self.clock.step if place is None else place
        if place >= len(self._sample_levels) or given.get("per_token_timesteps") is not None:
            raise TokenMergeError(
                f"{type(scheduler).__name__} tells no one level of noise at this step, without which no clean "
                "prediction can be held; use another what, or a Merge"
            )
        self._predicted = timestep
        output = self._predictor.step(given["model_output"], given["sample"], self._sample_levels[place])
        if "model_output" in named:
            return arguments, {**named, "model_output": output}
        first = list(given).index("model_output")
        return (*arguments[:first], output, *arguments[first + 1 :]), named

    def stepped(self, scheduler: Any, *arguments: Any, **named: Any) -> None:
        given = _given(scheduler, arguments, named)
        # Most take it second, also where a wrapper of somebody's own hides the names.
        timestep = given.get("timestep", arguments[1] if len(arguments) > 1 else None)
        # Another pipeline may share the scheduler: a step without a call of this denoiser is none of ours to refuse.
        ours = self.clock.call >= 0
        if _is_same(timestep, self._stepped):
            if ours:
                raise TokenMergeError(
                    "the scheduler was stepped twice from one timestep: parts of a picture, or several, take turns, "
                    "and their calls cannot be told apart; let one call have all of them (view_batch_size), or remove "
                    "first"
                )
            # One call for a batch, and a step for each of its samples.
            return
        if ours and self._way_out_of_noise and any(given.get(name) for name in _NOISE_ARGUMENTS):
            raise self._noisy(scheduler)
        self._stepped = timestep
        self.clock.next_step()

    # What calls tell that the scheduler does not.

    def _see_call(self, scheduler: Any, call: DenoiserCall) -> None:
        if self.clock.is_over:
            # Loops of one's own may set the timesteps once, for many images.
            self.timesteps_set(scheduler)
        if self.clock.call >= 0 and self._place is not None:
            # An image was broken off between a call and its step, and timesteps had been set for many.
            place = _place_in(scheduler.timesteps, call.timestep, self._place)
            if place is not None and place < self._place:
                self.timesteps_set(scheduler)
        if self.clock.call < 0:
            self._see_place(scheduler, call.timestep)
            self._timestep = call.timestep
            if self.clock.step == 0:
                self.clock.begin = self._begin(scheduler, call.timestep)
        elif self.clock.call >= MAX_CALLS - 1 and not _same_time(call.timestep, self._timestep):
            # Not at the first calls, since reading timesteps waits for the device.
            raise _driven_by_another(f"{MAX_CALLS + 1} calls came without a step of the scheduler")

    def _see_place(self, scheduler: Any, timestep: Tensor) -> None:
        """See from where the timestep of a step's first call lies whether the loop still is that of the last image."""
        timesteps = getattr(scheduler, "timesteps", None)
        before = self._place
        place = _place_in(timesteps, timestep, 0 if before is None else before + 1)
        if before is not None and place is not None and place <= before:
            # Back to an earlier one, or to that of the step before: an image was broken off, and timesteps had been
            # set for many. Past its first step, parts of one that take turns look alike, and are still refused.
            turns = self._stepped if place == before and self.clock.step > 1 else None
            self.timesteps_set(scheduler)
            self._stepped = turns
        elif before is not None and place is None and isinstance(timesteps, Tensor):
            following = timesteps[before + 1 : before + 2]
            if not len(following) or not _same_time(timestep, following):
                raise _driven_by_another("a call came that is no step of the scheduler")
        elif place is not None:
            # Some schedulers have a time twice.
            self._stepped = None
        self._place = place

    def _begin(self, scheduler: Any, timestep: Tensor) -> int:
        """Where in the schedule an image begins. Old schedulers do not say; then the timestep is looked up."""
        if hasattr(scheduler, "begin_index"):
            return scheduler.begin_index or 0
        if self._timeline.hold is None and not self._timeline.needs_length:
            return 0
        places = (scheduler.timesteps.cpu() == timestep.flatten()[0].cpu()).nonzero()
        return int(places[0]) if len(places) else 0

    def _noisy(self, scheduler: Any) -> TokenMergeError:
        return TokenMergeError(
            f"{type(scheduler).__name__} adds noise at its steps; held steps would leave it in the picture: "
            f"{self._way_out_of_noise}"
        )


def _given(scheduler: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a scheduler's step, by name."""
    names = list(inspect.signature(scheduler.step).parameters)
    if "model_output" not in names:
        # A wrapper of somebody's own hides them.
        names = list(inspect.signature(type(scheduler).step).parameters)[1:]
    return {**dict(zip(names, arguments, strict=False)), **named}


def scheduler_source(model: Any, scheduler: Any) -> Callable[[], Any]:
    """A function that gives the scheduler in use now, and keeps neither pipeline nor scheduler alive."""
    if scheduler is not None:
        if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
            told = scheduler.__name__ if isinstance(scheduler, type) else f"a {type(scheduler).__name__}"
            raise TokenMergeError(f"scheduler is {told}; give the scheduler object that drives the denoiser")
        return weakref.ref(scheduler)
    if isinstance(model, nn.Module):
        return lambda: None
    try:
        pipeline = weakref.ref(model)
    except TypeError:
        # A model host of somebody's own that cannot be referred to weakly.
        return scheduler_source(nn.Module(), getattr(model, "scheduler", None))
    return lambda: getattr(pipeline(), "scheduler", None)


def _place_in(timesteps: Any, timestep: Tensor, likely: int) -> int | None:
    """Which of the timesteps this one is: by where it lies, if it is a view of them, as pipelines pass it on; by its
    value, if a loop of one's own gave a number, which a family reads as float64."""
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
        f"{fact} that was given: another loop drives this denoiser; apply to the pipeline that runs, give scheduler=, "
        "or apply to the denoiser alone, with techniques whose window is all steps"
    )


def _is_same(one: Any, other: Any) -> bool:
    """Whether a scheduler was given one of its timesteps twice: the number, or where it lies. To compare values of
    tensors would wait for the device."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.device == other.device and one.data_ptr() == other.data_ptr())
    return one is not None and not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


def _same_time(one: Tensor, other: Tensor | None) -> bool:
    """Whether two calls have the same timestep, given once or for each sample of their batch."""
    return other is not None and one.device == other.device and bool(one.flatten()[0] == other.flatten()[0])

"""Clock: the image, step and call that a denoising loop has reached, and their place in its schedule."""

from __future__ import annotations

from .levels import Place, place_at

# Each of the first calls of a step has maps and residuals of its own. Guidance makes two or three calls.
MAX_CALLS = 4


class Clock:
    """Counts images, steps of the image and calls of the step, each from 0. Before the first, image and call are -1."""

    def __init__(self) -> None:
        self.image = -1
        self.step = 0
        self.call = -1
        self.total: int | None = None  # steps of the whole schedule, if known
        self.begin = 0  # the step of the schedule that this image begins with (img2img skips some)
        self._levels: list[float] = []  # noise-to-signal ratio of every step of the schedule; empty if unknown
        self._gain = 1.0  # `levels.error_gain` of the solver
        self.length = 1.0  # `levels.output_length` of the model
        self.clips = False  # whether the solver clips clean predictions
        self._timestep: float | None = None
        self._inside = False  # whether a call has begun but not ended; a failed call never ends

    @property
    def now(self) -> tuple[int, int, int]:
        return self.image, self.step, self.call

    def place(self, step: int | None = None) -> Place:
        """The place in the schedule of a step of this image, by default of the current one."""
        return place_at(self.begin + (self.step if step is None else step), self.total, self._levels, self._gain)

    @property
    def is_over(self) -> bool:
        """Whether all steps of the schedule are done."""
        return self.total is not None and self.begin + self.step >= self.total

    def start_image(
        self,
        total: int | None,
        levels: list[float] | None = None,
        *,
        gain: float = 1.0,
        length: float = 1.0,
        clips: bool = False,
    ) -> None:
        self.image += 1
        self.step, self.call, self.begin, self.total = 0, -1, 0, total
        self._levels, self._gain, self.length, self.clips = levels or [], gain, length, clips

    def correct_levels(self, levels: list[float]) -> None:
        """Replace the schedule of this image, because the solver has left it."""
        self.total, self._levels = len(levels), levels

    def start_training(self) -> None:
        """Count a training call as an image of its own, without a schedule."""
        self.start_image(None)
        self._timestep = None

    def next_step(self) -> None:
        self.step += 1
        self.call = -1

    def begin_call(self) -> None:
        """Count a call, unless it repeats one that failed."""
        self.call += self.call < 0 or not self._inside
        self._inside = True

    def end_call(self) -> None:
        """At the end of a call that did not fail."""
        self._inside = False

    def follow_timestep(self, timestep: float) -> None:
        """Without a scheduler: an equal timestep is the same step, a lower one the next, a higher one a new image."""
        if self._timestep is None or timestep > self._timestep:
            self.start_image(None)
        elif timestep < self._timestep:
            self.next_step()
        self._timestep = timestep

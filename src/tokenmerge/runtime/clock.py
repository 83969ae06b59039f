"""Clock: which image, step and call a denoising loop has come to, and where that lies in its schedule."""

from __future__ import annotations

from .levels import Place, place_at

# Denoiser calls within one step that maps and residuals are kept apart for (guidance makes two or three).
MAX_CALLS = 4


class Clock:
    """Where the denoising loop stands: image, step and call within the step, each counted from 0."""

    def __init__(self) -> None:
        self.image = -1
        self.step = 0
        self.call = -1
        self.total: int | None = None  # steps of the whole schedule
        self.begin = 0  # where in the schedule this image begins (img2img)
        self._levels: list[float] = []  # of noise to signal, by step of the schedule, where they are known
        self._gain = 1.0  # by which the solver magnifies errors
        self.length = 1.0  # of what the model gives out, over that of noise
        self.clips = False  # whether the solver clips clean predictions
        self._timestep: float | None = None

    @property
    def now(self) -> tuple[int, int, int]:
        return self.image, self.step, self.call

    def place(self, step: int | None = None) -> Place:
        """Where a step of this image lies in the schedule; without one, the step now."""
        return place_at(self.begin + (self.step if step is None else step), self.total, self._levels, self._gain)

    @property
    def is_over(self) -> bool:
        """Whether all steps of the schedule lie behind."""
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
        """The schedule is another than was told when the image began."""
        self.total, self._levels = len(levels), levels

    def start_training(self) -> None:
        """A call of training is a picture by itself, of no schedule."""
        self.start_image(None)
        self._timestep = None

    def next_step(self) -> None:
        self.step += 1
        self.call = -1

    def follow_timestep(self, timestep: float) -> None:
        """Without a scheduler: an equal timestep is the same step, a lower one the next, a higher one a new image."""
        if self._timestep is None or timestep > self._timestep:
            self.start_image(None)
        elif timestep < self._timestep:
            self.next_step()
        self._timestep = timestep

"""Clock: which image, step and call a denoising loop has come to."""

from __future__ import annotations

from .timeline import Place

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
        self._ats: list[float] = []  # under an uneven schedule, what its steps amount to
        self._levels: list[float] = []  # of noise, by step of the schedule, where they are asked for
        self._timestep: float | None = None

    @property
    def now(self) -> tuple[int, int, int]:
        return self.image, self.step, self.call

    def place(self, step: int | None = None) -> Place:
        """Where a step of this image lies in the schedule; without one, the step now."""
        number = self.begin + (self.step if step is None else step)
        if not self.total:
            return Place(number, None)
        if not self._ats:
            return Place(float(number), number / self.total)
        at, following = (self._ats[min(each, len(self._ats) - 1)] for each in (number, number + 1))
        return Place(at, at / self.total, following - at)

    def distance(self, step: int) -> float:
        """What a step lies at for extrapolation: its noise level where asked for, else its place."""
        number = self.begin + step
        return self._levels[number] if number < len(self._levels) else self.place(step).at

    @property
    def is_over(self) -> bool:
        """Whether all steps of the schedule lie behind."""
        return self.total is not None and self.begin + self.step >= self.total

    def start_image(self, total: int | None, ats: list[float] | None = None, levels: list[float] | None = None) -> None:
        self.image += 1
        self.step, self.call, self.begin, self.total = 0, -1, 0, total
        self._ats, self._levels = ats or [], levels or []

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

"""Clock: which image, step and call a denoising loop has come to."""

from __future__ import annotations


class Clock:
    """Where the denoising loop stands: image, step and call within the step, each counted from 0."""

    def __init__(self) -> None:
        self.image = -1
        self.step = 0
        self.call = -1
        self.total: int | None = None  # steps of the whole schedule
        self.begin = 0  # where in the schedule this image begins (img2img)
        self.levels: list[float] = []  # of noise, by step of the schedule
        self._timestep: float | None = None

    @property
    def now(self) -> tuple[int, int, int]:
        return self.image, self.step, self.call

    @property
    def position(self) -> float:
        """Share of the schedule that lies behind; 0 where its length is unknown."""
        return self.position_of(self.step) or 0.0

    def position_of(self, step: int) -> float | None:
        """Share of the schedule that lies behind at a step of this image; None where its length is unknown."""
        return (self.begin + step) / self.total if self.total else None

    def noise_level(self, step: int) -> float:
        """The noise level of a step, or its number where levels are not known or not asked for."""
        place = self.begin + step
        return self.levels[place] if place < len(self.levels) else float(step)

    @property
    def is_over(self) -> bool:
        """Whether all steps of the schedule lie behind."""
        return self.total is not None and self.begin + self.step >= self.total

    def start_image(self, total: int | None, levels: list[float] | None = None) -> None:
        self.image += 1
        self.step, self.call, self.begin, self.total = 0, -1, 0, total
        self.levels = levels or []

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

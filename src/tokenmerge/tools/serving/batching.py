"""The jobs that wait for one replica, and which of them are drawn together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from .requests import Job


@dataclass(frozen=True)
class Report:
    """What one batch did. It travels with only one of its pictures."""

    size: int
    seconds: float
    steps: Mapping[str, int]  # by kind
    psnr: float | None  # to the plain picture, as Hold estimates it; the worst of the batch


@dataclass(frozen=True)
class Drawn:
    """A picture as a PNG file."""

    png: bytes
    report: Report | None = None


@dataclass(frozen=True)
class Failed:
    """Why there is no picture. The message never quotes a prompt."""

    status: int
    message: str


@dataclass(eq=False)
class Waiting:
    """A job and the future of its answer."""

    job: Job
    answer: asyncio.Future[Drawn | Failed]

    @property
    def left(self) -> bool:
        """Whether nobody waits any more."""
        return self.answer.done()


class Queue:
    """Jobs in order of arrival. batched: for each speed, whether its pictures may share a batch."""

    def __init__(self, most: int, batched: Mapping[str, bool]) -> None:
        self._most = most
        self._batched = batched
        self._waiting: deque[Waiting] = deque()

    def add(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)

    def take(self) -> list[Waiting]:
        """Take the oldest job that is still wanted out of the queue, with later jobs of equal settings."""
        self._waiting = deque(each for each in self._waiting if not each.left)
        if not self._waiting:
            return []
        settings = self._waiting[0].job.settings
        most = self._most if self._batched[settings.speed] else 1
        taken = [each for each in self._waiting if each.job.settings == settings][:most]
        self._waiting = deque(each for each in self._waiting if each not in taken)
        return taken

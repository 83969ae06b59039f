"""Pair: a picture drawn plain and with techniques. Drawing tells how far it is, and can be stopped at every step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from threading import Event

from PIL import Image

from ... import api
from ...runtime.timeline import FULL
from ..drawing.comparison import Shot, compared, take_shot
from ..drawing.pictures import difference, to_tensor
from ..drawing.studio import Studio
from ..quality.metrics import BY_NAME, Meter, Picture, choose_metrics
from ..quality.networks import Found, Sources, find_network
from ..typed import PLAIN, Configuration
from .code import as_python
from .models import Models
from .orders import Order

# Seconds after which a page hears something, so that it is noticed when nobody listens any more.
_PULSE = 0.25
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Side:
    """How far one of both pictures is."""

    kinds: tuple[str, ...] = ()  # of the steps that are done: full, merged, held
    seconds: float = 0.0
    done: bool = False


@dataclass(frozen=True)
class Progress:
    """How far both pictures of an order are."""

    order: Order
    doing: str = "Waiting for the model"
    plain: Side = field(default_factory=Side)
    fast: Side = field(default_factory=Side)


@dataclass(frozen=True)
class Pair:
    """Both pictures of an order, and what is told of them."""

    order: Order
    plain: Shot
    fast: Shot
    progress: Progress
    summary: str  # what the library itself tells of the fast picture
    python: str

    @cached_property
    def drift(self) -> Image.Image:
        """Where both differ."""
        return difference(self.plain.picture, self.fast.picture)


Tell = Callable[[Progress], None]


class Stopped(Exception):
    """Nobody waits for the picture any more."""


class Easel:
    """Draws pairs, one after the other, in a thread of its own: a model serves one picture at a time."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._closed = Event()
        self._worker = ThreadPoolExecutor(1, "tokenmerge-demo")
        found = isinstance(find_network("lpips", Sources()), Found)
        self._lpips = Meter(choose_metrics(["lpips"], Sources()), models.device) if found else None

    def draw(self, order: Order, known: Shot | None = None) -> Iterator[Progress | Pair]:
        """How far a pair is, whenever that changes, and at last the pair. known: the plain picture, if it is there.

        Who closes the iterator stops the drawing before its next step.
        """
        stop = Event()

        def stopped() -> bool:
            return stop.is_set() or self._closed.is_set()

        told: SimpleQueue[Progress | None] = SimpleQueue()
        future = self._worker.submit(self._draw, order, known, told.put, stopped)
        future.add_done_callback(lambda _: told.put(None))
        latest: Progress | None = Progress(order)
        try:
            while latest is not None:
                yield latest
                try:
                    latest = told.get(timeout=_PULSE)
                except Empty:
                    continue
            yield future.result()
        finally:
            stop.set()

    def close(self) -> None:
        """Stop what is being drawn, and give the thread back."""
        self._closed.set()
        self._worker.shutdown(cancel_futures=True)

    def _draw(self, order: Order, known: Shot | None, tell: Tell, stopped: Callable[[], bool]) -> Pair:
        """Runs in the worker's thread."""
        told = Told(order, tell, stopped)
        studio = self.models.studio(order.model)
        studio.request = order.request
        studio.check(order.configuration)
        if not studio.is_loaded:
            told.say(f"Loading {order.model}")
        self.models.load(order.model)
        try:
            plain = known or self._take(studio, order, Configuration(PLAIN), told)
            told.ended("plain", plain)
            fast = plain
            if not order.configuration.is_plain:
                fast = self._take(studio, order, order.configuration, told)
            told.ended("fast", fast)
            summary = str(api.summary(studio.pipe))
            return Pair(order, plain, self._measured(fast, plain), told.progress, summary, as_python(order, studio))
        finally:
            studio.restore()

    def _take(self, studio: Studio, order: Order, configuration: Configuration, told: Told) -> Shot:
        studio.configure(configuration)
        side = "plain" if configuration.is_plain else "fast"
        if self.models.is_first(order.model, configuration):
            told.say("Warming up")
            studio.draw(order.prompt, (order.seed,), min(_WARM_UP_STEPS, order.request.steps), told.check)
        told.begin(side)

        def on_step(done: int) -> None:
            told.step(side, dict(api.summary(studio.pipe).steps) or {FULL: done})

        return take_shot(studio, configuration, order.prompt, order.seed, overlay=True, on_step=on_step)

    def _measured(self, fast: Shot, plain: Shot) -> Shot:
        """With its drift, also by LPIPS where that network is installed."""
        shot = compared(fast, plain)
        if self._lpips is None:
            return shot
        first, second = (Picture(to_tensor(each.picture)) for each in (plain, shot))
        return replace(shot, drift={**shot.drift, "lpips": self._lpips.pair(BY_NAME["lpips"], first, second)})


class Told:
    """What is told of an order while it is drawn; raises as soon as nobody listens."""

    def __init__(self, order: Order, tell: Tell, stopped: Callable[[], bool]) -> None:
        self.progress = Progress(order)
        self._tell = tell
        self._stopped = stopped
        self._begun = 0.0

    def check(self, _: int = 0) -> None:
        if self._stopped():
            raise Stopped

    def say(self, doing: str) -> None:
        self._now(replace(self.progress, doing=doing))

    def begin(self, side: str) -> None:
        self._begun = time.perf_counter()
        self.say(f"Drawing the {side} picture")

    def step(self, side: str, kinds: dict[str, int]) -> None:
        """kinds: how many steps there were of each, with this one."""
        before = getattr(self.progress, side).kinds
        new = (Counter(kinds) - Counter(before)).elements()
        self._side(side, Side((*before, *new), time.perf_counter() - self._begun))

    def ended(self, side: str, shot: Shot) -> None:
        kinds = getattr(self.progress, side).kinds or (FULL,) * self.progress.order.request.steps
        self._side(side, Side(kinds, shot.seconds, done=True))

    def _side(self, side: str, now: Side) -> None:
        self._now(replace(self.progress, plain=now) if side == "plain" else replace(self.progress, fast=now))

    def _now(self, progress: Progress) -> None:
        self.check()
        self.progress = progress
        self._tell(progress)

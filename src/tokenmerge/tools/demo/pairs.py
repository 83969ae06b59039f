"""Draws pairs: one picture plain and with techniques. Drawing reports progress and can be stopped at every step."""

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

# Seconds between updates of a page, even without news: a visitor who has left is noticed at the next one.
_PULSE = 0.25
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Side:
    """Progress of one of the two pictures."""

    kinds: tuple[str, ...] = ()  # of the finished steps: full, merged, held
    seconds: float = 0.0
    done: bool = False


@dataclass(frozen=True)
class Progress:
    """Progress of an order."""

    order: Order
    doing: str = "Waiting for the model"
    plain: Side = field(default_factory=Side)
    fast: Side = field(default_factory=Side)


@dataclass(frozen=True)
class Pair:
    """Both pictures of an order, with the summary and the script of the fast one."""

    order: Order
    plain: Shot
    fast: Shot
    progress: Progress
    summary: str
    python: str

    @cached_property
    def drift(self) -> Image.Image:
        """A picture of where the two differ."""
        return difference(self.plain.picture, self.fast.picture)


class Stopped(Exception):
    """Nobody waits for the picture any more."""


class Easel:
    """Draws pairs one after the other, in its own thread: a model draws one picture at a time."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._closed = Event()
        self._worker = ThreadPoolExecutor(1, "tokenmerge-demo")
        found = isinstance(find_network("lpips", Sources()), Found)
        self._lpips = Meter(choose_metrics(["lpips"], Sources()), models.device) if found else None

    def draw(self, order: Order, known: Shot | None = None) -> Iterator[Progress | Pair]:
        """Yield progress whenever it changes, and finally the pair. known: the plain picture, if drawn before.

        Closing the iterator stops the drawing before its next step.
        """
        stop = Event()

        def stopped() -> bool:
            return stop.is_set() or self._closed.is_set()

        news: SimpleQueue[Progress | None] = SimpleQueue()
        future = self._worker.submit(self._draw, order, known, _Reporter(order, news.put, stopped))
        future.add_done_callback(lambda _: news.put(None))
        latest: Progress | None = Progress(order)
        try:
            while latest is not None:
                yield latest
                try:
                    latest = news.get(timeout=_PULSE)
                except Empty:
                    continue
            yield future.result()
        finally:
            stop.set()

    def close(self) -> None:
        """Stop the current drawing and end the thread."""
        self._closed.set()
        self._worker.shutdown(cancel_futures=True)

    def _draw(self, order: Order, known: Shot | None, reporter: _Reporter) -> Pair:
        """Draw a pair. Runs in the worker's thread."""
        studio = self.models.studio(order.model)
        studio.request = order.request
        studio.check(order.configuration)
        if not studio.is_loaded:
            reporter.say(f"Loading {order.model}")
        self.models.load(order.model)
        try:
            plain = known or self._take(studio, order, Configuration(PLAIN), reporter)
            reporter.end("plain", plain)
            fast = plain
            if not order.configuration.is_plain:
                fast = self._take(studio, order, order.configuration, reporter)
            reporter.end("fast", fast)
            summary = str(api.summary(studio.pipe))
            return Pair(order, plain, self._measured(fast, plain), reporter.progress, summary, as_python(order, studio))
        finally:
            studio.restore()

    def _take(self, studio: Studio, order: Order, configuration: Configuration, reporter: _Reporter) -> Shot:
        studio.configure(configuration)
        side = "plain" if configuration.is_plain else "fast"
        if self.models.is_first(order.model, configuration):
            reporter.say("Warming up")
            studio.draw(order.prompt, (order.seed,), min(_WARM_UP_STEPS, order.request.steps), reporter.check)
        reporter.begin(side)

        def on_step(done: int) -> None:
            reporter.step(side, dict(api.summary(studio.pipe).steps) or {FULL: done})

        return take_shot(studio, configuration, order.prompt, order.seed, overlay=True, on_step=on_step)

    def _measured(self, fast: Shot, plain: Shot) -> Shot:
        """The fast picture with its drift, including LPIPS where its network is installed."""
        shot = compared(fast, plain)
        if self._lpips is None:
            return shot
        first, second = (Picture(to_tensor(each.picture)) for each in (plain, shot))
        return replace(shot, drift={**shot.drift, "lpips": self._lpips.pair(BY_NAME["lpips"], first, second)})


class _Reporter:
    """Reports the progress of an order. Raises `Stopped` once nobody listens."""

    def __init__(self, order: Order, report: Callable[[Progress], None], stopped: Callable[[], bool]) -> None:
        self.progress = Progress(order)
        self._report = report
        self._stopped = stopped
        self._begun = 0.0

    def check(self, _: int = 0) -> None:
        if self._stopped():
            raise Stopped

    def say(self, doing: str) -> None:
        self._update(replace(self.progress, doing=doing))

    def begin(self, side: str) -> None:
        self._begun = time.perf_counter()
        self.say(f"Drawing the {side} picture")

    def step(self, side: str, kinds: dict[str, int]) -> None:
        """Add a step. kinds: the number of steps of each kind so far, this one included."""
        before = getattr(self.progress, side).kinds
        new = (Counter(kinds) - Counter(before)).elements()
        self._update_side(side, Side((*before, *new), time.perf_counter() - self._begun))

    def end(self, side: str, shot: Shot) -> None:
        kinds = getattr(self.progress, side).kinds or (FULL,) * self.progress.order.request.steps
        self._update_side(side, Side(kinds, shot.seconds, done=True))

    def _update_side(self, side: str, now: Side) -> None:
        self._update(replace(self.progress, plain=now) if side == "plain" else replace(self.progress, fast=now))

    def _update(self, progress: Progress) -> None:
        self.check()
        self.progress = progress
        self._report(progress)

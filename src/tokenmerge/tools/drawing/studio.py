"""Studio: a model on a device, ready to draw with any configuration. Weights are loaded when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from PIL import Image

from ... import api
from ...compiling import recordings, uncompile
from ...errors import TokenMergeError
from ...families import denoiser_of
from ..compiling import check_compiled_cache, compile_as, way_on
from ..loading import best_device, dtype_on, load_pipeline, outline
from ..measure import free_memory, timed_calls
from ..rivals.base import Run
from ..rivals.diffusers_caches import calibrate
from ..solvers import scheduler_named
from ..typed import PLAIN, Configuration
from .request import Request, draw

# Of a picture that shows whether a configuration works at all.
_TRIAL_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, and what is chosen for all of its pictures; None stands for the model's or the machine's own."""

    model: str
    size: tuple[int, int] | None = None  # width, height
    steps: int | None = None
    guidance: float | None = None
    device: str | None = None
    dtype: str | None = None
    compile: str | None = None
    threads: int | None = None
    safetensors: bool = False  # refuse weights in formats that may hold code
    scheduler: str | None = None  # by name, in place of the pipeline's own


class Studio:
    """Draws with one configuration after the other. What can be refused without weights is refused without them."""

    def __init__(self, setup: Setup, device: torch.device | None = None) -> None:
        self.device = device or best_device(setup.device)
        self.way = way_on(self.device, setup.compile)
        self.dtype = dtype_on(self.device, setup.dtype)
        if setup.threads is not None:
            # Also where a GPU computes: sums on the CPU round by the number of threads.
            torch.set_num_threads(setup.threads)
        self.outline = outline(setup.model)
        self.request = self.asked(setup.size, setup.steps, setup.guidance)
        self.mag_ratios: Sequence[float] | None = None
        self._safetensors = setup.safetensors
        self._scheduler = setup.scheduler
        # What has to be undone before the next configuration, the last first.
        self._undo = ExitStack()
        self._calls: int | None = None
        self._configured = Configuration(PLAIN)

    def asked(self, size: tuple[int, int] | None, steps: int | None, guidance: float | None = None) -> Request:
        """A request to draw that the model can meet; None stands for its own."""
        width, height = size or self.outline.own_size
        self.outline.check_size(width, height)
        defaults = self.outline.defaults
        request = Request("", steps or defaults.steps, width, height, guidance, defaults)
        if self.outline.pipeline_class is not None:
            request.arguments(self.outline.pipeline_class)
        return request

    @cached_property
    def pipe(self) -> Any:
        """The pipeline, with its weights."""
        pipe, _ = load_pipeline(self.outline.model, getattr(torch, self.dtype), self.device, self._safetensors)
        if self._scheduler is not None:
            pipe.scheduler = scheduler_named(self._scheduler, pipe.scheduler)
        return pipe

    @property
    def is_loaded(self) -> bool:
        """Whether weights are in memory."""
        return "pipe" in vars(self)

    def unload(self) -> None:
        """Give the weights back; the next picture loads them again."""
        if self.is_loaded:
            del self.pipe
            free_memory(self.device)

    def check(self, configuration: Configuration) -> None:
        """Refuse what the model does not go with, as far as its config files tell."""
        request, hold = self.request, configuration.techniques.hold
        if configuration.cache:
            check_compiled_cache(self.way)
        for rival in configuration.rivals:
            rival.check(self.outline, request.steps)
        if configuration.cache and hold is not None and hold.acts:
            raise TokenMergeError(
                f"Hold and the {configuration.cache.name} cache both skip steps; leave one of them out"
            )
        steps = self.steps_of(configuration)
        self.outline.plan(configuration.techniques, request.width, request.height, steps=steps)

    def steps_of(self, configuration: Configuration) -> int:
        """Of a picture: as the schedule says, or else as all pictures have them."""
        return (configuration.schedule and configuration.schedule.steps) or self.request.steps

    def attempt(self, configuration: Configuration, prompt: str) -> None:
        """Refuse what only the loaded model tells: that a scheduler or a rival does not go with it."""
        steps = min(_TRIAL_STEPS, self.steps_of(configuration))
        calls = self._calls_a_step(prompt) if configuration.cache else 1
        with ExitStack() as undo:
            self._switch_on(configuration, Run(steps, calls, [1.0] * steps), undo)
            if not configuration.rivals and not (configuration.is_plain and self._scheduler):
                return
            with timed_calls(denoiser_of(self.pipe), self.device) as watch:
                self.draw(prompt, (0,), steps)
            for rival in configuration.rivals:
                rival.check_calls(self.pipe, watch.laps, steps)

    def _calls_a_step(self, prompt: str) -> int:
        """How often a step of the plain pipeline calls the denoiser."""
        if self._calls is None:
            steps = min(_TRIAL_STEPS, self.request.steps)
            with timed_calls(denoiser_of(self.pipe), self.device) as watch:
                self.draw(prompt, (0,), steps)
            self._calls = watch.laps // steps
        return self._calls

    def configure(self, configuration: Configuration) -> None:
        """From now on, draw with this configuration."""
        self.restore()
        run = Run(self.steps_of(configuration), self._calls or 1, self.mag_ratios)
        self._switch_on(configuration, run, self._undo, compiled=True)
        self._configured = configuration

    def _switch_on(self, configuration: Configuration, run: Run, undo: ExitStack, *, compiled: bool = False) -> None:
        """A schedule before techniques, which follow the scheduler; a cache after them, since it sees their blocks."""
        if configuration.schedule:
            undo.enter_context(configuration.schedule.enabled(self.pipe, run))
        api.apply(self.pipe, configuration.techniques)
        undo.callback(api.remove, self.pipe)
        # With a cache calls run as they are: what it decides cannot be recorded.
        if compiled and self.way and not configuration.cache:
            # Code compiled for other token counts before, in this process, might serve these too and round differently.
            torch.compiler.reset()
            compile_as(self.pipe, self.way)
            undo.callback(uncompile, self.pipe)
        if configuration.cache:
            undo.enter_context(configuration.cache.enabled(self.pipe, run))

    def restore(self) -> None:
        """The model as it was loaded."""
        self._configured = Configuration(PLAIN)
        self._undo.close()

    @property
    def graphs(self) -> int | None:
        """How many kinds of call are replayed as CUDA graphs so far; None where none are to be."""
        if self._configured.cache and self.way:
            return 0
        return recordings(denoiser_of(self.pipe))

    def calibrate(self, prompt: str, seed: int) -> None:
        """Measure what some caches need to know of the plain model."""
        self.mag_ratios = calibrate(self.pipe, lambda: self.draw(prompt, (seed,)), self.request.steps)

    def draw(
        self,
        prompt: str,
        seeds: Sequence[int],
        steps: int | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> tuple[list[Image.Image], float]:
        """A batch of pictures, one for each seed, and the seconds it took. steps: if not those of the configuration.
        on_step: as in `request.draw`."""
        steps = steps or self.steps_of(self._configured)
        return draw(self.pipe, replace(self.request, prompt=prompt, steps=steps), seeds, on_step)


def is_calibrated(configurations: Sequence[Configuration]) -> bool:
    """Whether any of them has a cache that needs `calibrate`."""
    return any(each.cache is not None and each.cache.calibrated for each in configurations)

"""Studio: a model on a device, ready to draw with any configuration. Loads weights when they are needed."""

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

# Steps of a trial picture, which shows whether a configuration works at all.
_TRIAL_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model and the settings for all its pictures. None means the default of the model or the machine."""

    model: str
    size: tuple[int, int] | None = None  # width, height
    steps: int | None = None
    guidance: float | None = None
    device: str | None = None
    dtype: str | None = None
    compile: str | None = None
    threads: int | None = None
    safetensors: bool = False  # refuse weights in formats that may hold code
    scheduler: str | None = None  # name of a scheduler that replaces the pipeline's own


class Studio:
    """Draws with one configuration after the other. Refuses what it can before it loads weights."""

    def __init__(self, setup: Setup, device: torch.device | None = None) -> None:
        self.device = device or best_device(setup.device)
        self.way = way_on(self.device, setup.compile)
        self.dtype = dtype_on(self.device, setup.dtype)
        if setup.threads is not None:
            # On a GPU too: rounding of sums on the CPU depends on the number of threads.
            torch.set_num_threads(setup.threads)
        self.outline = outline(setup.model)
        self.request = self.asked(setup.size, setup.steps, setup.guidance)
        self.mag_ratios: Sequence[float] | None = None
        self._safetensors = setup.safetensors
        self._scheduler = setup.scheduler
        # What to undo before the next configuration, last first.
        self._undo = ExitStack()
        # How often a step of the plain pipeline calls the denoiser, once measured.
        self._calls: int | None = None
        self._configured = Configuration(PLAIN)

    def asked(self, size: tuple[int, int] | None, steps: int | None, guidance: float | None = None) -> Request:
        """A request that the model can meet. None means the model's default."""
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
        """Free the weights. The next picture loads them again."""
        if self.is_loaded:
            del self.pipe
            free_memory(self.device)

    def check(self, configuration: Configuration) -> None:
        """Refuse a configuration that does not suit the model, as far as its config files show."""
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
        """Steps of a picture: those of the configuration's schedule, if any, else those of all pictures."""
        return (configuration.schedule and configuration.schedule.steps) or self.request.steps

    def attempt(self, configuration: Configuration, prompt: str) -> None:
        """Refuse a scheduler or rival that fails on the loaded model, by a trial picture."""
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
        """Draw with this configuration from now on."""
        self.restore()
        run = Run(self.steps_of(configuration), self._calls or 1, self.mag_ratios)
        self._switch_on(configuration, run, self._undo, compiled=True)
        self._configured = configuration

    def _switch_on(self, configuration: Configuration, run: Run, undo: ExitStack, *, compiled: bool = False) -> None:
        """Switch on a schedule, techniques and a cache, in this order.

        Techniques follow the scheduler that they find, and a cache must see the blocks as techniques leave them.
        """
        if configuration.schedule:
            undo.enter_context(configuration.schedule.enabled(self.pipe, run))
        api.apply(self.pipe, configuration.techniques)
        undo.callback(api.remove, self.pipe)
        # With a cache, nothing is compiled: its decisions cannot be recorded.
        if compiled and self.way and not configuration.cache:
            # Code that this process compiled for other token counts might be reused here and round differently.
            torch.compiler.reset()
            compile_as(self.pipe, self.way)
            undo.callback(uncompile, self.pipe)
        if configuration.cache:
            undo.enter_context(configuration.cache.enabled(self.pipe, run))

    def restore(self) -> None:
        """Bring the model back to how it was loaded."""
        self._configured = Configuration(PLAIN)
        self._undo.close()

    @property
    def graphs(self) -> int | None:
        """How many kinds of call are replayed as CUDA graphs so far; None if graphs are off."""
        if self._configured.cache and self.way:
            return 0
        return recordings(denoiser_of(self.pipe))

    def calibrate(self, prompt: str, seed: int) -> None:
        """Measure what some caches must know about the plain model."""
        self.mag_ratios = calibrate(self.pipe, lambda: self.draw(prompt, (seed,)), self.request.steps)

    def draw(
        self,
        prompt: str,
        seeds: Sequence[int],
        steps: int | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> tuple[list[Image.Image], float]:
        """A batch of pictures, one per seed, and the seconds it took.

        steps: None for those of the configuration; on_step: as in `request.draw`.
        """
        steps = steps or self.steps_of(self._configured)
        return draw(self.pipe, replace(self.request, prompt=prompt, steps=steps), seeds, on_step)


def is_calibrated(configurations: Sequence[Configuration]) -> bool:
    """Whether any configuration has a cache that needs `calibrate`."""
    return any(each.cache is not None and each.cache.calibrated for each in configurations)

"""Studio: a model on a device, ready to draw with any configuration. Weights are loaded when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from PIL import Image

from ... import api
from ...compiling import uncompile
from ...errors import TokenMergeError
from ..caches import TRIAL_STEPS, calibrate, check_cacheable, disable_cache, enable_cache, try_cache
from ..compiling import check_compiled_cache, compile_as, way_on
from ..fields import check_counts, check_finite
from ..loading import best_device, dtype_on, load_pipeline, outline
from ..typed import Configuration
from .request import Request, draw


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

    def __post_init__(self) -> None:
        check_counts(steps=self.steps, threads=self.threads)
        check_finite(guidance=self.guidance)


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
        width, height = setup.size or self.outline.own_size
        self.outline.check_size(width, height)
        defaults = self.outline.defaults
        self.request = Request("", setup.steps or defaults.steps, width, height, setup.guidance, defaults)
        if self.outline.pipeline_class is not None:
            self.request.arguments(self.outline.pipeline_class)
        self.mag_ratios: Sequence[float] | None = None

    @cached_property
    def pipe(self) -> Any:
        """The pipeline, with its weights."""
        pipe, _ = load_pipeline(self.outline.model, getattr(torch, self.dtype), self.device)
        return pipe

    def check(self, configuration: Configuration) -> None:
        """Refuse what the model does not go with, as far as its config files tell."""
        cache, hold = configuration.cache, configuration.techniques.hold
        if cache:
            check_compiled_cache(self.way)
            check_cacheable(self.outline.denoiser)
            if hold is not None and hold.every > 1:
                raise TokenMergeError(f"Hold and the {cache.name} cache both skip steps; leave one of them out")
        request = self.request
        size = {"height": request.height, "width": request.width, "vae_scale_factor": self.outline.scale}
        api.plan(self.outline.denoiser, configuration.techniques, steps=request.steps, **size)

    def attempt(self, configuration: Configuration, prompt: str) -> None:
        """Refuse what only the loaded model tells: its scheduler, or that a cache does not go with it."""
        with api.applied(self.pipe, configuration.techniques):
            if configuration.cache:
                steps = min(TRIAL_STEPS, self.request.steps)
                try_cache(self.pipe, configuration.cache, partial(self.draw, prompt, (0,), steps), steps)

    def configure(self, configuration: Configuration) -> None:
        """From now on, draw with this configuration."""
        disable_cache(self.pipe)
        api.apply(self.pipe, configuration.techniques)
        if self.way:
            # Code compiled for other token counts before, in this process, might serve these too and round differently.
            uncompile(self.pipe)
            torch.compiler.reset()
            compile_as(self.pipe, self.way)
        if configuration.cache:
            enable_cache(self.pipe, configuration.cache, self.request.steps, self.mag_ratios)

    def restore(self) -> None:
        """The model as it was loaded."""
        disable_cache(self.pipe)
        api.remove(self.pipe)
        uncompile(self.pipe)

    def calibrate(self, prompt: str, seed: int) -> None:
        """Measure what some caches need to know of the plain model."""
        self.mag_ratios = calibrate(self.pipe, lambda: self.draw(prompt, (seed,)), self.request.steps)

    def draw(self, prompt: str, seeds: Sequence[int], steps: int | None = None) -> tuple[list[Image.Image], float]:
        """A batch of pictures, one for each seed, and the seconds it took."""
        return draw(self.pipe, replace(self.request, prompt=prompt, steps=steps or self.request.steps), seeds)


def is_calibrated(configurations: Sequence[Configuration]) -> bool:
    """Whether any of them has a cache that needs `calibrate`."""
    return any(each.cache is not None and each.cache.calibrated for each in configurations)

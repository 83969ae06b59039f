"""Models: those that were named when the page started. No visitor can name another."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from ...errors import TokenMergeError
from ..drawing.request import tells_steps
from ..drawing.studio import Setup, Studio
from ..loading import best_device, name_of
from ..typed import Configuration


class Models:
    """Studios by the names that visitors see. One has its weights in memory at a time."""

    def __init__(
        self,
        models: Sequence[str],
        device: str | None = None,
        dtype: str | None = None,
        threads: int | None = None,
    ) -> None:
        self.device = best_device(device)
        self._studios: dict[str, Studio] = {}
        for model in models:
            name = name_of(model)
            if name in self._studios:
                raise TokenMergeError(f"two models are called {name!r}; leave one out, or rename its folder")
            setup = Setup(model=model, dtype=dtype, threads=threads, safetensors=True)
            self._studios[name] = Studio(setup, self.device)
            _check_drawing(self._studios[name])
        self._warm: set[Any] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._studios)

    def studio(self, name: Any) -> Studio:
        """A model by its name, whether its weights are loaded or not."""
        if name not in self.names:
            raise TokenMergeError(f"There is no model {name!r} here; choose from {', '.join(self.names)}")
        return self._studios[name]

    def load(self, name: str) -> Studio:
        """A model with its weights. Those of another are given back first."""
        studio = self.studio(name)
        if not studio.is_loaded:
            for other in self._studios.values():
                other.unload()
            self._warm.clear()
            studio.pipe.set_progress_bar_config(disable=True)
        return studio

    def is_first(self, name: str, configuration: Configuration) -> bool:
        """Whether a model that is loaded draws with a configuration at its size for the first time."""
        request = self._studios[name].request
        key = (name, request.width, request.height, configuration.what)
        first = key not in self._warm
        self._warm.add(key)
        return first


def _check_drawing(studio: Studio) -> None:
    """Refuse models that draw no pictures, or whose steps nobody hears."""
    model, pipeline = studio.outline.model, studio.outline.drawing_class()
    if "num_frames" in inspect.signature(pipeline.__call__).parameters:
        raise TokenMergeError(f"{model!r} makes videos, and this page shows pictures; give another model")
    if not tells_steps(pipeline):
        raise TokenMergeError(f"{pipeline.__name__} does not tell of its steps; give another model")

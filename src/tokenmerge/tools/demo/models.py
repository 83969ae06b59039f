"""The models that the page offers. They are named when it starts; visitors cannot name others."""

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
    """Studios by the names that visitors see. Only one has its weights in memory at a time."""

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
        """A model's studio, whether or not its weights are loaded."""
        if name not in self.names:
            raise TokenMergeError(f"There is no model {name!r} here; choose from {', '.join(self.names)}")
        return self._studios[name]

    def load(self, name: str) -> Studio:
        """A model's studio, with weights loaded. Weights of other models are freed first."""
        studio = self.studio(name)
        if not studio.is_loaded:
            for other in self._studios.values():
                other.unload()
            self._warm.clear()
            studio.pipe.set_progress_bar_config(disable=True)
        return studio

    def is_first(self, name: str, configuration: Configuration) -> bool:
        """Whether the loaded model has yet to draw this configuration at its current size. The next call says no."""
        request = self._studios[name].request
        key = (name, request.width, request.height, configuration.what)
        first = key not in self._warm
        self._warm.add(key)
        return first


def _check_drawing(studio: Studio) -> None:
    """Refuse models that draw no still pictures, or do not report their steps."""
    model, pipeline = studio.outline.model, studio.outline.drawing_class()
    if "num_frames" in inspect.signature(pipeline.__call__).parameters:
        raise TokenMergeError(f"{model!r} makes videos, but this page shows pictures; give another model")
    if not tells_steps(pipeline):
        raise TokenMergeError(f"{pipeline.__name__} does not report its steps; give another model")

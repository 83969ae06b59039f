"""The worker: a replica with its own pipeline, which draws one batch after the other."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from PIL import Image

from ... import api
from ...errors import TokenMergeError
from ...runtime.timeline import FULL
from ..drawing.pictures import as_png
from ..drawing.request import Request
from ..loading import best_device, dtype_on, load_pipeline
from ..measure import timed
from ..speeds import BATCHED_SPEEDS
from .batching import Drawn, Failed, Queue, Report, Waiting
from .offer import Serving
from .processes import bind_replica
from .requests import Job, Settings

# Seconds that the first job waits for others that arrive at the same time.
_GATHER = 0.01
# Packages whose logs quote prompts, such as the words that were cut off.
_TALKATIVE = ("diffusers", "transformers")
_log = logging.getLogger("ray.serve")


class _Abandoned(Exception):
    """Nobody waits for a batch any more."""


class Worker:
    """Draws the oldest job together with others of equal settings. batched: as in `Queue`."""

    def __init__(self, serving: Serving, batched: Mapping[str, bool]) -> None:
        if serving.local:
            bind_replica()
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        torch.set_num_threads(serving.threads)
        self._device = best_device(serving.device)
        dtype = getattr(torch, dtype_on(self._device, serving.dtype))
        self._pipe, self._defaults = load_pipeline(serving.model, dtype, self._device)
        self._pipe.set_progress_bar_config(disable=True)
        self._stops = "callback_on_step_end" in inspect.signature(self._pipe.__call__).parameters
        self._speed: str | None = None
        self._queue = Queue(serving.max_batch, batched)
        self._gather = _GATHER if serving.max_batch > 1 else 0.0
        # One pipeline draws one batch at a time.
        self._thread = ThreadPoolExecutor(1)
        self._drawing: asyncio.Task[None] | None = None

    async def draw(self, job: Job) -> Drawn | Failed:
        """Draw a picture. If the caller leaves, the job is dropped."""
        waiting = Waiting(job, asyncio.get_running_loop().create_future())
        self._queue.add(waiting)
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw_all())
        return await waiting.answer

    async def _draw_all(self) -> None:
        """Draw until nobody waits."""
        await asyncio.sleep(self._gather)
        while batch := self._queue.take():
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._draw_batch, batch)
            for each, answer in zip(batch, _reported(batch, answers), strict=True):
                if not each.left:
                    each.answer.set_result(answer)

    def _draw_batch(self, batch: Sequence[Waiting]) -> Sequence[Drawn | Failed]:
        """Draw a batch. Runs in the drawing thread."""
        try:
            pictures, report = self._pictures(batch)
            return [Drawn(as_png(picture), report) for picture in pictures]
        except _Abandoned:
            failed = Failed(503, "nobody waited for this picture")
        except TokenMergeError as error:
            failed = Failed(400, f"{error}; speed 'plain' needs no technique")
        except torch.OutOfMemoryError:
            failed = Failed(503, f"{self._device} has too little memory for this; ask for a smaller size")
        except Exception as error:
            # Catches everything: the message may quote the prompt, and Ray would log it.
            place = traceback.extract_tb(error.__traceback__)[-1]
            _log.error("A batch failed with %s at %s:%s.", type(error).__name__, place.filename, place.lineno)
            failed = Failed(500, f"the pipeline failed with {type(error).__name__}; the server's log says where")
        # After a failure, the state of the pipeline is unknown.
        self._speed = None
        return [failed] * len(batch)

    def _pictures(self, batch: Sequence[Waiting]) -> tuple[list[Image.Image], Report]:
        settings = batch[0].job.settings
        self._apply(settings.speed)
        arguments = self._arguments([each.job for each in batch], settings)
        if self._stops:
            arguments["callback_on_step_end"] = lambda *stepped: _stop_if_left(batch, stepped[-1])
        result, seconds = timed(lambda: self._pipe(**arguments), self._device)
        summary = api.summary(self._pipe)
        # Without a technique no steps are counted; all of them were full.
        steps = dict(summary.steps) or {FULL: settings.steps}
        return result.images, Report(len(batch), seconds, steps, summary.drift.psnr if summary.drift else None)

    def _apply(self, speed: str) -> None:
        if speed != self._speed:
            api.apply(self._pipe, BATCHED_SPEEDS[speed])
            self._speed = speed

    def _arguments(self, jobs: Sequence[Job], settings: Settings) -> dict[str, Any]:
        """The arguments of the pipeline, with a prompt and a generator for every picture."""
        request = Request("", settings.steps, settings.width, settings.height, defaults=self._defaults)
        # On the CPU, so that a seed means the same noise on every machine.
        generators = [torch.Generator().manual_seed(job.seed) for job in jobs]
        return {**request.arguments(self._pipe), "prompt": [job.prompt for job in jobs], "generator": generators}


def _stop_if_left(batch: Sequence[Waiting], tensors: dict[str, Any]) -> dict[str, Any]:
    if all(each.left for each in batch):
        raise _Abandoned
    return tensors


def _reported(batch: Sequence[Waiting], answers: Sequence[Drawn | Failed]) -> list[Drawn | Failed]:
    """Leave the report with the first picture that is still wanted, and take it off the others."""
    first = next((number for number, each in enumerate(batch) if not each.left), None)
    return [
        Drawn(answer.png) if isinstance(answer, Drawn) and number != first else answer
        for number, answer in enumerate(answers)
    ]

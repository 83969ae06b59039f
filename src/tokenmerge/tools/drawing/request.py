"""Requests to draw, and how a pipeline draws them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from ... import api
from ...errors import TokenMergeError, first_line
from ..fields import check_seeds
from ..loading import CallDefaults
from ..measure import timed


@dataclass(frozen=True)
class Request:
    """A picture to draw, without its seed."""

    prompt: str
    steps: int
    width: int
    height: int
    guidance: float | None = None
    defaults: CallDefaults = field(default_factory=CallDefaults)

    def arguments(self, pipeline: Any) -> dict[str, Any]:
        """The arguments of the pipeline call, without seeds. pipeline: the class or an instance."""
        guidance = {} if self.guidance is None else {self.defaults.guidance_argument: self.guidance}
        arguments = {**self.defaults.call, **guidance}
        unknown = sorted(set(arguments) - set(inspect.signature(pipeline.__call__).parameters))
        if unknown:
            kind = pipeline if isinstance(pipeline, type) else type(pipeline)
            raise TokenMergeError(f"{kind.__name__} takes no {', '.join(unknown)}; leave out --guidance")
        size = {"width": self.width, "height": self.height}
        return {"prompt": self.prompt, "num_inference_steps": self.steps, **size, **arguments}


def draw(
    pipe: Any, request: Request, seeds: Sequence[int], on_step: Callable[[int], None] | None = None
) -> tuple[list[Image.Image], float]:
    """A batch of pictures, one per seed, and the seconds it took.

    on_step: called after each step with the number of steps done. An exception from it ends the call.
    """
    check_seeds(*seeds)
    arguments = request.arguments(pipe)
    if on_step is not None:
        arguments |= _callback(pipe, on_step)
    device = torch.device(pipe._execution_device)
    # On the CPU a seed gives the same noise on every machine.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    arguments |= {"generator": generators, "num_images_per_prompt": len(seeds)}
    try:
        result, seconds = timed(lambda: pipe(**arguments), device)
    except TokenMergeError:
        raise
    except ValueError as error:
        # The pipeline checks its arguments itself, such as the size.
        raise TokenMergeError(f"{type(pipe).__name__} refused: {error}") from error
    except AssertionError as error:
        # Schedulers and step caches use assertions as checks, mostly without a message.
        raise TokenMergeError(
            f"{type(pipe).__name__} cannot draw this with {type(pipe.scheduler).__name__} ({first_line(error)}); "
            "leave out the step cache, schedule or --scheduler"
        ) from error
    except torch.OutOfMemoryError as error:
        raise TokenMergeError(
            f"{device} has too little memory for {len(seeds)} x {request.width}x{request.height}; use a smaller size"
        ) from error
    return result.images, seconds


def tells_steps(pipeline: type) -> bool:
    """Whether pipelines of this class report their steps, which `on_step` needs."""
    return not {"callback_on_step_end", "callback"}.isdisjoint(inspect.signature(pipeline.__call__).parameters)


def _callback(pipe: Any, on_step: Callable[[int], None]) -> dict[str, Any]:
    """The arguments that make a pipeline call `on_step` after each step."""
    if "callback_on_step_end" not in inspect.signature(pipe.__call__).parameters:
        return {"callback": lambda step, *_: on_step(step + 1), "callback_steps": 1}

    def after(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step(step + 1)
        return tensors

    return {"callback_on_step_end": after}


def token_counts(pipe: Any) -> str:
    """Tokens before and after merging, for every group that merged in the last image."""
    counts = dict.fromkeys(str(group["tokens"]) for group in api.summary(pipe).groups)
    return ", ".join(count for count in counts if "->" in count)


def slug(prompt: str) -> str:
    """A prompt as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture"

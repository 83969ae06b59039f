"""Noised pictures as a model's own pipeline gives them to its denoiser.

The image-to-image pipeline of the same family encodes pictures and prompts, adds the noise of a step and calls the
denoiser. That call is taken, and the pipeline stopped. So noise, scaling, packing and conditions are its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from ...config import Merge
from ...errors import TokenMergeError
from ...families import denoiser_of, denoisers_of
from ..drawing.request import Request
from ..loading import image_to_image


class NoisedCall(NamedTuple):
    """The arguments of a denoiser call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def rows(self) -> int:
        """Of its batch: guidance may take two for a picture."""
        return next(each for each in (*self.args, *self.kwargs.values()) if isinstance(each, Tensor)).shape[0]

    def output(self, denoiser: nn.Module) -> Tensor:
        return denoiser(*self.args, **{**self.kwargs, "return_dict": False})[0]


class _Taken(Exception):
    def __init__(self, call: NoisedCall) -> None:
        super().__init__()
        self.call = call


class Noising:
    """Makes calls from pictures, at the noise of any step in which a technique merges."""

    def __init__(self, pipe: Any, request: Request, merge: Merge) -> None:
        if len(denoisers_of(pipe)) > 1:
            raise TokenMergeError(f"{type(pipe).__name__} has two denoisers, and heal trains one; use another model")
        self._pipe = image_to_image(pipe)
        if not hasattr(self._pipe, "get_timesteps"):
            raise TokenMergeError(
                f"{type(self._pipe).__name__} takes pictures as references and not noised; use another model, such as "
                "those of SD, SDXL, SD3 and Flux"
            )
        self._pipe.set_progress_bar_config(disable=True)
        accepted = inspect.signature(self._pipe.__call__).parameters
        arguments = {**request.arguments(pipe), "output_type": "latent"}
        self._arguments = {name: value for name, value in arguments.items() if name in accepted}
        shares = [step / request.steps for step in range(request.steps)]
        self.steps = [step for step, share in enumerate(shares) if merge.start <= share < merge.stop]
        if not self.steps:
            raise TokenMergeError(
                f"merging acts from {merge.start:g} to {merge.stop:g} of the schedule, which is none of "
                f"{request.steps} steps; use a wider window"
            )

    def call(self, pictures: Sequence[Image.Image], captions: Sequence[str], step: int, seed: int) -> NoisedCall:
        """The denoiser's call for a batch of pictures with the noise of a step."""
        pipe, scheduler = self._pipe, self._pipe.scheduler
        arguments = {
            **self._arguments,
            "prompt": list(captions),
            "image": list(pictures),
            "generator": [torch.Generator().manual_seed(seed + place) for place in range(len(pictures))],
        }

        def timesteps(count: int, *_: Any, **__: Any) -> tuple[Tensor, int]:
            """Those from the step on. No strength tells the pipelines of all families the same step."""
            scheduler.set_begin_index(step * scheduler.order)
            return scheduler.timesteps[step * scheduler.order :], count - step

        handle = denoiser_of(pipe).register_forward_pre_hook(_take, with_kwargs=True, prepend=True)
        pipe.get_timesteps = timesteps
        try:
            pipe(**arguments)
        except _Taken as taken:
            return taken.call
        finally:
            del pipe.get_timesteps
            handle.remove()
        raise TokenMergeError(f"{type(pipe).__name__} did not call its denoiser; use another model")


def _take(denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Taken(NoisedCall(args, kwargs))

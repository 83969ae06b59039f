"""Noised pictures, as a model's own pipeline passes them to its denoiser.

The image-to-image pipeline of the same family encodes pictures and prompts, adds the noise of a step and calls the
denoiser. We capture that call and stop the pipeline. So noise, scaling, packing and conditions are the pipeline's own.
Encodings are cached; otherwise a GPU would wait for the encoders in every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...config import Merge
from ...errors import TokenMergeError
from ...families import denoiser_of, denoisers_of
from ..drawing.request import Request
from ..loading import image_to_image
from .data import BLANK, Item

# The most bytes of cached encodings.
_ROOM = 4 * 2**30


class NoisedCall(NamedTuple):
    """The arguments of a denoiser call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def rows(self) -> int:
        """Rows of the batch. Guidance may take two per picture."""
        return next(each for each in (*self.args, *self.kwargs.values()) if isinstance(each, Tensor)).shape[0]

    def output(self, denoiser: nn.Module) -> Tensor:
        return denoiser(*self.args, **{**self.kwargs, "return_dict": False})[0]


def joined(calls: Sequence[NoisedCall]) -> NoisedCall:
    """One call with the rows of all calls, each at its own noise."""
    return NoisedCall(*_joined([tuple(call) for call in calls], [call.rows for call in calls]))


def _joined(parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Concatenate the tensors of all parts. rows: the number of rows in each part."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts], rows) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(items, rows) for items in zip(*parts, strict=True))
    if not isinstance(first, Tensor):
        return first
    if first.ndim == 0:
        # A timestep that all rows of a part share.
        return torch.cat([part.expand(count) for part, count in zip(parts, rows, strict=True)])
    # Tensors without a row per sample, such as positions, are the same in all parts.
    return torch.cat(list(parts)) if first.shape[0] == rows[0] else first


class _Captured(Exception):
    """Carries the denoiser's call out of the pipeline."""

    def __init__(self, call: NoisedCall) -> None:
        super().__init__()
        self.call = call


class Noising:
    """Makes calls from pictures, at the noise of any step that merges."""

    def __init__(self, pipe: Any, request: Request, merge: Merge) -> None:
        if len(denoisers_of(pipe)) > 1:
            raise TokenMergeError(f"{type(pipe).__name__} has two denoisers, but heal trains one; use another model")
        self._pipe = image_to_image(pipe)
        if not hasattr(self._pipe, "get_timesteps"):
            raise TokenMergeError(
                f"{type(self._pipe).__name__} takes pictures as references and does not noise them; use another "
                "model, such as SD, SDXL, SD3 or Flux"
            )
        self._pipe.set_progress_bar_config(disable=True)
        accepted = inspect.signature(self._pipe.__call__).parameters
        arguments = {**request.arguments(pipe), "output_type": "latent"}
        self._arguments = {name: value for name, value in arguments.items() if name in accepted}
        self._size = request.width, request.height
        shares = [step / request.steps for step in range(request.steps)]
        self.steps = [step for step, share in enumerate(shares) if merge.start <= share < merge.stop]
        if not self.steps:
            raise TokenMergeError(
                f"merging acts from {merge.start:g} to {merge.stop:g} of the schedule, which has none of "
                f"{request.steps} steps; use a wider window"
            )
        self._encodings = _Cache(_ROOM)
        # Guidance adds rows without the caption to the same call, or makes a call of its own for them.
        self.guided = self.call([BLANK], [""], self.steps[0], 0).rows > 1

    def call(self, items: Sequence[Item], captions: Sequence[str], step: int, seed: int) -> NoisedCall:
        """The denoiser's call for a batch of pictures with the noise of a step."""
        width, height = self._size
        latents = iter([self._encodings.get(item.picture, partial(self._encoded, item)) for item in items])

        def encode(image: Tensor, *_: Any, **__: Any) -> SimpleNamespace:
            """Stands in for the autoencoder: returns the next cached latents, one for each picture."""
            found = torch.cat([next(latents)[0] for _ in image])
            return SimpleNamespace(latents=found.to(image.device, image.dtype))

        blank = torch.zeros(len(items), 3, height, width, device=self._pipe._execution_device)
        return self._captured(blank, captions, step, seed, encode)

    def _encoded(self, item: Item) -> tuple[Tensor]:
        """The latents of a picture, before the pipeline scales them."""
        encode_image, latents = self._pipe.vae.encode, []

        def encode(*args: Any, **kwargs: Any) -> Any:
            output = encode_image(*args, **kwargs)
            latents.append(output.latent_dist.mode() if hasattr(output, "latent_dist") else output.latents)
            return output

        self._captured([item.load(*self._size)], [""], self.steps[0], 0, encode)
        return (latents[0].cpu(),)

    def _captured(
        self, images: Any, captions: Sequence[str], step: int, seed: int, encode: Callable[..., Any]
    ) -> NoisedCall:
        """Run the pipeline up to its call of the denoiser. encode: replaces the autoencoder's method."""
        pipe = self._pipe
        generators = [torch.Generator().manual_seed(seed + place) for place in range(len(captions))]
        arguments = {**self._arguments, "prompt": list(captions), "image": images, "generator": generators}
        with ExitStack() as undo:
            undo.callback(denoiser_of(pipe).register_forward_pre_hook(_capture, with_kwargs=True, prepend=True).remove)
            undo.enter_context(_replaced(pipe, "get_timesteps", partial(_timesteps_from, pipe.scheduler, step)))
            undo.enter_context(_replaced(pipe, "encode_prompt", partial(self._encode_prompt, pipe.encode_prompt)))
            undo.enter_context(_replaced(pipe.vae, "encode", encode))
            try:
                pipe(**arguments)
            except _Captured as captured:
                return captured.call
        raise TokenMergeError(f"{type(pipe).__name__} did not call its denoiser; use another model")

    def _encode_prompt(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Encode captions one by one, so that no encoding depends on which others were cached."""
        given = inspect.signature(original).bind(*args, **kwargs)
        captions = given.arguments["prompt"]
        rows = []
        for caption in [captions] if isinstance(captions, str) else captions:
            given.arguments["prompt"] = [caption]
            rows.append(self._encodings.get(caption, lambda: _moved(original(*given.args, **given.kwargs), "cpu")))
        return _moved(_joined(rows, [1] * len(rows)), self._pipe._execution_device)


def _timesteps_from(scheduler: Any, step: int, count: int, *_: Any, **__: Any) -> tuple[Tensor, int]:
    """Timesteps from `step` on, in place of those of a strength: no strength gives the same step in every pipeline."""
    scheduler.set_begin_index(step * scheduler.order)
    return scheduler.timesteps[step * scheduler.order :], count - step


class _Cache:
    """Encodings on the CPU, as many as there is room for. Each is a tuple of tensors and perhaps other values."""

    def __init__(self, room: int) -> None:
        self._values: dict[Any, tuple[Any, ...]] = {}
        self._room = room

    def get(self, key: Any, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        if key in self._values:
            return self._values[key]
        value = make()
        size = sum(each.nbytes for each in value if isinstance(each, Tensor))
        if size <= self._room:
            self._room -= size
            self._values[key] = value
        return value


def _moved(values: Sequence[Any], device: torch.device | str) -> tuple[Any, ...]:
    return tuple(each.to(device) if isinstance(each, Tensor) else each for each in values)


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of an object's method."""
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)


def _capture(denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Captured(NoisedCall(args, kwargs))

"""Two ways to read a call: from the shape of a latent, or from the ids of packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .base import Argument, Calls, as_tensor
from .calls import DenoiserCall, TokenGrid, planned


def latest(timestep: Any) -> Tensor:
    """One timestep per sample. Where every token has its own, the tokens of a given image have 0."""
    given = as_tensor(timestep)
    return given.flatten(1).amax(1) if given.ndim > 1 else given


def length(argument: Argument | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of tokens in a text argument [B, T, ...]; 0 if it is left out."""
    text = None if argument is None else argument.read(args, kwargs)
    return 0 if text is None else int(text.shape[1])


def conditioned(
    height: int, width: int, frames: int, timestep: Any, may_be_given: bool = False
) -> tuple[TokenGrid, ...]:
    """The grids of a video. A first frame that may be a given image must not merge with other frames.

    It may be one where every token has a timestep of its own, and wherever `may_be_given` says so.
    """
    per_token = isinstance(timestep, Tensor) and timestep.ndim > 1 and timestep.shape[1] > 1
    grids = (TokenGrid(height, width, frames),)
    return first_apart(grids) if per_token or may_be_given else grids


def first_apart(grids: tuple[TokenGrid, ...]) -> tuple[TokenGrid, ...]:
    """The first frame of a video as a grid of its own."""
    first = grids[0]
    if len(grids) > 1 or first.frames == 1:
        return grids
    return replace(first, frames=1), replace(first, frames=first.frames - 1)


@dataclass(frozen=True)
class Latents(Calls):
    """Calls that receive a latent and cut it into patches: [B, C, H, W], [B, C, F, H, W], or with channels last."""

    argument: Callable[[str], Argument]
    latent: str = "hidden_states"
    text: str | None = "encoder_hidden_states"
    frames_axis: int = 2
    rises: bool = False  # whether timesteps rise from step to step
    channels_last: bool = False
    # From the config: whether the first frame may be a given image although all tokens share one timestep.
    may_be_given: Callable[[Any], bool] = lambda config: False

    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        latent = self.argument(self.latent).read(args, kwargs)
        given = self.argument("timestep").read(args, kwargs)
        height, width = latent.shape[-3:-1] if self.channels_last else latent.shape[-2:]
        frames = latent.shape[self.frames_axis] if latent.ndim == 5 else 1
        timestep = latest(given)
        return DenoiserCall(
            latent.shape[0],
            latent.dtype,
            latent.device,
            -timestep if self.rises else timestep,
            self._grids(denoiser, height, width, frames, given),
            text_tokens=length(self.argument(self.text) if self.text else None, args, kwargs),
        )

    def plan(self, denoiser: Any, height: int, width: int, frames: int = 1) -> DenoiserCall:
        return planned(*self._grids(denoiser, height, width, frames))

    def _grids(
        self, denoiser: Any, height: int, width: int, frames: int, timestep: Any = None
    ) -> tuple[TokenGrid, ...]:
        per_frame, per_row, per_column = _patch(denoiser.config)
        sides = height // per_row, width // per_column, max(1, frames // per_frame)
        return conditioned(*sides, timestep, self.may_be_given(denoiser.config))

    def unit(self, denoiser: Any, scale: int) -> int:
        return _patch(denoiser.config)[1] * scale


@dataclass(frozen=True)
class Ids(Calls):
    """Calls that receive packed tokens [B, N, C] with the image number, row and column of each.

    Pipelines pack 2x2 latents into a token.
    """

    argument: Callable[[str], Argument]
    ids: str = "img_ids"

    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        tokens = self.argument("hidden_states").read(args, kwargs)
        ids = self.argument(self.ids).read(args, kwargs)
        # Rows of text may come first. A fourth column counts text tokens only.
        ids = (ids[0] if ids.ndim == 3 else ids)[-tokens.shape[1] :, :3]
        return DenoiserCall(
            tokens.shape[0],
            tokens.dtype,
            tokens.device,
            as_tensor(self.argument("timestep").read(args, kwargs)),
            ids=ids,
            text_tokens=length(self.argument("encoder_hidden_states"), args, kwargs),
        )

    def plan(self, denoiser: Any, height: int, width: int, frames: int = 1) -> DenoiserCall:
        return planned(TokenGrid(height // 2, width // 2))

    def unit(self, denoiser: Any, scale: int) -> int:
        return 2 * scale


def _patch(config: Any) -> tuple[int, ...]:
    """Frames, height and width of a token in latents, from a diffusers config."""
    size = config.get("patch_size", 1)
    return (config.get("patch_size_t") or 1, size, size) if isinstance(size, int) else (1, *size)[-3:]


def beside_channels(config: Any) -> bool:
    """Whether a given image may enter in extra channels of the latent."""
    return bool(config.in_channels != config.out_channels)


def ids_of(height: int, width: int, columns: int = 3) -> Tensor:
    """Ids [N, columns] of one image, in the form that pipelines pass them."""
    rows, places = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.zeros(height, width, columns)
    ids[..., 1], ids[..., 2] = rows, places
    return ids.view(-1, columns)

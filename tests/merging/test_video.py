"""Merged videos do not flicker: they change no more from frame to frame than plain ones (docs/merging.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_laws import make_map
from torch import Tensor

import tokenmerge
import zoo
from tokenmerge import Merge
from tokenmerge.families import denoiser_of, families, family_of
from tokenmerge.families.calls import TokenGrid

FRAMES, SIDE, CHANNELS = 8, 16, 12
VIDEO = tokenmerge.presets()["video"]
# Axes of frames and channels in a pipeline's output. Models that are not listed have (2, 1).
AXES = {"cogvideox-2b": (1, 2), "cogvideox-5b": (1, 2), "kandinsky5": (1, 4), "ltx": (1, 4)}
PIPELINES = [name for name, model in zoo.MODELS.items() if model.frames > 1 and name != "svd"]


def frame_change(clip: Tensor, frames: int, channels: int) -> float:
    """Mean norm of the change from frame to frame. `frames` and `channels` are axes of the clip."""
    return float(clip.diff(dim=frames).norm(dim=channels).mean())


def panned(speed: float, seed: int) -> Tensor:
    """Tokens [1, F * H * W, C] of a camera that pans over a smooth picture, `speed` tokens per frame."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, CHANNELS, 12, 12, generator=generator)
    picture = F.interpolate(coarse, (96, 96), mode="bicubic")
    ways = [torch.linspace(-0.6, 0.6, SIDE) + speed * 2 / 96 * (frame - FRAMES / 2) for frame in range(FRAMES)]
    places = torch.stack([torch.stack(torch.meshgrid(way, way, indexing="xy"), -1) for way in ways])
    views = F.grid_sample(picture.expand(FRAMES, -1, -1, -1), places, align_corners=False)
    return views.permute(0, 2, 3, 1).reshape(1, -1, CHANNELS)


def restored(tokens: Tensor, technique: Merge) -> Tensor:
    made = make_map(tokens, TokenGrid(SIDE, SIDE, FRAMES), technique)
    return made.unmerge(made.merge(tokens))


@pytest.mark.parametrize("speed", [0.3, 1.0, 2.0, 6.0])
def test_tiles_over_frames_lose_less_and_add_no_motion(speed: float) -> None:
    for seed in range(3):
        clip = panned(speed, seed)
        clips = [clip, restored(clip, Merge()), restored(clip, Merge(regions=VIDEO.regions))]
        plain, within, over = (frame_change(each.unflatten(1, (FRAMES, -1)), 1, -1) for each in clips)
        assert (clips[2] - clip).norm() < (clips[1] - clip).norm()
        assert over <= plain
        # Tiles within frames add motion to slow clips, since destinations change although the picture hardly does.
        assert speed > 1 or within > 1.1 * plain


@pytest.mark.parametrize("name", PIPELINES)
def test_merged_videos_change_no_more_from_frame_to_frame(name: str) -> None:
    model = zoo.MODELS[name]
    pipe = model.build()
    assert family_of(denoiser_of(pipe)).merging == "video"
    axes = AXES.get(name, (2, 1))
    plain = zoo.draw(pipe, model, steps=4)
    tokenmerge.apply(pipe, "video", skip_first=0)
    merged: Any = zoo.draw(pipe, model, steps=4)
    if name == "ltx":
        # LTX returns tokens [B, N, C], frame by frame.
        plain, merged = (each.unflatten(1, (-1, 8, 8)) for each in (plain, merged))
    assert not torch.equal(merged, plain)
    # Random weights add noise of less than 1 %.
    assert frame_change(merged, *axes) <= 1.01 * frame_change(plain, *axes)


def test_models_of_video_merge_over_frames_by_default() -> None:
    """UNets are the exception: their spatial blocks see one frame at a time."""
    for family in families():
        expected = "video" if family.frames > 1 and family.stages is None else ("dit", "unet")
        assert family.merging in expected, family.name
    assert VIDEO.select_in.frames == 2

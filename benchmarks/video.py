"""Measures which regions suit video: tiles within a frame, or tiles over several frames.

    python benchmarks/video.py --data FOLDER --out benchmarks/results/video-tiles.jsonl

FOLDER holds photographs as `*.npz` files: `data`, the bytes of pictures one after the other, and `offsets`. A camera
stands still, pans or zooms over them. Speeds are per latent frame, which is four pixel frames. Tokens are

    latent       blocks of 4 frames of 8x8 pixels as 16 channels (principal components of deviation 1, a linear
                 stand-in for a video autoencoder), with 2x2 blocks per token
    tiny-flux    the input of a block of the bundled model, which sees one frame at a time

with the noise of a flow-matching model at `noise`, shared by all frames (`frames_share_noise`) or drawn for each. Tiles
of frames x rows x columns with the same number of tokens cost the same. In each tile, facility location selects
destinations, every token joins the nearest, and gets back the mean of its cluster. With `places` all frames have the
same destinations, with `map` also the same clusters. The figures are

    similarity      mean cosine of two tokens in a tile
    target_error    |y - y'| / |y|, where y is what the map is for (tokens without noise, or the block's residual), and
                    y' is y merged and unmerged
    target_flicker  mean |change of y - y' to the next frame| / mean |y|
    target_rest     mean |change of y' to the next frame| / mean |change of y|. Flicker also counts change that merging
                    removes, such as each frame's own noise. Below 1 there is less change than without merging.
    target_step     the largest such ratio of any two frames: what freezes within a tile may jump to the next
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from bundled import load, parser_for, write_records
from PIL import Image
from torch import Tensor

from tokenmerge.merging.ops import reference

FRAMES, SIDE = 8, 256
# Photographs; fewer for the model, which takes most of the time.
PICTURES, FLUX_PICTURES = 16, 3
RATIOS = (0.5, 0.75)
# Frames, rows and columns of a tile, and what frames share.
TILES = {
    "1x4x4": ((1, 4, 4), None),
    "1x4x4 places": ((1, 4, 4), "places"),
    "1x4x4 map": ((1, 4, 4), "map"),
    "2x2x4": ((2, 2, 4), None),
    "4x2x2": ((4, 2, 2), None),
    "8x1x2": ((8, 1, 2), None),
    "1x4x8": ((1, 4, 8), None),
    "1x4x8 places": ((1, 4, 8), "places"),
    "2x4x4": ((2, 4, 4), None),
    "4x2x4": ((4, 2, 4), None),
    "8x2x2": ((8, 2, 2), None),
    "1x8x8": ((1, 8, 8), None),
    "4x4x4": ((4, 4, 4), None),
}
# For latents: pixels of a block, frames of a block, channels, and pixels of a token.
BLOCK, TIMES, CHANNELS, LATENT_TOKEN = 8, 4, 16, 16
# For tiny-flux: the side of the photograph under the camera, pixels of a token, and the blocks to record.
PHOTOGRAPH, FLUX_TOKEN, FLUX_BLOCKS = 384, 8, ("transformer_blocks.1", "single_transformer_blocks.2")


class Motion(NamedTuple):
    kind: str
    speed: float  # tokens per latent frame, or the share by which a zoom magnifies


MOTIONS = [Motion("still", 0.0), *(Motion("pan", speed) for speed in (0.15, 0.3, 0.6, 1.0, 1.3, 2.0))]
MOTIONS += [Motion("zoom", speed) for speed in (0.01, 0.04, 0.08)]
FEW = [Motion("still", 0.0), Motion("pan", 0.3), Motion("pan", 1.3), Motion("zoom", 0.04)]
NOISES = list(itertools.product((0.2, 0.5, 0.8), (True, False)))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of photographs")
    options = parser.parse_args()
    with torch.no_grad():
        write_records(options.out, measured(options.data))


def measured(folder: Path) -> Iterator[dict[str, Any]]:
    clips = itertools.chain(
        latents(read_photographs(folder, PICTURES)), hidden(read_photographs(folder, FLUX_PICTURES))
    )
    for conditions, tokens, target in clips:
        conditions |= {"photographs": tokens.shape[0], "grid": "x".join(map(str, tokens.shape[1:4]))}
        conditions["change"], conditions["target_change"] = (round(change(each, each), 3) for each in (tokens, target))
        found = {name: measure(tokens, target, name) for name in TILES}
        for ratio in RATIOS:
            yield {**conditions, "ratio": ratio, "tiles": {name: by_ratio[ratio] for name, by_ratio in found.items()}}


def read_photographs(folder: Path, count: int) -> Tensor:
    """Photographs [count, 3, H, W] in -1..1, at even distances in the first file."""
    with np.load(min(folder.glob("*.npz"))) as file:
        data, offsets = file["data"], file["offsets"]
    pictures = []
    for index in np.linspace(0, len(offsets) - 2, count).astype(int):
        with Image.open(io.BytesIO(data[offsets[index] : offsets[index + 1]].tobytes())) as picture:
            pictures.append(np.array(picture.convert("RGB")))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1


def direction(number: int) -> tuple[float, float]:
    """A step down and right of length 1, in eight directions by turns."""
    return math.sin(number * math.pi / 4), math.cos(number * math.pi / 4)


def film(photographs: Tensor, motion: Motion, token: int, times: int) -> Tensor:
    """Clips [P, FRAMES * times, 3, SIDE, SIDE], with `times` pixel frames per latent frame."""
    side = photographs.shape[-1]
    clock = [frame / times for frame in range(FRAMES * times)]
    clips = []
    for number, photograph in enumerate(photographs):
        clip = []
        for time in clock:
            if motion.kind == "zoom":
                # Even, so that the centre stays where it is.
                width = 2 * round(SIDE * (1 + motion.speed) ** (clock[-1] - time) / 2)
                down = right = (side - width) // 2
            else:
                width = SIDE
                way = motion.speed * token * (time - clock[-1] / 2)
                down, right = (round((side - SIDE) / 2 + way * part) for part in direction(number))
            view = photograph[:, down : down + width, right : right + width]
            clip.append(view if width == SIDE else resized(view, SIDE))
        clips.append(torch.stack(clip))
    return torch.stack(clips)


def resized(pictures: Tensor, side: int) -> Tensor:
    batch = pictures if pictures.ndim == 4 else pictures[None]
    return F.interpolate(batch, (side, side), mode="bicubic", antialias=True).view(*pictures.shape[:-2], side, side)


Clips = Iterator[tuple[dict[str, Any], Tensor, Tensor]]


def latents(photographs: Tensor) -> Clips:
    """Conditions, tokens [P, F, H, W, C], and targets likewise."""
    blocks = {motion: _blocks(film(photographs, motion, LATENT_TOKEN, TIMES)) for motion in MOTIONS}
    sample = torch.cat([each.flatten(0, 3)[::41] for each in blocks.values()])
    mean = sample.mean(0)
    values, vectors = torch.linalg.eigh((sample - mean).T.double().cov())
    channels = (vectors[:, -CHANNELS:] / values[-CHANNELS:].sqrt()).float()
    for motion, each in blocks.items():
        clean = _packed((each - mean) @ channels)
        for noise, share in [(0.0, None), *(NOISES if motion in FEW else [])]:
            yield _conditions("latent", motion, noise, share), noised(clean, noise, share), clean


def _blocks(films: Tensor) -> Tensor:
    """[P, F * TIMES, 3, SIDE, SIDE] to [P, F, SIDE / BLOCK, SIDE / BLOCK, values]."""
    films = films.unflatten(1, (FRAMES, TIMES)).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    return films.permute(0, 1, 4, 6, 2, 3, 5, 7).flatten(4)


def _packed(latent: Tensor) -> Tensor:
    """[P, F, H, W, C] to [P, F, H / 2, W / 2, 4 C]."""
    return latent.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).transpose(3, 4).flatten(4)


def _conditions(features: str, motion: Motion, noise: float, share: bool | None) -> dict[str, Any]:
    record = {"features": features, "motion": motion.kind, "speed": motion.speed}
    return record | {"noise": noise, "frames_share_noise": share}


def noised(clean: Tensor, level: float, share: bool | None) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (clean.shape[0], 1 if share else clean.shape[1], *clean.shape[2:])
    return (1 - level) * clean + level * torch.randn(shape, generator=generator)


def hidden(photographs: Tensor) -> Clips:
    """As `latents`, for every block in FLUX_BLOCKS."""
    pipe, _ = load("tiny-flux")
    prompt, pooled, text_ids = pipe.encode_prompt("a photo of a flower", None, max_sequence_length=32)
    seen: dict[str, list[Tensor]] = {}

    def see(name: str, inputs: dict[str, Tensor], outputs: tuple[Tensor, Tensor]) -> None:
        entered = inputs["hidden_states"]
        seen.setdefault(name, []).append(torch.stack([entered, outputs[1] - entered]))

    for name in FLUX_BLOCKS:
        pipe.transformer.get_submodule(name).register_forward_hook(
            lambda _, __, inputs, outputs, name=name: see(name, inputs, outputs), with_kwargs=True
        )
    photographs = resized(photographs, PHOTOGRAPH)
    for motion in FEW:
        # A model for images has no frames between latent ones.
        films = film(photographs, motion, FLUX_TOKEN, 1)
        clean = torch.stack([pipe.vae.encode(each).latent_dist.mode() for each in films])
        clean = _packed(clean.permute(0, 1, 3, 4, 2)).unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)
        ids = torch.cartesian_prod(torch.zeros(1), *(torch.arange(float(side)) for side in clean.shape[2:4]))
        for noise, share in NOISES:
            seen.clear()
            for tokens in noised(clean, noise, share).flatten(2, 3):
                pipe.transformer(
                    hidden_states=tokens,
                    timestep=torch.full((FRAMES,), noise),
                    pooled_projections=pooled.expand(FRAMES, -1),
                    encoder_hidden_states=prompt.expand(FRAMES, -1, -1),
                    txt_ids=text_ids,
                    img_ids=ids,
                )
            for name, found in seen.items():
                entered, added = torch.stack(found, 1).unflatten(3, clean.shape[2:4])
                record = _conditions(f"tiny-flux {name}", motion, noise, share)
                yield record, entered, added


def measure(tokens: Tensor, target: Tensor, name: str) -> dict[float, dict[str, float]]:
    """All figures, by ratio. Tokens and target are [P, F, H, W, C]."""
    shape, sharing = TILES[name]
    size = math.prod(shape)
    tiles, target_tiles = cut(tokens, shape), cut(target, shape)
    pairs = reference.pairwise_similarity(tiles, "cosine")
    similarity = (pairs.sum((-1, -2)) - size).mean() / (size * (size - 1))
    moved = change(target, target)
    figures = {}
    for ratio in RATIOS:
        joined = joining(pairs, round(size * (1 - ratio)), sharing)
        target_back = back(target_tiles, joined, target.shape, shape)
        target_lost = target - target_back
        found = {"similarity": similarity, "target_error": target_lost.norm() / target.norm()}
        found["target_flicker"] = change(target_lost, target)
        # By rounding, even still clips change slightly.
        if moved > 1e-4:
            found["target_rest"] = change(target_back, target) / moved
            found["target_step"] = (lengths_of(target_back) / lengths_of(target)).max()
        figures[ratio] = {key: round(float(value), 3) for key, value in found.items()}
    return figures


def cut(clips: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """[P, F, H, W, C] to [P * F / f, tiles of these frames, f * h * w, C]."""
    frames, rows, columns = shape
    tiles = clips.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).unflatten(1, (-1, frames))
    return tiles.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4, 6).flatten(2, 3).flatten(0, 1)


def back(tiles: Tensor, joined: Tensor, whole: torch.Size, shape: tuple[int, int, int]) -> Tensor:
    """Merge and unmerge tiles from `cut`, back to clips of the shape `whole`. joined: one-hot [.., n, k]."""
    means = joined.transpose(-1, -2) @ tiles / joined.sum(-2)[..., None].clamp_min(1)
    clips, frames, rows, columns, _ = whole
    parts = (clips, frames // shape[0], rows // shape[1], columns // shape[2], *shape, -1)
    return (joined @ means).view(parts).permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(whole)


def joining(pairs: Tensor, count: int, sharing: str | None) -> Tensor:
    """The destination that each token joins, one-hot [.., n, count]."""
    if sharing:
        # One region holds the tokens of all frames. Its candidates are the positions of one frame.
        frames = pairs.unflatten(0, (-1, FRAMES))
        if sharing == "map":
            frames = frames.mean(1, keepdim=True).expand_as(frames)
        candidates = frames.transpose(1, 2).flatten(2, 3)
        chosen = reference.select_destinations(reference.with_exact_sums(candidates), count)
        chosen = chosen.repeat_interleave(FRAMES, 0)
        pairs = frames.flatten(0, 1)
    else:
        chosen = reference.select_destinations(reference.with_exact_sums(pairs), count)
    near = pairs.gather(-1, chosen[..., None, :].expand(*pairs.shape[:3], count))
    return F.one_hot(near.argmax(-1), count).float()


def change(clips: Tensor, scale: Tensor) -> float:
    """Mean length of the change to the next frame, over the mean length of `scale`."""
    return float(lengths_of(clips).mean() / scale.norm(dim=-1).mean())


def lengths_of(clips: Tensor) -> Tensor:
    """Mean length of the change from each frame to the next."""
    return (clips[:, 1:] - clips[:, :-1]).norm(dim=-1).mean((0, 2, 3))


if __name__ == "__main__":
    main()

"""Pictures for people: strips with captions, where two pictures differ, and what merged into what."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ...errors import TokenMergeError
from ...families.calls import TokenGrid
from ..files import check_writable, write_file

_PAPER, _INK, _GREY = (255, 255, 255), (24, 24, 28), (110, 110, 118)
_GAP = 12
# Takes a third of PNG's default time, for a tenth more bytes.
_PNG: dict[str, Any] = {"compress_level": 3}
# Colours of differences, from none (black) to `_BRIGHTEST` and more (pale yellow).
_BRIGHTEST = 96.0
_HEAT = torch.tensor([[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]], dtype=torch.float32)


@dataclass(frozen=True)
class Panel:
    """A picture with a title above and a caption below; a caption may have several lines."""

    picture: Image.Image
    title: str
    caption: str = ""


def strip(rows: Sequence[Sequence[Panel]], heading: str = "", side: int = 320) -> Image.Image:
    """Rows of panels, each picture scaled to at most `side` pixels, under a heading."""
    font, large = _font(14), _font(18)
    pictures = [[_fitted(panel.picture, side) for panel in row] for row in rows]
    width = _GAP + max(sum(picture.width + _GAP for picture in row) for row in pictures)
    title_height = _height(font, "Ag") + 6
    heights = [
        title_height
        + max(picture.height for picture in row)
        + 6
        + max(_height(font, panel.caption) if panel.caption else 0 for panel in panels)
        for row, panels in zip(pictures, rows, strict=True)
    ]
    top = _GAP + (_height(large, heading) + _GAP if heading else 0)
    canvas = Image.new("RGB", (width, top + sum(heights) + _GAP * len(heights)), _PAPER)
    draw = ImageDraw.Draw(canvas)
    if heading:
        draw.text((_GAP, _GAP), _shortened(heading, large, width - 2 * _GAP), _INK, large)
    for row, panels, height in zip(pictures, rows, heights, strict=True):
        left = _GAP
        for picture, panel in zip(row, panels, strict=True):
            draw.text((left, top), _shortened(panel.title, font, picture.width), _INK, font)
            canvas.paste(picture, (left, top + title_height))
            draw.multiline_text((left, top + title_height + picture.height + 6), panel.caption, _GREY, font)
            left += picture.width + _GAP
        top += height + _GAP
    return canvas


def to_tensor(picture: Image.Image) -> Tensor:
    """uint8 [H, W, 3]."""
    values = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    return values.view(picture.height, picture.width, 3)


def to_picture(values: Tensor) -> Image.Image:
    """From uint8 [H, W, 3]."""
    return Image.fromarray(values.numpy())


def blank(like: Image.Image) -> Image.Image:
    """A picture of plain paper with the size of another."""
    return Image.new("RGB", like.size, _PAPER)


def difference(reference: Image.Image, test: Image.Image) -> Image.Image:
    """Mean absolute difference over colours: black for none, pale yellow for `_BRIGHTEST` of 255 and more."""
    differences = (to_tensor(reference).float() - to_tensor(test).float()).abs().mean(-1)
    place = (differences / _BRIGHTEST).clamp(0, 1) * (len(_HEAT) - 1)
    lower = place.long().clamp_max(len(_HEAT) - 2)
    colours = torch.lerp(_HEAT[lower], _HEAT[lower + 1], (place - lower)[..., None])
    return to_picture(colours.round().to(torch.uint8))


def overlay_map(picture: Image.Image, grid: TokenGrid, owners: Tensor, regions: Tensor, scale: int = 1) -> Image.Image:
    """A picture with regions outlined, destinations dotted, and a line from each token to its destination.

    owners: [N] index of the destination that each token merges into most; regions: [N] region number of each token.
    """
    base = picture.convert("RGB").resize((picture.width * scale, picture.height * scale), Image.Resampling.LANCZOS)
    canvas = Image.blend(base, Image.new("RGB", base.size, _PAPER), 0.35)
    draw = ImageDraw.Draw(canvas)
    cell_x, cell_y = canvas.width / grid.width, canvas.height / grid.height
    places, region = owners.view(grid.height, grid.width), regions.view(grid.height, grid.width)

    def centre(index: int) -> tuple[float, float]:
        return (index % grid.width + 0.5) * cell_x, (index // grid.width + 0.5) * cell_y

    for row in range(grid.height):
        for column in range(grid.width):
            left, top = column * cell_x, row * cell_y
            if column and region[row, column] != region[row, column - 1]:
                draw.line([(left, top), (left, top + cell_y)], _GREY)
            if row and region[row, column] != region[row - 1, column]:
                draw.line([(left, top), (left + cell_x, top)], _GREY)
            token, owner = row * grid.width + column, int(places[row, column])
            if token != owner:
                draw.line([centre(token), centre(owner)], (214, 40, 40), max(1, round(cell_x / 8)))
    radius = max(1.0, min(cell_x, cell_y) / 5)
    for owner in owners.unique().tolist():
        x, y = centre(owner)
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], _INK)
    return canvas


def check_picture_file(path: Path) -> None:
    """Refuse a file that `save_picture` could not write, before there is a picture to lose."""
    known = Image.registered_extensions()
    if known.get(path.suffix.lower()) not in Image.SAVE:
        raise TokenMergeError(f"{path} does not end like a picture file; use .png, .jpg or .webp")
    check_writable(path)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a picture whole or not at all, in the format of the file's ending."""
    kind = Image.registered_extensions()[path.suffix.lower()]
    write_file(path, lambda file: picture.save(file, format=kind, **(_PNG if kind == "PNG" else {})))


def as_png(picture: Image.Image) -> bytes:
    """A picture as a PNG file."""
    file = io.BytesIO()
    picture.save(file, format="PNG", **_PNG)
    return file.getvalue()


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _height(font: ImageFont.FreeTypeFont | ImageFont.ImageFont, text: str) -> int:
    probe = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    return round(probe.multiline_textbbox((0, 0), text, font)[3])


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """`text`, cut with an ellipsis if it is wider than `width`."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    factor = side / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    return picture.convert("RGB").resize(size, Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.BICUBIC)

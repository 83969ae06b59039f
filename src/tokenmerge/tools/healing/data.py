"""Pictures to heal with: those of a folder or a list, or the plain model's own, which are drawn first and kept."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from ...errors import TokenMergeError
from ...planning.tables import counted
from ..drawing.pictures import save_picture
from ..drawing.studio import Studio
from ..evaluation.pairs import list_pictures
from ..files import digest_of, write_text

# Of the pictures, that may be unreadable; more of them tell of another mistake.
_UNREADABLE = 0.1
_NAMED = 5
_CAPTION = ".txt"


@dataclass(frozen=True)
class Item:
    """A picture, and what it shows."""

    picture: Path | None
    caption: str

    def load(self, width: int, height: int) -> Image.Image:
        """The picture at a size: its middle, as much as fits."""
        if self.picture is None:
            return Image.new("RGB", (width, height))
        with Image.open(self.picture) as picture:
            upright = ImageOps.exif_transpose(picture).convert("RGB")
            return ImageOps.fit(upright, (width, height), Image.Resampling.LANCZOS)


# A picture of nothing, to try with.
BLANK = Item(None, "")


def read_items(source: Path) -> list[Item]:
    """The pictures of a folder, or those that a text file lists, with captions from text files of the same names.

    Pictures that cannot be read are named and left out; more than a tenth are refused.
    """
    paths = list_pictures(source) if source.is_dir() else _listed(source)
    readable = {path: _is_readable(path) for path in paths}
    unreadable = [path for path in paths if not readable[path]]
    if unreadable:
        named = ", ".join(str(path) for path in unreadable[:_NAMED]) + (", ..." if len(unreadable) > _NAMED else "")
        share = len(unreadable) / len(paths)
        told = f"{len(unreadable)} of {counted(len(paths), 'picture')} cannot be read ({named})"
        if share > _UNREADABLE:
            raise TokenMergeError(f"{told}; at most {_UNREADABLE:.0%} are left out: mend or remove them")
        print(f"tokenmerge: {told}: left out", file=sys.stderr)
    return [Item(path, _caption(path)) for path in paths if readable[path]]


def digest_items(items: Sequence[Item]) -> str:
    """The same for pictures of the same names, content and captions in the same order."""
    digest = hashlib.sha256()
    for item in items:
        assert item.picture is not None
        digest.update(f"{item.picture.name} {digest_of(item.picture)} {item.caption}\n".encode())
    return f"{len(items)} ({digest.hexdigest()[:16]})"


def check_number(pictures: int, held_out: int) -> None:
    """Refuse to hold out all pictures."""
    if pictures <= held_out:
        raise TokenMergeError(
            f"there are {counted(pictures, 'picture')}, and {held_out} are held out; give more, or a smaller --held-out"
        )


def split(items: Sequence[Item], held_out: int, seed: int) -> tuple[list[Item], list[Item]]:
    """Those to train with, and so many that training does not see."""
    check_number(len(items), held_out)
    order = list(items)
    random.Random(seed).shuffle(order)
    return order[held_out:], order[:held_out]


def draw_items(studio: Studio, prompts: Sequence[str], number: int, seed: int, folder: Path) -> None:
    """The plain model's own pictures, as far as they are not there yet, with their prompts beside them."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    for place in tqdm(range(number), desc="pictures", leave=False):
        path = folder / f"{place:05d}.png"
        if path.is_file():
            continue
        prompt = prompts[place % len(prompts)]
        (picture,), _ = studio.draw(prompt, (seed + place,))
        write_text(path.with_suffix(_CAPTION), prompt)
        # After its prompt: a picture that is there is whole.
        save_picture(picture, path)


def _listed(source: Path) -> list[Path]:
    """The paths in a text file, one to a line; relative ones begin at the file."""
    if not source.is_file():
        raise TokenMergeError(f"{source} is not there; give a folder of pictures, or a text file that lists them")
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenMergeError(f"{source} lists no pictures ({error}); give a text file with a path per line") from error
    paths = [source.parent / line.strip() for line in lines if line.strip()]
    if not paths:
        raise TokenMergeError(f"{source} lists no picture; write a path per line")
    return paths


def _is_readable(path: Path) -> bool:
    try:
        with Image.open(path) as picture:
            picture.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
    return True


def _caption(path: Path) -> str:
    beside = path.with_suffix(_CAPTION)
    try:
        return beside.read_text(encoding="utf-8-sig").strip() if beside.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise TokenMergeError(f"caption {beside} cannot be read ({error}); write it in UTF-8, or remove it") from error

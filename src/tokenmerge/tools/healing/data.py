"""Pictures to heal with: from a folder or a list, or drawn by the plain model first and kept."""

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

# Share of pictures that may be unreadable. More of them point to another mistake.
_UNREADABLE = 0.1
# Unreadable pictures that a message names.
_NAMED = 5
_CAPTION = ".txt"


@dataclass(frozen=True)
class Item:
    """A picture and its caption."""

    picture: Path | None
    caption: str

    def load(self, width: int, height: int) -> Image.Image:
        """The picture at a size, cropped around its centre."""
        if self.picture is None:
            return Image.new("RGB", (width, height))
        with Image.open(self.picture) as picture:
            upright = ImageOps.exif_transpose(picture).convert("RGB")
            return ImageOps.fit(upright, (width, height), Image.Resampling.LANCZOS)


# A black picture without a caption, for trial calls.
BLANK = Item(None, "")


def read_items(source: Path) -> list[Item]:
    """Read the pictures of a folder or of a list in a text file. Captions come from text files of the same names.

    Unreadable pictures are named and left out; more than a tenth are refused.
    """
    paths = list_pictures(source) if source.is_dir() else _listed(source)
    readable = {path: _is_readable(path) for path in paths}
    unreadable = [path for path in paths if not readable[path]]
    if unreadable:
        named = ", ".join(str(path) for path in unreadable[:_NAMED]) + (", ..." if len(unreadable) > _NAMED else "")
        share = len(unreadable) / len(paths)
        fact = f"{len(unreadable)} of {counted(len(paths), 'picture')} cannot be read ({named})"
        if share > _UNREADABLE:
            raise TokenMergeError(f"{fact}; at most {_UNREADABLE:.0%} may be left out: repair or remove them")
        print(f"tokenmerge: {fact}; they are left out", file=sys.stderr)
    return [Item(path, _caption(path)) for path in paths if readable[path]]


def digest_items(items: Sequence[Item]) -> str:
    """A digest of the pictures' names, content and captions, in their order."""
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
    """Items to train with, and `held_out` items that training does not see."""
    check_number(len(items), held_out)
    order = list(items)
    random.Random(seed).shuffle(order)
    return order[held_out:], order[:held_out]


def draw_items(studio: Studio, prompts: Sequence[str], number: int, seed: int, folder: Path) -> None:
    """Draw the pictures that the folder does not have yet, and write the prompt of each beside it."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    for place in tqdm(range(number), desc="pictures", leave=False):
        path = folder / f"{place:05d}.png"
        if path.is_file():
            continue
        prompt = prompts[place % len(prompts)]
        (picture,), _ = studio.draw(prompt, (seed + place,))
        write_text(path.with_suffix(_CAPTION), prompt)
        # The picture comes last: one that exists has its prompt.
        save_picture(picture, path)


def _listed(source: Path) -> list[Path]:
    """The paths in a text file, one per line and relative to it."""
    if not source.is_file():
        raise TokenMergeError(f"{source} does not exist; give a folder of pictures, or a text file that lists them")
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenMergeError(f"{source} cannot be read ({error}); give a text file with one path per line") from error
    paths = [source.parent / line.strip() for line in lines if line.strip()]
    if not paths:
        raise TokenMergeError(f"{source} lists no picture; write one path per line")
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

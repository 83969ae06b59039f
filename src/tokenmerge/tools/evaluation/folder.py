"""The files of an evaluation. Each is written whole or not at all, so a file that exists is done.

run.json                      the settings; a run with other settings may not continue
images/CONFIG/SAMPLE.png      pictures
values/CONFIG/SAMPLE.json     metrics of one picture
features/CONFIG/SAMPLE.npy    Inception features, for metrics of sets
reference/NAME.npy            features of the photographs given with --reference
sets/CONFIG.json              metrics of sets: of the whole set, then without a tenth of the prompts at a time
kinds/CONFIG.json             how many steps of a picture were full, merged, held or skipped
work/CONFIG/SAMPLE.json       operations of the denoiser in one picture, and Hold's estimate of its PSNR
calibration.json              what the mag cache decides by
timing/CONFIG/LAP.json        seconds and memory of one timed batch
metrics.jsonl, results.jsonl, table.md, table.csv, report.html, plots/    made from all other files at the end
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...errors import TokenMergeError
from ..drawing.pictures import to_tensor
from ..drawing.request import slug
from ..files import PARTIAL, check_folder, to_json, write_file, write_text
from ..typed import PLAIN, Configuration

# Files that count as done if they exist.
_DONE = (
    "images/*/*.png",
    "values/*/*.json",
    "features/*/*.npy",
    "reference/*.npy",
    "sets/*.json",
    "kinds/*.json",
    "work/*/*.json",
    "timing/*/*.json",
)
# How to replace a damaged file.
_MAKE_ANEW = "delete it, and continue with --resume"
# Messages list so many names, and count the rest.
_LISTED = 6


@dataclass(frozen=True)
class Sample:
    """A prompt, its place in the list, and a seed: one picture of every configuration."""

    place: int
    prompt: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.place:04d}-{self.seed}-{slug(self.prompt)[:40]}"


@dataclass(frozen=True)
class Folder:
    """The folder of an evaluation, and the paths in it."""

    root: Path

    def __post_init__(self) -> None:
        check_folder(self.root)

    def image(self, configuration: Configuration, sample: Sample) -> Path:
        return self.root / "images" / configuration.folder / f"{sample.name}.png"

    def values(self, configuration: Configuration, sample: Sample) -> Path:
        return self.root / "values" / configuration.folder / f"{sample.name}.json"

    def features(self, configuration: Configuration, sample: Sample) -> Path:
        return self.root / "features" / configuration.folder / f"{sample.name}.npy"

    def reference(self, picture: Path) -> Path:
        return self.root / "reference" / f"{picture.name}.npy"

    def sets(self, configuration: Configuration) -> Path:
        return self.root / "sets" / f"{configuration.folder}.json"

    def kinds(self, configuration: Configuration) -> Path:
        return self.root / "kinds" / f"{configuration.folder}.json"

    def work(self, configuration: Configuration, sample: Sample) -> Path:
        return self.root / "work" / configuration.folder / f"{sample.name}.json"

    @property
    def calibration(self) -> Path:
        return self.root / "calibration.json"

    def timing(self, configuration: Configuration, lap: int) -> Path:
        return self.root / "timing" / configuration.folder / f"{lap:04d}.json"

    @property
    def _record(self) -> Path:
        return self.root / "run.json"

    def begun(self) -> dict[str, Any] | None:
        """The settings of an earlier run in this folder."""
        if not self._record.is_file():
            return None
        before = read_json(self._record, "it says how all other files here were made: give another --out")
        # Version 0.1 kept one config per configuration instead of a list of techniques.
        if any(isinstance(config, dict) for config in before.get("configurations", {}).values()):
            raise TokenMergeError(
                f"{self.root} holds an evaluation of tokenmerge 0.1, whose techniques had other names and fields; "
                "give another --out"
            )
        return before

    def begin(self, settings: dict[str, Any], resume: bool) -> dict[str, Any]:
        """Write the settings, after a check that those of an earlier run agree. Returns what is written."""
        # Compare what will be read again: JSON has neither tuples nor infinities.
        settings = json.loads(to_json(settings))
        before = self.begun()
        if before is None and any(any(self.root.glob(files)) for files in _DONE):
            raise TokenMergeError(
                f"{self.root} holds files of an evaluation, but no run.json that says how they were made; give another "
                "--out"
            )
        if before is None and resume:
            tell_new(self.root)
        if before is not None and not resume:
            raise TokenMergeError(
                f"{self.root} holds an evaluation; add --resume to continue it, or give another --out"
            )
        if before is not None:
            settings = _joined(before, settings, self.root)
        for left_over in self.root.rglob(f"*{PARTIAL}"):
            left_over.unlink()
        write_text(self._record, to_json(settings, indent=2))
        return settings


def _joined(before: dict[str, Any], now: dict[str, Any], root: Path) -> dict[str, Any]:
    """The settings of a resumed evaluation. They must agree, except that networks, timed batches and the pictures with
    more steps may be added. Commits may differ, as few of them affect pictures: all are kept."""
    found = [item["environment"].pop("commit", None) for item in (before, now)]
    commits = ", ".join(dict.fromkeys(part for commit in found if commit for part in commit.split(", ")))
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if name == "repeats" and (old or 0) <= (new or 0):
            continue
        if name == "reference_steps" and not old:
            continue
        changed = None
        if name == "configurations":
            old, new = _by_technique(old or {}), _by_technique(new or {})
            changed = _other_labels(old, new)
        changed = changed or _difference(name, old, new, may_grow=name == "networks")
        if changed:
            raise TokenMergeError(f"{root} was begun {changed}; ask for the same, or give another --out")
    return {**now, "environment": {**now["environment"], **({"commit": commits} if commits else {})}}


def _by_technique(configurations: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Techniques by name, so that messages can name a difference."""
    return {label: {each["technique"]: each for each in listed} for label, listed in configurations.items()}


def _other_labels(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """How the labels of configurations differ."""
    added = [label for label in new if label not in old]
    left_out = [label for label in old if label not in new]
    changes = [f"{_listed(added)} {'was' if len(added) == 1 else 'were'} not among them"] if added else []
    changes += [f"{_listed(left_out)} {'is' if len(left_out) == 1 else 'are'} left out now"] if left_out else []
    begun = [label for label in old if label != PLAIN] or [PLAIN]
    return f"with {_listed(begun)}; {', and '.join(changes)}" if changes else None


def _listed(labels: list[str]) -> str:
    more = len(labels) - _LISTED
    return ", ".join(labels[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _difference(name: str, old: Any, new: Any, *, may_grow: bool = False) -> str | None:
    """The first difference of two values, by its innermost name. may_grow: new names are no difference."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return None if old == new else f"with {name} {_short(old)}, not {_short(new)}"
    for key in dict.fromkeys((*old, *new)):
        if key not in new:
            return f"with {name} {key}, which is left out now"
        if key not in old and not may_grow:
            return f"without {name} {key}"
        inner = _difference(f"{name} {key}", old[key], new[key]) if key in old else None
        if inner:
            return inner
    return None


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) < 80 else f"{text[:76]} ..."


def tell_new(out: Path) -> None:
    """Say that there is nothing to resume: the name of the folder may be misspelt."""
    print(f"tokenmerge: {out} holds nothing yet; starting from the beginning", file=sys.stderr)


def interrupted(out: Path) -> KeyboardInterrupt:
    """An interrupt that says how to continue, if there is anything to continue."""
    return KeyboardInterrupt(*([f"finished files are kept in {out}; continue with --resume"] if out.is_dir() else []))


def read_json(path: Path, way_out: str = _MAKE_ANEW) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error, way_out) from error
    return content


def read_if_there(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none."""
    return read_json(path) if path.is_file() else {}


def save_features(path: Path, features: Tensor) -> None:
    """Write the features fp32 [d] of a picture."""
    buffer = io.BytesIO()
    np.save(buffer, features.numpy())
    write_file(path, lambda file: file.write(buffer.getbuffer()))


def read_features(paths: list[Path]) -> Tensor:
    """The features of pictures, [n, d]."""
    rows = []
    for path in paths:
        try:
            rows.append(torch.from_numpy(np.load(path)))
        except (OSError, ValueError) as error:
            raise _damaged(path, error) from error
    return torch.stack(rows)


def read_picture(path: Path) -> Tensor:
    """The pixels of a picture, uint8 [H, W, 3]."""
    try:
        with Image.open(path) as picture:
            return to_tensor(picture)
    except OSError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception, way_out: str = _MAKE_ANEW) -> TokenMergeError:
    return TokenMergeError(f"{path} cannot be read ({error}); {way_out}")

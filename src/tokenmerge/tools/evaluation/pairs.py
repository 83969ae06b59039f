"""`tokenmerge metrics`: compares two folders of pictures."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError

from ...errors import TokenMergeError
from ...planning.tables import counted, table
from ..files import finite
from ..loading import best_device
from ..quality.metrics import BY_NAME, Choice, Meter, Picture, choose_metrics
from ..quality.networks import Sources
from ..quality.statistics import Estimate, estimate, grouped, jackknife
from .folder import read_picture
from .table import figure

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Comparison:
    """Figures of two folders, and of every picture."""

    estimates: dict[str, Estimate]
    pictures: dict[str, dict[str, float]]
    missing: tuple[str, ...]
    counts: tuple[int, int]
    by_prompt: bool  # whether the pictures of a prompt count as one sample in intervals

    def to_dict(self) -> Any:
        return finite(
            {
                "counts": {"reference": self.counts[0], "test": self.counts[1]},
                "metrics": {name: asdict(value) for name, value in self.estimates.items()},
                "intervals_over": "prompts" if self.by_prompt else "pictures",
                "pictures": self.pictures,
                "missing": list(self.missing),
            }
        )

    def __str__(self) -> str:
        rows = []
        for name, value in self.estimates.items():
            metric = BY_NAME[name]
            better = "higher" if metric.higher_is_better else "lower"
            rows.append([metric.title, figure(metric, value), better, metric.meaning])
        text = table(["metric", "value", "better", "meaning"], rows)
        text += f"\n\n{counted(self.counts[1], 'picture')} against {self.counts[0]}"
        if any(value.interval is not None for value in self.estimates.values()):
            text += "; +- is the 95 % confidence interval. " + (
                "All pictures of a prompt count as one sample"
                if self.by_prompt
                else "Every picture counts as independent; if some share a prompt, give --prompts with one per picture"
            )
        return "\n".join([f"{text}.", *self.missing])


def compare_folders(
    reference: Path,
    test: Path,
    *,
    metrics: Sequence[str] | None = None,
    sources: Sources | None = None,
    prompts: Sequence[str] | None = None,
    device: str | None = None,
    threads: int = 1,
) -> Comparison:
    """Compare `test` with `reference`, paired by file name without its ending. Metrics of sets need no pairs.

    prompts: one per picture in `test`, in the order of names. The CLIP score needs them, and in intervals all pictures
    of a prompt count as one sample. Without prompts every picture counts as independent.
    """
    place = best_device(device)
    torch.set_num_threads(threads)
    originals, tests = list_pictures(reference), list_pictures(test)
    choice = choose_metrics(metrics, sources or Sources()).without(_objections(originals, tests, prompts))
    if choice.of_kind("pair"):
        _check_pairs(reference, test, originals, tests)
    meter = Meter(choice, place, threads)
    values: dict[str, dict[str, float]] = {}
    features: list[torch.Tensor] = []
    for number, path in enumerate(tests):
        shown = Picture(read_picture(path))
        original = originals[number] if choice.of_kind("pair") else None
        values[path.name] = _measured(meter, choice, shown, original, prompts[number] if prompts else None)
        if choice.of_kind("set"):
            features.append(meter.features(shown))
    keys: Sequence[Hashable] = prompts or tests
    estimates = {
        metric.name: estimate(grouped(keys, [each[metric.name] for each in values.values()]))
        for metric in choice.metrics
        if metric.kind != "set"
    }
    if choice.of_kind("set"):
        wanted = torch.stack([meter.features(Picture(read_picture(path))) for path in originals])
        for metric in choice.of_kind("set"):
            whole, *without = meter.of_parts(metric, wanted, torch.stack(features), keys)
            estimates[metric.name] = jackknife(whole, without)
    counts = (len(originals), len(tests))
    return Comparison(estimates, values, tuple(choice.missing_lines()), counts, prompts is not None)


def _measured(
    meter: Meter, choice: Choice, shown: Picture, original: Path | None, prompt: str | None
) -> dict[str, float]:
    """The metrics of one picture with its original and its prompt."""
    found = {}
    if original is not None:
        reference = Picture(read_picture(original))
        found = {metric.name: meter.pair(metric, reference, shown) for metric in choice.of_kind("pair")}
    return found | {metric.name: meter.text(metric, prompt or "", shown) for metric in choice.of_kind("text")}


def list_pictures(folder: Path) -> list[Path]:
    """The pictures in a folder, sorted by name without ending."""
    if not folder.is_dir():
        raise TokenMergeError(f"{folder} is not a folder; give one that holds pictures")
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _ENDINGS)
    if not found:
        raise TokenMergeError(f"{folder} holds no picture that ends in {', '.join(_ENDINGS)}")
    stems: dict[str, Path] = {}
    for path in found:
        if path.stem in stems:
            raise TokenMergeError(f"{path} and {stems[path.stem].name} have the same name; rename one of them")
        stems[path.stem] = path
    return [stems[stem] for stem in sorted(stems)]


def _objections(originals: Sequence[Path], tests: Sequence[Path], prompts: Sequence[str] | None) -> dict[str, str]:
    """The kinds of metrics that these folders rule out, with reasons."""
    reasons: dict[str, str] = {}
    if prompts is None:
        reasons["text"] = "it needs --prompts FILE, with one per picture in the order of names"
    elif len(prompts) != len(tests):
        raise TokenMergeError(
            f"{counted(len(prompts), 'prompt')} for {counted(len(tests), 'picture')}; give one per picture"
        )
    if min(len(originals), len(tests)) < 2:
        reasons["set"] = "it needs two pictures or more in each folder"
    return reasons


def _check_pairs(reference: Path, test: Path, originals: Sequence[Path], tests: Sequence[Path]) -> None:
    first, second = {path.stem for path in originals}, {path.stem for path in tests}
    if first != second:
        name = min(first ^ second)
        place = test if name in first else reference
        raise TokenMergeError(
            f"{len(first ^ second)} pictures have no partner, first {name!r}, which is missing in {place}; "
            "add it, or compare only sets with --metrics fid,kid"
        )
    for one, two in zip(originals, tests, strict=True):
        sizes = [_size(path) for path in (one, two)]
        if sizes[0] != sizes[1]:
            raise TokenMergeError(f"{one} has {sizes[0]} pixels and {two} {sizes[1]}; make them the same size")


def _size(path: Path) -> str:
    try:
        with Image.open(path) as picture:
            return f"{picture.width}x{picture.height}"
    except (UnidentifiedImageError, OSError) as error:
        raise TokenMergeError(f"{path} cannot be read as a picture ({error}); remove it") from error

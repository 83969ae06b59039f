"""All metrics by name, and `Meter`, which measures pictures with the available ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import TokenMergeError, did_you_mean
from . import pixels
from .distributions import frechet_distance, kernel_distance
from .networks import Found, Sources, find_network
from .statistics import without_parts


@dataclass(frozen=True)
class Metric:
    """A metric. kind: it measures a `pair` of pictures (reference and test), a picture and its `text`, or a `set`."""

    name: str
    title: str
    kind: str
    higher_is_better: bool
    digits: int
    meaning: str
    network: str | None = None


METRICS = (
    Metric("mse", "MSE", "pair", False, 1, "mean squared difference of pixels, 0-255"),
    Metric("psnr", "PSNR", "pair", True, 2, "peak signal to noise ratio, dB"),
    Metric("ssim", "SSIM", "pair", True, 4, "structural similarity"),
    Metric("lpips", "LPIPS", "pair", False, 4, "perceptual distance, AlexNet trunk", "lpips"),
    Metric("dino", "DINO", "pair", False, 4, "1 - cosine of DINO class tokens", "dino"),
    Metric("sscd", "SSCD", "pair", True, 4, "cosine of copy-detection vectors", "sscd"),
    Metric("clip", "CLIP", "text", True, 3, "100 x cosine of picture and prompt", "clip"),
    Metric("fid", "FID", "set", False, 2, "Frechet distance of Inception features", "inception"),
    Metric("kid", "KID", "set", False, 5, "kernel distance of Inception features", "inception"),
)
BY_NAME = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True)
class Picture:
    """A picture, uint8 [H, W, 3], and a cache of its vectors by network."""

    pixels: Tensor
    vectors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The chosen metrics that are available, their networks, and why other metrics are missing.

    named: the user named the metrics, so none may be left out."""

    metrics: tuple[Metric, ...]
    networks: dict[str, Found]
    missing: dict[str, str]
    named: bool = False

    def of_kind(self, kind: str) -> tuple[Metric, ...]:
        return tuple(metric for metric in self.metrics if metric.kind == kind)

    def without(self, reasons: dict[str, str]) -> Choice:
        """The choice without the kinds of metrics in `reasons`, which gives a reason for each kind."""
        left_out = {metric.name: reasons[metric.kind] for metric in self.metrics if metric.kind in reasons}
        if self.named and left_out:
            name, reason = next(iter(left_out.items()))
            raise TokenMergeError(f"--metrics names {name}; {reason}")
        kept = tuple(metric for metric in self.metrics if metric.name not in left_out)
        return replace(self, metrics=kept, missing={**self.missing, **left_out})

    def missing_lines(self) -> list[str]:
        """One line per reason, with all metrics that are missing for it."""
        titles: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            titles.setdefault(reason, []).append(BY_NAME[name].title)
        return [
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing: {reason}"
            for reason, names in titles.items()
        ]


def choose_metrics(names: Sequence[str] | None, sources: Sources) -> Choice:
    """The metrics in `names`, all of which must be available; without names, all available ones."""
    for name in names or ():
        if name not in BY_NAME:
            near = did_you_mean(name, BY_NAME)
            raise TokenMergeError(f"metric {name!r} is unknown{near}; choose from {', '.join(BY_NAME)}")
    wanted = [metric for metric in METRICS if names is None or metric.name in names]
    found = {name: find_network(name, sources) for name in dict.fromkeys(m.network for m in wanted) if name}
    networks = {name: place for name, place in found.items() if isinstance(place, Found)}
    there = tuple(metric for metric in wanted if metric.network is None or metric.network in networks)
    missing = {
        metric.name: place.reason
        for metric in wanted
        if metric.network and not isinstance(place := found[metric.network], Found)
    }
    if names is not None and missing:
        name, reason = next(iter(missing.items()))
        raise TokenMergeError(f"--metrics names {name}, whose network is missing: {reason}")
    return Choice(there, networks, missing, named=names is not None)


class Meter:
    """Measures pictures. Loads each network once, on first use."""

    def __init__(self, choice: Choice, device: torch.device, threads: int = 1) -> None:
        self._choice = choice
        self._device = device
        self._threads = threads
        self._networks: dict[str, Any] = {}

    def pair(self, metric: Metric, reference: Picture, test: Picture) -> float:
        pixels.check_sizes(reference.pixels, test.pixels)
        if metric.name == "lpips":
            return self._lpips(reference, test)
        if metric.network is not None:
            cosine = _cosine(self._vector(metric.network, reference), self._vector(metric.network, test))
            return cosine if metric.higher_is_better else 1 - cosine
        return pixels.MEASURES[metric.name](self._pixels(reference), self._pixels(test))

    def text(self, metric: Metric, prompt: str, test: Picture) -> float:
        assert metric.network is not None
        return 100 * _cosine(self._vector(metric.network, test), self._network(metric.network).text(prompt))

    def features(self, picture: Picture) -> Tensor:
        """Features [2048] of a picture, from which metrics of sets are computed."""
        return self._vector("inception", picture)

    @staticmethod
    def of_sets(metric: Metric, reference: Tensor, test: Tensor) -> float:
        """A metric of two sets of pictures, from their features [n, 2048]."""
        return {"fid": frechet_distance, "kid": kernel_distance}[metric.name](reference, test)

    def of_parts(self, metric: Metric, reference: Tensor, test: Tensor, keys: Sequence[Hashable]) -> list[float]:
        """A metric of the whole set `test`, then of the set without each part, for `jackknife`. keys: as in
        `without_parts`."""
        sets = [test, *(test[left] for left in without_parts(keys))]
        return [self.of_sets(metric, reference, each) for each in sets]

    def _pixels(self, picture: Picture) -> Tensor:
        """On the fastest device with double precision."""
        return picture.pixels.to(self._device) if self._device.type == "cuda" else picture.pixels

    def _vector(self, network: str, picture: Picture) -> Tensor:
        if network not in picture.vectors:
            picture.vectors[network] = self._network(network)(picture.pixels)
        return picture.vectors[network]

    def _lpips(self, reference: Picture, test: Picture) -> float:
        from .embeddings import exactly

        first, second = (
            picture.pixels.to(self._device).permute(2, 0, 1)[None].float() / 127.5 - 1 for picture in (test, reference)
        )
        with exactly():
            return self._network("lpips")(first, second).item()

    def _network(self, name: str) -> Any:
        if name not in self._networks:
            self._networks[name] = _load(name, self._choice.networks[name].path, self._device, self._threads)
        return self._networks[name]


def _load(name: str, path: Path, device: torch.device, threads: int) -> Any:
    """Load a network by its name in the table of metrics."""
    from . import embeddings
    from .perceptual import ALEXNET, PerceptualDistance, read_weights

    if name == "lpips":
        return PerceptualDistance(read_weights(path, ALEXNET), ALEXNET).to(device)
    if name == "sscd":
        return embeddings.Sscd(path, threads)
    kinds = {"inception": embeddings.Inception, "dino": embeddings.Dino, "clip": embeddings.Clip}
    return kinds[name](path, device)


def _cosine(first: Tensor, second: Tensor) -> float:
    return (first.double() @ second.double()).item()

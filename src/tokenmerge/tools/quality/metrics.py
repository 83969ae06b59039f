"""The metrics by name, and `Meter`, which measures pictures with those that can be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import TokenMergeError, did_you_mean
from . import pixels
from .distributions import frechet_distance, kernel_distance
from .networks import Found, Sources, find_network


@dataclass(frozen=True)
class Metric:
    """One figure. kind: of a `pair` of pictures (reference and test), of a picture and its `text`, or of a `set`."""

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
    """A picture, uint8 [H, W, 3], and the vectors that networks have made of it."""

    pixels: Tensor
    vectors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """Metrics that were chosen and can be had, the networks they use, and why others cannot be had.

    named: whether they were asked for by name, so that none may be left out."""

    metrics: tuple[Metric, ...]
    networks: dict[str, Found]
    missing: dict[str, str]
    named: bool = False

    def of_kind(self, kind: str) -> tuple[Metric, ...]:
        return tuple(metric for metric in self.metrics if metric.kind == kind)

    def without(self, reasons: dict[str, str]) -> Choice:
        """Without metrics of the kinds that `reasons` speak against."""
        left_out = {metric.name: reasons[metric.kind] for metric in self.metrics if metric.kind in reasons}
        if self.named and left_out:
            name, reason = next(iter(left_out.items()))
            raise TokenMergeError(f"--metrics names {name}; {reason}")
        kept = tuple(metric for metric in self.metrics if metric.name not in left_out)
        return replace(self, metrics=kept, missing={**self.missing, **left_out})

    def missing_lines(self) -> list[str]:
        """One line for each reason that metrics are missing for."""
        titles: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            titles.setdefault(reason, []).append(BY_NAME[name].title)
        return [
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing: {reason}"
            for reason, names in titles.items()
        ]


def choose_metrics(names: Sequence[str] | None, sources: Sources) -> Choice:
    """The metrics `names`, all of which must be there; or, without names, those that are there."""
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
    """Measures. Each network is loaded on first use, once."""

    def __init__(self, choice: Choice, device: torch.device, threads: int = 1) -> None:
        self._choice = choice
        self._device = device
        self._threads = threads
        self._networks: dict[str, Any] = {}

    def pair(self, metric: Metric, reference: Picture, test: Picture) -> float:
        pixels.check_sizes(reference.pixels, test.pixels)
        return self._pairwise[metric.name](reference, test)

    def text(self, metric: Metric, prompt: str, test: Picture) -> float:
        return {"clip": self._clip_score}[metric.name](prompt, test)

    def features(self, picture: Picture) -> Tensor:
        """What the metrics of sets are made from, [2048]."""
        return self._vector("inception", picture)

    @staticmethod
    def of_sets(metric: Metric, reference: Tensor, test: Tensor) -> float:
        """From the features of two sets, [n, 2048] each."""
        return {"fid": frechet_distance, "kid": kernel_distance}[metric.name](reference, test)

    @cached_property
    def _pairwise(self) -> dict[str, Callable[[Picture, Picture], float]]:
        return {
            "mse": lambda reference, test: pixels.mse(self._pixels(reference), self._pixels(test)),
            "psnr": lambda reference, test: pixels.psnr(self._pixels(reference), self._pixels(test)),
            "ssim": lambda reference, test: pixels.ssim(self._pixels(reference), self._pixels(test)),
            "lpips": self._lpips_distance,
            "dino": lambda reference, test: 1 - _cosine(self._vector("dino", reference), self._vector("dino", test)),
            "sscd": lambda reference, test: _cosine(self._vector("sscd", reference), self._vector("sscd", test)),
        }

    def _pixels(self, picture: Picture) -> Tensor:
        """Where they are compared fastest; not every device has double precision."""
        return picture.pixels.to(self._device) if self._device.type == "cuda" else picture.pixels

    def _clip_score(self, prompt: str, test: Picture) -> float:
        return 100 * _cosine(self._vector("clip", test), self._network("clip").text(prompt))

    def _vector(self, network: str, picture: Picture) -> Tensor:
        if network not in picture.vectors:
            picture.vectors[network] = self._network(network)(picture.pixels)
        return picture.vectors[network]

    def _lpips_distance(self, reference: Picture, test: Picture) -> float:
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
    """A network by the name that metrics have for it."""
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

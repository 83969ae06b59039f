"""`tokenmerge generate`: the plain picture beside pictures with techniques from the same seed, with time and drift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from ... import api
from ...applying import token_maps
from ...errors import TokenMergeError
from ...planning import Drift, describe_steps
from ...planning.drift import UNCALIBRATED
from ...planning.tables import table
from ...runtime.timeline import HELD, MERGED
from ..compiling import warm_ups
from ..fields import check_seeds
from ..files import finite
from ..measure import environment
from ..quality import compare
from ..typed import Configuration, default_techniques, read_configurations
from .pictures import Panel, blank, check_picture_file, difference, overlay_map, save_picture, strip, to_tensor
from .request import slug, token_counts
from .studio import Setup, Studio, is_calibrated


@dataclass(frozen=True, kw_only=True)
class Comparison(Setup):
    """The request of `generate`."""

    prompt: str
    techniques: Sequence[str] | None = None  # as typed; None for the defaults of the model's family
    ratios: Sequence[float] | None = None
    seed: int = 0
    number: int = 1
    show_destinations: bool = False
    out: Path | None = None

    def __post_init__(self) -> None:
        check_seeds(self.seed, self.seed + self.number - 1)

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.number)


@dataclass(frozen=True)
class Shot:
    """One picture, and how it compares with the plain one of the same seed."""

    configuration: Configuration
    seed: int
    picture: Image.Image
    seconds: float
    tokens: str
    kinds: dict[str, int]  # number of steps per kind: full, merged, held, skipped; empty for plain pictures
    speed_up: float = 1.0
    drift: dict[str, float] = field(default_factory=dict)
    overlay: Image.Image | None = None
    estimate: Drift | None = None  # drift estimated from Hold's own errors, without the plain picture

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.configuration.to_dict(),
            "seed": self.seed,
            "seconds": self.seconds,
            "speed_up": self.speed_up,
            "tokens": self.tokens,
            "kinds": self.kinds,
            "estimated_psnr": None if self.estimate is None else self.estimate.psnr,
            "estimate_calibrated": None if self.estimate is None else self.estimate.calibrated,
            **self.drift,
        }


@dataclass(frozen=True)
class Result:
    """The pictures that were drawn, and where they were written."""

    rows: list[list[Shot]]
    path: Path
    environment: dict[str, str]

    def to_dict(self) -> Any:
        shots = [shot.to_dict() for row in self.rows for shot in row]
        return finite({"picture": str(self.path), "environment": self.environment, "shots": shots})

    def __str__(self) -> str:
        return f"{report(self.rows)}\n\n{self.path}"


def compare_pictures(asked: Comparison) -> Result:
    """Load a model, draw the pictures and write them side by side."""
    path = asked.out or Path(f"{slug(asked.prompt)}-{asked.seed}.png")
    typed = None if asked.techniques is None else read_configurations(asked.techniques, asked.ratios)
    check_picture_file(path)
    studio = Studio(asked)
    configurations = typed or read_configurations(default_techniques(studio.outline.family), asked.ratios)
    if asked.show_destinations and not any(_merges(each) for each in configurations):
        raise TokenMergeError(
            "--show-destinations shows which tokens merge, but nothing merges here; add a technique that merges, such "
            f"as {studio.outline.family.merging}"
        )
    for configuration in configurations:
        studio.check(configuration)
    studio.pipe.set_progress_bar_config(desc=f"{'trial':>12}", leave=False)
    for configuration in configurations:
        studio.attempt(configuration, asked.prompt)
    rows = draw_rows(studio, asked, configurations)
    save_picture(compose(rows, asked.prompt), path)
    return Result(rows, path, environment(studio.device))


def draw_rows(studio: Studio, asked: Comparison, configurations: Sequence[Configuration]) -> list[list[Shot]]:
    """For every seed one picture per configuration, the plain one first.

    Configurations take turns in two laps, and the faster lap counts. So slow moments and first launches do not.
    """
    columns: list[list[Shot]] = []
    if is_calibrated(configurations):
        studio.pipe.set_progress_bar_config(desc=f"{'calibration':>12}", leave=False)
        studio.calibrate(asked.prompt, asked.seed)
    try:
        for configuration in configurations:
            _configure(studio, configuration, asked)
            columns.append(
                [take_shot(studio, configuration, asked.prompt, seed, asked.show_destinations) for seed in asked.seeds]
            )
        for place, configuration in enumerate(configurations):
            _configure(studio, configuration, asked)
            columns[place] = [_timed_again(studio, shot, asked.prompt) for shot in columns[place]]
    finally:
        studio.restore()
    plain, *others = columns
    beside = [[compared(shot, first) for shot, first in zip(column, plain, strict=True)] for column in others]
    return [list(row) for row in zip(plain, *beside, strict=True)]


def take_shot(
    studio: Studio,
    configuration: Configuration,
    prompt: str,
    seed: int,
    overlay: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> Shot:
    """Draw one picture with the studio's present configuration.

    overlay: show which tokens merged; on_step: as in `request.draw`.
    """
    (picture,), seconds = studio.draw(prompt, (seed,), on_step=on_step)
    merged = _overlay(studio.pipe, picture) if overlay else None
    summary = api.summary(studio.pipe)
    tokens = token_counts(studio.pipe)
    return Shot(configuration, seed, picture, seconds, tokens, summary.steps, overlay=merged, estimate=summary.drift)


def _configure(studio: Studio, configuration: Configuration, asked: Comparison) -> None:
    """Begin a lap of a configuration."""
    studio.configure(configuration)
    studio.pipe.set_progress_bar_config(desc=f"{configuration.label[-40:]:>12}", leave=False)
    # Compiled code must have seen every kind of step.
    for _ in range(warm_ups(studio.way) if studio.way else 0):
        studio.draw(asked.prompt, asked.seeds[:1])


def _timed_again(studio: Studio, shot: Shot, prompt: str) -> Shot:
    """The shot with the seconds of the faster lap."""
    _, seconds = studio.draw(prompt, (shot.seed,))
    return replace(shot, seconds=min(shot.seconds, seconds))


def compared(shot: Shot, plain: Shot) -> Shot:
    """The shot with its speed-up and drift against the plain shot of its seed."""
    drift = compare(to_tensor(plain.picture), to_tensor(shot.picture))
    return replace(shot, speed_up=plain.seconds / shot.seconds, drift=drift)


def report(rows: Sequence[Sequence[Shot]]) -> str:
    """The table for people to read."""
    header = ["seed", "technique", "seconds", "speed-up", "steps", "tokens", "MSE", "PSNR", "estimated", "SSIM"]
    shots = [shot for row in rows for shot in row]
    lines = []
    for shot in shots:
        drift = shot.drift
        guess = "" if shot.estimate is None else shot.estimate.short
        values = [f"{drift['mse']:.1f}", f"{drift['psnr']:.2f}", guess, f"{drift['ssim']:.3f}"] if drift else [""] * 4
        speed = f"{shot.speed_up:.2f}x" if drift else ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in shot.kinds.items())
        lines.append(
            [str(shot.seed), shot.configuration.label, f"{shot.seconds:.2f}", speed, kinds, shot.tokens, *values]
        )
    notes = [saves_nothing(shot.configuration.label, shot.kinds) for shot in shots]
    if any(shot.estimate is not None and not shot.estimate.calibrated for shot in shots):
        notes.append(UNCALIBRATED)
    if any(shot.kinds.get(MERGED) and shot.speed_up < 1 for shot in shots):
        notes.append("Below 1.00x, merging cost more than it saved: there are too few tokens. Try a larger --size.")
    return "\n\n".join([table(header, lines), *dict.fromkeys(note for note in notes if note)])


def saves_nothing(label: str, kinds: dict[str, int]) -> str | None:
    """A note if a technique was applied but no step was merged or held. kinds: number of steps per kind."""
    if not kinds or kinds.get(MERGED) or kinds.get(HELD):
        return None
    return f"{label}: {describe_steps(kinds)}"


def compose(rows: Sequence[Sequence[Shot]], prompt: str) -> Image.Image:
    """One picture of everything: for each seed the pictures, and below them where they differ from the plain one."""
    panels = []
    for plain, *others in rows:
        corner = blank(plain.picture)
        line = [Panel(plain.picture, f"plain, seed {plain.seed}", f"{plain.seconds:.2f} s")]
        for shot in others:
            caption = f"{shot.seconds:.2f} s, {shot.speed_up:.2f}x\nPSNR {shot.drift['psnr']:.1f} dB, "
            line.append(Panel(shot.picture, _title(shot.configuration), f"{caption}SSIM {shot.drift['ssim']:.3f}"))
        panels.append(line)
        if others:
            drifts = [
                Panel(difference(plain.picture, shot.picture), "drift", f"MSE {shot.drift['mse']:.0f}")
                for shot in others
            ]
            panels.append([Panel(corner, "black: equal to plain"), *drifts])
        if any(shot.overlay for shot in others):
            overlays = [Panel(shot.overlay or corner, "what merged" if shot.overlay else "") for shot in others]
            panels.append([Panel(corner, "lines lead to destinations"), *overlays])
    return strip(panels, heading=prompt)


def _title(configuration: Configuration) -> str:
    """A title for people who do not know the presets: what is done, then by which configuration."""
    merge, hold = configuration.techniques
    words = ["merged" if merge else "", "held" if hold else "", "cached" if configuration.cache else ""]
    words.append(f"in {configuration.schedule.steps} steps" if configuration.schedule else "")
    return f"{' and '.join(word for word in words if word)}: {configuration.label}"


def _merges(configuration: Configuration) -> bool:
    merge = configuration.techniques.merge
    return merge is not None and merge.ratio > 0


def _overlay(pipe: Any, picture: Image.Image) -> Image.Image | None:
    """What merged into what in the last merged step, in the group with the most tokens; None if nothing merged."""
    group = max(token_maps(pipe), key=lambda group: group.grid.count, default=None)
    if group is None:
        return None
    scale = max(1, round(16 * group.grid.width / picture.width))
    return overlay_map(picture, group.grid, group.owners, group.regions, scale)

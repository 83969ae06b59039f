"""Make one picture with and without merging, or merging and a step cache, from the same seed, and tell what it cost and
what it changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ... import api
from ...families import denoiser_of
from ..caches import TRIAL_STEPS, StepCache, calibrate, disable_cache, enable_cache, read_cache, try_cache
from ..loading import CallDefaults, check_size, dtype_on, load_pipeline
from ...presets import DEFAULT
from ...compiling.blocks import check_cacheable, compile_as, warm_ups, way_on
from ...config import MergeConfig
from ...errors import TokenMergeError, first_line
from ..measure import environment, timed
from ..typed import check_counts
from .pictures import Panel, check_picture_file, difference, overlay_map, save_picture, strip, to_tensor
from ..quality import compare
from ...planning.tables import table

# That a generator takes everywhere.
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Variant:
    """One way to make the picture; without a config it is the original."""

    label: str
    config: MergeConfig | None = None
    cache: StepCache | None = None


@dataclass(frozen=True)
class Shot:
    """One picture that was made, and how it compares with the original of the same seed."""

    variant: Variant
    seed: int
    picture: Image.Image
    seconds: float
    tokens: str
    speed_up: float = 1.0
    drift: dict[str, float] = field(default_factory=dict)
    overlay: Image.Image | None = None
    modes: dict[str, int] = field(default_factory=dict)  # steps by mode: full, anchor, merged, skipped

    def to_dict(self) -> dict[str, Any]:
        return {
            "variant": self.variant.label,
            "config": self.variant.config.to_dict() if self.variant.config else None,
            "cache": self.variant.cache.to_dict() if self.variant.cache else None,
            "seed": self.seed,
            "seconds": self.seconds,
            "speed_up": self.speed_up,
            "tokens": self.tokens,
            "modes": self.modes,
            **self.drift,
        }


@dataclass(frozen=True)
class Request:
    """What to draw."""

    prompt: str
    steps: int
    width: int
    height: int
    seeds: tuple[int, ...]
    guidance: float | None = None
    defaults: CallDefaults = field(default_factory=CallDefaults)

    def arguments(self, pipe: Any, seeds: Sequence[int], steps: int) -> dict[str, Any]:
        """The call of the pipeline for a batch of pictures, one for each of `seeds`."""
        accepted = inspect.signature(pipe.__call__).parameters
        guidance = {} if self.guidance is None else {self.defaults.guidance_argument: self.guidance}
        arguments = {**self.defaults.call, **guidance}
        unknown = sorted(set(arguments) - set(accepted))
        if unknown:
            raise TokenMergeError(f"{type(pipe).__name__} takes no {', '.join(unknown)}; leave out --guidance")
        check_seeds(seeds)
        return {
            "prompt": self.prompt,
            "num_inference_steps": steps,
            "width": self.width,
            "height": self.height,
            # On the CPU, so that a seed means the same noise on every machine.
            "generator": [torch.Generator().manual_seed(seed) for seed in seeds],
            "num_images_per_prompt": len(seeds),
            **arguments,
        }


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse what a generator does not take."""
    if min(seeds) < 0 or max(seeds) > _LARGEST_SEED:
        raise TokenMergeError(f"seeds are {', '.join(map(str, seeds))}; they must be from 0 to {_LARGEST_SEED}")


@dataclass(frozen=True)
class Result:
    """What was made, and where it was written."""

    rows: list[list[Shot]]
    path: Path
    environment: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        shots = [shot.to_dict() for row in self.rows for shot in row]
        return {"picture": str(self.path), "environment": self.environment, "shots": shots}

    def __str__(self) -> str:
        return f"{report(self.rows)}\n\n{self.path}"


def make_picture(
    prompt: str,
    model: str,
    *,
    preset: str | None = None,
    changes: dict[str, Any] | None = None,
    ratios: Sequence[float] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    seed: int = 0,
    size: str | None = None,
    number: int = 1,
    show_destinations: bool = False,
    out: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    compile: str | None = None,
    cache: str | None = None,
) -> Result:
    """Load a model, make the pictures, write the comparison. cache: of all pictures but the originals."""
    path = Path(out) if out else Path(f"{slug(prompt)}-{seed}.png")
    check_picture_file(path)
    check_counts(steps=steps, number=number)
    changes = dict(changes or {})
    single = changes.pop("ratio", None)
    if ratios and single is not None:
        raise TokenMergeError("both --ratio and --ratios were given; give one of them")
    place = best_device(device)
    way = way_on(place, compile)
    step_cache = read_cache(cache) if cache is not None else None
    if step_cache:
        check_cacheable(way)
    pipe, defaults = load_pipeline(model, getattr(torch, dtype_on(place, dtype)), place)
    variants = []
    for ratio in ratios or (single,):
        config = api.config_for(pipe, preset=preset, **changes, **({} if ratio is None else {"ratio": ratio}))
        if show_destinations and (config.holds or config.method == "none" or not any(config.ratios)):
            why = "blocks are held" if config.holds else "nothing does here"
            raise TokenMergeError(f"--show-destinations shows what merges, and {why}; give a --ratio above 0 to merge")
        # Models without caches are told so when one is tried.
        if step_cache and config.holds and hasattr(denoiser_of(pipe), "enable_cache"):
            # What holds because it was asked for takes neither.
            given = {**changes, **({} if preset in (None, DEFAULT) else {"preset": preset})}
            asked = [f"--{name}" for name in ("preset", "method") if name in given]
            raise TokenMergeError(
                f"the {step_cache.name} cache skips steps, and between anchors blocks are held already; leave out "
                f"--cache, or add --ratio 0.5 or --method none{' in place of ' + ' and '.join(asked) if asked else ''}"
            )
        variants.append(Variant(_label(config, step_cache), config, step_cache))
    if way:
        compile_as(pipe, way)
    width, height = picture_size(size, defaults, pipe)
    seeds = tuple(range(seed, seed + number))
    request = Request(prompt, steps or defaults.steps, width, height, seeds, guidance, defaults)
    rows = generate(
        pipe,
        request,
        variants,
        show_destinations=show_destinations,
        # Untimed runs load kernels and fill caches; what is compiled must also see every phase of the schedule.
        warm_up_steps=request.steps if way else 2,
        warm_up_pictures=warm_ups(way),
    )
    save_picture(compose(rows, prompt), path)
    return Result(rows, path, environment(place))


def _label(config: MergeConfig, cache: StepCache | None) -> str:
    """For a caption: the method, how much it removes, whether anchors bring back what that costs, and the cache."""
    anchors = config.schedule.anchor_every
    ratios = "/".join(f"{ratio:g}" for ratio in config.ratios)
    if config.coverage is not None:
        ratios = f"to {config.ratio:g}, coverage {config.coverage:g}"
    merging = f"{config.method} {ratios}" + (f", anchor every {anchors}" if anchors else "")
    if config.method == "none":
        merging = "unmerged"
    if config.holds:
        merging = f"held, anchor every {anchors}"
    return f"{merging} + {cache.name}" if cache else merging


def slug(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture"


def best_device(name: str | None) -> torch.device:
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name or best)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TokenMergeError(f"device {name!r} cannot be used here ({first_line(error)}); try {best}") from error
    return device


def parse_size(text: str) -> tuple[int, int]:
    """Width and height, written as in 512x384."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise TokenMergeError(f"size {text!r} is not understood; write width x height, as in 512x384")
    return int(match[1]), int(match[2])


def picture_size(text: str | None, defaults: CallDefaults, pipe: Any) -> tuple[int, int]:
    """Width and height: as asked, or the model's own."""
    if text is None:
        latent = getattr(pipe, "default_sample_size", None) or denoiser_of(pipe).config["sample_size"]  # type: ignore[index]
        own = int(latent) * pipe.vae_scale_factor
        return (defaults.size[0], defaults.size[1]) if defaults.size else (own, own)
    width, height = parse_size(text)
    check_size(denoiser_of(pipe), pipe.vae_scale_factor, width, height)
    return width, height


def generate(
    pipe: Any,
    request: Request,
    variants: Sequence[Variant],
    *,
    show_destinations: bool = False,
    warm_up_steps: int = 2,
    warm_up_pictures: int = 1,
) -> list[list[Shot]]:
    """For every seed, the original and each variant, each warmed up before it is timed."""
    device = torch.device(pipe._execution_device)
    _check(pipe, request, variants, device)
    columns: list[list[Shot]] = []
    ratios = None
    if any(variant.cache and variant.cache.calibrated for variant in variants):
        pipe.set_progress_bar_config(desc=f"{'calibration':>12}", leave=False)
        ratios = calibrate(pipe, partial(draw, pipe, request, request.seeds[:1], request.steps, device), request.steps)
    try:
        for variant in (Variant("original"), *variants):
            disable_cache(pipe)
            if variant.config is None:
                api.remove(pipe)
            else:
                api.apply(pipe, variant.config)
            if variant.cache:
                enable_cache(pipe, variant.cache, request.steps, ratios)
            pipe.set_progress_bar_config(desc=f"{'warm-up':>12}", leave=False)
            for _ in range(warm_up_pictures):
                draw(pipe, request, request.seeds[:1], min(warm_up_steps, request.steps), device)
            pipe.set_progress_bar_config(desc=f"{variant.label:>12}", leave=False)
            column = []
            for place, seed in enumerate(request.seeds):
                (picture,), seconds = draw(pipe, request, (seed,), request.steps, device)
                shot = Shot(variant, seed, picture, seconds, token_counts(pipe), modes=step_modes(pipe))
                if variant.config is not None:
                    first = columns[0][place]
                    drift = compare(to_tensor(first.picture), to_tensor(picture))
                    overlay = _overlay(pipe, picture) if show_destinations else None
                    shot = replace(shot, speed_up=first.seconds / seconds, drift=drift, overlay=overlay)
                column.append(shot)
            columns.append(column)
    finally:
        disable_cache(pipe)
        api.remove(pipe)
    return [list(row) for row in zip(*columns, strict=True)]


def _check(pipe: Any, request: Request, variants: Sequence[Variant], device: torch.device) -> None:
    """Refuse what the model does not go with before any picture is made."""
    steps = min(TRIAL_STEPS, request.steps)
    pipe.set_progress_bar_config(desc=f"{'trial':>12}", leave=False)
    for variant in variants:
        if variant.config:
            # What regions there are is known with the size.
            api.plan(pipe, variant.config, height=request.height, width=request.width)
        with api.applied(pipe, variant.config) if variant.config else nullcontext():
            if variant.cache:
                try_cache(pipe, variant.cache, partial(draw, pipe, request, request.seeds[:1], steps, device), steps)


def report(rows: Sequence[Sequence[Shot]]) -> str:
    """The table a person reads."""
    header = ["seed", "variant", "seconds", "speed-up", "tokens", "MSE", "PSNR", "SSIM"]
    lines = []
    for shot in (shot for row in rows for shot in row):
        drift = shot.drift
        values = [f"{drift['mse']:.1f}", f"{drift['psnr']:.2f}", f"{drift['ssim']:.3f}"] if drift else ["", "", ""]
        speed = f"{shot.speed_up:.2f}x" if drift else ""
        lines.append([str(shot.seed), shot.variant.label, f"{shot.seconds:.2f}", speed, shot.tokens, *values])
    text = table(header, lines)
    if any(shot.modes.get("merged") and shot.speed_up < 1 for row in rows for shot in row):
        text += "\n\nBelow 1.00x that cost more than it saved: it pays with more tokens (a larger size) or more work "
        text += "per launch (a larger batch, --compile)."
    notes = [saves_nothing(shot.variant.label, shot.modes, shot.variant.config) for row in rows for shot in row]
    return "\n\n".join([text, *dict.fromkeys(note for note in notes if note)])


def saves_nothing(label: str, modes: dict[str, int], config: MergeConfig | None) -> str | None:
    """What to say where merging was on and no step ran on merged tokens alone. modes: steps of an image, by mode."""
    if not modes or modes.get("merged"):
        return None
    return f"{label}: {api.told_steps(modes, held=config is not None and config.holds)}"


def compose(rows: Sequence[Sequence[Shot]], prompt: str) -> Image.Image:
    """One picture with everything: originals, merged ones, and where they differ."""
    panels = []
    for row in rows:
        original, *merged = row
        line = [Panel(original.picture, "original", f"{original.seconds:.2f} s")]
        for shot in merged:
            caption = f"{shot.seconds:.2f} s, {shot.speed_up:.2f}x"
            caption += f"\nPSNR {shot.drift['psnr']:.1f} dB, SSIM {shot.drift['ssim']:.3f}"
            line.append(Panel(shot.picture, shot.variant.label, caption))
        for shot in merged:
            label = "difference" if len(merged) == 1 else f"difference, {shot.variant.label}"
            line.append(Panel(difference(original.picture, shot.picture), label, f"MSE {shot.drift['mse']:.0f}"))
        line += [
            Panel(shot.overlay, f"what merged, {shot.variant.label}", "lines lead to destinations")
            for shot in merged
            if shot.overlay is not None
        ]
        panels.append(line)
    return strip(panels, heading=prompt)


def draw(
    pipe: Any, request: Request, seeds: Sequence[int], steps: int, device: torch.device
) -> tuple[list[Image.Image], float]:
    """A batch of pictures, one for each seed, and the seconds it took."""
    arguments = request.arguments(pipe, seeds, steps)
    try:
        result, seconds = timed(lambda: pipe(**arguments), device)
    except TokenMergeError:
        raise
    except ValueError as error:
        # The pipeline's own checks of its arguments: a size it cannot do, say.
        raise TokenMergeError(f"{type(pipe).__name__} refused: {error}") from error
    except torch.OutOfMemoryError as error:
        raise TokenMergeError(
            f"{device} has too little memory for {len(seeds)} x {request.width}x{request.height}; use a smaller --size"
        ) from error
    return result.images, seconds


def token_counts(pipe: Any) -> str:
    """Tokens before and after merging, of every group; nothing of held blocks, which run on all or not at all."""
    summary = api.summary(pipe)
    groups = () if summary.plan is None or summary.plan.config.holds else summary.groups
    return ", ".join(dict.fromkeys(str(group["tokens"]) for group in groups))


def step_modes(pipe: Any) -> dict[str, int]:
    """How many steps of the last image were full, anchors, merged or skipped; nothing of a model without merging."""
    return api.summary(pipe).steps


def _overlay(pipe: Any, picture: Image.Image) -> Image.Image | None:
    """What merged into what at the end, in the group with the most tokens, if there is one."""
    group = max(api.token_maps(pipe), key=lambda group: group.grid.count, default=None)
    if group is None:
        return None
    scale = max(1, round(16 * group.grid.width / picture.width))
    return overlay_map(picture, group.grid, group.owners, group.regions, scale)

"""The functions that users call: apply, applied, remove, plan, summary, supported_models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .applying import apply_plans, checked_plan, detach, plan_on, resolve_auto, scheduler_checks, summary_of
from .config import Hold, Merge, Techniques
from .errors import TokenMergeError, check_whole
from .families import denoiser_of, denoisers_of, families, family_of
from .families.reading import first_apart
from .families.scales import known_scales, latent_frames
from .planning import Plan, Summary, make_plan
from .presets import resolve
from .runtime.foreign import shard_of
from .runtime.levels import planned_levels
from .runtime.scheduler import scheduler_source

Model = TypeVar("Model")
# Every form in which `apply` accepts techniques.
TechniqueLike = Merge | Hold | list[Merge | Hold] | Techniques | str | Path | None


def apply(model: Model, technique: TechniqueLike = None, *, scheduler: Any = None, **fields: Any) -> Model:
    """Apply techniques to a pipeline or its denoiser, until `remove`.

    technique: a `Merge`, a `Hold`, a list of one of each, the name of a preset, or the path of a JSON or YAML file.
    By default, the recommended preset.
    scheduler: the scheduler that drives a bare denoiser. Without it, steps are recognised by their timesteps, which
    waits for the device in every call.
    fields: changes to the fields of a preset: `apply(pipe, "toma", ratio=0.25)`.
    New techniques replace those applied before. If an error is raised, the model is left as it was.
    """
    techniques = resolve(technique, fields)
    scheduler_of = scheduler_source(model, scheduler)
    denoisers = denoisers_of(model)
    # Check all denoisers before touching any.
    plans = [checked_plan(denoiser, techniques, scheduler_of()) for denoiser in denoisers]
    apply_plans([(denoiser, plan_, scheduler_of) for denoiser, plan_ in zip(denoisers, plans, strict=True)])
    return model


@contextmanager
def applied(model: Model, technique: TechniqueLike = None, *, scheduler: Any = None, **fields: Any) -> Iterator[Model]:
    """`apply` inside a `with` block. Afterwards the model has the techniques it had before, if any."""
    denoisers = denoisers_of(model)
    before = [plan_on(denoiser) for denoiser in denoisers]
    apply(model, technique, scheduler=scheduler, **fields)
    try:
        yield model
    finally:
        # The denoisers from before: the model may have been given other ones meanwhile.
        for denoiser in denoisers:
            detach(denoiser)
        apply_plans([each for each in before if each is not None])


def remove(model: Model) -> Model:
    """Remove all techniques from a pipeline or denoiser, and leave it exactly as before `apply`. Safe to call twice."""
    for denoiser in denoisers_of(model):
        detach(denoiser)
    return model


def plan(
    model: Any,
    technique: TechniqueLike = None,
    *,
    height: int,
    width: int,
    frames: int | None = None,
    steps: int = 30,
    vae_scale_factor: int | None = None,
    vae_scale_factor_temporal: int | None = None,
    **fields: Any,
) -> Plan:
    """What `apply` would do in `steps` steps at `height` x `width` pixels, without doing it.

    frames: length of a video. By default, the usual length for the model's family.
    vae_scale_factor, vae_scale_factor_temporal: the number of pixels along a side, and of frames, that one latent
    stands for. Pipelines know theirs. The model may be on the meta device.
    """
    techniques = resolve(technique, fields)
    check_whole(height=height, width=width, steps=steps)
    scales = {"vae_scale_factor": vae_scale_factor, "vae_scale_factor_temporal": vae_scale_factor_temporal}
    check_whole(**{name: scale for name, scale in scales.items() if scale is not None})
    denoiser = denoiser_of(model)
    family = family_of(denoiser)
    scheduler = scheduler_source(model, None)()
    techniques = resolve_auto(denoiser, family, techniques, *scheduler_checks(scheduler))
    known_scale, known_frames = known_scales(model, family)
    scale = vae_scale_factor or known_scale
    if min(height, width) < scale:
        raise TokenMergeError(f"{width}x{height} pixels are less than one {scale}-pixel latent; give a larger size")
    latents = latent_frames(family, frames, vae_scale_factor_temporal or known_frames)
    call = family.calls.plan(denoiser, height // scale, width // scale, latents)._replace(shard=shard_of(denoiser))
    # With this setting (Wan 2.2 TI2V) every token has its own timestep. Only the pipeline's config says so.
    if getattr(getattr(model, "config", None), "expand_timesteps", False):
        call = call._replace(grids=first_apart(call.grids))
    if call.grids and not call.tokens:
        side = family.calls.unit(denoiser, scale)
        raise TokenMergeError(f"{width}x{height} pixels are less than one token of {side}x{side}; give a larger size")
    return make_plan(denoiser, family, techniques, call, steps, planned_levels(scheduler, steps))


def summary(model: Any) -> Summary:
    """What is applied to a pipeline or denoiser, and what happened in its last image."""
    first, *others = map(summary_of, denoisers_of(model))
    return replace(first, others=tuple(others))


def supported_models() -> dict[str, str]:
    """The denoisers that can be merged and held: names of diffusers classes, each with the common names of the models
    that use it. Most other denoisers can be held."""
    return {family.denoiser.__name__: family.title for family in families()}

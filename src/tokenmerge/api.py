"""apply, applied, remove, plan, summary, supported_models: what a user calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .applying import apply_plans, asked_of, checked_plan, decided, detach, plan_on, summary_of
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
# What `apply` takes as a technique.
Asked = Merge | Hold | list[Merge | Hold] | Techniques | str | Path | None


def apply(model: Model, technique: Asked = None, *, scheduler: Any = None, **fields: Any) -> Model:
    """Apply techniques to a pipeline or its denoiser, until `remove`.

    technique: a `Merge`, a `Hold`, a list of one of each, the name of a preset, or the path of a JSON or YAML file;
    without one, what is recommended for the model.
    scheduler: for a bare denoiser, the scheduler that drives it. Without one steps are told apart by their timesteps,
    which waits for the device at every call.
    fields: of a preset, to change it: `apply(pipe, "toma", ratio=0.25)`.
    A model that has techniques already gets the new ones instead. If anything is wrong the model is left as it was.
    """
    techniques = resolve(technique, fields)
    scheduler_of = scheduler_source(model, scheduler)
    denoisers = denoisers_of(model)
    # All are checked before any is touched.
    plans = [checked_plan(denoiser, techniques, scheduler_of()) for denoiser in denoisers]
    apply_plans([(denoiser, plan_, scheduler_of) for denoiser, plan_ in zip(denoisers, plans, strict=True)])
    return model


@contextmanager
def applied(model: Model, technique: Asked = None, *, scheduler: Any = None, **fields: Any) -> Iterator[Model]:
    """`apply` inside a `with` block; afterwards the model has what it had before, be it techniques or none."""
    denoisers = denoisers_of(model)
    before = [plan_on(denoiser) for denoiser in denoisers]
    apply(model, technique, scheduler=scheduler, **fields)
    try:
        yield model
    finally:
        # Not those of the model now: somebody may have put another one in.
        for denoiser in denoisers:
            detach(denoiser)
        apply_plans([each for each in before if each is not None])


def remove(model: Model) -> Model:
    """Take all techniques off a pipeline or denoiser, which is then exactly as before `apply`. Safe to call twice."""
    for denoiser in denoisers_of(model):
        detach(denoiser)
    return model


def plan(
    model: Any,
    technique: Asked = None,
    *,
    height: int,
    width: int,
    frames: int | None = None,
    steps: int = 30,
    vae_scale_factor: int | None = None,
    vae_scale_factor_temporal: int | None = None,
    **fields: Any,
) -> Plan:
    """What `apply` would do in so many steps at `height` x `width` pixels, without doing it.

    frames: of a video; without it, as many as models of its family usually make.
    vae_scale_factor, vae_scale_factor_temporal: pixels along a side and frames that a latent stands for; a pipeline
    knows its own. The model may be on the meta device.
    """
    techniques = resolve(technique, fields)
    check_whole(height=height, width=width, steps=steps)
    scales = {"vae_scale_factor": vae_scale_factor, "vae_scale_factor_temporal": vae_scale_factor_temporal}
    check_whole(**{name: scale for name, scale in scales.items() if scale is not None})
    denoiser = denoiser_of(model)
    family = family_of(denoiser)
    scheduler = scheduler_source(model, None)()
    techniques = decided(denoiser, family, techniques, *asked_of(scheduler))
    known_scale, known_frames = known_scales(model, family)
    scale = vae_scale_factor or known_scale
    if min(height, width) < scale:
        raise TokenMergeError(f"{width}x{height} pixels are less than one {scale}-pixel latent; give a larger size")
    latents = latent_frames(family, frames, vae_scale_factor_temporal or known_frames)
    call = family.plan_call(denoiser, height // scale, width // scale, latents)._replace(shard=shard_of(denoiser))
    # Such a pipeline gives every token a timestep (Wan 2.2 TI2V), which a denoiser does not know.
    if getattr(getattr(model, "config", None), "expand_timesteps", False):
        call = call._replace(grids=first_apart(call.grids))
    if call.grids and not call.tokens:
        side = family.unit(denoiser, scale)
        raise TokenMergeError(f"{width}x{height} pixels are less than one token of {side}x{side}; give a larger size")
    return make_plan(denoiser, family, techniques, call, steps, planned_levels(scheduler, steps))


def summary(model: Any) -> Summary:
    """What is applied to a pipeline or denoiser, and what its last image did."""
    first, *others = map(summary_of, denoisers_of(model))
    return replace(first, others=tuple(others))


def supported_models() -> dict[str, str]:
    """The denoisers that can be merged and held: the names of their classes in diffusers, each with the models that
    have it, as people call them. Most other denoisers can be held."""
    return {family.denoiser.__name__: family.title for family in families()}

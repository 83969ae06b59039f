"""Techniques on a MODEL: they are put on its modules when a sampler begins, and taken off when it ends."""

from __future__ import annotations

import logging
from typing import Any

from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.api import hosted, hosted_plan, way_out_of_noise
from tokenmerge.config import Techniques
from tokenmerge.planning import Plan
from tokenmerge.planning.summary import told_steps
from tokenmerge.runtime.sigmas import SigmaFollower

from .families import family_of
from .fields import joined
from .samplers import noise_levels, sampler_name, try_sampler

KEY = "tokenmerge"


class Applied:
    """Wraps the sampling of the MODELs that it was put on. Nothing is kept from one run of a sampler to the next."""

    def __init__(self, techniques: Techniques) -> None:
        self.techniques = techniques
        self._runs: list[tuple[SigmaFollower, Any]] = []  # the innermost last, each with how its model tells sigmas

    def sample(self, executor: Any, guider: Any, sigmas: Tensor, extra_args: dict[str, Any], *args: Any, **more: Any):
        """Around a whole run of a sampler."""
        sampler, model = executor.class_obj, guider.inner_model
        denoiser = plain_module(model.diffusion_model)
        family = family_of(denoiser)
        trial = try_sampler(sampler, guider, sigmas, extra_args)
        plan = hosted_plan(denoiser, family, self.techniques, lambda: trial.noisy)
        if trial.noisy and way_out_of_noise(family, plan):
            raise TokenMergeError(_noisy(sampler_name(sampler), plan))
        follower = SigmaFollower(noise_levels(trial.sigmas, model.model_sampling), trial.gain)
        with hosted(denoiser, family, plan, follower) as told:
            self._runs.append((follower, model.model_sampling))
            try:
                samples = executor(guider, sigmas, extra_args, *args, **more)
            finally:
                self._runs.pop()
            summary = told()
        drift = "" if summary.drift is None else f" {summary.drift}"
        logging.info("tokenmerge: %s%s", told_steps(summary.steps, self.techniques.hold), drift)
        return samples

    def evaluate(self, executor: Any, x: Tensor, sigma: Tensor, *args: Any, **more: Any):
        """Around an evaluation of the model, which may take several calls of it."""
        if self._runs:
            follower, sampling = self._runs[-1]
            (level,) = noise_levels([float(sigma.flatten()[0])], sampling)
            follower.evaluate(level)
        return executor(x, sigma, *args, **more)


def applied_to(model: Any) -> Techniques:
    """What nodes before have put on a MODEL."""
    wrappers = model.get_wrappers(WrappersMP.SAMPLER_SAMPLE, KEY)
    return wrappers[0].__self__.techniques if wrappers else Techniques()


def with_technique(model: Any, technique: Hold | Merge) -> Any:
    """A MODEL with one technique more, or another of its kind; the one that was given stays as it is."""
    techniques = joined(applied_to(model), technique)
    denoiser = denoiser_of(model)
    # Refused here what can be, and not in the middle of a workflow.
    hosted_plan(denoiser, family_of(denoiser), techniques, lambda: False)
    model = model.clone()
    applied = Applied(techniques)
    wrappers = {WrappersMP.SAMPLER_SAMPLE: applied.sample, WrappersMP.PREDICT_NOISE: applied.evaluate}
    for kind, wrapper in wrappers.items():
        model.remove_wrappers_with_key(kind, KEY)
        model.add_wrapper_with_key(kind, KEY, wrapper)
    return model


def denoiser_of(model: Any) -> nn.Module:
    return plain_module(model.get_model_object("diffusion_model"))


def plain_module(module: Any) -> nn.Module:
    """Without what torch.compile puts around it."""
    return getattr(module, "_orig_mod", module)


def _noisy(sampler: str, plan: Plan) -> str:
    stages = any(run.stages for run in plan.runs)
    way = "set what to blocks or auto" if stages else "use the Merge node"
    return (
        f"the sampler {sampler} adds noise at its steps; held steps would leave it in the picture: take a sampler that "
        f"adds none, such as euler or dpmpp_2m, or {way}"
    )

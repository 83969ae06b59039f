"""Techniques on a MODEL: put on its modules when a sampler begins, and removed when it ends."""

from __future__ import annotations

import logging
from typing import Any

from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.applying import hosted, hosted_plan, way_out_of_noise
from tokenmerge.config import Techniques
from tokenmerge.families.base import Family
from tokenmerge.planning import Plan
from tokenmerge.planning.summary import describe_steps
from tokenmerge.runtime.sigmas import SigmaFollower

from .families import family_of
from .fields import joined
from .samplers import Trial, noise_levels, sampler_name, try_sampler

KEY = "tokenmerge"


class Applied:
    """Wraps the sampling of a MODEL. Nothing is kept from one run of a sampler to the next."""

    def __init__(self, techniques: Techniques) -> None:
        self.techniques = techniques
        self._runs: list[tuple[SigmaFollower, Any]] = []  # innermost last, each with the model's sampling

    def sample(self, executor: Any, guider: Any, sigmas: Tensor, extra_args: dict[str, Any], *args: Any, **more: Any):
        """Wraps a whole run of a sampler."""
        sampler, model = executor.class_obj, guider.inner_model
        denoiser = plain_module(model.diffusion_model)
        family = family_of(denoiser)
        trial = try_sampler(sampler, guider, sigmas, extra_args)
        plan = hosted_plan(denoiser, family, self.techniques, lambda: trial.noisy, lambda: not trial.reads_guidance)
        check_sampler(sampler_name(sampler), trial, family, plan)
        follower = SigmaFollower(noise_levels(trial.sigmas, model.model_sampling), trial.gain)
        with hosted(denoiser, family, plan, follower) as summarise:
            self._runs.append((follower, model.model_sampling))
            try:
                samples = executor(guider, sigmas, extra_args, *args, **more)
            finally:
                self._runs.pop()
            summary = summarise()
        drift = "" if summary.drift is None else f" {summary.drift}"
        logging.info("tokenmerge: %s%s", describe_steps(summary.steps, self.techniques.hold), drift)
        return samples

    def evaluate(self, executor: Any, x: Tensor, sigma: Tensor, *args: Any, **more: Any):
        """Wraps an evaluation: one or several calls of the model, which give the guided clean picture."""
        if not self._runs:
            return executor(x, sigma, *args, **more)
        follower, sampling = self._runs[-1]
        (level,) = noise_levels([float(sigma.flatten()[0])], sampling)
        return follower.evaluate(level, x, lambda: executor(x, sigma, *args, **more))


def applied_to(model: Any) -> Techniques:
    """The techniques that earlier nodes have put on a MODEL."""
    wrappers = model.get_wrappers(WrappersMP.SAMPLER_SAMPLE, KEY)
    return wrappers[0].__self__.techniques if wrappers else Techniques()


def with_technique(model: Any, technique: Hold | Merge) -> Any:
    """A copy of a MODEL with the technique added, or with one of its kind replaced."""
    techniques = joined(applied_to(model), technique)
    denoiser = denoiser_of(model)
    # Refuse as much as possible here, not in the middle of a workflow.
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
    """The module inside torch.compile's wrapper."""
    return getattr(module, "_orig_mod", module)


def check_sampler(name: str, trial: Trial, family: Family, plan: Plan) -> None:
    """Refuse a sampler under which held steps would spoil the picture."""
    adds_noise = "adds noise at its steps, which held steps would leave in the picture"
    reads_guidance = "reads the two parts of guidance separately, but a held prediction has only their result"
    leaves_noise = trial.noisy and bool(way_out_of_noise(family, plan))
    if trial.reads_guidance and any(run.whole for run in plan.runs):
        fact = reads_guidance
        # Only where auto would hold something else.
        ways = ["set what to auto"] if family.stages is not None or not trial.noisy else []
    elif leaves_noise and trial.reads_guidance and family.stages is None:
        fact, ways = f"{adds_noise}, and it {reads_guidance}", []
    elif leaves_noise:
        fact, ways = adds_noise, ["set what to auto"]
    else:
        return
    other = "euler_ancestral" if trial.noisy and trial.reads_guidance else "euler or dpmpp_2m"
    ways += [f"choose another sampler, such as {other}", "use the Merge node"]
    raise TokenMergeError(f"the sampler {name} {fact}: {', '.join(ways[:-1])}, or {ways[-1]}")

"""Step caches of diffusers: typing, calibration, reset between pictures, and refusals."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import diffusers.hooks
import pytest
import torch
from torch import Tensor

import tiny
import tokenmerge
from tokenmerge import Merge, TokenMergeError
from tokenmerge.runtime.foreign import cache_hooks
from tokenmerge.tools.drawing.pictures import to_tensor
from tokenmerge.tools.drawing.request import Request, draw
from tokenmerge.tools.loading import load_pipeline
from tokenmerge.tools.rivals.base import Run
from tokenmerge.tools.rivals.diffusers_caches import calibrate
from tokenmerge.tools.rivals.reading import RIVALS, read_rival

CPU = torch.device("cpu")
STEPS = 6


@pytest.fixture(scope="module")
def flux() -> tuple[Any, Any]:
    pipe, defaults = load_pipeline("tiny-flux", torch.float32, CPU)
    pipe.set_progress_bar_config(disable=True)
    return pipe, defaults


def picture(flux: tuple[Any, Any], seed: int = 0, guidance: float | None = None) -> Tensor:
    pipe, defaults = flux
    request = Request(f"a photo of flower {seed}", STEPS, 64, 64, guidance, defaults)
    (made,), _ = draw(pipe, request, (seed,))
    return to_tensor(made)


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("first-block", "first-block", {"threshold": 0.05}),
        (" first-block:threshold=0.1", "first-block", {"threshold": 0.1}),
        ("mag:max_skip_steps=2", "mag", {"threshold": 0.06, "max_skip_steps": 2, "retention_ratio": 0.2}),
        (
            "taylorseer:cache_interval=3,taylor_factors_dtype=float32,use_lite_mode=true",
            "taylorseer",
            {
                "cache_interval": 3,
                "disable_cache_before_step": 3,
                "disable_cache_after_step": None,
                "max_order": 1,
                "taylor_factors_dtype": torch.float32,
                "use_lite_mode": True,
            },
        ),
        (
            "faster:spatial_attention_timestep_skip_range=-1,900",
            "faster",
            {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (-1, 900)},
        ),
    ],
)
def test_caches_as_typed(text: str, name: str, values: dict[str, Any]) -> None:
    cache = read_rival(text)
    assert (cache.name, dict(cache.values)) == (name, values)
    # Typed defaults make the same cache.
    assert read_rival(f"{name}:{','.join(f'{key}={typed(value)}' for key, value in values.items() if value)}") == cache


def typed(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).removeprefix("torch.").replace("True", "true")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a rival is empty; write it as in first-block:threshold=0.1"),
        ("second-block", f"is unknown (did you mean 'first-block'?); choose from {', '.join(RIVALS)}"),
        ("first-block + mag", "'first-block + mag' is unknown"),
        ("first-block:mag_ratios=1", "no field 'mag_ratios'; its fields are threshold"),
        ("mag:mag_ratios=1", "its fields are threshold, max_skip_steps, retention_ratio"),
        ("mag:treshold=1", "(did you mean 'threshold'?)"),
        ("mag:max_skip_steps=1.5", "max_skip_steps: '1.5' is not a whole number, as in 3"),
        ("mag:threshold=0.1,threshold=0.2", "gives threshold twice"),
        ("mag:retention_ratio=1.5", "retention_ratio is 1.5; it must be from 0 to 1"),
        ("first-block:threshold=-1", "threshold is -1; it must be 0 or more"),
        ("first-block:threshold=nan", "threshold is nan"),
        ("taylorseer:disable_cache_before_step=0", "it must be 1 or more"),
        ("taylorseer:use_lite_mode=yes", "write true or false"),
        ("taylorseer:taylor_factors_dtype=int8", "write float32"),
        ("faster:spatial_attention_timestep_skip_range=1", "2 values are needed"),
        ("faster:spatial_attention_timestep_skip_range=-1,1001", "from -1 to 1000"),
    ],
)
def test_caches_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(TokenMergeError) as error:
        read_rival(text)
    assert words in str(error.value)


def test_a_cache_that_diffusers_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(diffusers.hooks, "MagCacheConfig")
    with pytest.raises(TokenMergeError, match="has no MagCacheConfig; install a newer one"):
        read_rival("mag")


@pytest.mark.parametrize(
    ("text", "guidance", "merged"),
    [
        ("first-block:threshold=0.9", None, False),
        ("first-block:threshold=0.9", None, True),
        ("mag:threshold=0.9", None, False),
        ("mag:threshold=0.9", None, True),
        ("taylorseer:cache_interval=2,disable_cache_before_step=2", None, False),
        ("faster:spatial_attention_timestep_skip_range=-1,1000", 1.0, False),
    ],
)
def test_a_picture_does_not_depend_on_those_before_it(
    flux: tuple[Any, Any], text: str, guidance: float | None, merged: bool
) -> None:
    pipe, _ = flux
    plain = picture(flux, guidance=guidance)
    cache = read_rival(text)
    ratios = calibrate(pipe, partial(picture, flux, guidance=guidance), STEPS) if cache.calibrated else None
    if merged:
        tokenmerge.apply(pipe, Merge(ratio=0.5))
    uncached = picture(flux, guidance=guidance)
    with cache.enabled(pipe, Run(STEPS, mag_ratios=ratios)):
        first = picture(flux, guidance=guidance)
        other = picture(flux, seed=1, guidance=guidance)
        assert torch.equal(picture(flux, guidance=guidance), first)
        assert torch.equal(picture(flux, seed=1, guidance=guidance), other)
        assert not torch.equal(first, uncached)
    assert torch.equal(picture(flux, guidance=guidance), uncached)
    tokenmerge.remove(pipe)
    assert cache_hooks(pipe.transformer) == []
    assert torch.equal(picture(flux, guidance=guidance), plain)


def test_calibration_is_the_growth_of_the_conditional_residual(
    flux: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The expected ratios follow the definition, on residuals that hooks take at the first and last block."""
    pipe, _ = flux
    transformer = pipe.transformer
    given: list[Tensor] = []
    residuals: list[Tensor] = []
    hooks = [
        transformer.transformer_blocks[0].register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs["hidden_states"]), with_kwargs=True
        ),
        transformer.single_transformer_blocks[-1].register_forward_hook(
            lambda module, args, output: residuals.append(output[1] - given[-1])
        ),
    ]
    picture(flux)
    for hook in hooks:
        hook.remove()
    # With guidance, every other call is unconditional.
    norms = [residual.norm(dim=-1) for residual in residuals[::2]]
    expected = [1.0, *((now / before).mean().item() for before, now in pairwise(norms))]
    assert len(residuals) == 2 * STEPS
    assert calibrate(pipe, partial(picture, flux), STEPS) == pytest.approx(expected, rel=1e-4)
    assert capsys.readouterr().out == ""
    assert not transformer.is_cache_enabled


@pytest.mark.parametrize("steps", [STEPS - 2, STEPS + 1])
def test_calibration_needs_one_call_a_step(flux: tuple[Any, Any], steps: int) -> None:
    """A scheduler of higher order makes more calls than steps; a run that starts midway makes fewer."""
    pipe, _ = flux
    with pytest.raises(TokenMergeError, match=rf"one call per step, but FluxPipeline made 12 in {steps} steps"):
        calibrate(pipe, partial(picture, flux), steps)
    assert not pipe.transformer.is_cache_enabled


def test_a_cache_that_takes_calls_for_steps_is_refused_where_guidance_calls_twice(flux: tuple[Any, Any]) -> None:
    with pytest.raises(TokenMergeError, match="FluxPipeline makes 12 in 6 steps; use another cache, or no guidance"):
        read_rival("faster").check_calls(flux[0], 12, 6)


def test_a_cache_inside_of_blocks_does_not_go_with_merging(flux: tuple[Any, Any]) -> None:
    pipe, _ = flux
    with (
        tokenmerge.applied(pipe, Merge(ratio=0.5)),
        read_rival("taylorseer").enabled(pipe, Run(STEPS)),
        pytest.raises(TokenMergeError, match="stores tensors inside of blocks"),
    ):
        picture(flux)
    assert not pipe.transformer.is_cache_enabled


@pytest.mark.parametrize("family", ["sdxl", "sd3"])
def test_a_model_without_caches_is_refused(family: str) -> None:
    pipe = tiny.build(family)
    name = type(tiny.denoiser_of(pipe)).__name__
    with (
        pytest.raises(TokenMergeError, match=rf"{name} has no enable_cache in diffusers .*; leave out the cache"),
        read_rival("first-block").enabled(pipe, Run(STEPS)),
    ):
        pass

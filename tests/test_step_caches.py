"""Anchored merging under caches that skip blocks: an anchor counts only in a call that runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig
from torch import Tensor

import tiny
import tokenmerge
from tokenmerge.families import family_of

STEPS = 12
ANCHORED: dict[str, Any] = {**tiny.PLAIN, "ratio": 0.5, "skip_first": 1, "anchor_every": 3, "destinations_every": 4}


def magnitude(most: int) -> MagCacheConfig:
    """After two steps, skips as many as told, runs one, and so on."""
    return MagCacheConfig(
        threshold=1.0, max_skip_steps=most, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS, retention_ratio=0.2
    )


# Of a threshold that skips about half of the calls.
CACHES = {"first block": FirstBlockCacheConfig(threshold=0.28), "magnitude": magnitude(2)}


def build(**options: Any) -> Any:
    return tokenmerge.apply(tiny.build("flux"), **{**ANCHORED, **options})


def draw(pipe: Any, *, guided: bool = False) -> Tensor:
    """A picture; guided, by two denoiser calls in every step, whose tokens change at different speeds."""
    negative = {
        "true_cfg_scale": 3.0,
        "negative_prompt_embeds": tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH, seed=50),
        "negative_pooled_prompt_embeds": 10 * tiny.noise(1, tiny.POOLED_WIDTH, seed=51),
    }
    return tiny.draw(pipe, steps=STEPS, **(negative if guided else {}))


class Calls:
    """What happened in each denoiser call: whether a part of the last block ran, and what was given out."""

    def __init__(self, pipe: Any) -> None:
        self.ran: list[bool] = []
        self.outputs: list[Any] = []
        inner = pipe.transformer.single_transformer_blocks[-1].norm
        pipe.transformer.register_forward_pre_hook(lambda *_: self.ran.append(False))
        inner.register_forward_pre_hook(lambda *_: self.ran.__setitem__(-1, True))
        pipe.transformer.register_forward_hook(lambda module, args, output: self.outputs.append(output))

    def missed_anchors(self, turns: int) -> list[int]:
        """How many anchors were due in a call that was skipped, for each call of a step."""
        missed = []
        for turn in range(turns):
            last, count = -STEPS, 0
            for step, ran in enumerate(self.ran[turn::turns]):
                due = step - last >= ANCHORED["anchor_every"]
                last = step if due and ran else last
                count += due and not ran
            missed.append(count)
        return missed


def without_skipped_calls(pipe: Any, calls: Calls) -> None:
    """Let the pipeline take what `calls` gave out in those that a cache skipped. The denoiser is not called there, and
    merging knows of them only that they had a place in their step."""
    run = pipe.transformer._call_impl
    clock = pipe.transformer._tokenmerge.state.clock
    recorded = iter(zip(calls.ran, calls.outputs, strict=True))

    def call(*args: Any, **kwargs: Any) -> Any:
        ran, output = next(recorded)
        if ran:
            return run(*args, **kwargs)
        clock.call += 1
        return output

    pipe.transformer._call_impl = call


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("options", [{}, {"gap": "linear"}, {"coverage": 0.8, "gap": "linear"}], ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_skipped_calls_are_as_if_they_were_not_there(cache: str, options: dict[str, Any], guided: bool) -> None:
    """The picture is that of a model without a cache whose skipped calls are left out: there no anchor is ever missed,
    and every gap is that of the maps in use."""
    pipe = build(**options)
    calls = Calls(pipe)
    pipe.transformer.enable_cache(CACHES[cache])
    cached = draw(pipe, guided=guided)
    assert all(missed > 0 for missed in calls.missed_anchors(1 + guided))
    if cache == "first block" and guided:
        assert calls.ran[0::2] != calls.ran[1::2]
    other = build(**options)
    without_skipped_calls(other, calls)
    assert torch.equal(draw(other, guided=guided), cached)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("options", [{}, {"anchor_every": 0}], ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_steps_that_a_cache_skips_are_told_as_such(cache: str, options: dict[str, Any], guided: bool) -> None:
    pipe = build(**options)
    calls = Calls(pipe)
    pipe.transformer.enable_cache(CACHES[cache])
    draw(pipe, guided=guided)
    told = tokenmerge.summary(pipe)
    merged = told.steps.get("merged")
    skipped = calls.ran[:: 1 + guided].count(False)
    assert told.steps["skipped"] == skipped > 0
    assert sum(told.steps.values()) == STEPS
    # A cache may leave nothing but anchors.
    saved = "" if merged else ": merging saved nothing"
    assert f"{skipped} skipped by a cache{saved}." in str(told)
    pipe.transformer.disable_cache()
    draw(pipe, guided=guided)
    assert "skipped" not in tokenmerge.summary(pipe).steps


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    "cache", [FirstBlockCacheConfig(threshold=0.0), magnitude(0)], ids=["first block", "magnitude"]
)
def test_a_cache_that_skips_nothing_changes_nothing(cache: Any, guided: bool) -> None:
    pipe = build()
    anchored = draw(pipe, guided=guided)
    pipe.transformer.enable_cache(cache)
    assert torch.equal(draw(pipe, guided=guided), anchored)


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_leaves_nothing_behind(cache: str) -> None:
    pipe = tiny.build("flux")
    original = draw(pipe)
    tokenmerge.apply(pipe, **ANCHORED)
    anchored = draw(pipe)
    pipe.transformer.enable_cache(CACHES[cache])
    cached = draw(pipe)
    assert not torch.equal(cached, anchored)
    assert torch.equal(draw(pipe), cached)
    pipe.transformer.disable_cache()
    assert torch.equal(draw(pipe), anchored)
    pipe.transformer.enable_cache(CACHES[cache])
    draw(pipe)
    tokenmerge.remove(pipe)
    pipe.transformer.disable_cache()
    assert torch.equal(draw(pipe), original)


def test_a_first_block_that_runs_in_skipped_calls_is_refused() -> None:
    pipe = build(skip_first=0)
    anchored = draw(pipe)
    pipe.transformer.enable_cache(CACHES["first block"])
    with pytest.raises(tokenmerge.TokenMergeError, match=r"transformer_blocks\.0.*use skip_first=1"):
        draw(pipe)
    pipe.transformer.disable_cache()
    assert torch.equal(draw(pipe), anchored)


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_over_held_blocks_is_refused(cache: str) -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), preset="hold")
    held = draw(pipe)
    pipe.transformer.enable_cache(CACHES[cache])
    with pytest.raises(tokenmerge.TokenMergeError, match="blocks are held already"):
        draw(pipe)
    pipe.transformer.disable_cache()
    assert torch.equal(draw(pipe), held)


def test_a_refused_call_is_refused_again() -> None:
    """Without a scheduler a second try is another call of the same step."""
    transformer = tiny.build("flux").transformer
    tokenmerge.apply(transformer, **{**tiny.PLAIN, "anchor_every": 3, "skip_first": 0})
    transformer.enable_cache(CACHES["first block"])
    arguments = family_of(transformer).example(transformer, 1, 16, 16)
    for _ in range(2):
        with pytest.raises(tokenmerge.TokenMergeError, match="use skip_first=1"):
            transformer(**arguments)


def test_mag_cache_skips_the_first_block_too_so_it_may_merge() -> None:
    pipe = build(skip_first=0)
    calls = Calls(pipe)
    pipe.transformer.enable_cache(CACHES["magnitude"])
    cached = draw(pipe)
    assert calls.missed_anchors(1) != [0]
    other = build(skip_first=0)
    without_skipped_calls(other, calls)
    assert torch.equal(draw(other), cached)

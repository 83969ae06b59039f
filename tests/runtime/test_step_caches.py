"""Merging under caches that skip steps: due maps wait for the next call that runs; summaries count what really ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig
from torch import Tensor

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families import family_of

STEPS = 12
# A FirstBlockCache runs the first block in every call; here that block does not merge.
MERGE = Merge(skip_first=1, destinations_every=3, weights_every=2)


def magnitude(most: int) -> MagCacheConfig:
    """A MagCache that, after two steps, skips `most` steps between any two that run."""
    return MagCacheConfig(
        threshold=1.0, max_skip_steps=most, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS, retention_ratio=0.2
    )


# This threshold skips about half of the calls.
CACHES = {"first block": FirstBlockCacheConfig(threshold=0.28), "magnitude": magnitude(2)}


def build(technique: Merge = MERGE) -> Any:
    return tokenmerge.apply(tiny.build("flux"), technique)


def draw(pipe: Any, *, guided: bool = False) -> Tensor:
    """A picture. guided: with two denoiser calls in every step, whose tokens change at different speeds."""
    negative = {
        "true_cfg_scale": 3.0,
        "negative_prompt_embeds": tiny.noise(1, tiny.TEXT_TOKENS, tiny.TEXT_WIDTH, seed=50),
        "negative_pooled_prompt_embeds": 10 * tiny.noise(1, tiny.POOLED_WIDTH, seed=51),
    }
    return tiny.draw(pipe, steps=STEPS, **(negative if guided else {}))


class Calls:
    """For each denoiser call, whether the last block ran, and the output."""

    def __init__(self, pipe: Any) -> None:
        self.ran: list[bool] = []
        self.outputs: list[Any] = []
        inner = pipe.transformer.single_transformer_blocks[-1].norm
        pipe.transformer.register_forward_pre_hook(lambda *_: self.ran.append(False))
        inner.register_forward_pre_hook(lambda *_: self.ran.__setitem__(-1, True))
        pipe.transformer.register_forward_hook(lambda module, args, output: self.outputs.append(output))

    def missed_selections(self, turns: int) -> list[int]:
        """How many selections fell due in skipped calls, for each call of a step."""
        missed = []
        for turn in range(turns):
            last, count = -STEPS, 0
            for step, ran in enumerate(self.ran[turn::turns]):
                due = step - last >= MERGE.destinations_every
                last = step if due and ran else last
                count += due and not ran
            missed.append(count)
        return missed


def without_skipped_calls(pipe: Any, calls: Calls) -> None:
    """Replay the recorded outputs of the calls that a cache skipped, without running the denoiser. Merging only learns
    that these calls had a place in their step."""
    run = pipe.transformer._call_impl
    clock = pipe.transformer._tokenmerge.state.follower.clock
    recorded = iter(zip(calls.ran, calls.outputs, strict=True))

    def call(*args: Any, **kwargs: Any) -> Any:
        ran, output = next(recorded)
        if ran:
            return run(*args, **kwargs)
        clock.call += 1
        return output

    pipe.transformer._call_impl = call


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    ("cache", "technique"),
    [("first block", MERGE), ("magnitude", MERGE), ("magnitude", MERGE.replace(skip_first=0))],
    ids=["first block", "magnitude", "magnitude-first merged"],
)
def test_skipped_calls_are_as_if_they_were_not_there(cache: str, technique: Merge, guided: bool) -> None:
    """The picture equals that of an uncached model whose skipped calls are left out: a map that falls due in a skipped
    call is made in the next one that runs."""
    pipe = build(technique)
    calls = Calls(pipe)
    pipe.transformer.enable_cache(CACHES[cache])
    cached = draw(pipe, guided=guided)
    assert all(missed > 0 for missed in calls.missed_selections(1 + guided))
    if cache == "first block" and guided:
        assert calls.ran[0::2] != calls.ran[1::2]
    other = build(technique)
    without_skipped_calls(other, calls)
    assert torch.equal(draw(other, guided=guided), cached)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    "technique",
    [
        MERGE,
        Merge(),
        Merge(sites="component"),
        Merge(sites="component", components=("mlp",), method="tomesd", selection="random"),
        Merge(start=0.4),
    ],
    ids=["first whole", "first merged", "components", "matched in every block", "window"],
)
@pytest.mark.parametrize("cache", CACHES)
def test_steps_that_a_cache_skips_are_told_as_such(cache: str, technique: Merge, guided: bool) -> None:
    """Also if the first block merges, although a FirstBlockCache runs it in every call."""
    pipe = build(technique)
    calls = Calls(pipe)
    pipe.transformer.enable_cache(CACHES[cache])
    draw(pipe, guided=guided)
    told = tokenmerge.summary(pipe)
    ran = calls.ran[:: 1 + guided]
    inside = [step / STEPS >= technique.start for step in range(STEPS)]
    skipped = sum(inside[step] and not ran[step] for step in range(STEPS))
    assert told.steps["skipped"] == skipped > 0
    assert told.steps["merged"] == sum(inside[step] and ran[step] for step in range(STEPS)) > 0
    assert sum(told.steps.values()) == STEPS
    assert f"{skipped} skipped by a cache." in str(told)
    pipe.transformer.disable_cache()
    draw(pipe, guided=guided)
    assert "skipped" not in tokenmerge.summary(pipe).steps


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    "cache", [FirstBlockCacheConfig(threshold=0.0), magnitude(0)], ids=["first block", "magnitude"]
)
def test_a_cache_that_skips_nothing_changes_nothing(cache: Any, guided: bool) -> None:
    pipe = build(Merge())
    merged = draw(pipe, guided=guided)
    pipe.transformer.enable_cache(cache)
    assert torch.equal(draw(pipe, guided=guided), merged)
    assert tokenmerge.summary(pipe).steps == {"merged": STEPS}


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_leaves_nothing_behind(cache: str) -> None:
    pipe = tiny.build("flux")
    original = draw(pipe)
    tokenmerge.apply(pipe, MERGE)
    merged = draw(pipe)
    pipe.transformer.enable_cache(CACHES[cache])
    cached = draw(pipe)
    assert not torch.equal(cached, merged)
    assert torch.equal(draw(pipe), cached)
    pipe.transformer.disable_cache()
    assert torch.equal(draw(pipe), merged)
    pipe.transformer.enable_cache(CACHES[cache])
    draw(pipe)
    tokenmerge.remove(pipe)
    pipe.transformer.disable_cache()
    assert torch.equal(draw(pipe), original)


@pytest.mark.parametrize(
    "techniques", [[Hold(every=3, start=0.2)], [MERGE, Hold(every=3, start=0.2)]], ids=["hold", "both"]
)
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_over_held_blocks_is_refused(cache: str, techniques: list[Any]) -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), techniques)
    held = draw(pipe)
    pipe.transformer.enable_cache(CACHES[cache])
    with pytest.raises(TokenMergeError, match=r"skips steps, and so does Hold; use only one of them: .* apply Merge"):
        draw(pipe)
    pipe.transformer.disable_cache()
    assert torch.equal(draw(pipe), held)


def test_a_refused_call_is_refused_again() -> None:
    """Without a scheduler, a retry counts as another call of the same step."""
    transformer = tiny.build("flux").transformer
    tokenmerge.apply(transformer, Hold(every=3, start=0.0))
    transformer.enable_cache(CACHES["first block"])
    arguments = family_of(transformer).example(transformer, 1, 16, 16)
    for _ in range(2):
        with pytest.raises(TokenMergeError, match="use only one of them"):
            transformer(**arguments)

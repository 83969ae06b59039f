"""Failures leave no partial state: retried calls, a refused apply, a denoiser replaced while a technique is on."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.families import family_of
from tokenmerge.merging.ops import reference
from tokenmerge.runtime.clock import Clock

MERGE = Merge(regions="tile:2x2")


def call(unet: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return unet(**family_of(unet).example(unet, 2, 16, 16), return_dict=False)[0]


def test_a_map_that_failed_to_be_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call(tokenmerge.apply(tiny.build("sdxl").unet, MERGE))
    unet = tokenmerge.apply(tiny.build("sdxl").unet, MERGE)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(reference, "select", fail)
        with pytest.raises(MemoryError):
            call(unet)
    assert torch.equal(call(unet), expected)


def test_a_call_that_failed_and_is_made_again_counts_once() -> None:
    clock, counted = Clock(), []
    clock.start_image(None)
    for ends in (False, True, False, False, True):
        clock.begin_call()
        counted.append(clock.call)
        if ends:
            clock.end_call()
    assert counted == [0, 0, 1, 1, 1]
    # Once the scheduler has stepped, the next call is not a retry.
    clock.begin_call()
    clock.next_step()
    clock.begin_call()
    assert clock.now == (0, 1, 0)


def test_a_refused_apply_leaves_what_was_applied() -> None:
    pipe = tokenmerge.apply(tiny.build("sdxl"), Hold(every=3, start=0.2, what="stages"))
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(TokenMergeError, match="adds noise"):
        tokenmerge.apply(pipe, Hold(what="stages", every=2))
    assert tokenmerge.summary(pipe).plan.techniques.hold == Hold(every=3, start=0.2, what="stages")


def test_applied_takes_off_what_it_put_on_though_the_denoiser_was_exchanged() -> None:
    pipe, other = tiny.build("sdxl"), tiny.build("sdxl").unet
    before = pipe.unet
    plain = call(before)
    with tokenmerge.applied(pipe, MERGE):
        pipe.unet = other
    assert torch.equal(call(before), plain)
    assert tokenmerge.summary(pipe).plan is None


def test_blocks_that_are_called_after_an_image_run_as_they_are() -> None:
    pipe = tiny.build("sdxl")
    arguments = family_of(pipe.unet).example(pipe.unet, 2, 16, 16)
    plain = pipe.unet.forward(**arguments, return_dict=False)[0]
    tiny.draw(tokenmerge.apply(pipe, [MERGE, Hold(every=3, start=0.0)]), steps=8)
    assert torch.equal(pipe.unet.forward(**arguments, return_dict=False)[0], plain)


@pytest.mark.parametrize("scheduler", ["ddim", DDIMScheduler, object()], ids=["text", "class", "object"])
def test_what_is_no_scheduler_is_refused(scheduler: Any) -> None:
    with pytest.raises(TokenMergeError, match="give the scheduler object"):
        tokenmerge.apply(tiny.build("sdxl").unet, Hold(every=3, start=0.2), scheduler=scheduler)


def test_a_model_host_of_ones_own_needs_no_more_than_its_parts() -> None:
    pipe = tiny.build("sdxl")
    host = types.SimpleNamespace(unet=pipe.unet, scheduler=pipe.scheduler)
    plain = tiny.draw(pipe, steps=8)
    tokenmerge.apply(host, Hold(every=3, start=0.2))
    assert not torch.equal(tiny.draw(pipe, steps=8), plain)
    tokenmerge.remove(host)
    assert torch.equal(tiny.draw(pipe, steps=8), plain)


def test_hold_does_not_move_the_window_of_merge() -> None:
    firsts = []
    for techniques in ([Merge(start=0.4)], [Merge(start=0.4), Hold(every=2, start=0.9)]):
        pipe = tiny.build("sdxl")
        pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, use_karras_sigmas=True)
        tiny.draw(tokenmerge.apply(pipe, techniques), steps=12)
        firsts.append(tokenmerge.summary(pipe).steps["full"])
    assert firsts[0] == firsts[1]

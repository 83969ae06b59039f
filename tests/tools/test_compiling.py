"""Which ways of `--compile` each device gets."""

from __future__ import annotations

import pytest
import torch

import tiny
import tokenmerge
from tokenmerge import TokenMergeError
from tokenmerge.tools.compiling import compile_as, warm_ups, way_on


@pytest.mark.parametrize(
    ("device", "way", "found"),
    [
        ("cuda", None, None),
        ("cuda", "both", "both"),
        ("cuda", "graphs", "graphs"),
        ("cpu", None, None),
        ("cpu", "both", "blocks"),
        ("cpu", "blocks", "blocks"),
    ],
)
def test_what_compiling_comes_to_on_a_device(device: str, way: str | None, found: str | None) -> None:
    assert way_on(torch.device(device), way) == found


def test_graphs_alone_need_a_cuda_device() -> None:
    with pytest.raises(TokenMergeError, match="needs a CUDA device, but this is cpu; use --compile blocks"):
        way_on(torch.device("cpu"), "graphs")


def test_graphs_take_one_more_picture_to_warm_up() -> None:
    assert [warm_ups(way) for way in (None, "blocks", "graphs", "both")] == [1, 1, 2, 2]


def test_blocks_alone_are_compiled_by_name() -> None:
    pipe = compile_as(tiny.build("sdxl", unet=tiny.short_sdxl_unet()), "blocks")
    assert tokenmerge.summary(pipe).compiled.endswith("blocks, no CUDA graphs")
    with pytest.raises(TokenMergeError, match="need a CUDA device"):
        compile_as(pipe, "graphs")

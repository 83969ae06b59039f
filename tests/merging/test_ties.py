"""Ties in selection go to the lowest index, whatever rounding does: a picture must not depend on its batch."""

from __future__ import annotations

import pytest
import torch

from tokenmerge.merging.ops import reference

REGIONS = 2048


@pytest.mark.parametrize("channels", [64, 640, 1536])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_noise_of_rounding_flips_no_selection(size: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, REGIONS * size, channels, generator=generator)
    noise = 1 + 1e-7 * torch.randn(tokens.shape, generator=generator)
    chosen, again = (reference.select(each, None, REGIONS, size // 2) for each in (tokens, tokens * noise))
    assert torch.equal(chosen.sort(-1).values, again.sort(-1).values)


def test_the_first_of_two_tokens_is_chosen() -> None:
    tokens = torch.randn(1, 2 * REGIONS, 64, generator=torch.Generator().manual_seed(1))
    chosen = reference.select(tokens, None, REGIONS, 1)
    assert torch.equal(chosen.flatten(), torch.arange(0, 2 * REGIONS, 2))


def test_a_batch_selects_as_its_samples_do_alone() -> None:
    tokens = torch.randn(2, 2 * REGIONS, 320, generator=torch.Generator().manual_seed(2))
    together = reference.select(tokens, None, REGIONS, 1)
    alone = torch.cat([reference.select(sample[None], None, REGIONS, 1) for sample in tokens])
    assert torch.equal(together, alone)

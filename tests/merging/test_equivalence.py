"""Merged pipelines equal a second implementation of ToMA, in plain loops over samples and regions.

This file writes out the formulas of every block and uses none of the package's operations. One pipeline runs these
formulas, another runs Merge, and their images are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
import tokenmerge
from tokenmerge import Hold, Merge

SIDE = 4  # regions are SIDE x SIDE tiles


class Tie(Exception):
    """Rounding would decide the selection, so a comparison would mean nothing."""


def plain_similarity(first: np.ndarray, second: np.ndarray, kind: str) -> np.ndarray:
    if kind == "dot":
        return first @ second.T / np.sqrt(first.shape[-1])
    return (first / np.linalg.norm(first, axis=1, keepdims=True)) @ (
        second / np.linalg.norm(second, axis=1, keepdims=True)
    ).T


def plain_selection(similarities: list[np.ndarray], count: int) -> list[int]:
    """Greedy facility location with destinations that all samples share: it maximises the sum of their gains."""
    size = similarities[0].shape[0]
    covered = [None] * len(similarities)
    chosen: list[int] = []
    for _ in range(count):
        gains = np.full(size, -np.inf)
        for candidate in range(size):
            if candidate in chosen:
                continue
            gains[candidate] = sum(
                similarity[:, candidate].sum()
                if cover is None
                else np.maximum(similarity[:, candidate] - cover, 0).sum()
                for similarity, cover in zip(similarities, covered, strict=True)
            )
        # Candidates with a gain of exactly 0 tie exactly, and the lowest index wins. Rounding decides any other tie.
        second, best = np.sort(gains)[-2:]
        if best != 0 and best - second < 1e-5:
            raise Tie
        pick = int(gains.argmax())
        chosen.append(pick)
        covered = [
            similarity[:, pick] if cover is None else np.maximum(cover, similarity[:, pick])
            for similarity, cover in zip(similarities, covered, strict=True)
        ]
    return chosen


class PlainMap:
    """Destinations and weights for every sample and tile of tokens [B, N, C] on a square grid."""

    def __init__(self, tokens: Tensor, ratio: float, similarity: str, temperature: float, shared: bool) -> None:
        batch, count, _ = tokens.shape
        side = int(count**0.5)
        self.similarity = similarity
        self.temperature = temperature
        self.tiles = [
            [row * side + column for row in range(top, top + SIDE) for column in range(left, left + SIDE)]
            for top in range(0, side, SIDE)
            for left in range(0, side, SIDE)
        ]
        keep = round(SIDE * SIDE * (1 - ratio))
        self.chosen: list[list[list[int]]] = [[] for _ in range(batch)]  # per sample and tile: places in the tile
        for pairs in zip(*self.pairs(tokens), strict=True):
            together = plain_selection(list(pairs), keep) if shared else None
            for sample in range(batch):
                self.chosen[sample].append(together or plain_selection([pairs[sample]], keep))
        self.weigh(tokens)

    def pairs(self, tokens: Tensor) -> list[list[np.ndarray]]:
        """Similarity matrices by sample and tile."""
        numbers = tokens.detach().double().numpy()
        return [
            [plain_similarity(sample[tile], sample[tile], self.similarity) for tile in self.tiles] for sample in numbers
        ]

    def weigh(self, tokens: Tensor) -> None:
        """Makes the weights [k, n] of every sample and tile. Columns sum to 1."""
        self.spread: list[list[Tensor]] = []
        for pairs, chosen in zip(self.pairs(tokens), self.chosen, strict=True):
            logits = [pair[places] / self.temperature for pair, places in zip(pairs, chosen, strict=True)]
            exponentials = [np.exp(each - each.max(axis=0)) for each in logits]
            self.spread.append([torch.tensor(each / each.sum(axis=0)).float() for each in exponentials])

    def merge(self, tokens: Tensor) -> Tensor:
        samples = []
        for sample, spread in zip(tokens, self.spread, strict=True):
            means = [
                weights / weights.sum(dim=1, keepdim=True) @ sample[tile]
                for tile, weights in zip(self.tiles, spread, strict=True)
            ]
            samples.append(torch.cat(means))
        return torch.stack(samples)

    def unmerge(self, merged: Tensor) -> Tensor:
        keep = self.spread[0][0].shape[0]
        result = torch.zeros(merged.shape[0], sum(map(len, self.tiles)), merged.shape[2])
        for sample, spread in enumerate(self.spread):
            for number, (tile, weights) in enumerate(zip(self.tiles, spread, strict=True)):
                result[sample, tile] = weights.T @ merged[sample, number * keep : (number + 1) * keep]
        return result

    def rotary(self, tables: tuple[Tensor, Tensor], text: int) -> tuple[Tensor, ...]:
        places = [tile[place] for tile, chosen in zip(self.tiles, self.chosen[0], strict=True) for place in chosen]
        rows = [*range(text), *(text + place for place in places)]
        return tuple(table[rows] for table in tables)


class PlainMaps:
    """One map per group. Each call of the denoiser keeps, reweighs or selects it."""

    def __init__(self, denoiser: nn.Module, each_call: str = "keep", **options: Any) -> None:
        self.options = options
        self.each_call = each_call
        self.maps: dict[Any, PlainMap] = {}
        self.served: set[Any] = set()
        denoiser.register_forward_pre_hook(lambda *_: self.served.clear())

    def of(self, group: Any, tokens: Tensor) -> PlainMap:
        if group not in self.maps or (group not in self.served and self.each_call == "select"):
            self.maps[group] = PlainMap(tokens, **self.options)
        elif group not in self.served and self.each_call == "reweigh":
            self.maps[group].weigh(tokens)
        self.served.add(group)
        return self.maps[group]


Forward = Callable[..., Any]


def unet_component(block: nn.Module, maps: PlainMaps) -> Forward:
    """BasicTransformerBlock with each component merged alone. Groups are levels, which differ in token count."""

    def forward(tokens: Tensor, encoder_hidden_states: Tensor, **_: Any) -> Tensor:
        normed = block.norm1(tokens)
        here = maps.of(tokens.shape[1], normed)
        tokens = tokens + here.unmerge(block.attn1(here.merge(normed)))
        normed = block.norm2(tokens)
        tokens = tokens + here.unmerge(block.attn2(here.merge(normed), encoder_hidden_states=encoder_hidden_states))
        normed = block.norm3(tokens)
        return tokens + here.unmerge(block.ff(here.merge(normed)))

    return forward


def sd3_component(block: nn.Module, maps: PlainMaps) -> Forward:
    """JointTransformerBlock, with or without a second attention, with or without a text output."""

    def forward(hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, **_: Any) -> Any:
        tokens, text = hidden_states, encoder_hidden_states
        if block.use_dual_attention:
            normed, gate, shift, scale, gate_mlp, normed_2, gate_2 = block.norm1(tokens, emb=temb)
        else:
            normed, gate, shift, scale, gate_mlp = block.norm1(tokens, emb=temb)
        if block.context_pre_only:
            normed_text = block.norm1_context(text, temb)
        else:
            normed_text, text_gate, text_shift, text_scale, text_gate_mlp = block.norm1_context(text, emb=temb)
        here = maps.of("joint", normed)
        attended, attended_text = block.attn(hidden_states=here.merge(normed), encoder_hidden_states=normed_text)
        tokens = tokens + gate[:, None] * here.unmerge(attended)
        if block.use_dual_attention:
            tokens = tokens + gate_2[:, None] * here.unmerge(block.attn2(hidden_states=here.merge(normed_2)))
        normed = block.norm2(tokens) * (1 + scale[:, None]) + shift[:, None]
        tokens = tokens + gate_mlp[:, None] * here.unmerge(block.ff(here.merge(normed)))
        if block.context_pre_only:
            return None, tokens
        text = text + text_gate[:, None] * attended_text
        normed_text = block.norm2_context(text) * (1 + text_scale[:, None]) + text_shift[:, None]
        return text + text_gate_mlp[:, None] * block.ff_context(normed_text), tokens

    return forward


def flux_component(block: nn.Module, maps: PlainMaps) -> Forward:
    def joint(
        hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Any, **_: Any
    ) -> Any:
        tokens, text = hidden_states, encoder_hidden_states
        normed, gate, shift, scale, gate_mlp = block.norm1(tokens, emb=temb)
        normed_text, text_gate, text_shift, text_scale, text_gate_mlp = block.norm1_context(text, emb=temb)
        here = maps.of("joint", normed)
        attended, attended_text = block.attn(
            hidden_states=here.merge(normed),
            encoder_hidden_states=normed_text,
            image_rotary_emb=here.rotary(image_rotary_emb, text.shape[1]),
        )
        tokens = tokens + gate[:, None] * here.unmerge(attended)
        normed = block.norm2(tokens) * (1 + scale[:, None]) + shift[:, None]
        tokens = tokens + gate_mlp[:, None] * here.unmerge(block.ff(here.merge(normed)))
        text = text + text_gate[:, None] * attended_text
        normed_text = block.norm2_context(text) * (1 + text_scale[:, None]) + text_shift[:, None]
        return text + text_gate_mlp[:, None] * block.ff_context(normed_text), tokens

    def single(
        hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: Any, **_: Any
    ) -> Any:
        length = encoder_hidden_states.shape[1]
        sequence = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        normed, gate = block.norm(sequence, emb=temb)
        here = maps.of("single", normed[:, length:])
        merged = torch.cat([normed[:, :length], here.merge(normed[:, length:])], dim=1)

        def unmerge(output: Tensor) -> Tensor:
            return torch.cat([output[:, :length], here.unmerge(output[:, length:])], dim=1)

        mlp = unmerge(block.act_mlp(block.proj_mlp(merged)))
        attended = unmerge(block.attn(hidden_states=merged, image_rotary_emb=here.rotary(image_rotary_emb, length)))
        sequence = sequence + gate[:, None] * block.proj_out(torch.cat([attended, mlp], dim=2))
        return sequence[:, :length], sequence[:, length:]

    return single if hasattr(block, "proj_mlp") else joint


COMPONENT = {"sd": unet_component, "sdxl": unet_component, "sd3": sd3_component, "flux": flux_component}


def merged_block(block: nn.Module, maps: PlainMaps) -> Forward:
    """Any block, merged as a whole: it runs on merged tokens, and its residual is unmerged."""
    original = block.forward

    def forward(hidden_states: Tensor, **others: Any) -> Any:
        here = maps.of((type(block), hidden_states.shape[1]), hidden_states)
        merged = here.merge(hidden_states)
        if "image_rotary_emb" in others:
            length = others["encoder_hidden_states"].shape[1]
            others["image_rotary_emb"] = here.rotary(others["image_rotary_emb"], length)
        output = original(merged, **others)
        *text, left = output if isinstance(output, tuple) else (output,)
        tokens = hidden_states + here.unmerge(left - merged)
        return (*text, tokens) if text else tokens

    return forward


def blocks_of(pipe: Any) -> dict[str, nn.Module]:
    names = ("BasicTransformerBlock", "JointTransformerBlock", "FluxTransformerBlock", "FluxSingleTransformerBlock")
    blocks = {name: module for name, module in tiny.denoiser_of(pipe).named_modules() if type(module).__name__ in names}
    if type(pipe).__name__ == "StableDiffusionPipeline":
        # The coarser levels have fewer tokens than a region.
        fine = ("down_blocks.0", "down_blocks.1", "up_blocks.2", "up_blocks.3")
        return {name: block for name, block in blocks.items() if name.startswith(fine)}
    return blocks


def merge_plainly(pipe: Any, kind: str, sites: str, maps: PlainMaps) -> None:
    for block in blocks_of(pipe).values():
        block.forward = COMPONENT[kind](block, maps) if sites == "component" else merged_block(block, maps)


# With cosines, two tokens that are each other's nearest tie: either gains the same. So the cosine setting keeps few
# tokens in every region. Dot products have no such ties.
SETTINGS = [
    {"ratio": 0.875, "similarity": "cosine", "temperature": 0.001},
    {"ratio": 0.5, "similarity": "dot", "temperature": 0.1},
]


def assert_equal_to_plain(
    kind: str, sites: str, batch: int, setting: dict[str, Any], steps: int = 2, each_call: str = "keep"
) -> None:
    plain = tiny.build(kind)
    maps = PlainMaps(tiny.denoiser_of(plain), each_call, **setting, shared=kind == "flux")
    merge_plainly(plain, kind, sites, maps)
    seed, expected = first_without_tie(plain, maps, batch=batch, steps=steps)

    pipe = tiny.build(kind)
    unpatched = tiny.draw(pipe, batch=batch, seed=seed, steps=steps)
    every: dict[str, dict[str, int]] = {
        "keep": {},
        "reweigh": {"weights_every": 1},
        "select": {"destinations_every": 1, "weights_every": 1},
    }
    levels = {"sd": (1, 2), "sdxl": (2, 4)}.get(kind)
    merge = Merge(sites=sites, regions=f"tile:{SIDE}x{SIDE}", levels=levels, **setting, **every[each_call])
    tokenmerge.apply(pipe, merge)
    merged = tiny.draw(pipe, batch=batch, seed=seed, steps=steps)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-4)
    assert (merged - unpatched).abs().max() > 0.05


def first_without_tie(plain: Any, maps: PlainMaps, **call: Any) -> tuple[int, Tensor]:
    for seed in range(10):
        maps.maps.clear()
        try:
            return seed, tiny.draw(plain, seed=seed, **call)
        except Tie:
            continue
    raise AssertionError("every seed has a tie")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["similarity"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sites", ["component", "block"])
@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_merged_pipelines_equal_the_plain_computation(
    kind: str, sites: str, batch: int, setting: dict[str, Any]
) -> None:
    assert_equal_to_plain(kind, sites, batch, setting)


@pytest.mark.parametrize("each_call", ["reweigh", "select"])
@pytest.mark.parametrize("sites", ["component", "block"])
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_refreshed_maps_equal_the_plain_computation(kind: str, sites: str, each_call: str) -> None:
    assert_equal_to_plain(kind, sites, 1, SETTINGS[1], steps=3, each_call=each_call)


@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_a_technique_that_does_nothing_leaves_the_other_as_it_is(kind: str) -> None:
    nothing: dict[type[Merge] | type[Hold], Merge | Hold] = {Merge: Merge(ratio=0.0), Hold: Hold(every=1)}
    pipe = tiny.build(kind)
    for acting, other in ((Merge(regions="tile:2x2"), Hold), (Hold(every=2, start=0.0), Merge)):
        alone = tiny.draw(tokenmerge.apply(pipe, acting), steps=4)
        steps = tokenmerge.summary(pipe).steps
        tokenmerge.apply(pipe, [acting, nothing[other]])
        assert torch.equal(tiny.draw(pipe, steps=4), alone)
        assert tokenmerge.summary(pipe).steps == steps

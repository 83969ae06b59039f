"""Pitfalls of single models: each failed once, or would fail silently.

General pitfalls of noise, regions and merged rows are in `runtime/test_noise.py`, `merging/test_laws.py` and
`test_contract.py`.
"""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

import tokenmerge
import zoo
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.applying import token_maps
from tokenmerge.families import family_of
from tokenmerge.families.calls import TokenGrid
from tokenmerge.merging.grid import partition_grids
from tokenmerge.runtime.noise import adds_noise

HOLD = Hold(every=2, start=0.0)


def built(name: str) -> Any:
    pipe = zoo.MODELS[name].build()
    return pipe, zoo.denoisers(pipe)[0]


def calls(denoiser: Any, given: dict[str, Any], factors: list[float]) -> list[Any]:
    key = "timestep" if "timestep" in given else "t"
    with torch.no_grad():
        return [denoiser(**{**given, key: given[key] * factor}, return_dict=False)[0] for factor in factors]


# Schedulers


@pytest.mark.parametrize("name", ["CogVideoXDPMScheduler", "SCMScheduler"])
def test_schedulers_that_a_plain_trial_cannot_step_add_noise(name: str) -> None:
    assert adds_noise(getattr(diffusers, name)())


def test_cogvideox_holds_its_prediction_under_a_scheduler_that_adds_noise() -> None:
    """This scheduler's step takes the last prediction as second argument, where others take the timestep."""
    pipe, _ = built("cogvideox-5b")
    pipe.scheduler = diffusers.CogVideoXDPMScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(TokenMergeError, match="CogVideoXDPMScheduler adds noise"):
        tokenmerge.apply(pipe, HOLD.replace(what="blocks"))
    tokenmerge.apply(pipe, HOLD)
    zoo.draw(pipe, zoo.MODELS["cogvideox-5b"], steps=5)
    assert tokenmerge.summary(pipe).steps == {"full": 3, "held": 2}
    tokenmerge.apply(pipe, Merge())
    zoo.draw(pipe, zoo.MODELS["cogvideox-5b"], steps=4)
    assert tokenmerge.summary(pipe).steps == {"merged": 4}


# Times


@pytest.mark.parametrize("name", ["zimage", "lumina2"])
def test_times_that_rise_are_the_steps_of_one_image(name: str) -> None:
    _, denoiser = built(name)
    given = family_of(denoiser).example(denoiser, 1, 16, 16)
    tokenmerge.apply(denoiser, HOLD)
    calls(denoiser, given, [0.2, 0.4, 0.6, 0.8])
    assert tokenmerge.summary(denoiser).steps == {"full": 2, "held": 2}
    calls(denoiser, given, [0.2, 0.4])
    assert tokenmerge.summary(denoiser).steps == {"full": 1, "held": 1}


def test_the_time_of_a_given_first_frame_is_not_that_of_the_step() -> None:
    """Wan 2.2 TI2V passes a time for every token, which is 0 for tokens of the given image."""
    _, denoiser = built("wan2.2-ti2v-image")
    given = family_of(denoiser).example(denoiser, 1, 8, 8, 3)
    tokens = 3 * 4 * 4
    times = torch.full((1, tokens), 900.0)
    times[:, : tokens // 3] = 0
    given["timestep"] = times
    read = family_of(denoiser).calls.read(denoiser, (), given)
    assert float(read.timestep) == 900.0
    assert read.grids == (TokenGrid(4, 4), TokenGrid(4, 4, 2))
    tokenmerge.apply(denoiser, HOLD)
    calls(denoiser, given, [1.0, 0.9, 0.8, 0.7])
    assert tokenmerge.summary(denoiser).steps == {"full": 2, "held": 2}


@pytest.mark.parametrize("technique", ["toma-once", Merge(method="tomesd", selection="random")], ids=str)
def test_where_no_region_fits_both_a_given_frame_is_left_and_the_video_merges(technique: Any) -> None:
    """The plan agrees. It needs the pipeline: the denoiser alone does not know that every token gets a time."""
    model = zoo.MODELS["wan2.2-ti2v-image"]
    pipe = model.build()
    height, width = model.sizes[0]
    (planned,) = tokenmerge.plan(pipe, technique, height=height, width=width, frames=model.frames).groups
    tokenmerge.apply(pipe, technique)
    zoo.draw(pipe, model, steps=2)
    (ran,) = tokenmerge.summary(pipe).groups
    assert (ran["grid"], ran["regions"]) == (planned.grid, planned.regions)
    assert ran["tokens"] == f"{planned.tokens} -> {planned.merged}"
    assert planned.tokens == 2 * 64
    assert 0 < planned.saved < planned.total
    (drawn,) = token_maps(pipe)
    assert drawn.grid == TokenGrid(8, 8, 2)
    assert drawn.owners.unique().shape[0] <= planned.merged
    assert drawn.owners.max() < 128


# Text


def test_text_of_two_lengths_in_one_step() -> None:
    """Qwen's two calls of a step have texts of different lengths, and their residuals must not mix."""
    pipe, _denoiser = built("qwen")
    model = zoo.MODELS["qwen"]
    tokenmerge.apply(pipe, HOLD)
    found = zoo.draw(pipe, model, steps=6, text=5, negative_text=9)
    assert tokenmerge.summary(pipe).steps == {"full": 3, "held": 3}
    assert found.isfinite().all()
    assert torch.equal(zoo.draw(pipe, model, steps=6, text=5, negative_text=9), found)


# Pipelines that call a denoiser of the contract in another way


def test_the_first_of_the_editing_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    # By default this pipeline draws pictures and scales references to a megapixel.
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (32, 32, None))
    model = zoo.MODELS["qwen-edit-plus"]
    pipe = zoo._pipeline("QwenImageEditPipeline", **zoo._qwen_parts())
    plain = zoo.draw(pipe, model)
    tokenmerge.apply(pipe, [Merge(), HOLD])
    merged = zoo.draw(pipe, model)
    assert merged.isfinite().all()
    assert not torch.equal(merged, plain)
    (group,) = tokenmerge.summary(pipe).groups
    assert (group["grid"], group["tokens"]) == ("8x8 + 4x4", "80 -> 40")
    tokenmerge.remove(pipe)
    assert torch.equal(zoo.draw(pipe, model), plain)


# Regions


@pytest.mark.parametrize("spec", ["tile:4x4", "tile:8x8"])
@pytest.mark.parametrize(
    "grids",
    [
        (TokenGrid(83, 83), TokenGrid(64, 64)),  # Qwen-Image-Edit
        (TokenGrid(30, 52, 3),),  # Wan at 480p
        (TokenGrid(45, 80, 2),),  # Wan at 720p
        (TokenGrid(30, 53, 2),),  # HunyuanVideo 1.5 at 480p
    ],
    ids=str,
)
def test_ragged_tiles_of_real_sizes_straddle_neither_images_nor_frames(spec: str, grids: tuple[TokenGrid, ...]) -> None:
    partition = partition_grids(grids, Merge(regions=spec))
    tokens, size = partition.layout.tokens, partition.layout.select_size
    order = torch.arange(tokens) if partition.order is None else partition.order
    areas = torch.tensor([grid.area for grid in partition.grids for _ in range(grid.frames)])
    frames = torch.repeat_interleave(torch.arange(len(areas)), areas)[order].view(-1, size)
    assert size > 1
    assert bool((frames == frames[:, :1]).all())


# Calls that cannot be merged, most of which can be held


def test_image_to_video_by_token_replacement_is_held_and_not_merged() -> None:
    transformer = zoo._hunyuanvideo(image_condition_type="token_replace", guidance_embeds=False).transformer
    with pytest.raises(TokenMergeError, match=r"counts the tokens of its first frame.*use Hold"):
        tokenmerge.apply(transformer, Merge())
    given = family_of(transformer).example(transformer, 1, 8, 8, 3)
    plain = calls(transformer, given, [1.0, 0.9])
    tokenmerge.apply(transformer, HOLD)
    found = calls(transformer, given, [1.0, 0.9])
    assert torch.equal(found[0], plain[0])
    assert tokenmerge.summary(transformer).steps == {"full": 1, "held": 1}


def uneven_text(given: dict[str, Any]) -> dict[str, Any]:
    mask = given["encoder_attention_mask"].clone()
    mask[1, 40:] = False
    return {"encoder_attention_mask": mask}


UNMERGEABLE = {
    # Both images have 64 tokens.
    "qwen": (lambda given: {"img_shapes": [[(1, 8, 8)], [(1, 4, 16)]]}, "batch have images of different sizes"),
    "zimage": (lambda given: {"x": [given["x"][0], given["x"][1][:, :, :8]]}, "batch have different sizes"),
    "zimage-turbo": (
        lambda given: {
            **{name: [given[name]] for name in ("x", "cap_feats")},
            **{"t": given["t"][:1], "siglip_feats": [None], "image_noise_mask": [[0, 1]]},
        },
        "with reference images mixes text between them",
    ),
    "lumina2": (uneven_text, "prompts of a batch have different lengths"),
}


@pytest.mark.parametrize("name", UNMERGEABLE)
def test_calls_that_cannot_be_merged_are_held(name: str) -> None:
    _, denoiser = built(name)
    changed, reason = UNMERGEABLE[name]
    given = family_of(denoiser).example(denoiser, 2, 16, 16)
    given |= changed(given)
    rises = name != "qwen"
    factors = [0.6, 0.7, 0.8, 0.9] if rises else [0.9, 0.8, 0.7, 0.6]
    plain = calls(denoiser, given, factors)
    tokenmerge.apply(denoiser, Merge())
    with pytest.raises(TokenMergeError, match=f"{reason}.*; use Hold"):
        calls(denoiser, given, factors)
    tokenmerge.apply(denoiser, HOLD)
    found = calls(denoiser, given, factors)
    assert tokenmerge.summary(denoiser).steps == {"full": 2, "held": 2}
    first, second = (torch.cat([each.flatten() for each in step]) for step in (plain[0], found[0]))
    assert torch.equal(first, second)


def test_conditions_of_ltx_lie_on_no_grid_and_are_held() -> None:
    model = zoo.MODELS["ltx"]
    parts = {name: part for name, part in model.build().components.items() if part is not None}
    parts["scheduler"] = zoo._flow()
    pipe = zoo._pipeline("LTXConditionPipeline", **parts)
    height, width = model.sizes[0]
    given = {"steps": 4, "image": zoo._picture(height, width, 0)}
    tokenmerge.apply(pipe, Merge())
    with pytest.raises(TokenMergeError, match=r"the 192 tokens of this call lie on no grid; use Hold"):
        zoo.draw(pipe, model, **given)
    tokenmerge.apply(pipe, HOLD)
    assert zoo.draw(pipe, model, **given).isfinite().all()
    assert tokenmerge.summary(pipe).steps == {"full": 3, "held": 1}


def test_calls_that_fill_a_cache_of_keys_and_values_are_not_merged() -> None:
    """FLUX.2 klein makes such calls for its reference images."""
    _, denoiser = built("flux2-klein")
    given = family_of(denoiser).example(denoiser, 1, 16, 16)
    tokenmerge.apply(denoiser, Merge())
    with pytest.raises(TokenMergeError, match="cache of keys and values"):
        denoiser(**given, kv_cache_mode="extract")


def test_what_a_controlnet_shares_with_its_denoiser_is_left_alone() -> None:
    """Z-Image's ControlNet runs the denoiser's noise refiner outside the denoiser's calls."""
    pipe, denoiser = built("zimage-controlnet")
    shared = {id(module) for module in pipe.controlnet.modules()} & {id(module) for module in denoiser.modules()}
    tokenmerge.apply(pipe, [Merge(), HOLD])
    zoo.draw(pipe, zoo.MODELS["zimage-controlnet"], steps=4)
    touched = {id(module) for module in denoiser.modules() if "forward" in vars(module)}
    assert touched
    assert not touched & shared
    assert {name.split(".")[0] for name, module in denoiser.named_modules() if "forward" in vars(module)} == {"layers"}


# Shapes of residuals


@pytest.mark.parametrize("name", ["wan2.1", "flux1-kontext"])
def test_all_blocks_in_a_row_have_one_residual(name: str) -> None:
    """A run keeps one residual. For Wan at 720p, one per block would take 0.8 GB each."""
    pipe, denoiser = built(name)
    tokenmerge.apply(pipe, HOLD)
    zoo.draw(pipe, zoo.MODELS[name], steps=4, guided=False)
    holding = vars(denoiser)["_tokenmerge"].holding
    kept = [each for part in holding._parts_by_size.values() for each in part.residuals.values() if each.nbytes]
    assert len(kept) == 1

"""Plans and summaries: a plan predicts what a picture will do and save at every size; a summary reports what ran."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tiny
import tokenmerge
import zoo
from denoisers import DENOISERS
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.planning import describe_steps
from traces import attributes, same

WAYS = {
    "merge": [Merge()],
    "components": [Merge(sites="component", components=("mlp",), start=0.2)],
    "hold": [Hold(every=3)],
    "both": [Merge(stop=0.7), Hold(every=3, start=0.4)],
}

LITTLE = "less than 15 %: Hold saves little. To save more, with more drift:"
HOLDS_MORE = "Hold(every=2, start=0), which holds more"
MERGES = ", which saves work in every step"
MERGE = f"Merge(ratio=0.5){MERGES}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_the_plan_tells_what_the_run_then_does(kind: str, way: str) -> None:
    pipe = tiny.build(kind)
    before = attributes(pipe)
    plan = tokenmerge.plan(pipe, WAYS[way], height=72, width=104, steps=8)
    assert same(before, attributes(pipe))
    tokenmerge.apply(pipe, WAYS[way])
    tiny.draw(pipe, size=(72, 104), steps=8)
    told = tokenmerge.summary(pipe)
    # Flux pipelines pass their own sigmas to the scheduler, which a plan does not know.
    assert told.steps == plan.steps or (kind == "flux" and plan.techniques.hold is not None)
    assert (told.plan.techniques, told.plan.sites, told.plan.runs) == (plan.techniques, plan.sites, plan.runs)
    ran = {group["group"]: group for group in told.groups}
    assert list(ran) == ([group.name for group in plan.groups] if plan.techniques.merge else [])
    for group in plan.groups if ran else ():
        assert ran[group.name]["sites"] == group.merges
        assert ran[group.name]["grid"] == group.grid
        assert ran[group.name]["tokens"] == f"{group.tokens} -> {group.merged}"
        assert ran[group.name]["regions"] == group.regions


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_what_is_saved_is_what_does_not_run(kind: str) -> None:
    """Held steps save a whole step, merged ones their share; together, each saves in its own steps."""
    pipe = tiny.build(kind)

    def plan(*techniques: Any) -> Any:
        return tokenmerge.plan(pipe, list(techniques), height=64, width=64, steps=20)

    merged, held, both = plan(Merge()), plan(Hold(every=3)), plan(Merge(), Hold(every=3))
    assert 0 < merged.spent < merged.saved < 1
    assert (held.saved, held.spent) == (held.steps["held"] / 20, 0.0)
    share = both.steps["merged"] / 20
    assert both.steps == {"merged": held.steps["full"], "held": held.steps["held"]}
    assert both.saved == pytest.approx(held.saved + share * merged.saved)
    # With fewer merged steps, a larger share of them makes maps.
    assert share * merged.spent < both.spent < merged.spent
    windowed = plan(Merge(start=0.25, stop=0.75))
    assert windowed.steps == {"full": 10, "merged": 10}
    assert windowed.saved == pytest.approx(merged.saved / 2)
    nothing = plan(Merge(ratio=0.0), Hold(every=1))
    assert (nothing.steps, nothing.saved, nothing.spent) == ({"full": 20}, 0.0, 0.0)


@pytest.mark.parametrize("hold", [[], [Hold(every=3)]], ids=["merge", "both"])
def test_a_plan_counts_the_maps_that_the_run_then_makes(hold: list[Hold]) -> None:
    """With Hold, fewer maps are made, but by a larger share of the merged steps."""
    pipe, steps = tiny.build("sdxl"), 20

    def spent(*every: int) -> float:
        """The cost of all merged steps."""
        merge = Merge(destinations_every=every[0], weights_every=every[1])
        return tokenmerge.plan(pipe, [merge, *hold], height=64, width=64, steps=steps).spent * steps

    merge = Merge(destinations_every=6, weights_every=3)
    tokenmerge.apply(pipe, [merge, *hold])
    tiny.draw(pipe, steps=steps)
    told = tokenmerge.summary(pipe)
    ((selected, weighed),) = {(group["selected"], group["weighed"]) for group in told.groups}
    merged = told.steps["merged"]
    assert selected * 6 > merged or not hold
    # The costs of one selection and one weighing, from plans that make them in every merged step or only once.
    weighing = (spent(steps, 1) - spent(steps, steps)) / (merged - 1)
    selection = (spent(1, 1) - spent(steps, 1)) / (merged - 1)
    rest = spent(1, 1) - merged * (selection + weighing)
    assert spent(6, 3) == pytest.approx(selected * selection + weighed * weighing + rest)


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_is_the_same_on_the_meta_device(way: str) -> None:
    unet = tiny.sdxl_unet()
    size = {"height": 64, "width": 64, "vae_scale_factor": 2}
    meta, real = (tokenmerge.plan(model, WAYS[way], **size) for model in (unet.to("meta"), tiny.sdxl_unet()))
    assert meta.to_dict() == real.to_dict()
    assert str(meta) == str(real)


def test_a_plan_in_words() -> None:
    techniques = [Merge(sites="component", components=("mlp",)), Hold(every=3)]
    told = str(tokenmerge.plan(tiny.build("sdxl"), techniques, height=64, width=104, steps=20)).splitlines()
    assert told[0] == (
        "UNet2DConditionModel (unet): toma at ratio 0.5, once per component, 11 of 33 sites; hold every 3, 7 stages"
    )
    assert told[2].split() == ["group", "blocks", "grid", "merged", "tokens", "regions", "saved", "spent"]
    assert told[4].split()[:7] == ["level-2", "3", "16x26", "3", "416", "->", "208"]
    assert "Of 20 steps: 10 merged, 10 held." in told
    assert any("this saves 51.2% and spends 1.3%." in line for line in told)
    assert told[-3:] == [
        "Not merged:",
        "  11 x self_attention is not in components",
        "  11 x cross_attention is not in components",
    ]
    merged = str(tokenmerge.plan(tiny.build("sd"), Merge(levels=(8,)), height=64, width=64, steps=1))
    assert "Of 1 step: 1 merged." in merged
    held = str(tokenmerge.plan(tiny.build("sdxl"), Hold(every=3), height=64, width=64))
    assert "spends" not in held
    assert "The other layers of the stages are held too, but not counted." in held
    slow = str(tokenmerge.plan(tiny.build("sdxl"), "toma", ratio=0.02, regions="whole", height=64, width=64))
    assert "slower than plain; raise the ratio" in slow


@pytest.mark.parametrize("way", WAYS)
def test_plans_and_summaries_are_plain_data(way: str) -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), WAYS[way])
    tiny.draw(pipe, steps=5)
    told = tokenmerge.summary(pipe)
    data = json.loads(json.dumps(told.to_dict(), allow_nan=False))
    assert data["steps"] == told.steps
    assert data["plan"]["techniques"] == told.plan.techniques.to_list()
    assert len(data["plan"]["sites"]) == len(told.plan.sites)
    assert sum(map(len, data["plan"]["runs"])) == (5 if "hold" in way or way == "both" else 0)
    assert (data["residual_bytes"] > 0) == (told.plan.techniques.hold is not None)
    # No size is given, so there are no costs.
    assert data["plan"]["groups"] == []


def test_a_summary_of_nothing() -> None:
    told = tokenmerge.summary(tiny.build("flux"))
    assert (told.plan, told.groups, told.steps, told.residual_bytes) == (None, (), {}, 0)
    assert str(told).startswith("No technique is applied.")


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ({"merged": 20}, "20 merged."),
        ({"full": 4, "merged": 6, "held": 10}, "4 full, 6 merged, 10 held."),
        ({"held": 2, "full": 3}, "3 full, 2 held."),
        ({"merged": 5, "skipped": 5}, "5 merged, 5 skipped by a cache."),
        ({"full": 4}, f"4 full: nothing was saved. To save more, with more drift: {HOLDS_MORE}, or {MERGE}."),
        (
            {"full": 1},
            "1 full: nothing was saved. To save more, with more drift: Hold(every=2, start=0) in at least 3 steps",
        ),
        ({"full": 4, "skipped": 4}, "4 full, 4 skipped by a cache: merging saved nothing."),
    ],
)
def test_steps_in_words(steps: dict[str, int], told: str) -> None:
    assert describe_steps(steps).startswith(f"Steps of the last image: {told}")


@pytest.mark.parametrize(
    ("steps", "hold", "told"),
    [
        ({"full": 18, "held": 2}, None, f"2 of 20 steps were held, {LITTLE} {HOLDS_MORE}, or {MERGE}."),
        ({"full": 17, "held": 3}, Hold(every=3), None),
        ({"merged": 2}, None, None),
        ({"merged": 2}, Hold(every=1), None),
        ({"merged": 3}, Hold(every=3), f"0 of 3 steps were held, {LITTLE} {HOLDS_MORE}, or a Merge with a higher"),
        (
            {"merged": 1},
            Hold(every=3),
            f"0 of 1 steps were held, {LITTLE} Hold(every=2, start=0) in at least 3 steps, or",
        ),
        ({"merged": 9, "held": 1}, Hold(every=3), f"1 of 10 steps were held, {LITTLE}"),
    ],
)
def test_steps_of_which_few_are_held_say_what_saves_more(
    steps: dict[str, int], hold: Hold | None, told: str | None
) -> None:
    _, _, rest = describe_steps(steps, hold).partition(". ")
    assert rest.startswith(told) if told else not rest


@pytest.mark.parametrize(("start", "little"), [(0.9, True), (0.2, False)])
def test_a_summary_says_where_holding_saves_little(start: float, little: bool) -> None:
    pipe = tokenmerge.apply(tiny.build("flux"), [Merge(), Hold(every=3, start=start)])
    tiny.draw(pipe, steps=4)
    assert (LITTLE in str(tokenmerge.summary(pipe))) == little


FEW_STEPS = [("flux2-klein", 4), ("zimage-turbo", 8), ("qwen", 4), ("qwen", 8), ("wan2.1", 4)]


@pytest.mark.parametrize(("name", "steps"), FEW_STEPS)
def test_models_of_few_steps_do_not_pretend(name: str, steps: int) -> None:
    """If and only if less than 15% of the steps are held, the summary says so and suggests what saves more."""
    model = zoo.MODELS[name]
    pipe = model.build()
    seen = set()
    # The last one starts too late to hold anything.
    for technique in (None, Hold(every=2, start=0.0), Hold(start=0.7), Hold(start=0.9)):
        tokenmerge.apply(pipe, technique)
        zoo.draw(pipe, model, steps=steps)
        summary = tokenmerge.summary(pipe)
        assert sum(summary.steps.values()) == steps
        little = summary.steps.get("held", 0) < 0.15 * steps
        preset = "video" if model.frames > 1 else "dit"
        merges = f'or apply(pipe, "{preset}"){MERGES}'
        assert (HOLDS_MORE in str(summary)) == (merges in str(summary)) == little
        seen.add(little)
    assert seen == {True, False}


def test_nobody_is_told_to_merge_what_cannot_be_merged() -> None:
    case = DENOISERS["SanaTransformer2DModel"]
    denoiser = case.build()
    tokenmerge.apply(denoiser)
    for step in range(4):
        case.call(denoiser, step)
    told = str(tokenmerge.summary(denoiser))
    assert HOLDS_MORE in told
    assert "erge" not in told.partition("To save more")[2]


def test_a_plan_takes_what_apply_does_on_grids_too_small_to_merge() -> None:
    """At 32 pixels the lowest level has one token. ToMeSD has nothing to match there and leaves it alone."""
    pipe = tiny.build("sd")
    tokenmerge.apply(pipe, "tomesd", levels=(1,))
    assert tiny.draw(pipe, size=(32, 32)).isfinite().all()
    ran = [(group["grid"], group["tokens"]) for group in tokenmerge.summary(pipe).groups]
    plan = tokenmerge.plan(pipe, "tomesd", levels=(1,), height=32, width=32)
    told = [(group.grid, f"{group.tokens} -> {group.merged}") for group in plan.groups]
    assert told == [*ran, ("4x4", "16 -> 16"), ("2x2", "4 -> 4"), ("1x1", "1 -> 1")]
    with pytest.raises(TokenMergeError, match="1x1 token grid has no 2x2 cell"):
        tokenmerge.plan(pipe, "tomesd", height=32, width=32)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("sdxl", {"height": 1, "width": 64}, "64x1 pixels are less than one 2-pixel latent"),
        ("flux", {"height": 2, "width": 64}, "64x2 pixels are less than one token of 4x4"),
        ("flux", {"height": 64, "width": 64, "steps": 0}, "steps is 0; it must be a whole number from 1"),
    ],
)
def test_sizes_and_steps_that_cannot_be_are_refused(kind: str, size: dict[str, int], message: str) -> None:
    with pytest.raises(TokenMergeError, match=message):
        tokenmerge.plan(tiny.build(kind), Merge(), **size)

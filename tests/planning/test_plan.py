"""Plans and summaries: a plan tells what the run then does, at every size, and what that saves; a summary what ran."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tiny
import tokenmerge
from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.planning import told_steps
from traces import attributes, same

WAYS = {
    "merge": [Merge()],
    "components": [Merge(sites="component", components=("mlp",), start=0.2)],
    "hold": [Hold()],
    "both": [Merge(stop=0.7), Hold(start=0.4)],
}


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
    assert told.steps == plan.steps
    assert (told.plan.techniques, told.plan.sites, told.plan.runs) == (plan.techniques, plan.sites, plan.runs)
    ran = {group["group"]: group for group in told.groups}
    assert list(ran) == ([group.name for group in plan.groups] if plan.techniques.merge else [])
    for group in plan.groups if ran else ():
        assert ran[group.name]["sites"] == group.merges
        assert ran[group.name]["grid"] == str(group.grid)
        assert ran[group.name]["tokens"] == f"{group.grid.count} -> {group.merged}"
        assert ran[group.name]["regions"] == group.regions


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_what_is_saved_is_what_does_not_run(kind: str) -> None:
    """Held steps save all of a step, merged ones their share; both together, each in its steps."""
    pipe = tiny.build(kind)

    def plan(*techniques: Any) -> Any:
        return tokenmerge.plan(pipe, list(techniques), height=64, width=64, steps=20)

    merged, held, both = plan(Merge()), plan(Hold()), plan(Merge(), Hold())
    assert 0 < merged.spent < merged.saved < 1
    assert (held.saved, held.spent) == (held.steps["held"] / 20, 0.0)
    share = both.steps["merged"] / 20
    assert both.steps == {"merged": held.steps["full"], "held": held.steps["held"]}
    assert both.saved == pytest.approx(held.saved + share * merged.saved)
    assert both.spent == pytest.approx(share * merged.spent)
    windowed = plan(Merge(start=0.25, stop=0.75))
    assert windowed.steps == {"full": 10, "merged": 10}
    assert windowed.saved == pytest.approx(merged.saved / 2)
    nothing = plan(Merge(ratio=0.0), Hold(every=1))
    assert (nothing.steps, nothing.saved, nothing.spent) == ({"full": 20}, 0.0, 0.0)


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_is_the_same_on_the_meta_device(way: str) -> None:
    unet = tiny.sdxl_unet()
    size = {"height": 64, "width": 64, "vae_scale_factor": 2}
    meta, real = (tokenmerge.plan(model, WAYS[way], **size) for model in (unet.to("meta"), tiny.sdxl_unet()))
    assert meta.to_dict() == real.to_dict()
    assert str(meta) == str(real)


def test_a_plan_in_words() -> None:
    techniques = [Merge(sites="component", components=("mlp",)), Hold()]
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
    held = str(tokenmerge.plan(tiny.build("sdxl"), Hold(), height=64, width=64))
    assert "spends" not in held
    assert "All other layers of the stages are held with them, and not counted." in held
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
    # Costs need a size.
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
        ({"full": 4}, "4 full: nothing was saved. For so few steps, at more drift: Hold(start=0), or a Merge that"),
        ({"full": 4, "skipped": 4}, "4 full, 4 skipped by a cache: merging saved nothing."),
    ],
)
def test_steps_in_words(steps: dict[str, int], told: str) -> None:
    assert told_steps(steps).startswith(f"Steps of the last image: {told}")


def test_a_plan_takes_what_apply_does_on_grids_too_small_to_merge() -> None:
    """The lowest level of 32 pixels has one token, in which ToMeSD has nothing to match, and is left alone."""
    pipe = tiny.build("sd")
    tokenmerge.apply(pipe, "tomesd", levels=(1,))
    assert tiny.draw(pipe, size=(32, 32)).isfinite().all()
    ran = [(group["grid"], group["tokens"]) for group in tokenmerge.summary(pipe).groups]
    plan = tokenmerge.plan(pipe, "tomesd", levels=(1,), height=32, width=32)
    told = [(str(group.grid), f"{group.grid.count} -> {group.merged}") for group in plan.groups]
    assert told == [*ran, ("4x4", "16 -> 16"), ("2x2", "4 -> 4"), ("1x1", "1 -> 1")]
    with pytest.raises(TokenMergeError, match="1x1 token grid has no 2x2 cell"):
        tokenmerge.plan(pipe, "tomesd", height=32, width=32)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("sdxl", {"height": 1, "width": 64}, "64x1 pixels are less than one 2-pixel latent"),
        ("flux", {"height": 2, "width": 64}, "64x2 pixels are less than one token of 4x4"),
        ("flux", {"height": 64, "width": 64, "steps": 0}, "steps is 0; a picture takes 1 step or more"),
    ],
)
def test_sizes_and_steps_that_cannot_be_are_refused(kind: str, size: dict[str, int], message: str) -> None:
    with pytest.raises(TokenMergeError, match=message):
        tokenmerge.plan(tiny.build(kind), Merge(), **size)

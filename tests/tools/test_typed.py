"""Techniques as people type them: parsing, refusals and sweeps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tokenmerge import Hold, Merge, TokenMergeError, presets
from tokenmerge.config import Techniques
from tokenmerge.tools.fields import parse_as, write_value
from tokenmerge.tools.typed import PLAIN, default_techniques, read_configurations, read_typed


@pytest.mark.parametrize(
    ("text", "techniques"),
    [
        ("none", Techniques()),
        ("hold", Techniques(hold=Hold())),
        ("  toma  ", Techniques(presets()["toma"])),
        ("hold:every=4", Techniques(hold=Hold(every=4))),
        # Both values must be read together: the window ends before the preset's own start.
        ("hold:stop=.1,start=0", Techniques(hold=Hold(start=0.0, stop=0.1))),
        ("unet:components=mlp,sites=component", Techniques(Merge(components=("mlp",), sites="component"))),
        ("unet:ratio=.25 + hold", Techniques(Merge(ratio=0.25), Hold())),
        ("hold + unet", Techniques(Merge(), Hold())),
        (
            "toma-tile:ratio=.5,components=self_attention,mlp,start=0.2 + hold:every=3 + mag",
            Techniques(presets()["toma-tile"].replace(components=("self_attention", "mlp"), start=0.2), Hold(every=3)),
        ),
        ("unet: levels=2,4 , skip_first=0.25", Techniques(Merge(levels=(2, 4), skip_first=0.25))),
        ("unet:skip_first=2", Techniques(Merge(skip_first=2))),
        ("toma:merge_regions=none", Techniques(presets()["toma"].replace(merge_regions=None))),
        ("none + first-block", Techniques()),
        ("hold:every=4 + dpm++:steps=8", Techniques(hold=Hold(every=4))),
        ("my own@dit + hold", Techniques(presets()["dit"], Hold())),
    ],
)
def test_what_is_typed_is_what_is_made(text: str, techniques: Techniques) -> None:
    made = read_typed(text).configuration
    assert made.techniques == techniques
    told = " ".join(rival.name for rival in made.rivals)
    assert told == next((each for each in ("dpm++", "mag", "first-block") if each in text), "")
    assert made.label == ("my own" if "@" in text else made.label)
    # A typed label makes the same configuration.
    again = read_typed(made.label if "@" not in text else text).configuration
    assert again.what == made.what


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_files_hold_one_technique_or_both(ending: str, tmp_path: Path) -> None:
    one, both = tmp_path / f"one.{ending}", tmp_path / f"both.{ending}"
    one.write_text(json.dumps(Merge(regions="whole").to_dict()))
    both.write_text(json.dumps(Techniques(Merge(), Hold()).to_list()))
    assert read_typed(f"{one}:ratio=0.25 + hold").configuration.techniques == Techniques(
        Merge(ratio=0.25, regions="whole"), Hold()
    )
    changed = read_typed(f"{both}:ratio=0.25,every=5").configuration
    assert changed.techniques == Techniques(Merge(ratio=0.25), Hold(every=5))
    with pytest.raises(TokenMergeError, match="both techniques in the file have a field start; change it in the file"):
        read_typed(f"{both}:start=0.5")
    with pytest.raises(TokenMergeError, match="Hold was given twice"):
        read_typed(f"{both} + hold")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a technique is empty; write it as in"),
        ("toma + ", "a technique is empty"),
        ("nothing", "'nothing' is unknown; use a preset (hold, unet,"),
        ("toma-tiles", "(did you mean 'toma-tile'?)"),
        ("hold + magg", "(did you mean 'mag'?)"),
        ("default", "'default' is unknown"),
        ("unet-anchored", "'unet-anchored' is unknown"),
        ("unet+hold", "put spaces around +"),
        ("+", "put quotes around what + joins"),
        ("toma:merge=pick", "'merge' is a field of tokenmerge 0.1; leave it out"),
        ("toma:hue=red", "Merge has no field 'hue'; fields are ratio, method"),
        ("toma:ratoi=0.5", "(did you mean 'ratio'?)"),
        ("hold:ratio=0.5", "Hold has no field 'ratio'; fields are tolerance, every, start"),
        ("toma:ratio=much", "ratio: 'much' is not a number, as in 0.5"),
        ("toma:ratio=2", "ratio is 2.0; it is the share"),
        ("toma:ratio=nan", "ratio is nan"),
        ("hold:every=2.5", "every: '2.5' is not a whole number, as in 3"),
        ("unet:levels=a,b", "levels: 'a,b' is not a list of whole numbers"),
        ("toma:ratio=0.5,ratio=0.6", "gives ratio twice"),
        ("toma + unet", "Merge was given twice"),
        ("none + hold", "combines with a step cache or schedule only"),
        ("none:ratio=0.5", "'none' is the plain model and has no fields"),
        ("mag", "the plain model beside it: 'none + mag'"),
        ("toma + mag + first-block", "two step caches, mag and first-block"),
        ("none + steps:count=3 + unipc:steps=4", "two schedules, steps:count=3 and unipc:steps=4"),
        ("none + mag + steps:count=3", "mag is calibrated on the plain schedule; leave out steps"),
        ("none + steps", "schedule 'steps' needs count; write it as in steps:count=14"),
        ("none + dpm++:steps=0", "schedule 'dpm++': steps is 0; it must be 1 or more"),
        ("none + cache-dit:taylorseer=yes", "taylorseer: 'yes' is not a whole number, as in 3"),
        ("unipc:steps=4", "the plain model beside it: 'none + unipc:steps=4'"),
        ("toma + mag:treshold=1", "(did you mean 'threshold'?)"),
        ("absent.yaml", "does not exist"),
    ],
)
def test_what_cannot_be_is_told_with_what_was_typed(text: str, words: str) -> None:
    with pytest.raises(TokenMergeError) as caught:
        read_typed(text)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"technique {text.strip()!r}: ")


@pytest.mark.parametrize("technique", [Merge(), Hold(), *presets().values()])
def test_every_field_is_typed_as_it_is_written(technique: Merge | Hold) -> None:
    head = "hold" if isinstance(technique, Hold) else "unet"
    typed = ",".join(f"{name}={write_value(getattr(technique, name))}" for name in technique.field_docs())
    assert next(each for each in read_typed(f"{head}:{typed}").configuration.techniques if each) == technique


def test_a_configuration_has_a_name_a_folder_and_a_series() -> None:
    typed = [
        "toma:ratio=0.25,regions=tile:8x8,components=self_attention,mlp",
        "mine@toma:regions=whole",
        "hold:every=2",
        "hold:every=5",
        "dit:ratio=0.5 + hold:every=3",
        "dit:ratio=0.75 + hold:every=3",
        "none + first-block:threshold=0.1",
        f"{'long' * 99}@pool",
    ]
    made = read_configurations(typed)
    assert [item.label for item in made] == [PLAIN, *typed[:1], "mine", *typed[2:7], "long" * 99]
    assert [item.series for item in made[1:8]] == [
        "toma:regions=tile:8x8,components=self_attention,mlp",
        "mine",
        *["hold"] * 2,
        *["dit + hold"] * 2,
        "none + first-block",
    ]
    assert [item.knobs for item in made[:8]] == [
        {},
        {"ratio": 0.25},
        {"ratio": 0.5},
        {"every": 2},
        {"every": 5},
        {"ratio": 0.5, "every": 3},
        {"ratio": 0.75, "every": 3},
        {"threshold": 0.1},
    ]
    assert [item.is_plain for item in made] == [True] + [False] * 8
    assert len({item.folder for item in made}) == len(made)
    assert all(re.fullmatch(r"[\w.=+-]{1,119}", item.folder) for item in made)


def test_ratios_are_for_what_merges_and_gives_none() -> None:
    typed = [
        "toma:regions=whole + first-block:threshold=0.1",
        "mine@dit + hold",
        "unet:ratio=0.1",
        "hold",
        "none + mag",
    ]
    made = read_configurations(["none", *typed], (0.25, 0.75))
    assert [item.label for item in made] == [
        PLAIN,
        "toma:regions=whole,ratio=0.25 + first-block:threshold=0.1",
        "toma:regions=whole,ratio=0.75 + first-block:threshold=0.1",
        "mine:ratio=0.25",
        "mine:ratio=0.75",
        "unet:ratio=0.1",
        "hold",
        "none + mag",
    ]
    assert [item.knobs.get("ratio") for item in made] == [None, 0.25, 0.75, 0.25, 0.75, 0.1, None, None]
    assert made[3].series == made[4].series == "mine"


@pytest.mark.parametrize("typed", [["hold"], ["none"], ["none + mag", "hold:every=5"], ["toma:ratio=0.5"]])
def test_ratios_that_nothing_takes_are_refused(typed: list[str]) -> None:
    with pytest.raises(TokenMergeError, match="--ratios is for techniques that merge without a typed ratio"):
        read_configurations(typed, (0.5,))


@pytest.mark.parametrize(
    "typed",
    [
        ["toma", "toma"],
        ["toma:ratio=0.5", "toma"],
        ["none + mag", "other@none + mag:threshold=0.06"],
        ["a b@toma", "a_b@unet"],
        ["unet + hold", "hold + unet"],
    ],
)
def test_nothing_is_made_twice(typed: list[str]) -> None:
    with pytest.raises(TokenMergeError, match="are the same; leave one out"):
        read_configurations(typed)


def test_a_default_can_be_typed() -> None:
    from tokenmerge.families import families

    for family in families():
        made = read_configurations(default_techniques(family))
        assert [(item.techniques.merge is not None, item.techniques.hold is not None) for item in made] == [
            (False, False),
            (True, False),
            (False, True),
            (True, True),
        ]


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int | None, "none", None),
        (tuple[int, ...], "1, 2", (1, 2)),
        (int | float, "3", 3),
        (int | float, "3.0", 3.0),
        (bool, "true", True),
        (str | None, "whole", "whole"),
    ],
)
def test_values_are_of_their_type(hint: object, text: str, value: object) -> None:
    parsed = parse_as(hint)(text)
    assert (parsed, type(parsed)) == (value, type(value))

"""Merge and Hold: documented by field, validated once, frozen, and told apart in plain data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from inspect import cleandoc
from typing import Any

import numpy as np
import pytest

from tokenmerge import Hold, Merge, TokenMergeError
from tokenmerge.config import LARGEST_SEED, TECHNIQUES, TOLERANCE, Regions, Techniques
from tokenmerge.errors import did_you_mean, first_line

CLASSES = [Merge, Hold]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_a_sentence_and_nothing_else_has(cls: type[Merge] | type[Hold]) -> None:
    docs = cls.field_docs()
    assert list(docs) == [item.name for item in fields(cls)]
    for name, sentence in docs.items():
        assert len(sentence.split()) >= 3, f"{name} is not explained"
        assert "  " not in sentence
        assert "\n" not in sentence


@pytest.mark.parametrize("cls", CLASSES)
def test_docs_may_have_lost_their_indentation(cls: type[Merge] | type[Hold], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python strips it from 3.13 on."""
    docs = cls.field_docs()
    monkeypatch.setattr(cls, "__doc__", cleandoc(cls.__doc__ or ""))
    assert cls.field_docs() == docs


def test_a_sentence_of_two_lines_is_one() -> None:
    assert Hold.field_docs()["what"].endswith("blocks of UNets and the prediction of other models")


@pytest.mark.parametrize("cls", CLASSES)
def test_every_default_of_a_choice_is_named_in_its_sentence(cls: type[Merge] | type[Hold]) -> None:
    for item in fields(cls):
        if isinstance(item.default, str) and item.name != "regions":
            assert item.default in cls.field_docs()[item.name]


REFUSED: list[tuple[type[Merge] | type[Hold], str, object]] = [
    (Merge, "ratio", 1.0),
    (Merge, "ratio", -0.1),
    (Merge, "ratio", "half"),
    (Merge, "ratio", True),
    (Merge, "ratio", None),
    (Merge, "method", "magic"),
    (Merge, "method", "hold"),
    (Merge, "method", "none"),
    (Merge, "regions", "hexagons"),
    (Merge, "regions", 4),
    (Merge, "merge_regions", "tile:0"),
    (Merge, "selection", "best"),
    (Merge, "similarity", "euclid"),
    (Merge, "temperature", 0.0),
    (Merge, "temperature", math.inf),
    (Merge, "unmerge", "inverse"),
    (Merge, "sites", "span"),
    (Merge, "components", "mlp"),
    (Merge, "levels", (0,)),
    (Merge, "levels", (2.0,)),
    (Merge, "levels", (True,)),
    (Merge, "levels", 2),
    (Merge, "skip_first", -1),
    (Merge, "skip_last", 1.5),
    (Merge, "destinations_every", 0),
    (Merge, "weights_every", 0),
    (Merge, "weights_every", 2.5),
    (Merge, "weights_every", 10**400),
    (Merge, "start", 1.0),
    (Merge, "stop", 1.5),
    (Merge, "seed", 0.5),
    (Merge, "seed", -1),
    (Merge, "seed", 2**70),
    (Merge, "seed", LARGEST_SEED + 1),
    (Merge, "backend", "cuda"),
    (Hold, "every", 0),
    (Hold, "every", 2.5),
    (Hold, "every", True),
    (Hold, "every", 10**400),
    (Hold, "start", -0.1),
    (Hold, "stop", 0.0),
    (Hold, "what", "block"),
    (Hold, "tolerance", 0.0),
    (Hold, "tolerance", -0.1),
    (Hold, "tolerance", math.nan),
    (Hold, "tolerance", math.inf),
    (Hold, "tolerance", "small"),
    (Hold, "tolerance", True),
]


@pytest.mark.parametrize(("cls", "field", "value"), REFUSED, ids=lambda value: str(getattr(value, "NAME", value)))
def test_what_cannot_be_is_refused_by_name(cls: type[Merge] | type[Hold], field: str, value: object) -> None:
    with pytest.raises(TokenMergeError, match=f"{field}|window") as caught:
        cls(**{field: value})
    assert str(value) in str(caught.value), "the fact is missing"


@pytest.mark.parametrize(
    ("cls", "fields", "way_out"),
    [
        (Merge, {"ratio": 1.0}, r"must be in \[0, 1\), for example 0.5"),
        (Merge, {"ratio": "half"}, "it must be a number"),
        (Merge, {"regions": "tiles"}, "write 'whole', 'tile', 'stripe'"),
        (Merge, {"regions": "tile:0"}, "start at 1"),
        (Merge, {"regions": "stripe:4x4"}, "only 'tile' takes a shape; write 'stripe:4'"),
        (Merge, {"merge_regions": "whole:3"}, "takes no number"),
        (Merge, {"method": "tome"}, "choose from toma"),
        (Merge, {"temperature": 0.0}, "positive"),
        (Merge, {"start": 0.8, "stop": 0.2}, "0 <= start < stop <= 1"),
        (Hold, {"start": 0.8, "stop": 0.2}, "0 <= start < stop <= 1"),
        (Hold, {"every": 0}, "from 1"),
        (Merge, {"sites": "span"}, "choose from component, block"),
        (Merge, {"components": ("mlp",)}, r"components is \('mlp',\), which only applies with sites='component'"),
    ],
    ids=str,
)
def test_a_refusal_names_the_way_out(cls: type[Merge] | type[Hold], fields: dict[str, Any], way_out: str) -> None:
    with pytest.raises(TokenMergeError, match=way_out):
        cls(**fields)


NUMBERS = [(cls, item.name) for cls in CLASSES for item in fields(cls) if type(item.default) in (int, float)]


@pytest.mark.parametrize(("cls", "field"), NUMBERS, ids=lambda value: str(getattr(value, "NAME", value)))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_may_be_nan_or_infinite(cls: type[Merge] | type[Hold], field: str, value: float) -> None:
    with pytest.raises(TokenMergeError, match=f"{field}|window"):
        cls(**{field: value})


@pytest.mark.parametrize("seed", [0, LARGEST_SEED])
def test_every_seed_in_range_seeds_a_generator(seed: int) -> None:
    import torch

    # Each group adds its own number to the seed.
    for number in range(8):
        torch.Generator().manual_seed(Merge(seed=seed).seed + number)


def test_components_must_be_some_and_known() -> None:
    with pytest.raises(TokenMergeError, match="components is empty"):
        Merge(sites="component", components=())
    with pytest.raises(TokenMergeError, match=r"components is \('mlp', 'mlp'\), which repeats a name"):
        Merge(sites="component", components=("mlp", "mlp"))
    with pytest.raises(TokenMergeError, match="components is 'attention'"):
        Merge(sites="component", components=("mlp", "attention"))


@pytest.mark.parametrize("make", [lambda cls, **values: cls(**values), lambda cls, **values: cls().replace(**values)])
@pytest.mark.parametrize("cls", CLASSES)
def test_unknown_fields_are_type_errors(cls: type[Merge] | type[Hold], make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="everything"):
        make(cls, everything=0.5)


def test_a_near_name_is_proposed() -> None:
    with pytest.raises(TypeError, match=r"Merge has no field 'ratoi' \(did you mean 'ratio'\?\); fields are ratio"):
        Merge().replace(ratoi=0.5)
    with pytest.raises(TokenMergeError, match="did you mean 'toma'"):
        Merge(method="tomma")


def test_numbers_of_numpy_are_numbers() -> None:
    merge = Merge(ratio=np.float32(0.25), seed=np.int64(3), skip_first=np.int64(1), stop=1, levels=[np.int64(2), 4])
    assert merge == Merge(ratio=0.25, seed=3, skip_first=1, levels=(2, 4))
    assert [type(level) for level in merge.levels or ()] == [int, int]
    assert {type(value) for value in (merge.ratio, merge.stop)} == {float}
    assert type(Hold(every=np.int64(4)).every) is int


@pytest.mark.parametrize("cls", CLASSES)
def test_a_technique_is_frozen_and_hashable(cls: type[Merge] | type[Hold]) -> None:
    with pytest.raises(FrozenInstanceError):
        cls().start = 0.1  # type: ignore[misc]
    assert len({cls(), cls(), cls(start=0.5)}) == 2


def test_replace_changes_a_copy() -> None:
    merge = Merge()
    assert merge.replace(ratio=0.25, stop=0.9) == Merge(ratio=0.25, stop=0.9)
    assert merge == Merge()
    with pytest.raises(TokenMergeError, match="ratio"):
        merge.replace(ratio=2.0)


@pytest.mark.parametrize("cls", CLASSES)
def test_plain_data_says_which_technique_it_is(cls: type[Merge] | type[Hold]) -> None:
    data = cls().to_dict()
    assert list(data) == ["technique", *cls.field_docs()]
    assert TECHNIQUES[data.pop("technique")] is cls
    assert cls(**data) == cls()
    assert not any(isinstance(value, tuple) for value in data.values())


@pytest.mark.parametrize(("window", "windowed"), [((0.0, 1.0), False), ((0.1, 1.0), True), ((0.0, 0.9), True)])
def test_a_window_leaves_steps_out_unless_it_is_all(window: tuple[float, float], windowed: bool) -> None:
    for cls in CLASSES:
        assert cls(start=window[0], stop=window[1]).windowed == windowed


def test_techniques_are_one_of_each_in_any_order() -> None:
    merge, hold = Merge(ratio=0.25), Hold(every=2)
    assert Techniques.of(hold, merge) == Techniques.of(merge, hold) == Techniques(merge, hold)
    assert Techniques.of(hold) == (None, hold)
    assert Techniques.of() == Techniques()
    assert Techniques(merge, hold).to_list() == [merge.to_dict(), hold.to_dict()]
    assert Techniques().to_list() == []
    for twice in (merge, hold):
        with pytest.raises(TokenMergeError, match=f"{type(twice).__name__} was given twice"):
            Techniques.of(twice, twice)


@pytest.mark.parametrize(
    ("text", "told"),
    [("whole", "whole"), ("tile", "tile:64"), (" stripe:8 ", "stripe:8"), ("tile:8x4", "tile:8x4")],
)
def test_regions_are_written_one_way(text: str, told: str) -> None:
    assert str(Regions.parse(text)) == told
    assert Regions.parse(told) == Regions.parse(text)
    assert Merge(regions=text) == Merge(regions=told)


@pytest.mark.parametrize("text", ["tiles", "tile:", "tile:0", "whole:2", "stripe:2x2", "tile:8x0", "8x8", ""])
def test_regions_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(TokenMergeError, match="regions"):
        Regions.parse(text)
    with pytest.raises(TokenMergeError, match="merge_regions"):
        Merge(merge_regions=text)


@pytest.mark.parametrize(("error", "line"), [(OSError(), "OSError"), (ValueError("one\ntwo"), "one")])
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_only_near_names_are_proposed() -> None:
    assert did_you_mean("raito", ["ratio", "regions"]) == " (did you mean 'ratio'?)"
    assert did_you_mean(5, ["ratio"]) == ""


def test_hold_goes_by_a_tolerance_or_by_a_distance() -> None:
    assert Hold() == Hold(tolerance=TOLERANCE)
    assert Hold(every=3).tolerance is None
    with pytest.raises(TokenMergeError, match=r"tolerance is 0.1 and every is 3; .* give one"):
        Hold(tolerance=0.1, every=3)
    assert Hold().replace(every=3) == Hold(every=3)
    assert Hold(every=3, start=0.5).replace(tolerance=0.1) == Hold(tolerance=0.1, start=0.5)
    assert Hold(every=3).replace(start=0.5) == Hold(every=3, start=0.5)
    assert [Hold(every=1).acts, Hold(every=2).acts, Hold().acts] == [False, True, True]

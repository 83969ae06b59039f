"""Presets by name and from files, and how fields and files of version 0.1 are read or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given, settings

from tokenmerge import Hold, Merge, TokenMergeError, presets
from tokenmerge.config import (
    BACKENDS,
    COMPONENTS,
    HELD,
    LARGEST_SEED,
    METHODS,
    SELECTIONS,
    SIMILARITIES,
    UNMERGES,
    Techniques,
)
from tokenmerge.presets import RECOMMENDED, from_data, new_form, preset, read_file, resolve

starts, stops = st.floats(0, 0.4), st.floats(0.5, 1)
subsets = st.sets(st.sampled_from(COMPONENTS), min_size=1).map(tuple)
skips = st.integers(0, 5) | st.floats(0, 0.9)
sites = st.one_of(
    st.fixed_dictionaries({"sites": st.just("component"), "components": subsets}),
    st.just({"sites": "block", "components": COMPONENTS}),
)
merges = st.builds(
    lambda sites, **fields: Merge(**sites, **fields),
    sites=sites,
    ratio=st.floats(0, 0.99),
    method=st.sampled_from(METHODS),
    regions=st.sampled_from(("whole", "tile", "stripe:3", "tile:8x4")),
    merge_regions=st.sampled_from((None, "whole", "tile:2")),
    selection=st.sampled_from(SELECTIONS),
    similarity=st.sampled_from(SIMILARITIES),
    temperature=st.floats(1e-6, 10),
    unmerge=st.sampled_from(UNMERGES),
    levels=st.none() | st.lists(st.sampled_from((1, 2, 4)), min_size=1).map(tuple),
    skip_first=skips,
    skip_last=skips,
    destinations_every=st.integers(1, 50),
    weights_every=st.integers(1, 50),
    start=starts,
    stop=stops,
    seed=st.integers(0, LARGEST_SEED),
    backend=st.sampled_from(BACKENDS),
)
window = {"start": starts, "stop": stops, "what": st.sampled_from(HELD)}
holds = st.builds(Hold, every=st.integers(1, 50), **window) | st.builds(Hold, tolerance=st.floats(1e-6, 10), **window)


@settings(max_examples=100, deadline=None)
@given(merge=merges, hold=holds)
def test_techniques_survive_json_and_yaml(merge: Merge, hold: Hold) -> None:
    for techniques in (Techniques.of(merge), Techniques.of(hold), Techniques(merge, hold)):
        data = techniques.to_list()
        assert from_data(data) == techniques
        assert from_data(json.loads(json.dumps(data))) == techniques
        assert from_data(yaml.safe_load(yaml.safe_dump(data))) == techniques
    assert from_data(merge.to_dict()) == Techniques.of(merge)


def test_presets_are_named_once_and_cannot_be_changed() -> None:
    assert presets()["none"] == Merge(ratio=0.0)
    assert presets()[RECOMMENDED] == Hold()
    taken = presets()
    taken.clear()
    assert list(presets()) == [
        *("hold", "unet", "dit", "video", "toma", "toma-once", "toma-stripe", "toma-tile", "lower-bound"),
        *("tomesd", "tofu", "todo", "pool", "random", "uniform", "none"),
    ]
    assert {merge.method for merge in presets().values() if isinstance(merge, Merge)} == set(METHODS)


def test_the_papers_variants_differ_as_it_says() -> None:
    toma = preset("toma")
    assert (toma.ratio, toma.sites, toma.selection) == (0.5, "component", "facility-location")
    assert (toma.regions, toma.merge_regions) == ("stripe:256", "whole")
    assert preset("toma-once") == toma.replace(sites="block")
    assert preset("toma-stripe") == toma.replace(regions="stripe:64", merge_regions=None)
    assert preset("toma-tile") == toma.replace(regions="tile:64", merge_regions=None)
    assert preset("lower-bound") == preset("toma-tile").replace(method="lower-bound")


# What `apply` accepts

MERGE, HOLD = Merge(ratio=0.25), Hold(every=2)


@pytest.mark.parametrize(
    ("technique", "fields", "expected"),
    [
        (None, {}, Techniques(hold=Hold())),
        (MERGE, {}, Techniques(MERGE)),
        (HOLD, {}, Techniques(hold=HOLD)),
        ([HOLD, MERGE], {}, Techniques(MERGE, HOLD)),
        ((MERGE, HOLD), {}, Techniques(MERGE, HOLD)),
        ([MERGE], {}, Techniques(MERGE)),
        ("toma", {}, Techniques(presets()["toma"])),
        ("toma", {"ratio": 0.25, "stop": 0.5}, Techniques(presets()["toma"].replace(ratio=0.25, stop=0.5))),
        ("hold", {"every": 2}, Techniques(hold=HOLD)),
        ("none", {}, Techniques(Merge(ratio=0.0))),
    ],
    ids=str,
)
def test_what_a_technique_is_asked_for_by(technique: Any, fields: dict[str, Any], expected: Techniques) -> None:
    assert resolve(technique, fields) == expected


@pytest.mark.parametrize(
    "techniques", [Techniques(), Techniques(MERGE), Techniques(hold=HOLD), Techniques(MERGE, HOLD)]
)
def test_what_was_resolved_resolves_to_itself(techniques: Techniques) -> None:
    assert resolve(techniques, {}) == techniques


def test_a_file_is_told_by_its_ending(tmp_path: Path) -> None:
    both = Techniques(MERGE, HOLD)
    for name, text in (
        ("both.json", json.dumps(both.to_list())),
        ("both.yaml", yaml.safe_dump(both.to_list())),
        ("both.yml", yaml.safe_dump(both.to_list())),
    ):
        path = tmp_path / name
        path.write_text(text)
        assert resolve(path, {}) == resolve(str(path), {}) == read_file(path) == both
    (tmp_path / "one.yaml").write_text("technique: hold\nevery: 2\n")
    assert resolve(tmp_path / "one.yaml", {}) == Techniques(hold=HOLD)
    with pytest.raises(TokenMergeError, match=r"other\.yaml' does not exist"):
        resolve(tmp_path / "other.yaml", {})
    with pytest.raises(TokenMergeError, match="does not exist"):
        resolve(tmp_path / "toma", {})


@pytest.mark.parametrize(
    ("technique", "fields", "words"),
    [
        (None, {"ratio": 0.5}, ["apply(pipe, Merge(ratio=0.5))", "apply(pipe, 'toma', ratio=0.5)"]),
        (None, {"seed": 0}, ["apply(pipe, Merge(seed=0))"]),
        (None, {"every": 4}, ["apply(pipe, Hold(every=4))", "apply(pipe, 'hold', every=4)"]),
        (None, {"start": 0.1, "every": 4}, ["apply(pipe, Hold(start=0.1, every=4))"]),
        (None, {"start": 0.1}, ["need a technique", "apply(pipe, Merge(start=0.1))"]),
        (None, {"raito": 0.5}, ["'raito' (did you mean 'ratio'?)"]),
        (None, {"evry": 2}, ["neither Merge nor Hold has a field 'evry' (did you mean 'every'?); fields are ratio, "]),
        (None, {"anchor_every": 2}, ["'anchor_every' is a field of tokenmerge 0.1; write Hold(every=...)"]),
        (None, {"ratio": 0.5, "every": 3}, ["apply(pipe, [Merge(ratio=0.5), Hold(every=3)])"]),
        (HOLD, {"start": 0.5}, ["Hold(start=0.5)"]),
        (MERGE, {"ratio": 0.5}, ["existing technique", "Merge(ratio=0.5)"]),
        (HOLD, {"every": 3}, ["existing technique", "Hold(every=3)"]),
        ([MERGE, HOLD], {"ratio": 0.5}, ["existing technique"]),
        ("mine.json", {"ratio": 0.5}, ["cannot be combined with a file"]),
        (Path("mine.yaml"), {"ratio": 0.5}, ["cannot be combined with a file"]),
        ("toma", {"every": 3}, ["Merge has no field 'every'"]),
        ("hold", {"ratio": 0.5}, ["Hold has no field 'ratio'"]),
    ],
    ids=str,
)
def test_fields_go_with_the_name_of_a_preset_only(technique: Any, fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        resolve(technique, fields)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("technique", "words"),
    [
        (Merge, ["technique is the class Merge;", "give a Merge, a Hold"]),
        (0.5, ["technique is of type float;"]),
        ({"technique": "merge"}, ["technique is of type dict;"]),
        (["toma", HOLD], ["technique is of type str;"]),
        ([MERGE, None], ["technique is of type NoneType;"]),
        (b"hold", ["technique is of type bytes;"]),
    ],
)
def test_what_is_no_technique_is_a_type_error(technique: Any, words: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        resolve(technique, {})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("technique", "message"),
    [
        ([], "empty; give a Merge, a Hold or one of each, or call remove"),
        ([MERGE, MERGE], "Merge was given twice"),
        ("toma-tiles", r"'toma-tiles' is unknown \(did you mean 'toma-tile'\?\); use one of hold, unet"),
        ("default", "'default' belongs to tokenmerge 0.1; use 'hold', or 'unet' or 'dit' with a ratio"),
        ("unet-hold", "'unet-hold' belongs to tokenmerge 0.1; use 'hold'"),
        ("ToMA", r"'ToMA' is unknown \(did you mean 'toma'\?\)"),
        ("toma:ratio=.5", "the notation of the command line; in Python, give fields by name"),
        ("toma + hold", r"both techniques as a list, as in \[Merge"),
        ("NONE.YAML", r"technique file 'NONE\.YAML' does not exist"),
        ("", "'' is unknown"),
    ],
)
def test_requests_that_cannot_be_met(technique: Any, message: str) -> None:
    with pytest.raises(TokenMergeError, match=message):
        resolve(technique, {})


# Invalid files

EXAMPLE = '{"technique": "merge", "ratio": 0.5}'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{bad", ("line 1, column 2",)),
        ("a.json", '{\n  "ratio": 0.5,\n  "regions" "whole"\n}', ("line 3, column 13",)),
        ("a.json", "", ("line 1, column 1",)),
        ("a.json", '{"technique": "hold", "every": ' + 5000 * "9" + "}", ("not valid JSON", "write shorter numbers")),
        ("a.json", "[0.5]", ("of type float", EXAMPLE)),
        ("a.json", "[]", ("the list of techniques is empty", EXAMPLE)),
        ("a.json", '"toma"', ("of type str", EXAMPLE)),
        ("a.json", "null", ("found nothing", EXAMPLE)),
        ("a.json", '{"technique": "merge", "ratio": 2}', ("ratio is 2",)),
        ("a.json", '{"technique": "merge", "ratio": NaN}', ("ratio is nan",)),
        ("a.json", '{"ratio": 0.75}', ("tokenmerge 0.1", '{"technique": "merge", "ratio": 0.75}')),
        (
            "a.json",
            '{"method": "toma", "coverage": 0.9}',
            ('{"technique": "merge"}', "coverage is gone: give a fixed ratio"),
        ),
        ("a.json", '{"title": 1}', ("technique is None", "merge, hold", EXAMPLE)),
        ("a.json", '{"technique": "blend"}', ("technique is 'blend'", "merge, hold")),
        ("a.json", '{"technique": ["merge"]}', ("technique is ['merge']", "merge, hold")),
        ("a.json", '{"technique": "merge", "every": 2}', ("Merge has no field 'every'",)),
        ("a.json", '[{"technique": "hold"}, {"technique": "hold"}]', ("Hold was given twice",)),
        ("a.yaml", "ratio: 0.5\nregions: {tile", ("line 2, column",)),
        ("a.yaml", "ratio: 0.5\nregions: [", ("line 2, column",)),
        ("a.yaml", "ratio: 0.5\n\tregions: whole", ("line 2, column 1",)),
        ("a.yaml", "ratio: !!python/name:os.system", ("line 1, column 8",)),
        ("a.yaml", "ratio: 0.5\x00", ("position 10",)),
        ("a.yaml", "ratio: 2026-13-45", ("month",)),
        ("a.yml", "- technique: merge\n- 3", ("of type int",)),
        ("a.yaml", "toma", ("of type str",)),
        ("a.yaml", "", ("found nothing",)),
        ("a.yaml", "technique: merge\n1: 2", ("no field '1'",)),
        ("a.yaml", "technique: merge\nratoi: 0.5", ("no field 'ratoi' (did you mean 'ratio'?)",)),
        (
            "a.yaml",
            "technique: hold\nschedule: 5",
            ("'schedule' is a field of tokenmerge 0.1; give destinations_every",),
        ),
        ("a.yaml", "ratio: é".encode("latin-1"), ("UTF-8",)),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, name: str, content: str | bytes, words: tuple[str, ...]) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TokenMergeError) as caught:
        resolve(tmp_path / name, {})
    assert all(word in str(caught.value) for word in (*words, str(tmp_path / name))), str(caught.value)


# Files of version 0.1

OLD: dict[str, tuple[dict[str, Any], Any]] = {
    "merging": (
        {"ratio": 0.25, "regions": "tile:8x8", "schedule": {"weights_every": 2, "stop": 0.9}, "gap_dtype": None},
        {"technique": "merge", "ratio": 0.25, "regions": "tile:8x8", "weights_every": 2, "stop": 0.9},
    ),
    "held blocks": (
        {"method": "hold", "ratio": 1.0, "sites": "block", "schedule": {"anchor_every": 4, "start": 0.1}},
        {"technique": "hold", "every": 4, "start": 0.1, "what": "blocks"},
    ),
    "held stages": (
        {"method": "hold", "sites": "stage", "gap": "sigma", "schedule": {"anchor_every": 3}},
        {"technique": "hold", "every": 3, "start": 0.0, "what": "stages"},
    ),
    "anchored": (
        {"ratio": 0.75, "trust": 0.5, "gap": "linear", "schedule": {"anchor_every": 5, "start": 0.2}},
        [
            {"technique": "merge", "ratio": 0.75, "start": 0.2},
            {"technique": "hold", "every": 5, "start": 0.2},
        ],
    ),
    "spans": ({"sites": "span", "span": 2, "components": ["mlp"], "coverage": 0.9}, {"technique": "merge"}),
    "components": (
        {"sites": "component", "components": ["mlp"], "schedule": None},
        {"technique": "merge", "sites": "component", "components": ["mlp"]},
    ),
    "no schedule": ({"components": list(COMPONENTS), "schedule": 5}, {"technique": "merge"}),
    "none": ({"method": "none", "ratio": 0.5, "schedule": {}}, {"technique": "merge", "ratio": 0.0}),
}


@pytest.mark.parametrize(("old", "new"), OLD.values(), ids=OLD)
def test_an_old_file_is_shown_its_new_form(tmp_path: Path, old: dict[str, Any], new: Any) -> None:
    assert new_form(old) == new
    from_data(new)
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    with pytest.raises(TokenMergeError, match=r"config of tokenmerge 0\.1") as caught:
        resolve(path, {})
    assert json.dumps(new) in str(caught.value)

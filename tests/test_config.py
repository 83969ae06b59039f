"""MergeConfig: validated once, frozen, and the same after a round trip."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from tokenmerge import MergeConfig, Schedule, TokenMergeError, presets
from tokenmerge.presets import Defaults, default_preset, load_preset
from tokenmerge.config import (
    BACKENDS,
    COMPONENTS,
    METHODS,
    SELECTIONS,
    SIMILARITIES,
    SITES,
    UNMERGES,
    first_line,
)

configs = st.builds(
    MergeConfig,
    ratio=st.floats(0, 0.99),
    method=st.sampled_from([method for method in METHODS if method != "hold"]),
    regions=st.sampled_from(("whole", "tile", "stripe:3", "tile:8x4")),
    merge_regions=st.sampled_from((None, "whole", "tile:2")),
    selection=st.sampled_from(SELECTIONS),
    similarity=st.sampled_from(SIMILARITIES),
    temperature=st.floats(1e-6, 10),
    unmerge=st.sampled_from(UNMERGES),
    sites=st.sampled_from([sites for sites in SITES if sites != "stage"]),
    span=st.integers(0, 9),
    components=st.sets(st.sampled_from(COMPONENTS), min_size=1).map(tuple),
    levels=st.none() | st.lists(st.sampled_from((1, 2, 4)), min_size=1).map(tuple),
    skip_first=st.integers(0, 5) | st.floats(0, 0.9),
    skip_last=st.integers(0, 5) | st.floats(0, 0.9),
    schedule=st.builds(Schedule, st.integers(1, 50), st.integers(1, 50), st.floats(0, 0.4), st.floats(0.5, 1)),
    seed=st.integers(0, 2**32),
    backend=st.sampled_from(BACKENDS),
)


@settings(max_examples=100, deadline=None)
@given(config=configs)
@example(config=load_preset("hold"))
@example(config=load_preset("unet-hold"))
def test_a_config_survives_dict_json_and_yaml(config: MergeConfig) -> None:
    assert MergeConfig.from_dict(config.to_dict()) == config
    assert MergeConfig.from_json(config.to_json()) == config
    assert MergeConfig.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ratio", 1.0),
        ("ratio", -0.1),
        ("ratio", float("nan")),
        ("ratio", "half"),
        ("ratio", True),
        ("method", "magic"),
        ("regions", "hexagons"),
        ("merge_regions", "tile:0"),
        ("selection", "best"),
        ("similarity", "euclid"),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("unmerge", "inverse"),
        ("sites", "everywhere"),
        ("span", -1),
        ("components", ()),
        ("components", ("attention",)),
        ("components", "mlp"),
        ("levels", (0,)),
        ("skip_first", -1),
        ("skip_last", 1.5),
        ("seed", 0.5),
        ("backend", "cuda"),
        ("schedule", {"destinations_every": 0}),
        ("schedule", {"start": 0.5, "stop": 0.5}),
        ("schedule", {"stop": 1.5}),
        ("schedule", {"when": 3}),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(TokenMergeError) as caught:
        MergeConfig(**{field: value})
    named = value if isinstance(value, dict) else {field: value}
    assert any(name in str(caught.value) for name in (*named, "window"))


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError):
        MergeConfig(ratios=0.5)  # type: ignore[call-arg]
    with pytest.raises(TokenMergeError, match="'ratios'"):
        MergeConfig.from_dict({"ratios": 0.5})
    with pytest.raises(TokenMergeError, match="mapping"):
        MergeConfig.from_yaml("- 1")


def test_numbers_of_numpy_are_numbers() -> None:
    config = MergeConfig(ratio=np.float32(0.25), seed=np.int64(3), skip_first=np.int64(1), trust=1)
    assert config == MergeConfig(ratio=0.25, seed=3, skip_first=1)
    assert MergeConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("block_ratios", (np.float64(0.25), np.float32(0.5)), (0.25, 0.5)),
        ("step_ratios", [np.float32(0.5), 0], (0.5, 0.0)),
        ("levels", (np.int64(2), 4), (2, 4)),
    ],
)
def test_numbers_of_numpy_in_lists_are_numbers(field: str, given: object, expected: tuple[float, ...]) -> None:
    config = MergeConfig(**{field: given})  # type: ignore[arg-type]
    assert getattr(config, field) == expected
    assert {type(number) for number in getattr(config, field)} == {type(expected[0])}
    assert MergeConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("field", "given"), [("block_ratios", (True,)), ("levels", (2.0,)), ("levels", (True,)), ("step_ratios", ("0.5",))]
)
def test_what_is_no_number_in_lists_is_refused(field: str, given: object) -> None:
    with pytest.raises(TokenMergeError, match=field):
        MergeConfig(**{field: given})  # type: ignore[arg-type]


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        MergeConfig().ratio = 0.1  # type: ignore[misc]


def test_replace_takes_fields_of_the_schedule_too() -> None:
    config = MergeConfig().replace(ratio=0.25, weights_every=2, stop=0.9)
    assert (config.ratio, config.schedule) == (0.25, Schedule(weights_every=2, stop=0.9))


@pytest.mark.parametrize("timing", [{"start": 0.1}, {"stop": 0.9, "anchor_every": 4}, {}])
def test_a_mapping_changes_the_fields_of_the_schedule_it_names(timing: dict[str, Any]) -> None:
    hold = load_preset("hold")
    assert hold.changed(schedule=timing) == hold.changed(**timing)
    assert hold.changed(schedule=timing, start=0.3) == hold.changed(**{**timing, "start": 0.3})
    with pytest.raises(TokenMergeError, match="Schedule has no field 'ratio'"):
        hold.replace(schedule={**timing, "ratio": 0.5})


def test_a_whole_schedule_replaces_all_of_it() -> None:
    unet = load_preset("unet-anchored")
    assert unet.replace(schedule=Schedule(start=0.1)).schedule == Schedule(start=0.1)
    assert unet.replace(schedule=Schedule(start=0.1), stop=0.9).schedule == Schedule(start=0.1, stop=0.9)


@pytest.mark.parametrize("name", ["toma", "toma-stripe", "toma-tile", "toma-once", "lower-bound", "none"])
def test_the_papers_variants_are_presets(name: str) -> None:
    assert load_preset(name) == presets()[name]


@pytest.mark.parametrize(
    ("options", "preset"),
    [
        ({}, "unet-hold"),
        ({"sites": "stage", "start": 0.1}, "unet-hold"),
        ({"sites": "stage", "levels": (2,)}, "hold"),
        ({"skip_first": 2, "start": 0.1}, "hold"),
        ({"span": 1}, "hold"),
        ({"sites": "stage", "ratio": 0.5}, "unet"),
        ({"start": 0.1, "anchor_every": 4, "gap_dtype": "float8"}, "unet-hold"),
        ({"method": "hold", "levels": (2,)}, "hold"),
        ({"ratio": 0.5}, "unet"),
        ({"anchor_every": 0}, "unet"),
        ({"start": 0.1, "regions": "tile"}, "unet"),
        ({"coverage": 0.9}, "unet"),
        ({"sites": "component"}, "unet"),
        ({"schedule": {"start": 0.1}}, "unet-hold"),
        ({"schedule": {"start": 0.1}, "ratio": 0.5}, "unet"),
        ({"schedule": {"anchor_every": 0}}, "unet"),
        ({"schedule": Schedule(start=0.1)}, "unet"),
        ({"method": "random", "start": 0.1}, "unet"),
        ({"method": "tomesd", "ratio": 0.5}, "tomesd"),
        ({"raito": 0.5}, "unet"),
    ],
)
def test_options_say_whether_to_hold_or_to_merge(options: dict[str, object], preset: str) -> None:
    assert default_preset(options, Defaults("unet", "unet-hold")) == preset
    assert default_preset(options, Defaults("unet")) == {"unet-hold": "hold"}.get(preset, preset)


def test_presets_come_from_files_too(tmp_path: Path) -> None:
    config = MergeConfig(ratio=0.3, regions="stripe:8")
    (tmp_path / "mine.yaml").write_text(config.to_yaml())
    (tmp_path / "mine.json").write_text(config.to_json())
    assert load_preset(str(tmp_path / "mine.yaml")) == load_preset(str(tmp_path / "mine.json")) == config
    with pytest.raises(TokenMergeError, match="not there"):
        load_preset(str(tmp_path / "other.yaml"))
    with pytest.raises(TokenMergeError, match="unknown"):
        load_preset("toma-tiles")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{bad", ("line 1, column 2", 'as in {"ratio": 0.5}')),
        ("a.json", '{\n  "ratio": 0.5,\n  "regions" "whole"\n}', ("line 3, column 13",)),
        ("a.json", "", ("line 1, column 1",)),
        ("a.json", "[0.5]", ("holds a list", "mapping of fields")),
        ("a.json", '"toma"', ("holds a str",)),
        ("a.json", "null", ("holds nothing",)),
        ("a.json", '{"ratio": 2}', ("ratio is 2",)),
        ("a.yaml", "ratio: 0.5\nregions: {tile", ("line 2, column", "as in ratio: 0.5")),
        ("a.yaml", "ratio: 0.5\nregions: [", ("line 2, column",)),
        ("a.yaml", "ratio: 0.5\n\tregions: whole", ("line 2, column 1",)),
        ("a.yaml", "ratio: !!python/name:os.system", ("line 1, column 8",)),
        ("a.yaml", "ratio: 0.5\x00", ("position 10",)),
        ("a.yaml", "ratio: 2026-13-45", ("month",)),
        ("a.yml", "- ratio: 0.5", ("holds a list",)),
        ("a.yaml", "toma", ("holds a str",)),
        ("a.yaml", "", ("holds nothing",)),
        ("a.yaml", "1: 2\nratios: 3", ("no field 'ratios' (did you mean 'ratio'?), 1;",)),
        ("a.yaml", "ratoi: 0.5", ("no field 'ratoi' (did you mean 'ratio'?)",)),
        ("a.yaml", "schedule: {strat: 0.2}", ("Schedule has no field 'strat' (did you mean 'start'?)",)),
        ("a.yaml", "start: 0.2", ("start belongs under schedule, as in schedule: {start: 0.2}",)),
        ("a.json", '{"ratio": 0.5, "anchor_every": 3}', ("anchor_every belongs under schedule",)),
        ("a.yaml", "schedule: 5", ("schedule is 5",)),
        ("a.yaml", "ratio: é".encode("latin-1"), ("UTF-8",)),
    ],
)
def test_preset_files_that_cannot_be(tmp_path: Path, name: str, content: str | bytes, words: tuple[str, ...]) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TokenMergeError) as caught:
        load_preset(str(tmp_path / name))
    assert all(word in str(caught.value) for word in (*words, str(tmp_path / name)))


@pytest.mark.parametrize(
    ("step", "selected", "weighed", "phase"),
    [(0, None, None, "select"), (4, 0, 0, "reuse"), (5, 0, 0, "reweigh"), (9, 0, 5, "reuse"), (10, 0, 5, "select")],
)
def test_what_is_due_at_a_step(step: int, selected: int | None, weighed: int | None, phase: str) -> None:
    assert Schedule().phase(step, selected, weighed) == phase


@pytest.mark.parametrize(
    ("every", "steps", "anchors"),
    [
        (5, 28, [6, 9, 13, 18, 24]),
        (3, 28, [6, 8, 10, 13, 16, 19, 23, 27]),
        (5, 50, [10, 13, 16, 20, 24, 29, 34, 40, 47]),
        (5, None, [0, 5, 10, 15]),
        (0, 28, []),
    ],
)
def test_anchors_lie_closer_at_first(every: int, steps: int | None, anchors: list[int]) -> None:
    schedule = Schedule(start=0.2 if steps else 0.0, anchor_every=every)
    found: list[int] = []
    for step in range(steps or 20):
        last = found[-1] if found else None
        position = last / steps if steps and last is not None else None
        if schedule.merges(step / steps if steps else 0.0) and schedule.anchors(step, last, position):
            found.append(step)
    assert found == anchors


@pytest.mark.parametrize(("error", "line"), [(OSError(), "OSError"), (ValueError("one\ntwo"), "one")])
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line

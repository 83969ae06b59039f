"""What a user can set: `MergeConfig`, its `Schedule` and its `Regions`.

Frozen, validated once, and convertible to and from dict, JSON and YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

METHODS = ("toma", "hold", "tomesd", "tofu", "todo", "pool", "random", "uniform", "lower-bound", "none")
SELECTIONS = ("facility-location", "graph-cut", "stochastic", "random", "uniform")
SIMILARITIES = ("cosine", "dot")
MERGES = ("mean", "pick")
UNMERGES = ("transpose", "pinv")
GAPS = ("last", "linear", "sigma")
GAP_DTYPES = ("tokens", "float8")
SITES = ("component", "block", "span", "stage")
COMPONENTS = ("self_attention", "cross_attention", "mlp")
BACKENDS = ("auto", "reference", "triton")
# Fields that JSON, YAML and command lines give as lists.
_TUPLES = ("step_ratios", "block_ratios", "components", "levels")

DEFAULT_REGION_COUNT = 64
# Shares of `ratio` that a coverage target chooses from: few, since each has tensors and recordings of its own.
_BUCKETS = 3


class TokenMergeError(ValueError):
    """A request that cannot be met. The message gives the fact, the bound and the way out."""


def first_line(error: BaseException) -> str:
    """What others' errors say, short enough for one of ours."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@dataclass(frozen=True)
class Regions:
    """How a grid is wished to be cut. What a grid allows is decided in `grid.py`.

    Written as `whole`, `tile` or `stripe` (64 regions), `tile:16` (16 regions), `tile:8x4` (height x width in tokens).
    """

    kind: str
    count: int | None = None
    tile: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str, name: str = "regions") -> Regions:
        match = re.fullmatch(r"(whole|tile|stripe)(?::(\d+)(?:x(\d+))?)?", text.strip())
        if not match:
            raise TokenMergeError(
                f"{name} {text!r} is not understood; write 'whole', 'tile', 'stripe', a count as in 'tile:64', "
                "or a tile shape as in 'tile:8x8'"
            )
        kind, first, second = match.groups()
        numbers = [int(number) for number in (first, second) if number is not None]
        if 0 in numbers:
            raise TokenMergeError(f"{name} {text!r} has a zero; counts and tile sides start at 1")
        if kind == "whole" and numbers:
            raise TokenMergeError(f"{name} {text!r}: 'whole' is one region and takes no number")
        if len(numbers) == 2:
            if kind != "tile":
                raise TokenMergeError(f"{name} {text!r}: only 'tile' takes a shape; write '{kind}:{numbers[0]}'")
            return cls(kind, tile=(numbers[0], numbers[1]))
        if kind == "whole":
            return cls(kind, count=1)
        return cls(kind, count=numbers[0] if numbers else DEFAULT_REGION_COUNT)

    def __str__(self) -> str:
        if self.kind == "whole":
            return "whole"
        return f"{self.kind}:{self.tile[0]}x{self.tile[1]}" if self.tile else f"{self.kind}:{self.count}"


@dataclass(frozen=True)
class Schedule:
    """When to act: refresh intervals in steps, and the window of steps that merge, as shares of all steps."""

    destinations_every: int = 10
    weights_every: int = 5
    start: float = 0.0
    stop: float = 1.0
    # Every how many merging steps, on average, blocks also run unmerged, to remember what merging leaves out; 0 is
    # never.
    anchor_every: int = 0

    def __post_init__(self) -> None:
        _check_types(self)
        if self.anchor_every < 0 or self.anchor_every == 1:
            raise TokenMergeError(
                f"anchor_every is {self.anchor_every}; it is 0 for no anchors, or from 2: at every step they would "
                "cost more than merging saves"
            )
        for name in ("destinations_every", "weights_every"):
            if getattr(self, name) < 1:
                raise TokenMergeError(f"{name} is {getattr(self, name)}; refresh intervals are 1 step or more")
        if not 0.0 <= self.start < self.stop <= 1.0:
            raise TokenMergeError(
                f"the merging window is {self.start} to {self.stop}; it must satisfy 0 <= start < stop <= 1"
            )

    @property
    def windowed(self) -> bool:
        """Whether some steps run unmerged."""
        return (self.start, self.stop) != (0.0, 1.0)

    def merges(self, position: float) -> bool:
        """Whether the step at `position`, its share of the whole schedule in [0, 1), merges."""
        return self.start <= position < self.stop

    def within(self, position: float) -> float:
        """Share of the merging window that lies behind a position in it."""
        return (position - self.start) / (self.stop - self.start)

    def anchors(self, step: int, anchored: int | None, position: float | None) -> bool:
        """Whether the step is an anchor, given the last one of this image and its position in the schedule, if known.

        What merging leaves out changes fastest at first, so the distance grows over the merging window, from half of
        `anchor_every` to one and a half times; it is never a single step, where nothing would be saved.
        """
        if not self.anchor_every or anchored is None:
            return self.anchor_every > 0
        share = 0.5 if position is None else self.within(position)
        return step - anchored >= max(2.0, self.anchor_every * (0.5 + share))

    def phase(self, step: int, selected: int | None, weighed: int | None, *, anchor: bool = False) -> str:
        """What is due at `step`, given the steps of the last selection and weighing of this image: select, reweigh or
        reuse. With anchors maps change at those alone, weights at each: the gap they remember is that of the map."""
        if self.anchor_every and not anchor and selected is not None:
            return "reuse"
        if selected is None or weighed is None or step - selected >= self.destinations_every:
            return "select"
        return "reweigh" if anchor or step - weighed >= self.weights_every else "reuse"


@dataclass(frozen=True)
class MergeConfig:
    """Everything that decides what merging does. `ratio` is the share of tokens removed."""

    ratio: float = 0.5
    # The least mean similarity of tokens to their best destination. With it `ratio` is the most that may be removed,
    # and each selection removes a third, two thirds or all of that.
    coverage: float | None = None
    # Other ratios, for equal parts of the merging window, or of the merged blocks of each group, first to last.
    step_ratios: tuple[float, ...] | None = None
    block_ratios: tuple[float, ...] | None = None
    method: str = "toma"
    # Where destinations are chosen, and where tokens merge into them (None: in the same regions).
    regions: str = "tile:4x4"
    merge_regions: str | None = None
    selection: str = "facility-location"
    similarity: str = "cosine"
    # Small on purpose: near zero, merging is the mean of each destination's cluster.
    temperature: float = 0.001
    # What a merged token is: the mean of those that merge into it, or its destination itself.
    merge: str = "mean"
    unmerge: str = "transpose"
    # Between anchors the gap is that of the last one, or extrapolated from the last two: linearly in steps, or in the
    # noise level.
    gap: str = "last"
    # How much of what a merged block has changed since the last anchor counts, from 0 to 1; without anchors all does.
    trust: float = 1.0
    # Gaps are kept in the dtype of the tokens, or in 8 bits: less memory, and coarser.
    gap_dtype: str = "tokens"
    sites: str = "block"
    # The longest run of blocks that one span covers; 0 is as long as the model allows.
    span: int = 0
    components: tuple[str, ...] = COMPONENTS
    # UNet levels by their downsampling of the latent (1, 2, 4, ...); None is every level that has tokens.
    levels: tuple[int, ...] | None = None
    # Blocks left alone at the start and end of each group: a number, or a share of the group's blocks.
    skip_first: int | float = 0
    skip_last: int | float = 0
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in _TUPLES:
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.schedule, Mapping):
            object.__setattr__(self, "schedule", _from_mapping(Schedule, self.schedule))
        _check_types(self)
        if self.holds:
            self._check_hold()
        elif self.sites == "stage":
            raise TokenMergeError(
                f"stages can only be held, and method is {self.method!r}; use method='hold', or sites='block'"
            )
        elif not 0.0 <= self.ratio < 1.0:
            raise TokenMergeError(
                f"ratio is {self.ratio}; it is the share of tokens removed and must be in [0, 1), for example 0.5"
            )
        for name in ("step_ratios", "block_ratios"):
            ratios = getattr(self, name)
            if ratios is None:
                continue
            if not ratios or not all(type(ratio) in (int, float) and 0 <= ratio < 1 for ratio in ratios):
                raise TokenMergeError(f"{name} is {ratios}; it is one or more ratios in [0, 1), as in (0.25, 0.5)")
        if self.step_ratios is not None and self.block_ratios is not None:
            raise TokenMergeError("both step_ratios and block_ratios were given; give one of them")
        for name, choices in (
            ("method", METHODS),
            ("selection", SELECTIONS),
            ("similarity", SIMILARITIES),
            ("merge", MERGES),
            ("unmerge", UNMERGES),
            ("gap", GAPS),
            ("gap_dtype", GAP_DTYPES),
            ("sites", SITES),
            ("backend", BACKENDS),
        ):
            _check_choice(name, getattr(self, name), choices)
        if self.coverage is not None:
            self._check_coverage(self.coverage)
        for component in self.components:
            _check_choice("components", component, COMPONENTS)
        if not self.components:
            raise TokenMergeError(f"components is empty; name at least one of {', '.join(COMPONENTS)}")
        object.__setattr__(self, "regions", str(Regions.parse(self.regions)))
        if self.merge_regions is not None:
            object.__setattr__(self, "merge_regions", str(Regions.parse(self.merge_regions, "merge_regions")))
        # NaN fails the comparison too.
        if not 0.0 < self.temperature < float("inf"):
            raise TokenMergeError(f"temperature is {self.temperature}; it must be positive and finite")
        if not 0.0 <= self.trust <= 1.0:
            raise TokenMergeError(
                f"trust is {self.trust}; it is a share and must be in [0, 1]: 1 for all that a merged block changes, "
                "0.5 for half of it"
            )
        if self.span < 0:
            raise TokenMergeError(f"span is {self.span}; it is a number of blocks, or 0 for as long as possible")
        if self.levels is not None and any(type(level) is not int or level < 1 for level in self.levels):
            raise TokenMergeError(f"levels is {self.levels}; levels are downsampling factors 1, 2, 4, ...")
        if self.schedule.anchor_every and self.sites not in ("block", "stage"):
            raise TokenMergeError(
                f"anchor_every is {self.schedule.anchor_every} and needs sites='block', where a block can also run "
                f"whole; with sites={self.sites!r} use anchor_every=0"
            )
        for name in ("skip_first", "skip_last"):
            skip = getattr(self, name)
            if skip < 0 or (isinstance(skip, float) and not skip < 1.0):
                raise TokenMergeError(
                    f"{name} is {skip}; write a number of blocks (an integer from 0) or a share of them (in [0, 1))"
                )

    def _check_hold(self) -> None:
        for name in ("step_ratios", "block_ratios"):
            if getattr(self, name) is not None:
                raise TokenMergeError(f"{name} was given, and method 'hold' merges nothing; leave it out")
        if self.ratio != 1.0:
            raise TokenMergeError(
                f"ratio is {self.ratio}, and method 'hold' runs no token between anchors, so that its ratio is 1; use "
                "preset='hold' without a ratio, or method='toma' with one"
            )
        if self.sites not in ("block", "stage"):
            raise TokenMergeError(
                f"method 'hold' leaves whole blocks out, or a UNet's stages; sites is {self.sites!r}: use 'block' or "
                "'stage'"
            )
        for name in ("span", "levels", "skip_first", "skip_last") if self.sites == "stage" else ():
            if getattr(self, name) != getattr(MergeConfig, name):
                raise TokenMergeError(
                    f"{name} is {getattr(self, name)!r}, and stages are held all together; leave it out, or use "
                    "preset='hold', which holds blocks"
                )
        if not self.schedule.anchor_every:
            raise TokenMergeError(
                "method 'hold' holds what blocks changed at anchors, and anchor_every is 0; use anchor_every=2 or more"
            )

    def _check_coverage(self, coverage: float) -> None:
        if not 0.0 <= coverage <= 1.0:
            raise TokenMergeError(
                f"coverage is {coverage}; it is a mean cosine similarity and must be in [0, 1], for example 0.9"
            )
        for name in ("step_ratios", "block_ratios"):
            if getattr(self, name) is not None:
                raise TokenMergeError(
                    f"both coverage and {name} were given, and both choose ratios; give one of them, and with coverage "
                    "the most that may be removed as ratio"
                )
        for name, needed in (("method", "toma"), ("selection", "facility-location"), ("similarity", "cosine")):
            if getattr(self, name) != needed:
                raise TokenMergeError(
                    f"coverage is what toma's facility location makes large, in cosine similarity, and {name} is "
                    f"{getattr(self, name)!r}; use {name}={needed!r}, or a fixed ratio"
                )

    @property
    def holds(self) -> bool:
        """Whether blocks run at anchors alone, and nothing is merged."""
        return self.method == "hold"

    @property
    def buckets(self) -> tuple[float, ...]:
        """The ratios that a coverage target chooses from, ascending; without one, the ratio alone."""
        if self.coverage is None:
            return (self.ratio,)
        return (*(self.ratio * part / _BUCKETS for part in range(1, _BUCKETS)), self.ratio)

    def next_ratio(self, used: float, coverages: Sequence[float]) -> float:
        """The bucket of the next selection: the largest whose coverage reached the target at the last one, made at the
        ratio `used`; or, if not even that did, the one below it. Coverages are by bucket, those below `used` unknown.
        """
        assert self.coverage is not None
        place = self.buckets.index(used)
        reached = [at for at in range(place, len(self.buckets)) if coverages[at] >= self.coverage]
        return self.buckets[reached[-1] if reached else max(0, place - 1)]

    @property
    def part_ratios(self) -> str | None:
        """The field that gives ratios for parts, in place of `ratio`, if one does."""
        return next((name for name in ("step_ratios", "block_ratios") if getattr(self, name) is not None), None)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Every ratio that some step or block may have."""
        return self.step_ratios or self.block_ratios or self.buckets

    @property
    def needs_length(self) -> bool:
        """Whether what a step does depends on how many there are."""
        return self.schedule.windowed or self.step_ratios is not None

    def ratio_at(self, position: float) -> float:
        """The ratio of the step at `position`, its share of the whole schedule in [0, 1)."""
        return self.ratio if self.step_ratios is None else part_of(self.step_ratios, self.schedule.within(position))

    @property
    def select_in(self) -> Regions:
        return Regions.parse(self.regions)

    @property
    def merge_in(self) -> Regions:
        return Regions.parse(self.merge_regions or self.regions)

    def replace(self, **changes: Any) -> MergeConfig:
        """A copy with fields changed. Fields of `Schedule` may be given directly, or as a mapping named `schedule`; a
        whole `Schedule` replaces all of them."""
        changes = one_by_one(changes)
        schedule_names = {item.name for item in fields(Schedule)}
        _check_names(changes, [*(item.name for item in fields(self)), *sorted(schedule_names)])
        timing = {name: changes.pop(name) for name in list(changes) if name in schedule_names}
        schedule = changes.get("schedule", self.schedule)
        if timing and isinstance(schedule, Schedule):
            changes["schedule"] = replace(schedule, **timing)
        return replace(self, **changes)

    def changed(self, **options: Any) -> MergeConfig:
        """The same for options that somebody gave: one that would be without effect is refused."""
        config = self.replace(**options)
        parts = config.part_ratios
        if parts is not None and options.get("ratio", self.ratio) != self.ratio:
            raise TokenMergeError(
                f"ratio is {config.ratio:g}, and {parts} gives other ratios for all parts; leave one of both out"
            )
        anchors = (config.schedule.anchor_every > 0, "anchors, as anchor_every=5 gives")
        for name, (counts, where) in {
            "components": (config.sites == "component", "sites='component' and anchor_every=0"),
            "span": (config.sites == "span" or config.holds, "sites='span' and anchor_every=0, or held blocks"),
            "gap": anchors,
            "gap_dtype": anchors,
            "trust": (anchors[0] and not config.holds, "anchors of merged blocks, as ratio=0.5, anchor_every=5 give"),
        }.items():
            value = getattr(config, name)
            if name in options and value != getattr(MergeConfig, name) and not counts:
                raise TokenMergeError(f"{name} is {value!r}, which counts with {where}; add that, or leave it out")
        return config

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for name in _TUPLES:
            if plain[name] is not None:
                plain[name] = list(plain[name])
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MergeConfig:
        return _from_mapping(cls, values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> MergeConfig:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise _unreadable("JSON", error.msg, (error.lineno, error.colno)) from error
        return cls.from_dict(_loaded_mapping(values, "JSON"))

    def to_yaml(self) -> str:
        return _yaml().safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> MergeConfig:
        yaml = _yaml()
        try:
            values = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            # A value that is not what it looks like, such as a thirteenth month, comes without a place.
            mark = getattr(error, "problem_mark", None)
            place = (mark.line + 1, mark.column + 1) if mark else None
            raise _unreadable("YAML", getattr(error, "problem", None) or str(error), place) from error
        return cls.from_dict(_loaded_mapping(values, "YAML"))


def one_by_one(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the fields of a schedule that is given as a mapping as if they were given by themselves."""
    schedule = options.get("schedule")
    if not isinstance(schedule, Mapping):
        return dict(options)
    _refuse_unknown(Schedule, schedule)
    return {**schedule, **{name: value for name, value in options.items() if name != "schedule"}}


def part_of(values: tuple[float, ...], share: float) -> float:
    """The value of the part that a share in [0, 1) falls into, when values have equal parts."""
    return values[min(len(values) - 1, max(0, int(share * len(values))))]


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The known name that is nearest to another one, as part of an error; nothing where none is near."""
    near = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _check_names(given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse options that are no fields, as Python does with arguments."""
    for name in given:
        if name not in known:
            raise TypeError(
                f"there is no option {name!r}{did_you_mean(name, known)}; "
                "options are the fields of tokenmerge.MergeConfig and tokenmerge.Schedule, which help() lists"
            )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise TokenMergeError(f"{name} is {value!r}; choose from {', '.join(choices)}")


# In words.
_TYPES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a tuple or list",
    NoneType: "None",
}


def _check_types(config: Any) -> None:
    """Refuse values of another type than annotated: a string ratio or a float seed would fail late and obscurely."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        choices = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        types = tuple(get_origin(choice) or choice for choice in choices)
        value = _plain(value, types)
        if isinstance(value, tuple) and tuple in types:
            items = next(get_args(choice) for choice in choices if get_origin(choice) is tuple)
            value = tuple(_plain(item, items) for item in value)
        object.__setattr__(config, name, value)
        if not isinstance(value, types) or isinstance(value, bool):
            expected = " or ".join(_TYPES.get(choice, choice.__name__) for choice in types)
            raise TokenMergeError(f"{name} is {value!r}; it must be {expected}")


def _plain(value: Any, types: tuple[Any, ...]) -> Any:
    """A number as one of Python's, where it may be one of `types`: NumPy has numbers of its own."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int in types:
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) and float in types else value


def _from_mapping(cls: Any, values: Mapping[str, Any]) -> Any:
    _refuse_unknown(cls, values)
    return cls(**values)


def _refuse_unknown(cls: Any, values: Mapping[str, Any]) -> None:
    known = {item.name for item in fields(cls)}
    # Names need not be texts in YAML.
    unknown = sorted((name for name in values if name not in known), key=repr)
    timing = [name for name in unknown if name in {item.name for item in fields(Schedule)}]
    if timing:
        raise TokenMergeError(
            f"{timing[0]} belongs under schedule, as in schedule: {{{timing[0]}: {values[timing[0]]}}}"
        )
    if unknown:
        told = ", ".join(f"{name!r}{did_you_mean(name, known)}" for name in unknown)
        raise TokenMergeError(f"{cls.__name__} has no field {told}; its fields are {', '.join(sorted(known))}")


# What a text that is read as a config must hold.
_MAPPING = {
    source: f"a config is a mapping of fields to values, as in {example}"
    for source, example in (("JSON", '{"ratio": 0.5}'), ("YAML", "ratio: 0.5"))
}


def _loaded_mapping(value: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        held = "nothing" if value is None else f"a {type(value).__name__}"
        raise TokenMergeError(f"the {source} holds {held}; {_MAPPING[source]}")
    return value


def _unreadable(source: str, reason: str, place: tuple[int, int] | None) -> TokenMergeError:
    """place: line and column, from 1."""
    where = f" at line {place[0]}, column {place[1]}" if place else ""
    return TokenMergeError(f"the {source} cannot be read{where} ({' '.join(reason.split())}); {_MAPPING[source]}")


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise TokenMergeError("YAML needs PyYAML: pip install .[yaml], or use JSON") from error
    return yaml

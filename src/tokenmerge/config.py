"""The two techniques and their fields: `Merge` and `Hold`.

Both are frozen and validated once. Each field is documented in its class and nowhere else. The command line's help and
the table of options are made from those docs.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from inspect import cleandoc
from numbers import Integral, Real
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from .errors import TokenMergeError, did_you_mean

METHODS = ("toma", "tomesd", "tofu", "todo", "pool", "random", "uniform", "lower-bound")
SELECTIONS = ("facility-location", "graph-cut", "stochastic", "random", "uniform")
SIMILARITIES = ("cosine", "dot")
UNMERGES = ("transpose", "pinv")
SITES = ("component", "block")
COMPONENTS = ("self_attention", "cross_attention", "mlp")
BACKENDS = ("auto", "reference", "triton")
HELD = ("auto", "blocks", "stages", "prediction")

DEFAULT_REGION_COUNT = 64
# Fields of version 0.1, and what to write instead.
OLD_FIELDS = {
    "anchor_every": "write Hold(every=...)",
    "schedule": "give destinations_every, weights_every, start and stop to Merge itself",
    "coverage": "give a fixed ratio",
    "step_ratios": "use start and stop",
    "block_ratios": "use skip_first and skip_last",
    "span": "leave it out: Hold groups neighbouring blocks into runs itself",
    "gap": "leave it out: Hold extrapolates over noise levels",
    "gap_dtype": "leave it out: residuals have the dtype of the tokens",
    "merge": "leave it out: a merged token is the mean of its cluster",
    "trust": "leave it out: it belonged to anchored merging",
}
# The longest interval in steps. No schedule is longer.
MOST_STEPS = 1_000_000
# The largest seed that every torch generator accepts.
LARGEST_SEED = 2**63 - 1

Self = TypeVar("Self", bound="Technique")


def unknown_field(fact: str, name: str, known: list[str]) -> TypeError:
    """The error for a name that is not a field. fact: how the message begins, such as `Merge has no`."""
    if name in OLD_FIELDS:
        return TypeError(f"{name!r} is a field of tokenmerge 0.1; {OLD_FIELDS[name]}")
    return TypeError(f"{fact} field {name!r}{did_you_mean(name, known)}; fields are {', '.join(known)}")


@dataclass(frozen=True)
class Regions:
    """How the user wants a grid cut. `merging/grid.py` decides what the grid allows.

    Written as `whole`, `tile` or `stripe` (64 regions), `tile:16` (16 regions), `tile:8x4` (height x width in tokens),
    `tile:2x8x4` (over two frames of a video).
    """

    kind: str
    count: int | None = None
    tile: tuple[int, int] | None = None
    frames: int = 1

    @classmethod
    def parse(cls, text: str, name: str = "regions") -> Regions:
        match = re.fullmatch(r"(whole|tile|stripe)(?::(\d{1,9})(?:x(\d{1,9}))?(?:x(\d{1,9}))?)?", text.strip())
        if not match:
            raise TokenMergeError(
                f"{name} {text!r} is not understood; write 'whole', 'tile', 'stripe', a count as in 'tile:64', "
                "or a tile shape as in 'tile:8x8' (over frames: 'tile:2x8x8')"
            )
        kind, *found = match.groups()
        numbers = [int(number) for number in found if number is not None]
        if 0 in numbers:
            raise TokenMergeError(f"{name} {text!r} has a zero; counts and tile sides start at 1")
        if kind == "whole":
            if numbers:
                raise TokenMergeError(f"{name} {text!r}: 'whole' is one region and takes no number")
            return cls(kind, count=1)
        if len(numbers) > 1:
            if kind != "tile":
                raise TokenMergeError(f"{name} {text!r}: only 'tile' takes a shape; write '{kind}:{numbers[0]}'")
            *frames, height, width = numbers
            return cls(kind, tile=(height, width), frames=frames[0] if frames else 1)
        return cls(kind, count=numbers[0] if numbers else DEFAULT_REGION_COUNT)

    def __str__(self) -> str:
        if self.kind == "whole":
            return "whole"
        if self.tile is None:
            return f"{self.kind}:{self.count}"
        sides = self.tile if self.frames == 1 else (self.frames, *self.tile)
        return f"{self.kind}:{'x'.join(map(str, sides))}"


class Technique(ABC):
    """What `Merge` and `Hold` share: checked field names, plain data, and a window."""

    NAME: ClassVar[str] = ""

    def __new__(cls, *_: Any, **values: Any) -> Any:
        cls.check_names(values)
        return super().__new__(cls)

    @property
    @abstractmethod
    def window(self) -> tuple[float, float]:
        """Where the technique acts, from start to stop: shares of the steps for Merge, of the noise for Hold."""

    @classmethod
    def field_docs(cls) -> dict[str, str]:
        """What each field means, from the `Attributes:` section of the class's docstring."""
        # From Python 3.13 on, docstrings lose their indentation when they are compiled.
        _, _, section = cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        docs: dict[str, str] = {}
        name = ""
        for line in section.splitlines():
            found = re.fullmatch(r" {4}(\w+): (.+)", line)
            if found:
                name = found[1]
                docs[name] = found[2]
            elif line.strip():
                docs[name] += f" {line.strip()}"
        return docs

    @classmethod
    def check_names(cls, names: Mapping[str, Any]) -> None:
        """Refuse names that are not fields with a TypeError, as Python refuses unknown arguments."""
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        for name in names:
            if name not in known:
                raise unknown_field(f"{cls.__name__} has no", name, known)

    def replace(self: Self, **changes: Any) -> Self:
        """A copy with fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that names the technique. `tokenmerge.presets` reads it back."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}  # type: ignore[call-overload]
        return {"technique": self.NAME, **plain}

    @property
    def windowed(self) -> bool:
        """Whether the window leaves out any steps."""
        return self.window != (0.0, 1.0)

    def _check_window(self) -> None:
        start, stop = self.window
        if not 0.0 <= start < stop <= 1.0:
            raise TokenMergeError(f"{self.NAME}'s window is {start} to {stop}; it must satisfy 0 <= start < stop <= 1")


@dataclass(frozen=True)
class Merge(Technique):
    """Run steps on fewer tokens: similar tokens merge before a block and are spread out again after it.

    Attributes:
        ratio: share of tokens removed, at least 0 and below 1
        method: how tokens are matched and merged: toma, tomesd, tofu, todo, pool, random, uniform or lower-bound
        regions: regions in which destinations are chosen: whole, tile, stripe, a count (tile:64), a tile's height x
            width in tokens (tile:4x4), or frames x height x width for video (tile:2x4x4)
        merge_regions: regions in which tokens merge, if not the same: larger ones of the same kind, or whole
        selection: how toma chooses destinations: facility-location, graph-cut, stochastic, random or uniform
        similarity: measure of how alike two tokens are: cosine or dot
        temperature: softmax temperature over destinations; near 0, each token joins a single destination
        unmerge: how merging is undone: by the transpose of the merge weights, or by their pseudo-inverse (pinv)
        sites: where tokens merge: once per block, or once per component as in the paper
        components: which parts of a block merge with sites=component: self_attention, cross_attention, mlp
        levels: UNet levels that merge, by downsampling factor (2 or 2,4); all by default
        skip_first: blocks at the start of each group that do not merge: a number, or a share such as 0.25
        skip_last: blocks at the end of each group that do not merge: a number, or a share such as 0.25
        destinations_every: steps from one selection of destinations to the next
        weights_every: steps from one update of the weights to the next
        start: share of the steps that run in full before merging begins
        stop: share of the steps after which merging ends
        seed: seed of random selections
        backend: implementation that runs the operations: auto, reference or triton
        lora: file of a LoRA that tokenmerge heal trained for these settings; it acts in merged steps only
    """

    NAME: ClassVar[str] = "merge"

    ratio: float = 0.5
    method: str = "toma"
    regions: str = "tile:4x4"
    merge_regions: str | None = None
    selection: str = "facility-location"
    similarity: str = "cosine"
    temperature: float = 0.001
    unmerge: str = "transpose"
    sites: str = "block"
    components: tuple[str, ...] = COMPONENTS
    levels: tuple[int, ...] | None = None
    skip_first: int | float = 0
    skip_last: int | float = 0
    destinations_every: int = 10
    weights_every: int = 5
    start: float = 0.0
    stop: float = 1.0
    seed: int = 0
    backend: str = "auto"
    lora: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lora, PathLike):
            object.__setattr__(self, "lora", fspath(self.lora))
        _check_types(self)
        if not 0.0 <= self.ratio < 1.0:
            raise TokenMergeError(
                f"ratio is {self.ratio}; it is the share of tokens removed and must be in [0, 1), for example 0.5"
            )
        for name, choices in (
            ("method", METHODS),
            ("selection", SELECTIONS),
            ("similarity", SIMILARITIES),
            ("unmerge", UNMERGES),
            ("sites", SITES),
            ("backend", BACKENDS),
        ):
            _check_choice(name, getattr(self, name), choices)
        for component in self.components:
            _check_choice("components", component, COMPONENTS)
        if not self.components or len(set(self.components)) < len(self.components):
            found = f"is {self.components}, which repeats a name" if self.components else "is empty"
            raise TokenMergeError(f"components {found}; give one or more of {', '.join(COMPONENTS)}, each once")
        object.__setattr__(self, "regions", str(Regions.parse(self.regions)))
        if self.merge_regions is not None:
            object.__setattr__(self, "merge_regions", str(Regions.parse(self.merge_regions, "merge_regions")))
        # NaN fails this comparison too.
        if not 0.0 < self.temperature < float("inf"):
            raise TokenMergeError(f"temperature is {self.temperature}; it must be positive and finite")
        if self.levels is not None and any(type(level) is not int or level < 1 for level in self.levels):
            raise TokenMergeError(f"levels is {self.levels}; it must list downsampling factors: 1, 2, 4, ...")
        for name in ("skip_first", "skip_last"):
            skip = getattr(self, name)
            if not skip >= 0 or (isinstance(skip, float) and not skip < 1.0):
                raise TokenMergeError(
                    f"{name} is {skip}; it must be a number of blocks (0, 1, 2, ...) or a share of them (in [0, 1))"
                )
        for name in ("destinations_every", "weights_every"):
            if not 1 <= getattr(self, name) <= MOST_STEPS:
                raise TokenMergeError(f"{name} is {getattr(self, name)}; it must be from 1 to {MOST_STEPS} steps")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise TokenMergeError(f"seed is {self.seed}; it must be from 0 to {LARGEST_SEED}")
        self._check_window()
        if self.sites != "component" and self.components != COMPONENTS:
            raise TokenMergeError(
                f"components is {self.components}, which only applies with sites='component'; set that, or leave "
                "components out"
            )

    @property
    def window(self) -> tuple[float, float]:
        return self.start, self.stop

    @property
    def select_in(self) -> Regions:
        return Regions.parse(self.regions)

    @property
    def merge_in(self) -> Regions:
        return Regions.parse(self.merge_regions or self.regions)


# The default of Hold. Pictures drift little at any number of steps (docs/holding.md).
TOLERANCE = 0.2


@dataclass(frozen=True)
class Hold(Technique):
    """Run fewer steps: steps between full ones skip the blocks and extrapolate their residual from the last two.

    Attributes:
        tolerance: relative error allowed in an extrapolated residual where noise and picture are equally strong; less
            is allowed at more noise. Errors measured at full steps decide how long to hold. 0.2 unless every is given
        every: mean number of steps from one full step to the next, instead of a tolerance; full steps lie closer
            together at first. 1 holds nothing
        start: share of the noise that is removed when holding begins. By default the measured errors decide; with every
            it is 0.2, and steps that change the picture much run in full
        stop: share of the noise that is removed when holding ends
        what: what is held: transformer blocks (blocks), all stages of a UNet with their convolutions (stages), or the
            clean prediction of the whole denoiser (prediction). auto holds stages of UNets and blocks of other models;
            under schedulers that add noise, blocks of UNets and the prediction of other models
    """

    NAME: ClassVar[str] = "hold"

    tolerance: float | None = None
    every: int | None = None
    start: float | None = None
    stop: float = 1.0
    what: str = "auto"

    def __post_init__(self) -> None:
        _check_types(self)
        if self.tolerance is not None and self.every is not None:
            raise TokenMergeError(
                f"tolerance is {self.tolerance} and every is {self.every}; both decide which steps run, so give one"
            )
        if self.every is not None and not 1 <= self.every <= MOST_STEPS:
            raise TokenMergeError(
                f"every is {self.every}; it is the mean number of steps from one full step to the next, from 1 "
                f"(nothing is held) to {MOST_STEPS}"
            )
        if self.every is None and self.tolerance is None:
            object.__setattr__(self, "tolerance", TOLERANCE)
        # NaN fails this comparison too.
        if self.tolerance is not None and not 0.0 < self.tolerance < float("inf"):
            raise TokenMergeError(
                f"tolerance is {self.tolerance}; it must be positive and finite, for example {TOLERANCE}"
            )
        _check_choice("what", self.what, HELD)
        self._check_window()

    @property
    def window(self) -> tuple[float, float]:
        usual = 0.0 if self.every is None else 0.2
        return usual if self.start is None else self.start, self.stop

    @property
    def acts(self) -> bool:
        """Whether any step can be held."""
        return self.every != 1

    def replace(self, **changes: Any) -> Hold:
        """A copy with fields changed. `tolerance` replaces `every`, and `every` replaces `tolerance`."""
        if any(changes.get(name) is not None for name in ("tolerance", "every")):
            changes = {"tolerance": None, "every": None, **changes}
        return super().replace(**changes)


class Techniques(NamedTuple):
    """The techniques applied to a model: one, both, or none."""

    merge: Merge | None = None
    hold: Hold | None = None

    @classmethod
    def of(cls, *techniques: Merge | Hold) -> Techniques:
        """From at most one technique of each kind, in any order."""
        chosen: dict[str, Any] = {}
        for technique in techniques:
            if technique.NAME in chosen:
                raise TokenMergeError(
                    f"{type(technique).__name__} was given twice; give at most one {type(technique).__name__}"
                )
            chosen[technique.NAME] = technique
        return cls(**chosen)

    def to_list(self) -> list[dict[str, Any]]:
        """Plain data, as written to files."""
        return [technique.to_dict() for technique in self if technique is not None]


TECHNIQUES: dict[str, type[Merge] | type[Hold]] = {kind.NAME: kind for kind in (Merge, Hold)}


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise TokenMergeError(f"{name} is {value!r}{did_you_mean(value, choices)}; choose from {', '.join(choices)}")


# How error messages name each type.
_TYPES = {int: "a whole number", float: "a number", str: "a string", tuple: "a tuple or list", NoneType: "None"}


def _check_types(technique: Technique) -> None:
    """Refuse values of other types than annotated: a string ratio or a float seed would fail late and obscurely."""
    hints = get_type_hints(type(technique))
    for item in fields(technique):  # type: ignore[arg-type]
        name, hint = item.name, hints[item.name]
        value = getattr(technique, name)
        choices = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        types = tuple(get_origin(choice) or choice for choice in choices)
        value = _plain(tuple(value) if isinstance(value, list) else value, types)
        if isinstance(value, tuple) and tuple in types:
            items = next(get_args(choice) for choice in choices if get_origin(choice) is tuple)
            value = tuple(_plain(each, items) for each in value)
        object.__setattr__(technique, name, value)
        if not isinstance(value, types) or isinstance(value, bool):
            expected = " or ".join(_TYPES.get(choice, choice.__name__) for choice in types)
            raise TokenMergeError(f"{name} is {value!r}; it must be {expected}")


def _plain(value: Any, types: tuple[Any, ...]) -> Any:
    """`value` as Python's own int or float where `types` allow that: it may be a NumPy number."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int in types:
        return int(value)
    if not isinstance(value, Real) or isinstance(value, bool) or float not in types:
        return value
    try:
        return float(value)
    except OverflowError:
        return float("inf")

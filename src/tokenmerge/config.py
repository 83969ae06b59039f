"""The two techniques and their fields: `Merge` and `Hold`.

Both are frozen and validated once. A field is documented in its class and nowhere else: the command line's help and the
table of options are made from there.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from .errors import TokenMergeError, did_you_mean

METHODS = ("toma", "tomesd", "tofu", "todo", "pool", "random", "uniform", "lower-bound")
SELECTIONS = ("facility-location", "graph-cut", "stochastic", "random", "uniform")
SIMILARITIES = ("cosine", "dot")
MERGES = ("mean", "pick")
UNMERGES = ("transpose", "pinv")
SITES = ("component", "block")
COMPONENTS = ("self_attention", "cross_attention", "mlp")
BACKENDS = ("auto", "reference", "triton")
HELD = ("auto", "blocks", "stages", "prediction")

DEFAULT_REGION_COUNT = 64
# Fields of version 0.1, and what to write instead.
GONE = {
    "anchor_every": "write Hold(every=...)",
    "schedule": "give destinations_every, weights_every, start and stop to Merge itself",
    "coverage": "give a fixed ratio",
    "step_ratios": "use start and stop",
    "block_ratios": "use skip_first and skip_last",
    "span": "leave it out: Hold makes runs of neighbouring blocks by itself",
    "gap": "leave it out: Hold extrapolates in noise",
    "gap_dtype": "leave it out: residuals have the dtype of the tokens",
    "trust": "leave it out: it went with anchored merging",
}
# Full steps may lie as far apart as any schedule is long.
MOST_STEPS = 1_000_000
# That a generator takes everywhere.
LARGEST_SEED = 2**63 - 1

Self = TypeVar("Self", bound="Technique")


def no_field(owner: str, name: str, known: list[str]) -> TypeError:
    """What to say of a name that is no field."""
    if name in GONE:
        return TypeError(f"{name!r} is a field of tokenmerge 0.1; {GONE[name]}")
    has = "has a" if owner.startswith("neither") else "has no"
    return TypeError(f"{owner} {has} field {name!r}{did_you_mean(name, known)}; fields are {', '.join(known)}")


@dataclass(frozen=True)
class Regions:
    """How a grid is wished to be cut. What a grid allows is decided in `merging/grid.py`.

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
        if kind == "whole" and numbers:
            raise TokenMergeError(f"{name} {text!r}: 'whole' is one region and takes no number")
        if len(numbers) > 1:
            if kind != "tile":
                raise TokenMergeError(f"{name} {text!r}: only 'tile' takes a shape; write '{kind}:{numbers[0]}'")
            *frames, height, width = numbers
            return cls(kind, tile=(height, width), frames=frames[0] if frames else 1)
        if kind == "whole":
            return cls(kind, count=1)
        return cls(kind, count=numbers[0] if numbers else DEFAULT_REGION_COUNT)

    def __str__(self) -> str:
        if self.kind == "whole":
            return "whole"
        if self.tile is None:
            return f"{self.kind}:{self.count}"
        sides = self.tile if self.frames == 1 else (self.frames, *self.tile)
        return f"{self.kind}:{'x'.join(map(str, sides))}"


class Technique(ABC):
    """What `Merge` and `Hold` share: a window of steps, and names of fields that are checked."""

    NAME: ClassVar[str] = ""

    def __new__(cls, *_: Any, **values: Any) -> Any:
        cls.check_names(values)
        return super().__new__(cls)

    @property
    @abstractmethod
    def window(self) -> tuple[float, float]:
        """Shares of the schedule, or of its noise, between which the technique acts."""

    @classmethod
    def field_docs(cls) -> dict[str, str]:
        """What every field means, from the class's own documentation."""
        return dict(_field_docs(cls.__doc__ or ""))

    @classmethod
    def check_names(cls, names: Mapping[str, Any]) -> None:
        """Refuse what is no field, as Python does with arguments."""
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        for name in names:
            if name not in known:
                raise no_field(cls.__name__, name, known)

    def replace(self: Self, **changes: Any) -> Self:
        """A copy with fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that says which technique it is. `tokenmerge.presets` reads it again."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}  # type: ignore[call-overload]
        return {"technique": self.NAME, **plain}

    @property
    def windowed(self) -> bool:
        """Whether the window leaves steps out."""
        return self.window != (0.0, 1.0)

    def _check_window(self) -> None:
        start, stop = self.window
        if not 0.0 <= start < stop <= 1.0:
            raise TokenMergeError(f"{self.NAME}'s window is {start} to {stop}; it must satisfy 0 <= start < stop <= 1")


@dataclass(frozen=True)
class Merge(Technique):
    """Run steps on fewer tokens: tokens that are alike merge before a block and are spread out again after it.

    Attributes:
        ratio: share of tokens removed, from 0 to below 1
        method: who merges with whom: toma, tomesd, tofu, todo, pool, random, uniform or lower-bound
        regions: where destinations are chosen: whole, tile, stripe, a count (tile:64), a tile's height x width
            (tile:4x4), or frames x height x width of a video (tile:2x4x4)
        merge_regions: where tokens merge, if not in the same regions: larger ones of the same kind, or whole
        selection: how toma picks destinations: facility-location, graph-cut, stochastic, random or uniform
        similarity: how alike two tokens are: cosine or dot
        temperature: temperature of the softmax over destinations; near 0, merging is the mean of each cluster
        merge: what a merged token is: the mean of its cluster, or its destination (pick)
        unmerge: the map back: transpose or pinv
        sites: merge once per block, or per component (the paper's form)
        components: for sites=component, which of self_attention, cross_attention, mlp
        levels: UNet levels to merge, by their downsampling (2 or 2,4); all by default
        skip_first: blocks at the start of each group that run whole: a number, or a share such as 0.25
        skip_last: the same at the end of each group
        destinations_every: steps between selections of destinations
        weights_every: steps between renewals of the weights
        start: share of the schedule that runs whole before merging begins
        stop: share of the schedule after which merging ends
        seed: the seed of random selections
        backend: what runs the operations: auto, reference or triton
        lora: file of a LoRA that tokenmerge heal has trained for these settings; it acts in merged steps only
    """

    NAME: ClassVar[str] = "merge"

    ratio: float = 0.5
    method: str = "toma"
    regions: str = "tile:4x4"
    merge_regions: str | None = None
    selection: str = "facility-location"
    similarity: str = "cosine"
    temperature: float = 0.001
    merge: str = "mean"
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
            ("merge", MERGES),
            ("unmerge", UNMERGES),
            ("sites", SITES),
            ("backend", BACKENDS),
        ):
            _check_choice(name, getattr(self, name), choices)
        for component in self.components:
            _check_choice("components", component, COMPONENTS)
        if not self.components or len(set(self.components)) < len(self.components):
            found = f"is {self.components}, with one twice" if self.components else "is empty"
            raise TokenMergeError(f"components {found}; name one or more of {', '.join(COMPONENTS)}, each once")
        object.__setattr__(self, "regions", str(Regions.parse(self.regions)))
        if self.merge_regions is not None:
            object.__setattr__(self, "merge_regions", str(Regions.parse(self.merge_regions, "merge_regions")))
        # NaN fails the comparison too.
        if not 0.0 < self.temperature < float("inf"):
            raise TokenMergeError(f"temperature is {self.temperature}; it must be positive and finite")
        if self.levels is not None and any(type(level) is not int or level < 1 for level in self.levels):
            raise TokenMergeError(f"levels is {self.levels}; levels are downsampling factors 1, 2, 4, ...")
        for name in ("skip_first", "skip_last"):
            skip = getattr(self, name)
            if not skip >= 0 or (isinstance(skip, float) and not skip < 1.0):
                raise TokenMergeError(
                    f"{name} is {skip}; write a number of blocks (an integer from 0) or a share of them (in [0, 1))"
                )
        for name in ("destinations_every", "weights_every"):
            if not 1 <= getattr(self, name) <= MOST_STEPS:
                raise TokenMergeError(f"{name} is {getattr(self, name)}; it must be from 1 to {MOST_STEPS} steps")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise TokenMergeError(f"seed is {self.seed}; it must be from 0 to {LARGEST_SEED}")
        self._check_window()
        if self.sites != "component" and self.components != COMPONENTS:
            raise TokenMergeError(
                f"components is {self.components}, which counts with sites='component' only; add that, or leave "
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


# Of `Hold()`: pictures drift little at any number of steps (docs/holding.md).
TOLERANCE = 0.2


@dataclass(frozen=True)
class Hold(Technique):
    """Run fewer steps: those between full steps skip the blocks, and extrapolate their residual from the last two.

    Attributes:
        tolerance: relative error that an extrapolated residual may have where noise and picture are equal; more noise
            allows less. Errors of full steps tell how long to hold; 0.2 unless every is given
        every: instead of a tolerance, the mean number of steps from one full step to the next; they lie closer at
            first. 1 holds nothing
        start: share of the noise that is gone when holding begins. By default the errors decide; with every it is 0.2,
            and steps that move the picture far run in full
        stop: share of the noise that is gone when holding ends
        what: what is held: transformer blocks (blocks), all stages of a UNet with their convolutions (stages), or the
            clean prediction of the whole denoiser (prediction). auto takes stages where they can be held; under
            schedulers that add noise, blocks of a UNet, and elsewhere the prediction
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
                f"tolerance is {self.tolerance} and every is {self.every}; each chooses which steps run, so give one"
            )
        if self.every is not None and not 1 <= self.every <= MOST_STEPS:
            raise TokenMergeError(
                f"every is {self.every}; it is the mean distance of full steps, from 1 (all steps run) to {MOST_STEPS}"
            )
        if self.every is None and self.tolerance is None:
            object.__setattr__(self, "tolerance", TOLERANCE)
        # NaN fails the comparison too.
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
        """Whether any step may be held."""
        return self.every != 1

    def replace(self, **changes: Any) -> Hold:
        """A copy with fields changed; a tolerance takes the place of `every`, and `every` that of a tolerance."""
        if any(changes.get(name) is not None for name in ("tolerance", "every")):
            changes = {"tolerance": None, "every": None, **changes}
        return super().replace(**changes)


class Techniques(NamedTuple):
    """What is applied to a model: either technique, both, or none."""

    merge: Merge | None = None
    hold: Hold | None = None

    @classmethod
    def of(cls, *techniques: Merge | Hold) -> Techniques:
        """At most one of each kind, in any order."""
        chosen: dict[str, Any] = {}
        for technique in techniques:
            if technique.NAME in chosen:
                raise TokenMergeError(
                    f"{type(technique).__name__} was given twice; give one {type(technique).__name__} at most"
                )
            chosen[technique.NAME] = technique
        return cls(**chosen)

    def to_list(self) -> list[dict[str, Any]]:
        """Plain data, as files hold it."""
        return [technique.to_dict() for technique in self if technique is not None]


TECHNIQUES: dict[str, type[Merge] | type[Hold]] = {kind.NAME: kind for kind in (Merge, Hold)}


@cache
def _field_docs(text: str) -> dict[str, str]:
    """The `Attributes:` section of a class's documentation, by name."""
    _, _, section = text.partition("Attributes:\n")
    docs: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        found = re.fullmatch(r" {8}(\w+): (.+)", line)
        if found:
            name = found[1]
            docs[name] = found[2]
        elif line.strip():
            docs[name] += f" {line.strip()}"
    return docs


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise TokenMergeError(f"{name} is {value!r}{did_you_mean(value, choices)}; choose from {', '.join(choices)}")


# In words.
_TYPES = {int: "a whole number", float: "a number", str: "a text", tuple: "a tuple or list", NoneType: "None"}


def _check_types(technique: Technique) -> None:
    """Refuse values of another type than annotated: a string ratio or a float seed would fail late and obscurely."""
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
    """A number as one of Python's, where it may be one of `types`: NumPy has numbers of its own."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int in types:
        return int(value)
    if not isinstance(value, Real) or isinstance(value, bool) or float not in types:
        return value
    try:
        return float(value)
    except OverflowError:
        return float("inf")

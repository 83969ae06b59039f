"""Orders: what visitors ask for, read from the page or a request and checked before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from ...config import Hold, Merge, Techniques
from ...errors import TokenMergeError, did_you_mean
from ...presets import presets
from ..drawing.request import Request
from ..fields import differing, parse_as, parse_size
from ..speeds import SPEEDS
from ..typed import PLAIN, Configuration, Part, heads, joined, read_typed
from .models import Models

LONGEST_PROMPT = 1000
LONGEST_TECHNIQUE = 500
MOST_STEPS = 200
LARGEST_SEED = 2**32 - 1
# The largest picture, in multiples of the pixels of the model's own size.
_LARGER = 4
# Fields that name files on the server.
_FILES = ("lora",)
# Texts in the page's field boxes, by technique and field name.
Values = Mapping[tuple[type[Merge] | type[Hold], str], str]


@dataclass(frozen=True)
class Order:
    """A picture to draw, plain and with a configuration."""

    model: str
    prompt: str
    seed: int
    configuration: Configuration
    request: Request  # its size and steps

    @property
    def sample(self) -> tuple[str, str, int, int, int, int]:
        """Everything that the plain picture depends on."""
        return self.model, self.prompt, self.seed, self.request.steps, self.request.width, self.request.height


def read_order(
    models: Models, *, model: Any, prompt: Any, seed: Any, steps: Any, size: Any, configuration: Configuration
) -> Order:
    """Read an order from values of any type: requests need not come from our page."""
    studio = models.studio(model)
    words = prompt.strip() if isinstance(prompt, str) else ""
    if not words:
        raise TokenMergeError("The prompt is empty; write what to draw")
    if len(words) > LONGEST_PROMPT:
        raise TokenMergeError(f"The prompt has {len(words)} characters; the limit is {LONGEST_PROMPT}")
    request = studio.asked(_size(size), _whole("The number of steps", steps, 1, MOST_STEPS))
    width, height = studio.outline.own_size
    if request.width * request.height > _LARGER * width * height:
        raise TokenMergeError(
            f"{request.width}x{request.height} is too large for this page; the limit is {_LARGER} times the pixels of "
            f"{width}x{height}"
        )
    return Order(model, words, _whole("The seed", seed, 0, LARGEST_SEED), configuration, request)


def read_technique(text: Any) -> Configuration:
    """Read the name of a speed, or techniques as typed: presets with fields. Visitors may not name files."""
    if not isinstance(text, str) or not text.strip():
        raise TokenMergeError(f"The technique is empty; use {', '.join(SPEEDS)}, or write it as in 'hold:every=4'")
    if text in SPEEDS:
        return Configuration(text, SPEEDS[text])
    if len(text) > LONGEST_TECHNIQUE:
        raise TokenMergeError(f"The technique has {len(text)} characters; the limit is {LONGEST_TECHNIQUE}")
    for head in heads(text):
        if head != PLAIN and head not in presets():
            near = did_you_mean(head, [*SPEEDS, *presets()])
            raise TokenMergeError(
                f"{head!r} is neither a speed nor a preset{near}; speeds are {', '.join(SPEEDS)}, presets "
                f"{', '.join(presets())}"
            )
    configuration = read_typed(text).configuration
    for name in _FILES:
        if getattr(configuration.techniques.merge, name, None) is not None:
            raise TokenMergeError(f"{name} names a file on the server, which visitors may not do; leave it out")
    return configuration


def read_values(chosen: Mapping[type[Merge] | type[Hold], bool], values: Values) -> Configuration:
    """Read a configuration from the page's field boxes. chosen: which techniques are switched on."""
    made = [_technique(kind, values) for kind, on in chosen.items() if on]
    techniques = Techniques.of(*made)
    return Configuration(label_of(techniques), techniques)


def label_of(techniques: Techniques) -> str:
    """The name of the speed with these techniques, or else the techniques as typed on the command line."""
    speed = next((name for name, each in SPEEDS.items() if each == techniques), None)
    return speed or as_typed(techniques)


def as_typed(techniques: Techniques) -> str:
    """Techniques as commands take them: the nearest preset, and the fields in which they differ from it."""
    return joined([_part(each) for each in techniques if each is not None]) or PLAIN


def _part(technique: Merge | Hold) -> Part:
    # Typed `none` means no technique, not the preset.
    alike = {name: each for name, each in presets().items() if type(each) is type(technique) and name != PLAIN}
    parts = [Part(name, differing(technique, each)) for name, each in alike.items()]
    return min(parts, key=lambda part: len(part.fields))


def fields_of(kind: type[Merge] | type[Hold]) -> list[str]:
    """The fields that a visitor may set."""
    return [item.name for item in fields(kind) if item.name not in _FILES]


def _technique(kind: type[Merge] | type[Hold], values: Values) -> Merge | Hold:
    hints = get_type_hints(kind)
    read: dict[str, Any] = {}
    for name in fields_of(kind):
        try:
            read[name] = parse_as(hints[name])(str(values[kind, name]).strip())
        except ValueError as error:
            raise TokenMergeError(f"{kind.__name__}'s {name}: {error}") from error
    return kind(**read)


def _size(text: Any) -> tuple[int, int]:
    try:
        return parse_size(str(text))
    except ValueError as error:
        raise TokenMergeError(str(error)) from error


def _whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number within bounds. JSON and the page may send it as a float."""
    must = f"it must be a whole number from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TokenMergeError(f"{name} is missing; {must}")
    # NaN and infinities fail the comparisons too.
    if not (least <= value <= most and value == int(value)):
        raise TokenMergeError(f"{name} is {value:g}; {must}")
    return int(value)

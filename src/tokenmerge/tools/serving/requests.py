"""Reads requests, and refuses those that are wrong or beyond the limits."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...config import LARGEST_SEED
from ...errors import did_you_mean
from ..fields import Unreadable, parse_size
from .offer import Limits, Offer

_FORMAT = "b64_json"
_FIELDS = ("prompt", "model", "n", "size", "response_format", "seed", "steps", "speed", "user")
# Seeds that the server draws stay short enough to type.
_CHOSEN_SEEDS = 2**32


class Refusal(Exception):
    """An answer other than a picture, in one sentence. param: the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def to_dict(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": None}}


class Settings(NamedTuple):
    """What the pictures of a batch have in common."""

    width: int
    height: int
    steps: int
    speed: str


@dataclass(frozen=True)
class Job:
    """One picture to draw."""

    prompt: str
    seed: int
    settings: Settings


@dataclass(frozen=True)
class Order:
    """What a request asks for: `n` pictures of one prompt, with seeds that count up."""

    prompt: str
    n: int
    seed: int
    settings: Settings

    def jobs(self) -> list[Job]:
        return [Job(self.prompt, self.seed + number, self.settings) for number in range(self.n)]


def read_order(body: bytes, offer: Offer) -> Order:
    """Read the body of a request. Raises `Refusal` if it is wrong or beyond the limits."""
    limits = offer.limits
    fields = _fields(body, limits)
    prompt = _prompt(fields.get("prompt"), limits)
    n = _count(fields, "n", 1, limits.n, "pictures")
    steps = _count(fields, "steps", offer.steps, limits.steps, "steps")
    _check_model(fields.get("model"), offer)
    form = fields.get("response_format")
    if form not in (None, _FORMAT):
        raise Refusal(400, f"response_format is {_shown(form)}; only {_FORMAT!r} is served", "response_format")
    settings = Settings(*_size(fields.get("size"), offer), steps, _speed(fields.get("speed"), offer))
    return Order(prompt, n, _seed(fields.get("seed"), n), settings)


def _fields(body: bytes, limits: Limits) -> dict[str, Any]:
    if len(body) > limits.body:
        raise Refusal(400, f"the body has {len(body)} bytes; the limit is {limits.body}: shorten the prompt")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, 'the body is not JSON; send an object such as {"prompt": "a rose"}') from None
    if not isinstance(fields, dict):
        raise Refusal(400, 'the body is not an object; send one such as {"prompt": "a rose"}')
    for name in fields:
        if name not in _FIELDS:
            near = did_you_mean(name, _FIELDS)
            raise Refusal(400, f"the field {_shown(name)} is unknown{near}; use any of {', '.join(_FIELDS)}")
    return fields


def _prompt(prompt: Any, limits: Limits) -> str:
    if not isinstance(prompt, str) or not prompt.strip():
        raise Refusal(400, "prompt is missing or empty; it must be a text that says what to draw", "prompt")
    if len(prompt) > limits.prompt:
        raise Refusal(400, f"prompt has {len(prompt)} characters; the limit is {limits.prompt}", "prompt")
    # JSON can express half of a surrogate pair, but no tokenizer can read it.
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise Refusal(400, "prompt has half of a surrogate pair; send valid Unicode", "prompt")
    return prompt


def _count(fields: dict[str, Any], name: str, default: int, most: int, unit: str) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not _is_int(value) or not 1 <= value <= most:
        raise Refusal(400, f"{name} is {_shown(value)}; it must be a whole number from 1 to {most} {unit}", name)
    return int(value)


def _check_model(model: Any, offer: Offer) -> None:
    if model not in (None, offer.model):
        raise Refusal(404, f"model {_shown(model)} is not served here; use {offer.model!r}, or leave it out", "model")


def _size(size: Any, offer: Offer) -> tuple[int, int]:
    if size in (None, "auto"):
        return offer.size
    try:
        # Longer texts are no sizes, and Python refuses to parse integers of arbitrary length.
        width, height = parse_size(size if isinstance(size, str) and len(size) < 20 else "")
    except Unreadable:
        raise Refusal(400, f"size is {_shown(size)}; write width x height, as in '512x384'", "size") from None
    unit, least, most = offer.unit, offer.least, offer.limits.side
    if not all(least <= side <= most and side % unit == 0 for side in (width, height)):
        raise Refusal(
            400, f"size is {width}x{height}; both sides must be multiples of {unit}, from {least} to {most}", "size"
        )
    return width, height


def _speed(speed: Any, offer: Offer) -> str:
    if speed is None:
        return offer.speed
    if not isinstance(speed, str) or speed not in offer.batched:
        raise Refusal(400, f"speed is {_shown(speed)}; choose from {', '.join(offer.batched)}", "speed")
    return speed


def _seed(seed: Any, n: int) -> int:
    if seed is None:
        return secrets.randbelow(_CHOSEN_SEEDS)
    if not _is_int(seed) or not 0 <= seed <= LARGEST_SEED - n + 1:
        raise Refusal(400, f"seed is {_shown(seed)}; seeds are whole numbers from 0 to {LARGEST_SEED}", "seed")
    return int(seed)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value for use in a sentence, cut where it is long."""
    if isinstance(value, int | float | str | None):
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
        return text if len(text) <= 60 else f"{text[:60]}..."
    return "an object" if isinstance(value, dict) else "a list"

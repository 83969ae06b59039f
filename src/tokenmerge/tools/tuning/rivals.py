"""Rivals in a search: step caches and schedules, measured on the samples of its last rung and never chosen."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import TokenMergeError
from ..drawing.studio import Studio
from ..rivals.reading import RIVALS, SCHEDULES
from ..typed import NO_TECHNIQUES, PLAIN, Configuration, heads, read_configurations, read_typed

# A careful and a fast setting of each cache, and the divisors of the steps for schedules.
_CACHES = {
    "first-block": ("threshold=0.1", "threshold=0.2"),
    "mag": ("threshold=0.06,max_skip_steps=1", "threshold=0.06,max_skip_steps=3"),
    "taylorseer": ("cache_interval=2", "cache_interval=4"),
    "cache-dit": ("threshold=0.08,warmup=4,taylorseer=1", "threshold=0.24,warmup=4,taylorseer=1"),
    "deepcache": ("interval=2", "interval=4"),
}
_DIVISORS = (2, 3)


def read_rivals(asked: Sequence[str] | None, studio: Studio) -> tuple[tuple[Configuration, ...], dict[str, str]]:
    """Rivals as typed, and why others are left out. A bare name stands for its known settings.

    Without `asked`: all rivals that fit the model. A typed rival that does not fit is an error.
    """
    taken: list[Configuration] = []
    left_out: dict[str, str] = {}
    for text in (*_CACHES, *SCHEDULES) if asked is None else asked:
        settings = [_read(setting) for setting in _settings(text, studio.request.steps) if setting != PLAIN]
        try:
            for each in settings:
                studio.check(each)
        except TokenMergeError as error:
            if asked is not None:
                raise TokenMergeError(f"{text!r} is refused: {error}") from error
            left_out[text] = str(error)
        else:
            taken += settings
    return read_configurations(list(dict.fromkeys(taken)))[1:], left_out


def _settings(text: str, steps: int) -> list[str]:
    """The known settings of a bare name, or else the text itself."""
    if text in SCHEDULES:
        counter = "count" if text == "steps" else "steps"
        return [f"{text}:{counter}={max(1, steps // divisor)}" for divisor in _DIVISORS]
    return [f"{text}:{fields}" for fields in _CACHES.get(text, ())] or [text]


def _read(text: str) -> Configuration:
    """A rival as typed; `none + ` before it is optional."""
    typed = read_typed(f"{PLAIN} + {text}" if heads(text)[0] in RIVALS else text)
    if typed.configuration.techniques != NO_TECHNIQUES or not typed.configuration.rivals:
        raise TokenMergeError(f"{text!r} is not a rival; use {', '.join(RIVALS)}, or give it to --techniques")
    return typed.configuration

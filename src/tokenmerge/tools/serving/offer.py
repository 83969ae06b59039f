"""What is served, where, and within which limits. Plain data, which needs neither torch nor Ray."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import TokenMergeError
from ..speeds import BATCHED_SPEEDS, DEFAULT

# Bytes of a body besides its prompt, and the most bytes that JSON escapes take for one character.
_OVERHEAD, _ESCAPED = 16_384, 12
# Fields that must be 1 or more.
_COUNTS = ("replicas", "threads", *(f"max_{name}" for name in ("batch", "queue", "side", "steps", "n", "prompt")))


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for."""

    side: int  # pixels
    steps: int
    n: int  # pictures
    prompt: int  # characters

    @property
    def body(self) -> int:
        """The most bytes of a body: one with the longest prompt."""
        return _OVERHEAD + _ESCAPED * self.prompt


@dataclass(frozen=True)
class Offer:
    """What is served: a model, its defaults and limits."""

    model: str
    size: tuple[int, int]  # width, height
    steps: int
    speed: str
    batched: dict[str, bool]  # for each speed, whether its pictures may share a batch
    unit: int  # sides are multiples of this number of pixels
    least: int  # shortest side allowed, in pixels
    limits: Limits

    def to_dict(self, created: int) -> dict[str, Any]:
        """The model in OpenAI's form, with its defaults, speeds and limits."""
        width, height = self.size
        more = {
            "defaults": {"size": f"{width}x{height}", "steps": self.steps, "speed": self.speed},
            "speeds": {name: {"batched": batched} for name, batched in self.batched.items()},
            "limits": asdict(self.limits),
        }
        return {"id": self.model, "object": "model", "created": created, "owned_by": "tokenmerge", "tokenmerge": more}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What to serve, where, and within which limits. Ray sends it to replicas on other machines."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    replicas: int = 1
    max_batch: int = 8
    max_queue: int = 64
    max_side: int = 2048
    max_steps: int = 100
    max_n: int = 10
    max_prompt: int = 4000
    timeout: float = 600.0
    speed: str = DEFAULT
    cluster: str | None = None
    logs: Path | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        # Ray's config files may contain anything.
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise TokenMergeError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 < self.timeout < math.inf:
            raise TokenMergeError(f"timeout is {self.timeout:g}; it must be a finite number above 0")
        if self.speed not in BATCHED_SPEEDS:
            raise TokenMergeError(f"speed is {self.speed!r}; choose from {', '.join(BATCHED_SPEEDS)}")

    @property
    def local(self) -> bool:
        """Whether it runs on its own Ray, on this machine."""
        return self.cluster is None

    @property
    def limits(self) -> Limits:
        # A request for more pictures than there are places would never be accepted.
        return Limits(self.max_side, self.max_steps, min(self.max_n, self.max_queue), self.max_prompt)

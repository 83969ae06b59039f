"""API keys: read from a file, kept as digests, compared in constant time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from hmac import compare_digest
from pathlib import Path

from ...errors import TokenMergeError

# Shorter keys can be guessed.
_LEAST = 16


def read_keys(path: Path | None) -> tuple[bytes, ...]:
    """Digests of the keys in a file, one key per line. Empty lines and lines that begin with # are skipped."""
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TokenMergeError(f"{path} cannot be read ({why}); give another --keys") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise TokenMergeError(f"{path} has no key; write one per line, of {_LEAST} characters or more")
    if any(len(key) < _LEAST for key in keys):
        raise TokenMergeError(f"{path} has a key of fewer than {_LEAST} characters; write longer ones")
    return tuple(map(digest, keys))


def digest(key: str) -> bytes:
    """A digest of the same length for every key, so that comparing reveals nothing about the length of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_known(header: str | None, digests: Sequence[bytes]) -> bool:
    """Whether an `Authorization` header has one of the keys. All digests are compared, even after a match."""
    scheme, _, key = (header or "").partition(" ")
    given = digest(key.strip())
    found = [compare_digest(given, each) for each in digests]
    return any(found) and scheme.lower() == "bearer"

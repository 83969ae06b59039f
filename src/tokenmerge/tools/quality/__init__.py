"""How far pictures are apart, how good sets of them are, and where the networks that judge come from."""

from .pixels import compare

__all__ = ["compare"]

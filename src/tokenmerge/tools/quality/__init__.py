"""Metrics of pictures and of sets of pictures, and the networks that some of them need."""

from .pixels import compare

__all__ = ["compare"]

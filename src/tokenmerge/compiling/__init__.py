"""Compiling for speed: blocks one by one, and whole denoiser calls as CUDA graphs."""

from .blocks import compile, compiled_state, recordings, uncompile, unrecorded

__all__ = ["compile", "compiled_state", "recordings", "uncompile", "unrecorded"]

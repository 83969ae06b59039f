"""Adapters: for each model family, tables that say where its image tokens pass. A new model is a table and its test."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import TokenMergeError
from .base import Block, BlockKind, Component, Family

__all__ = ["Block", "BlockKind", "Component", "Family", "denoiser_of", "families", "family_of"]


def families() -> tuple[Family, ...]:
    from . import flux, sd3, unet

    return (unet.FAMILY, sd3.FAMILY, flux.FAMILY)


def family_of(denoiser: nn.Module) -> Family:
    """The family of a denoiser, by its class."""
    for family in families():
        if isinstance(denoiser, family.denoiser):
            return family
    supported = ", ".join(family.denoiser.__name__ for family in families())
    raise TokenMergeError(
        f"{type(denoiser).__name__} is not supported; supported denoisers are {supported} (give one, or a pipeline)"
    )


def denoiser_of(model: Any) -> nn.Module:
    """The denoiser of a pipeline, or the module itself; compiled modules are looked into."""
    module = model
    if not isinstance(model, nn.Module):
        found = [getattr(model, name, None) for name in ("unet", "transformer")]
        module = next((part for part in found if isinstance(part, nn.Module)), None)
        if module is None:
            raise TokenMergeError(
                f"{type(model).__name__} is neither a module nor a pipeline with a unet or transformer; "
                f"supported denoisers are {', '.join(family.denoiser.__name__ for family in families())}"
            )
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner

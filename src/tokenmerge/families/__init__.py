"""Model families, one short table each, and how the denoiser of a model is found."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from ..errors import TokenMergeError
from .base import Block, BlockKind, Component, Family

__all__ = ["Block", "BlockKind", "Component", "Family", "denoiser_of", "families", "family_of"]

_PARTS = ("unet", "transformer")


@cache
def families() -> tuple[Family, ...]:
    try:
        import diffusers  # noqa: F401
    except ImportError as error:
        raise TokenMergeError("models need diffusers: pip install tokenmerge[diffusers]") from error
    from . import flux, sd3, unet

    return (unet.FAMILY, sd3.FAMILY, flux.FAMILY)


def family_of(denoiser: nn.Module) -> Family:
    """The family of a denoiser, by its class."""
    for family in families():
        if isinstance(denoiser, family.denoiser):
            return family
    raise TokenMergeError(
        f"{type(denoiser).__name__} is not supported; supported denoisers are {_supported()} (give one, or a pipeline)"
    )


def denoiser_of(model: Any) -> nn.Module:
    """The denoiser of a pipeline, or the module itself; compiled modules are looked into."""
    module = model
    if not isinstance(model, nn.Module):
        found = [getattr(model, name, None) for name in _PARTS]
        module = next((part for part in found if isinstance(part, nn.Module)), None)
        if module is None:
            raise TokenMergeError(
                f"{type(model).__name__} is neither a module nor a pipeline with a unet or transformer; "
                f"supported denoisers are {_supported()}"
            )
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def _supported() -> str:
    return ", ".join(family.denoiser.__name__ for family in families())

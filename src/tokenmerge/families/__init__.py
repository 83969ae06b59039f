"""Model families, one short table each, and the search for a model's denoisers."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from ..errors import TokenMergeError
from .base import Block, Family

__all__ = ["PARTS", "Block", "Family", "denoiser_of", "denoisers_of", "families", "family_of"]

# Tables name arguments that older versions of diffusers lack.
_OLDEST = (0, 37)
# In the order of our lists.
_TABLES = (
    "unet",
    "sd3",
    "flux",
    "flux2",
    "qwen",
    "zimage",
    "wan",
    "chroma",
    "krea2",
    "pixart",
    "auraflow",
    "cogview4",
    "hunyuan",
    "lumina2",
    "cogvideox",
    "ltx",
    "mochi",
    "kandinsky5",
)
# Errors name these when nothing has a similar name.
_BEST_KNOWN = ("UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel")
# Where pipelines keep denoisers. Wan 2.2 A14B has one for high and one for low noise; Ideogram 4 has one for guidance.
PARTS = ("unet", "transformer", "transformer_2", "unconditional_transformer")


@cache
def families() -> tuple[Family, ...]:
    """All families that the installed diffusers supports. Older versions lack the newest models."""
    install = "pip install -U tokenmerge[diffusers]"
    try:
        import diffusers
    except ImportError as error:
        raise TokenMergeError(f"models need diffusers: {install}") from error
    if tuple(map(int, diffusers.__version__.split(".")[:2])) < _OLDEST:
        raise TokenMergeError(f"diffusers {diffusers.__version__} is too old for tokenmerge: {install}")
    found: list[Family] = []
    for name in _TABLES:
        try:
            found += import_module(f".{name}", __name__).FAMILIES
        except ImportError:
            continue
    return tuple(found)


def family_of(denoiser: nn.Module) -> Family:
    """The family of a denoiser, by its class. Without a table its blocks can only be held."""
    for family in families():
        if isinstance(denoiser, family.denoiser):
            return family
    from .generic import generic_family, unholdable

    reason = unholdable(denoiser)
    if reason:
        name = type(denoiser).__name__
        raise TokenMergeError(
            f"{name} is not supported: it has no table, and Hold cannot work without one, because {reason}; "
            f"{_supported(name)}"
        )
    return generic_family(denoiser)


def denoisers_of(model: Any) -> list[nn.Module]:
    """The denoisers of a pipeline, or the module itself. Of a compiled module, the original."""
    parts = [model] if isinstance(model, nn.Module) else [getattr(model, name, None) for name in PARTS]
    found = [part for part in parts if isinstance(part, nn.Module)]
    if not found:
        name = type(model).__name__
        raise TokenMergeError(
            f"{name} is neither a module nor a pipeline with a unet or transformer{_other_part(model)}; "
            f"{_supported(name)}"
        )
    return [getattr(module, "_orig_mod", module) for module in found]


def _other_part(model: Any) -> str:
    """A hint at a part of the pipeline that could be held alone; empty if there is none."""
    from .generic import unholdable

    parts = getattr(model, "__dict__", {}).items()
    names = [name for name, part in parts if isinstance(part, nn.Module) and not unholdable(part)]
    return f", but Hold works on its {names[0]}: apply to pipe.{names[0]}, with scheduler=" if names else ""


def denoiser_of(model: Any) -> nn.Module:
    """The first denoiser of a pipeline, or the module itself."""
    return denoisers_of(model)[0]


def _supported(name: str) -> str:
    """The supported denoisers or pipelines with the nearest names."""
    known = [family.denoiser.__name__ for family in families()]
    pipelines = [each for family in families() for each in family.pipelines]
    near = get_close_matches(name, pipelines if "Pipeline" in name else known, cutoff=0.5)
    kind = "pipelines" if near and near[0] in pipelines else "denoisers"
    return f"supported {kind} are {', '.join(near or _BEST_KNOWN)} and others (tokenmerge.supported_models())"

"""What others have put on a model: caches and offload of diffusers, wrapped forwards."""

from __future__ import annotations

from torch import nn

# Hooks of diffusers' caches that see whole blocks from outside, and so all tokens; and of those that store what is
# inside, where tokens are merged.
OUTER_CACHES = ("fbc_", "mag_cache_")
INNER_CACHES = ("pyramid_attention_broadcast", "faster_cache_", "taylorseer_", "sea_cache_", "text_kv_cache_")
# Of a block that runs in every call and by its result decides whether the others do. MagCache decides before any runs.
_CACHE_LEADER = "fbc_leader"
_GROUP_OFFLOAD = "group_offloading"


def cache_hooks(denoiser: nn.Module) -> list[str]:
    """Names of diffusers' caches on a denoiser, by their hooks: not every model knows which cache it has."""
    names = dict.fromkeys(name for module in denoiser.modules() for name in _hook_names(module))
    return [name for name in names if name.startswith(OUTER_CACHES + INNER_CACHES)]


def leads_cache(block: nn.Module) -> bool:
    """Whether a block also runs in calls in which a cache skips the others."""
    return any(name.startswith(_CACHE_LEADER) for name in _hook_names(block))


def is_group_offloaded(block: nn.Module) -> bool:
    """Whether diffusers brings a block's weights to the device when the first of its group runs."""
    return _GROUP_OFFLOAD in _hook_names(block)


def runs_as_made(module: nn.Module) -> bool:
    """Whether the forward of a module of diffusers is its own, or one around it that passes for it: not one that
    somebody has written in its place."""
    return str(getattr(module.forward, "__module__", "")).partition(".")[0] in ("diffusers", "tokenmerge")


def _hook_names(module: nn.Module) -> list[str]:
    """Of diffusers' hooks on a module."""
    registry = vars(module).get("_diffusers_hook")
    return [] if registry is None else list(registry.hooks)

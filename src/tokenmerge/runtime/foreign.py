"""What others have put on a model: caches, offload and context parallel of diffusers, wrapped forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..families.calls import Shard

# Hooks of diffusers' caches that see whole blocks from outside, and so all tokens; and of those that store what is
# inside, where tokens are merged.
OUTER_CACHES = ("fbc_", "mag_cache_")
INNER_CACHES = ("pyramid_attention_broadcast", "faster_cache_", "taylorseer_", "sea_cache_", "text_kv_cache_")
# Of a block that runs in every call and by its result decides whether the others do. MagCache decides before any runs.
_CACHE_LEADER = "fbc_leader"
_GROUP_OFFLOAD = "group_offloading"
_CASTING = "layerwise_casting"
# On a denoiser whose blocks group offload tracks in one call, to know what to bring next.
_TRACKING = "lazy_prefetch_group_offloading"
# Share tokens out among processes, and gather them.
SHARDING = ("cp_input", "cp_output")


def cache_hooks(denoiser: nn.Module) -> list[str]:
    """Names of diffusers' caches on a denoiser, by their hooks: not every model knows which cache it has."""
    names = dict.fromkeys(name for module in denoiser.modules() for name in _hooks(module))
    return [name for name in names if name.startswith(OUTER_CACHES + INNER_CACHES)]


def leads_cache(block: nn.Module) -> bool:
    """Whether a block also runs in calls in which a cache skips the others."""
    return any(name.startswith(_CACHE_LEADER) for name in _hooks(block))


def offloaded_with(block: nn.Module) -> list[nn.Module]:
    """The modules whose weights diffusers' group offload brings and takes away with a block's; none without it."""
    hook = _hooks(block).get(_GROUP_OFFLOAD)
    return [] if hook is None else list(hook.group.modules)


def is_inside_offload(module: nn.Module, forward: Any) -> bool:
    """Whether group offload was put around a forward: weights then come and go whatever it does."""
    if _GROUP_OFFLOAD not in _hooks(module):
        return False
    registry = vars(module)["_diffusers_hook"]
    return registry._fn_refs[registry._hook_order.index(_GROUP_OFFLOAD)].forward is forward


def is_tracked(denoiser: nn.Module) -> bool:
    """Whether this call ends with hooks of group offload being taken off, and all that was put on them."""
    return _TRACKING in _hooks(denoiser)


def casts_weights(denoiser: nn.Module) -> bool:
    """Whether weights are kept in another dtype than that in which layers compute."""
    return any(_CASTING in _hooks(module) for module in denoiser.modules())


def shard_of(denoiser: nn.Module) -> Shard | None:
    """The part of all tokens that this process has, under diffusers' context parallel."""
    config: Any = getattr(getattr(denoiser, "_parallel_config", None), "context_parallel_config", None)
    if config is None:
        return None
    uneven = any(getattr(config, name, False) for name in ("ulysses_anything", "ring_anything"))
    group = config._flattened_mesh.get_group()
    return Shard(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), not uneven, group)


def runs_as_made(module: nn.Module) -> bool:
    """Whether the forward of a module of diffusers or ComfyUI is its own, or one around it that passes for it: not one
    that somebody has written in its place."""
    if isinstance(module, nn.ModuleList):
        # It never runs itself.
        return True
    return str(getattr(module.forward, "__module__", "")).partition(".")[0] in ("comfy", "diffusers", "tokenmerge")


def _hooks(module: nn.Module) -> dict[str, Any]:
    """diffusers' hooks on a module, by name."""
    registry = vars(module).get("_diffusers_hook")
    return {} if registry is None else registry.hooks

"""Detect what others have put on a model: diffusers' caches, offload and context parallelism, replaced forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..families.calls import Shard

# Names of diffusers' hooks, or what they begin with.
# Outer caches wrap whole blocks, so they see all tokens. Inner ones store what is inside a block, where tokens merge.
OUTER_CACHES = ("fbc_", "mag_cache_")
INNER_CACHES = ("pyramid_attention_broadcast", "faster_cache_", "taylorseer_", "sea_cache_", "text_kv_cache_")
# The first block under FirstBlockCache: it always runs, and its result decides whether the others do. MagCache decides
# before any block runs.
_CACHE_LEADER = "fbc_leader"
_GROUP_OFFLOAD = "group_offloading"
_CASTING = "layerwise_casting"
# Sits on the denoiser for one call, in which group offload learns the order of blocks for prefetching.
_TRACKING = "lazy_prefetch_group_offloading"
# Context parallelism: split the tokens among processes, and gather them again.
SHARDING = ("cp_input", "cp_output")


def cache_hooks(denoiser: nn.Module) -> list[str]:
    """Names of the hooks of diffusers' caches on a denoiser. Not every model records which cache is enabled."""
    names = dict.fromkeys(name for module in denoiser.modules() for name in _hooks(module))
    return [name for name in names if name.startswith(OUTER_CACHES + INNER_CACHES)]


def leads_cache(block: nn.Module) -> bool:
    """Whether a block runs even in calls where a cache skips the others."""
    return any(name.startswith(_CACHE_LEADER) for name in _hooks(block))


def offloaded_with(block: nn.Module) -> list[nn.Module]:
    """The modules whose weights diffusers' group offload moves together with this block's; empty without it."""
    hook = _hooks(block).get(_GROUP_OFFLOAD)
    return [] if hook is None else list(hook.group.modules)


def is_inside_offload(module: nn.Module, forward: Any) -> bool:
    """Whether group offload wraps `forward` directly. It then moves the weights even if `forward` skips the module."""
    if _GROUP_OFFLOAD not in _hooks(module):
        return False
    registry = vars(module)["_diffusers_hook"]
    return registry._fn_refs[registry._hook_order.index(_GROUP_OFFLOAD)].forward is forward


def is_tracked(denoiser: nn.Module) -> bool:
    """Whether group offload removes its tracking hooks after this call, and with them whatever was put around them."""
    return _TRACKING in _hooks(denoiser)


def casts_weights(denoiser: nn.Module) -> bool:
    """Whether diffusers stores weights in another dtype than layers compute in."""
    return any(_CASTING in _hooks(module) for module in denoiser.modules())


def shard_of(denoiser: nn.Module) -> Shard | None:
    """The shard of this process under diffusers' context parallelism; None without it."""
    config: Any = getattr(getattr(denoiser, "_parallel_config", None), "context_parallel_config", None)
    if config is None:
        return None
    uneven = any(getattr(config, name, False) for name in ("ulysses_anything", "ring_anything"))
    group = config._flattened_mesh.get_group()
    return Shard(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), not uneven, group)


def runs_as_made(module: nn.Module) -> bool:
    """Whether a module's forward comes from diffusers, ComfyUI or us by its `__module__`, which most wrappers copy."""
    if isinstance(module, nn.ModuleList):
        # A list has no forward of its own.
        return True
    return str(getattr(module.forward, "__module__", "")).partition(".")[0] in ("comfy", "diffusers", "tokenmerge")


def _hooks(module: nn.Module) -> dict[str, Any]:
    """Diffusers' hooks on a module, by name."""
    registry = vars(module).get("_diffusers_hook")
    return {} if registry is None else registry.hooks

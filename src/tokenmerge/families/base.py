"""The shape of an adapter's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .calls import DenoiserCall
from ..presets import Defaults
from ..config import MergeConfig
from ..errors import TokenMergeError
from ..runtime.noise import adds_noise
from .base import Argument, Ports


@dataclass(frozen=True)
class Component:
    """A submodule that can be merged by itself; `leave` is another submodule where its tokens come out, if any."""

    entry: str
    ports: Ports = Ports()
    leave: str | None = None


@dataclass(frozen=True)
class BlockKind:
    """One class of transformer block: its ports as a whole, and its components by name.

    keys_values: projections of self-attention to keys and values of image tokens, if fewer of those than queries will
    do. Rotary tables that are shared with queries forbid it.
    """

    ports: Ports
    components: Mapping[str, tuple[Component, ...]]
    keys_values: tuple[Component, ...] = ()


@dataclass(frozen=True)
class Block:
    """One block of a model, in the order they run."""

    name: str
    module: nn.Module
    kind: BlockKind
    group: str
    level: int = 0  # UNet: how often the latent was halved
    line: str = ""  # blocks of one line follow each other with nothing between: a span stays in one
    width: int = 0


@dataclass(frozen=True)
class Family:
    """A model family: how to list its blocks, read its calls, and what it must refuse."""

    name: str
    denoiser: type[nn.Module]
    defaults: Defaults  # where no preset is named
    blocks: Callable[[Any], list[Block]]
    read: Callable[[Any, tuple[Any, ...], dict[str, Any]], DenoiserCall]
    plan_call: Callable[[Any, int, int], DenoiserCall]  # the call a height x width latent leads to, without tensors
    unit: Callable[[Any, int], int]  # pixels that its pipelines want sides in multiples of, from pixels per latent
    example: Callable[[Any, int, int, int], dict[str, Any]]  # random arguments for a batch of height x width latents
    shared: bool = False  # whether a batch shares destinations, as it must where it shares rotary tables
    span_breakers: tuple[Argument, ...] = field(default=())  # arguments that reach in between blocks
    stages: Callable[[Any], list[Block]] | None = None  # all between its first and last layer, in the order they run
    # From the arguments of a call: what is added between stages, in a list that the denoiser empties.
    between_stages: Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]] = lambda args, kwargs: []
    masks: tuple[Argument, ...] = field(default=())  # arguments that mask image tokens
    attention_kwargs: Argument = Argument("joint_attention_kwargs", 7)

    def defaults_under(self, scheduler: Any) -> Defaults:
        """The same, but under a scheduler that adds noise UNets hold blocks: the convolutions around those see it."""
        noisy = self.stages is not None and adds_noise(scheduler)
        return self.defaults._replace(holding="hold") if noisy else self.defaults

    def way_out_of_noise(self, config: MergeConfig) -> str:
        """What to do under a scheduler that adds noise, where gaps stand in for all that would see it; else nothing."""
        if config.schedule.anchor_every and self.stages is None:
            return "use another scheduler, or start=0 and anchor_every=0, which merges at every step"
        return "use preset='hold', which holds blocks, or another scheduler" if config.sites == "stage" else ""

    def refuse(self, config: MergeConfig, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise for arguments of a denoiser call that merging cannot serve."""
        for argument in self.masks:
            if argument.read(args, kwargs) is not None:
                raise TokenMergeError(
                    f"{argument.name} masks image tokens in self-attention, which merged tokens cannot follow; "
                    "leave it out, or remove first"
                )
        extra = self.attention_kwargs.read(args, kwargs) or {}
        for name in ("attention_mask", "gligen"):
            if extra.get(name) is not None:
                raise TokenMergeError(
                    f"{self.attention_kwargs.name} has {name!r}, which needs every image token in its place; "
                    "leave it out, or remove first"
                )
        if extra.get("ip_adapter_masks") is not None and config.sites != "component":
            raise TokenMergeError(
                "IP-Adapter masks need cross-attention over all image tokens; use sites='component', "
                "which leaves masked cross-attention whole, or leave the masks out"
            )
        between = self.between_blocks(args, kwargs)
        if between and config.sites == "span":
            raise TokenMergeError(f"{between} acts between blocks, where a span has merged tokens; use sites='block'")

    def between_blocks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """An argument of a denoiser call that acts between blocks, if there is one."""
        given = (item.name for item in self.span_breakers if item.read(args, kwargs) is not None)
        return next(given, "")


def keys_values(*attentions: str) -> tuple[Component, ...]:
    """The projections to keys and values of diffusers' attention modules of these names."""
    ports = Ports(Argument("input", 0))
    return tuple(Component(f"{name}.{part}", ports) for name in attentions for part in ("to_k", "to_v"))


def as_tensor(timestep: Any) -> Tensor:
    return timestep if isinstance(timestep, Tensor) else torch.tensor(timestep, dtype=torch.float64)


def noise(denoiser: nn.Module, *shape: int) -> Tensor:
    """Random input for a denoiser, in its dtype and on its device."""
    parameter = next(denoiser.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(parameter.device, parameter.dtype)

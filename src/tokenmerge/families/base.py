"""What a family's table can say: where image tokens enter and leave, which blocks there are, what a call holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .calls import DenoiserCall

# The arguments of a call.
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Argument:
    """An argument of a forward. `arguments` makes them, with positions from the forward's signature."""

    name: str
    position: int

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.name in kwargs:
            return kwargs[self.name]
        return args[self.position] if len(args) > self.position else None

    def write(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Call:
        if self.name in kwargs:
            return args, {**kwargs, self.name: value}
        return (*args[: self.position], value, *args[self.position + 1 :]), kwargs


def arguments(module: type[nn.Module]) -> Callable[[str], Argument]:
    """The arguments of a module's forward, by name."""
    _, *names = inspect.signature(module.forward).parameters

    def argument(name: str) -> Argument:
        return Argument(name, names.index(name))

    return argument


_LINEAR = arguments(nn.Linear)("input")


@dataclass(frozen=True)
class Ports:
    """Where a module takes image tokens in and gives them out."""

    tokens: Argument = Argument("hidden_states", 0)
    outputs: tuple[int, ...] | None = None  # places in the returned tuple; None if the output is the tokens
    text_first: bool = False  # whether text tokens precede the image tokens in the same sequence
    text_tokens: Argument | None = None  # text that enters beside the image tokens, where as much is given out
    rotary: Argument | None = None

    def outgoing(self, output: Any) -> list[Tensor]:
        return [output] if self.outputs is None else [output[place] for place in self.outputs if place < len(output)]

    def text(self, output: Any) -> Tensor | None:
        """What a block gives out beside its image tokens."""
        if self.outputs is None:
            return None
        others = [value for place, value in enumerate(output) if place not in self.outputs]
        return others[0] if others else None

    def output(self, tokens: Tensor, text: Tensor | None) -> Any:
        """What a block that gave out these tokens and text would return."""
        if self.outputs is None:
            return tokens
        return tuple(tokens if place in self.outputs else text for place in range(1 + len(self.outputs)))

    def replaced(self, output: Any, tokens: list[Tensor]) -> Any:
        if self.outputs is None:
            return tokens[0]
        pairs = dict(zip(self.outputs, tokens, strict=False))
        return tuple(pairs.get(place, value) for place, value in enumerate(output))


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
    line: str = ""  # blocks of one line follow each other with nothing between: they can be held as one run
    width: int = 0


@dataclass(frozen=True)
class Family:
    """A model family: how to list its blocks and read its calls."""

    name: str
    denoiser: type[nn.Module]
    merging: str  # the preset that merges best here
    blocks: Callable[[Any], list[Block]]
    read: Callable[[Any, tuple[Any, ...], dict[str, Any]], DenoiserCall]
    plan_call: Callable[[Any, int, int], DenoiserCall]  # the call a height x width latent leads to, without tensors
    unit: Callable[[Any, int], int]  # pixels that its pipelines want sides in multiples of, from pixels per latent
    example: Callable[[Any, int, int, int], dict[str, Any]]  # random arguments for a batch of height x width latents
    attention_kwargs: Argument
    shares_positions: bool = False  # whether a batch shares rotary tables, and so destinations
    between_blocks: tuple[Argument, ...] = field(default=())  # arguments that reach in between blocks
    stages: Callable[[Any], list[Block]] | None = None  # all between its first and last layer, in the order they run
    # From the arguments of a call: what is added between stages, in a list that the denoiser empties.
    between_stages: Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]] = lambda args, kwargs: []
    masks: tuple[Argument, ...] = field(default=())  # arguments that mask image tokens


def keys_values(*attentions: str) -> tuple[Component, ...]:
    """The projections to keys and values of diffusers' attention modules of these names."""
    ports = Ports(_LINEAR)
    return tuple(Component(f"{name}.{part}", ports) for name in attentions for part in ("to_k", "to_v"))


def as_tensor(timestep: Any) -> Tensor:
    return timestep if isinstance(timestep, Tensor) else torch.tensor(timestep, dtype=torch.float64)


def random_input(denoiser: nn.Module, *shape: int) -> Tensor:
    """Random input for a denoiser, in its dtype and on its device."""
    parameter = next(denoiser.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(parameter.device, parameter.dtype)

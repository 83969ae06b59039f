"""What a family's table can say: where image tokens enter and leave, which blocks there are, what a call holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .calls import DenoiserCall

# Of a family that cannot tell before it runs.
_NO_CALL = DenoiserCall(1, torch.float32, torch.device("cpu"), torch.zeros(()))
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


LINEAR_INPUT = arguments(nn.Linear)("input")


@dataclass(frozen=True)
class PerToken:
    """An argument of a block with a row for every token of its sequence: a rotary table, a mask, a modulation. Merged
    tokens get the rows of their destinations."""

    argument: Argument
    axis: int  # that tokens lie along; 0 is shared by a batch, so that its samples must share destinations
    item: int | None = None  # of a tuple
    text: str = "first"  # where rows of text tokens lie, if it has any: first, or after those of image tokens
    ndim: int | None = None  # it has rows only if it has so many axes

    def rows(self, value: Any) -> Tensor | None:
        """The tensor with rows, if there are any."""
        tensor: Tensor | None = value if self.item is None or value is None else value[self.item]
        if tensor is None or (self.ndim is not None and tensor.ndim != self.ndim) or tensor.shape[self.axis] == 1:
            return None
        return tensor

    def replaced(self, value: Any, rows: Tensor) -> Any:
        """The argument with other rows."""
        if self.item is None:
            return rows
        return tuple(rows if number == self.item else item for number, item in enumerate(value))


def cos_sin(argument: Argument, axis: int = 0, text: str = "first") -> tuple[PerToken, PerToken]:
    """Two rotary tables in one argument."""
    return PerToken(argument, axis, 0, text), PerToken(argument, axis, 1, text)


@dataclass(frozen=True)
class Ports:
    """Where a module takes image tokens in and gives them out."""

    tokens: Argument = Argument("hidden_states", 0)
    outputs: tuple[int, ...] | None = None  # places in the returned tuple; None if the output is the tokens
    text: str = ""  # where text tokens lie in the same sequence: first, or after the image tokens
    text_tokens: Argument | None = None  # text that enters beside the image tokens, where as much is given out
    per_token: tuple[PerToken, ...] = ()
    in_place: bool = False  # whether the module may write to the tokens it is given
    # Of a held stage that is not the last: the shape of what it gives out, which nothing reads.
    nothing: tuple[int, ...] = ()

    def outgoing(self, output: Any) -> list[Tensor]:
        """Image tokens that a module gives out."""
        return [output] if self.outputs is None else [output[place] for place in self.outputs if place < len(output)]

    def replaced(self, output: Any, tokens: list[Tensor]) -> Any:
        if self.outputs is None:
            return tokens[0]
        pairs = dict(zip(self.outputs, tokens, strict=False))
        return tuple(pairs.get(place, value) for place, value in enumerate(output))

    # What a block changes: its image tokens, and its text tokens where they enter by themselves.

    @property
    def streams(self) -> int:
        return 1 if self.text_tokens is None else 2

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        tokens = self.tokens.read(args, kwargs)
        return (tokens,) if self.text_tokens is None else (tokens, self.text_tokens.read(args, kwargs))

    def leaving(self, output: Any) -> tuple[Tensor | None, ...]:
        """In the order of `entering`; None for what a block gives out no more."""
        if self.outputs is None:
            return (output,)
        (image,) = self.outputs
        others = [value for place, value in enumerate(output) if place != image]
        return (output[image], *others[:1])

    def output(self, streams: tuple[Tensor | None, ...]) -> Any:
        """What a block that gave out these would return."""
        if self.outputs is None:
            return streams[0]
        tokens, text = streams
        return (tokens, text) if self.outputs == (0,) else (text, tokens)


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
    components: Mapping[str, tuple[Component, ...]] = field(default_factory=dict)
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
    """A model family: how to list its blocks and read its calls. The page of models is made from these tables."""

    name: str
    title: str  # the models, as people call them
    denoiser: type[nn.Module]
    blocks: Callable[[Any], list[Block]]
    read: Callable[[Any, tuple[Any, ...], dict[str, Any]], DenoiserCall]
    pipelines: tuple[str, ...] = ()  # of diffusers, that are tested
    steps: str = ""  # that its models are usually given
    # The call that a latent of a height, a width and so many frames leads to, without tensors.
    plan_call: Callable[..., DenoiserCall] = lambda *_: _NO_CALL
    # Random arguments for a batch of latents of a height, a width and so many frames.
    example: Callable[..., dict[str, Any]] = lambda *_: {}
    # Pixels that its pipelines want sides in multiples of, from pixels per latent.
    unit: Callable[[Any, int], int] = lambda denoiser, scale: scale
    merging: str = "dit"  # the preset that merges best here
    frames: int = 1  # that its pipelines usually make; more than 1 for videos
    scales: tuple[int, int] = (8, 4)  # pixels along a side, and frames, that a latent usually stands for
    attention_kwargs: Argument | None = None
    between_blocks: tuple[Argument, ...] = ()  # arguments that reach in between blocks
    stages: Callable[[Any], list[Block]] | None = None  # all between its first and last layer, in the order they run
    # From the arguments of a call: what is added between stages, in a list that the denoiser empties.
    between_stages: Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]] = lambda args, kwargs: []
    masks: tuple[Argument, ...] = ()  # arguments that mask image tokens
    # Why a denoiser, or a call of it, cannot be merged, if it cannot.
    unmergeable: Callable[[Any], str] = lambda denoiser: ""
    unmergeable_call: Callable[[tuple[Any, ...], dict[str, Any]], str] = lambda args, kwargs: ""
    trained: str = ""  # a bundled model of the family, which is tested with trained weights
    note: str = ""  # on the page of models
    learned: bool = False  # whether blocks are candidates, of which a call shows what can be held


def keys_values(*attentions: str) -> tuple[Component, ...]:
    """The projections to keys and values of diffusers' attention modules of these names."""
    ports = Ports(LINEAR_INPUT)
    return tuple(Component(f"{name}.{part}", ports) for name in attentions for part in ("to_k", "to_v"))


def listed(*lists: tuple[str, BlockKind, str], line: str | None = None) -> Callable[[Any], list[Block]]:
    """The blocks of module lists, each given by its name, the kind of its blocks and their group.

    line: of all blocks, where nothing acts between two lists.
    """

    def blocks(denoiser: Any) -> list[Block]:
        width = _width(denoiser.config)
        return [
            Block(f"{name}.{number}", block, kind, group, line=group if line is None else line, width=width)
            for name, kind, group in lists
            for number, block in enumerate(denoiser.get_submodule(name))
        ]

    return blocks


def _width(config: Any) -> int:
    """Channels of a token, as diffusers' configs tell them."""
    for name in ("dim", "hidden_size", "model_dim"):
        if config.get(name):
            return int(config[name])
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def as_tensor(timestep: Any) -> Tensor:
    return timestep if isinstance(timestep, Tensor) else torch.tensor(timestep, dtype=torch.float64)


def random_input(denoiser: nn.Module, *shape: int) -> Tensor:
    """Random input for a denoiser, in its dtype and on its device."""
    parameter = next(denoiser.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(parameter.device, parameter.dtype)

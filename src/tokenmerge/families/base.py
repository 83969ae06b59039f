"""The vocabulary of family tables: where image tokens enter and leave, which blocks there are, how a call is read."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .calls import DenoiserCall, planned

# Positional and keyword arguments of a forward.
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Argument:
    """An argument of a forward. `arguments` makes it, with the position from the forward's signature."""

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
    """A lookup by name for the arguments of a module's forward."""
    _, *names = inspect.signature(module.forward).parameters

    def argument(name: str) -> Argument:
        return Argument(name, names.index(name))

    return argument


LINEAR_INPUT = arguments(nn.Linear)("input")


@dataclass(frozen=True)
class PerToken:
    """A block's argument with a row per token: a rotary table, a mask, a modulation.

    Merged tokens get the rows of their destinations.
    """

    argument: Argument
    axis: int  # the axis of tokens; if 0, the samples of a batch share the rows and must share destinations
    item: int | None = None  # index of the tensor, if the argument is a tuple
    text: str = "first"  # where rows of text tokens lie, if there are any: "first", or "after" the image tokens
    ndim: int | None = None  # the argument has rows only if its tensor has this many axes

    def rows(self, value: Any) -> Tensor | None:
        """The tensor with a row per token; None if the argument has no such rows."""
        tensor: Tensor | None = value if self.item is None or value is None else value[self.item]
        if tensor is None or (self.ndim is not None and tensor.ndim != self.ndim) or tensor.shape[self.axis] == 1:
            return None
        return tensor

    def replaced(self, value: Any, rows: Tensor) -> Any:
        """The argument with `rows` in place of its own."""
        if self.item is None:
            return rows
        return tuple(rows if number == self.item else item for number, item in enumerate(value))


def cos_sin(argument: Argument, axis: int = 0) -> tuple[PerToken, PerToken]:
    """The cosine and sine tables of one rotary argument, a tuple of both."""
    return PerToken(argument, axis, 0), PerToken(argument, axis, 1)


@dataclass(frozen=True)
class Ports:
    """Where image tokens enter and leave a module."""

    tokens: Argument = Argument("hidden_states", 0)
    outputs: tuple[int, ...] | None = None  # where tokens are in the returned tuple; None if the output is the tokens
    text: str = ""  # where text tokens lie in the same sequence: "first", or "after" the image tokens
    text_tokens: Argument | None = None  # text tokens that enter as an argument of their own and leave in the output
    per_token: tuple[PerToken, ...] = ()
    in_place: bool = False  # whether the module may write to its input tokens
    # Output shape of a held stage that is not the last. Nothing reads that output.
    nothing: tuple[int, ...] = ()

    def outgoing(self, output: Any) -> list[Tensor]:
        """The image tokens in a module's output."""
        return [output] if self.outputs is None else [output[place] for place in self.outputs if place < len(output)]

    def replaced(self, output: Any, tokens: list[Tensor]) -> Any:
        if self.outputs is None:
            return tokens[0]
        pairs = dict(zip(self.outputs, tokens, strict=False))
        return tuple(pairs.get(place, value) for place, value in enumerate(output))

    @property
    def streams(self) -> int:
        """How many streams a block changes: image tokens, and text tokens that enter as an argument of their own."""
        return 1 if self.text_tokens is None else 2

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        tokens = self.tokens.read(args, kwargs)
        return (tokens,) if self.text_tokens is None else (tokens, self.text_tokens.read(args, kwargs))

    def leaving(self, output: Any) -> tuple[Tensor | None, ...]:
        """The streams in a block's output, in the order of `entering`; None for text that a last block drops."""
        if self.outputs is None:
            return (output,)
        (image,) = self.outputs
        others = [value for place, value in enumerate(output) if place != image]
        return (output[image], *others[:1])

    def output(self, streams: tuple[Tensor | None, ...]) -> Any:
        """The return value of a block whose streams leave like this."""
        if self.outputs is None:
            return streams[0]
        tokens, text = streams
        return (tokens, text) if self.outputs == (0,) else (text, tokens)


def joint_ports(block: type[nn.Module], output: int, rotary: str | None = "image_rotary_emb") -> Ports:
    """The ports of a block where image and text tokens enter and leave side by side, as separate tensors.

    output: place of the image tokens in the returned pair; rotary: argument with the rotary tables, if there are any.
    """
    argument = arguments(block)
    return Ports(
        argument("hidden_states"),
        outputs=(output,),
        text_tokens=argument("encoder_hidden_states"),
        per_token=() if rotary is None else cos_sin(argument(rotary)),
    )


@dataclass(frozen=True)
class Component:
    """A submodule that can be merged alone. leave: the submodule where its tokens leave, if not itself."""

    entry: str
    ports: Ports = Ports()
    leave: str | None = None


@dataclass(frozen=True)
class BlockKind:
    """One class of transformer block: the ports of the whole block, and its components by name.

    keys_values: the projections of image tokens to keys and values, if self-attention works with fewer keys than
    queries. It does not where both share rotary tables.
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
    line: str = ""  # blocks of one line follow each other with nothing between, so they can be held as one run
    width: int = 0  # channels of a token


class Calls(ABC):
    """How a family's denoiser calls are read, and planned without tensors. Sizes are in latents."""

    @abstractmethod
    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        """What techniques must know of a call with these arguments."""

    def plan(self, denoiser: Any, height: int, width: int, frames: int = 1) -> DenoiserCall:
        """The call for a latent of this size, as far as it is known before it runs."""
        return planned()

    def unit(self, denoiser: Any, scale: int) -> int:
        """Sides of a picture must be multiples of this many pixels. scale: pixels along a side of a latent."""
        return scale


@dataclass(frozen=True)
class Family:
    """The table of a model architecture: its blocks, how its calls are read, what it cannot do."""

    name: str
    title: str  # the models, as people call them
    denoiser: type[nn.Module]
    blocks: Callable[[Any], list[Block]]
    calls: Calls
    pipelines: tuple[str, ...] = ()  # the diffusers pipelines that we test
    steps: str = ""  # how many steps people usually use
    # Random arguments for a call. It receives the denoiser, the batch, and height, width and frames in latents.
    example: Callable[..., dict[str, Any]] = lambda *_: {}
    merging: str = "dit"  # the preset that merges best here
    frames: int = 1  # how many frames its pipelines usually make; more than 1 for videos
    scales: tuple[int, int] = (8, 4)  # the usual pixels along a side of a latent, and frames per latent
    attention_kwargs: Argument | None = None
    between_blocks: tuple[Argument, ...] = ()  # arguments that act between blocks
    stages: Callable[[Any], list[Block]] | None = None  # UNet: everything between its first and last layer, in order
    # From a call's arguments: the list of tensors added between stages. The denoiser empties it as it goes.
    between_stages: Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]] = lambda args, kwargs: []
    masks: tuple[Argument, ...] = ()  # arguments that mask image tokens
    # Why a denoiser, or one call of it, cannot be merged; empty if it can.
    unmergeable: Callable[[Any], str] = lambda denoiser: ""
    unmergeable_call: Callable[[tuple[Any, ...], dict[str, Any]], str] = lambda args, kwargs: ""
    trained: str = ""  # a bundled model of this family, tested with trained weights
    note: str = ""  # shown on the page of models
    learned: bool = False  # whether `blocks` are only candidates: the first call shows which of them can be held


def keys_values(*attentions: str) -> tuple[Component, ...]:
    """The key and value projections of the diffusers attention modules with these names."""
    ports = Ports(LINEAR_INPUT)
    return tuple(Component(f"{name}.{part}", ports) for name in attentions for part in ("to_k", "to_v"))


def listed(*lists: tuple[str, BlockKind, str], line: str | None = None) -> Callable[[Any], list[Block]]:
    """The blocks of module lists. Each list is its name, the kind of its blocks and their group.

    line: one line for all blocks, where nothing acts between the lists.
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
    """Channels of a token, from a diffusers config."""
    for name in ("dim", "hidden_size", "model_dim"):
        if config.get(name):
            return int(config[name])
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def as_tensor(timestep: Any) -> Tensor:
    return timestep if isinstance(timestep, Tensor) else torch.tensor(timestep, dtype=torch.float64)


def random_input(denoiser: nn.Module, *shape: int) -> Tensor:
    """A random tensor in the denoiser's dtype and on its device."""
    parameter = next(denoiser.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(parameter.device, parameter.dtype)

"""Tables of ComfyUI's denoisers, in the library's form: where tokens enter and leave, and what a call contains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from comfy.ldm.chroma.model import Chroma
from comfy.ldm.flux.model import Flux
from comfy.ldm.modules.attention import BasicTransformerBlock, SpatialTransformer, SpatialVideoTransformer
from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, UNetModel, Upsample
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.ldm.wan.model import WanModel
from torch import Tensor, nn

from tokenmerge import TokenMergeError
from tokenmerge.families.base import Argument, Block, BlockKind, Calls, Component, Family, PerToken, Ports, keys_values
from tokenmerge.families.calls import DenoiserCall, TokenGrid

# ComfyUI passes these by keyword, so their positions are dummies.
_CONTROL = Argument("control", 99)
# Patches by other nodes that read or change single tokens of attention.
_ATTENTION_PATCHES = (
    *("attn1_patch", "attn1_output_patch", "attn2_patch", "attn2_output_patch", "middle_patch"),
    *("attn1", "attn2"),
)
_UNMERGEABLE = "in ComfyUI, Merge works with UNets, Flux and Chroma only"


@dataclass(frozen=True)
class _Patches(Argument):
    """Patches by other nodes that act between transformer blocks, or replace one."""

    names: tuple[str, ...] = ("dit", "double_block", "single_block")

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return next((name for name in self.names if name in _patches(kwargs)), None)


def _patches(kwargs: dict[str, Any]) -> set[str]:
    """The names of all patches in a call."""
    options = kwargs.get("transformer_options") or {}
    return {name for kind in ("patches", "patches_replace") for name, each in options.get(kind, {}).items() if each}


_BETWEEN = (_CONTROL, _Patches("transformer_options", 99))


def _call(kwargs: dict[str, Any], x: Tensor, timestep: Tensor, grids: tuple[TokenGrid, ...], **more: Any):
    return DenoiserCall(
        x.shape[0], x.dtype, x.device, timestep, grids, conditions=_conditions(kwargs, x.shape[0]), **more
    )


def _conditions(kwargs: dict[str, Any], batch: int) -> tuple[Any, ...]:
    """What each part of the batch is: its condition and, for a video drawn in windows, its frames."""
    options = kwargs.get("transformer_options") or {}
    uuids, window = options.get("uuids") or (), options.get("context_window")
    if not uuids or batch % len(uuids):
        return ()
    frames = () if window is None else tuple(window.index_list)
    return tuple((uuid, frames) for uuid in uuids)


def _shapes(kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Shapes, without the batch, of all tensors beside the latent: text, references, masks."""
    found = []
    for name, value in sorted(kwargs.items()):
        tensors = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, Tensor)]
        found += [(name, tuple(each.shape[1:])) for each in tensors]
    return tuple(found)


def _grid(latent: Tensor, patch: tuple[int, int, int]) -> TokenGrid:
    """The token grid of a latent. Sides that patches do not divide are padded."""
    frames = latent.shape[2] if latent.ndim == 5 else 1
    sides = (*latent.shape[-2:], frames)
    height, width, frames = (-(-side // size) for side, size in zip(sides, (patch[1], patch[2], patch[0]), strict=True))
    return TokenGrid(height, width, frames)


class _TransformerCalls(Calls):
    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        x, timestep = args[:2]
        size = getattr(denoiser, "patch_size", 1)
        patch = tuple(size) if isinstance(size, tuple | list) else (1, size, size)
        grids = tuple(_grid(each, patch) for each in (x, *(kwargs.get("ref_latents") or ())))
        return _call(kwargs, x, timestep, grids, shapes=_shapes(kwargs))


def _listed(*lists: tuple[str, BlockKind]) -> Any:
    def blocks(denoiser: Any) -> list[Block]:
        return [
            Block(f"{name}.{number}", block, kind, name, line=name)
            for name, kind in lists
            for number, block in enumerate(denoiser.get_submodule(name))
        ]

    return blocks


# Flux and Chroma: image and text side by side, then in one sequence. Blocks write to their inputs.

_DOUBLE = BlockKind(
    Ports(
        Argument("img", 0),
        outputs=(0,),
        text_tokens=Argument("txt", 1),
        per_token=(PerToken(Argument("pe", 3), 2),),
        in_place=True,
    )
)
_SINGLE = BlockKind(Ports(Argument("x", 0), text="first", per_token=(PerToken(Argument("pe", 2), 2),), in_place=True))


def _unmergeable_joint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if kwargs.get("attention_mask") is not None:
        return "this prompt has an attention mask over all tokens"
    patched = _BETWEEN[1].read(args, kwargs)
    return f"a patch by another node ({patched}) acts on the blocks" if patched else ""


def _flux(name: str, title: str, denoiser: type[nn.Module]) -> Family:
    return Family(
        name=name,
        title=title,
        denoiser=denoiser,
        blocks=_listed(("double_blocks", _DOUBLE), ("single_blocks", _SINGLE)),
        calls=_TransformerCalls(),
        between_blocks=_BETWEEN,
        unmergeable_call=_unmergeable_joint,
    )


# Families that can be held, but not merged.


def _held(name: str, title: str, denoiser: type[nn.Module], blocks: str, ports: Ports) -> Family:
    return Family(
        name=name,
        title=title,
        denoiser=denoiser,
        blocks=_listed((blocks, BlockKind(ports))),
        calls=_TransformerCalls(),
        between_blocks=_BETWEEN,
        unmergeable=lambda _: _UNMERGEABLE,
    )


# UNets.

_X = Ports(Argument("x", 0), in_place=True)
_COMPONENT = Ports(Argument("x", 0))
_BASIC = BlockKind(
    _X,
    {
        "self_attention": (Component("attn1", _COMPONENT),),
        "cross_attention": (Component("attn2", _COMPONENT),),
        "mlp": (Component("ff", _COMPONENT),),
    },
    keys_values("attn1"),
)
# A held layer returns this shape, which torch.cat ignores when it joins skip connections.
_LAYER = BlockKind(replace(_X, nothing=(0,)))


def _layers(unet: Any) -> list[tuple[str, nn.Module, int]]:
    """All layers after the first convolution, in order, each with how often the latent was halved before it."""
    sequences = [
        *((f"input_blocks.{place}", each) for place, each in enumerate(unet.input_blocks)),
        ("middle_block", unet.middle_block or ()),
        *((f"output_blocks.{place}", each) for place, each in enumerate(unet.output_blocks)),
    ]
    found, level = [], 0
    for path, sequence in sequences:
        for number, layer in enumerate(sequence):
            found.append((f"{path}.{number}", layer, level))
            level += _resizes(layer, Downsample) - _resizes(layer, Upsample)
    return found[1:]


def _resizes(layer: Any, kind: type[nn.Module]) -> bool:
    return isinstance(layer, kind) or isinstance(getattr(layer, "h_upd", None), kind)


def _stages(unet: Any) -> list[Block]:
    return [Block(name, layer, _LAYER, "stages") for name, layer, _ in _layers(unet)]


def _unet_blocks(unet: Any) -> list[Block]:
    return [
        Block(f"{path}.transformer_blocks.{number}", block, _BASIC, f"level-{2**level}", level, path)
        for path, layer, level in _layers(unet)
        if isinstance(layer, SpatialTransformer)
        for number, block in enumerate(layer.transformer_blocks)
        if isinstance(block, BasicTransformerBlock)
    ]


class _UNetCalls(Calls):
    def read(self, denoiser: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserCall:
        return _call(kwargs, *args[:2], (_grid(args[0], (1, 1, 1)),))


class _BetweenStages(list[Any]):
    """What other nodes add between the layers of a UNet. It is cleared in a call that holds the layers."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._kwargs = kwargs

    def clear(self) -> None:
        (self._kwargs.get("control") or {}).clear()
        options = self._kwargs.get("transformer_options") or {}
        if options.get("patches"):
            # A new dict, because other calls still use the old one.
            options["patches"] = {name: each for name, each in options["patches"].items() if "_block_patch" not in name}


def _unmergeable_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    found = sorted(_patches(kwargs).intersection(_ATTENTION_PATCHES))
    return f"a patch by another node ({found[0]}) works on single tokens of attention" if found else ""


@cache
def families() -> tuple[Family, ...]:
    return (
        Family(
            name="unet",
            title="Stable Diffusion 1.5, 2.x, SDXL",
            denoiser=UNetModel,
            blocks=_unet_blocks,
            calls=_UNetCalls(),
            merging="unet",
            stages=_stages,
            between_stages=lambda args, kwargs: _BetweenStages(kwargs),
            unmergeable_call=_unmergeable_attention,
        ),
        _flux("flux", "Flux", Flux),
        _flux("chroma", "Chroma", Chroma),
        _held(
            "sd3",
            "Stable Diffusion 3, 3.5",
            MMDiT,
            "joint_blocks",
            Ports(Argument("x", 1), outputs=(1,), text_tokens=Argument("context", 0)),
        ),
        _held("wan", "Wan 2.1, 2.2", WanModel, "blocks", Ports(Argument("x", 0))),
        _held(
            "qwen",
            "Qwen-Image",
            QwenImageTransformer2DModel,
            "transformer_blocks",
            Ports(Argument("hidden_states", 0), outputs=(1,), text_tokens=Argument("encoder_hidden_states", 1)),
        ),
    )


# Methods that run a model's blocks. A subclass that overrides one does other things between the blocks.
_LOOPS = ("forward_orig", "forward_core_with_concat", "_forward")


def family_of(denoiser: nn.Module) -> Family:
    """The table of a MODEL's denoiser; raises where there is none."""
    video = any(isinstance(module, SpatialVideoTransformer) for module in denoiser.modules())
    for family in families():
        if isinstance(denoiser, family.denoiser) and _runs_alike(type(denoiser), family.denoiser) and not video:
            return family
    known = ", ".join(family.title for family in families())
    raise TokenMergeError(
        f"this MODEL is a {type(denoiser).__name__}, which tokenmerge does not support in ComfyUI; it supports "
        f"{known}: connect one of those, or leave the node out"
    )


def _runs_alike(kind: type[nn.Module], known: type[nn.Module]) -> bool:
    return all(getattr(kind, name, None) is getattr(known, name, None) for name in _LOOPS)

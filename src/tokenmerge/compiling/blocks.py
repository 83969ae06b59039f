"""compile and uncompile: one line that gives a pipeline its best speed, with techniques or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ..errors import TokenMergeError
from ..families import PARTS, denoisers_of, family_of
from ..runtime.state import APPLIED
from .graphs import GraphedForward, Recordable

Model = TypeVar("Model")

# Where `compile` keeps what it knows, on the denoiser.
_COMPILED = "_tokenmerge_compiled"


@dataclass(frozen=True)
class _Compiled:
    blocks: tuple[nn.Module, ...]
    graphs: GraphedForward | None

    def __str__(self) -> str:
        if self.graphs is None:
            return f"{len(self.blocks)} blocks, no CUDA graphs"
        told = f"{len(self.blocks)} blocks, {self.graphs.recordings} CUDA graphs so far"
        return "; ".join([told, *(f"some calls cannot be recorded ({reason})" for reason in self.graphs.refusals)])


def compile(model: Model, *, blocks: bool = True, graphs: bool | None = None) -> Model:
    """Make a pipeline or denoiser fast, until `uncompile`; before or after `apply`, or without it.

    blocks: compile each transformer block by itself, in the first call of every size; that takes a fraction of the time
    that a whole denoiser takes. graphs: replay whole denoiser calls as CUDA graphs, one for each kind of call
    (default: on a CUDA device). A model that was compiled here before gets the new choice instead.
    """
    denoisers = denoisers_of(model)
    if graphs is None:
        graphs = next(denoisers[0].parameters()).device.type == "cuda"
    listed = []
    for denoiser in denoisers:
        _check_compilable(model, denoiser, str(next(denoiser.parameters()).device), graphs)
        listed.append(family_of(denoiser).blocks(denoiser) if blocks else [])
    uncompile(model)
    for denoiser, candidates in zip(denoisers, listed, strict=True):
        # One that somebody else has compiled is left alone.
        chosen = tuple(block.module for block in candidates if block.module._compiled_call_impl is None)
        for module in chosen:
            # Of blocks without a table nobody knows whether one graph holds them.
            module.compile(fullgraph=not family_of(denoiser).learned)
        graphed = GraphedForward(denoiser, _applied_state) if graphs else None
        setattr(denoiser, _COMPILED, _Compiled(chosen, graphed))
    return model


def uncompile(model: Model) -> Model:
    """Undo `compile`. Safe to call twice."""
    for denoiser in denoisers_of(model):
        known = vars(denoiser).get(_COMPILED)
        if known is None:
            continue
        if known.graphs is not None:
            known.graphs.undo()
        for block in known.blocks:
            block._compiled_call_impl = None
        delattr(denoiser, _COMPILED)
    return model


def unrecorded(denoiser: nn.Module) -> tuple[str, ...]:
    """Why calls of a denoiser that has run run as they are, though they were to be replayed as CUDA graphs."""
    known = vars(denoiser).get(_COMPILED)
    if known is None or known.graphs is None:
        return ()
    # A method that draws maps with the help of the host in every call is never recorded, and never fails to be.
    return known.graphs.refusals or (() if known.graphs.recordings else ("all of them need the host",))


def recordings(denoiser: nn.Module) -> int | None:
    """How many kinds of call are replayed as CUDA graphs so far; None where none are to be."""
    known = vars(denoiser).get(_COMPILED)
    return known.graphs.recordings if known is not None and known.graphs is not None else None


def compiled_state(denoiser: nn.Module) -> str:
    """What `compile` has done to a denoiser, for people."""
    return str(vars(denoiser).get(_COMPILED, "not by tokenmerge.compile"))


def _applied_state(denoiser: nn.Module) -> Recordable | None:
    known = vars(denoiser).get(APPLIED)
    return known.state if known is not None and (known.merging or known.holding) else None


def _check_compilable(model: Any, denoiser: nn.Module, device: str, graphs: bool) -> None:
    whole = denoiser._compiled_call_impl is not None or any(
        hasattr(getattr(model, name, None), "_orig_mod") for name in PARTS
    )
    if whole or hasattr(model, "_orig_mod"):
        raise TokenMergeError(
            "the denoiser is compiled as a whole already; compile its blocks instead: take torch.compile off it first"
        )
    if graphs and not device.startswith("cuda"):
        raise TokenMergeError(f"CUDA graphs need a CUDA device, the denoiser is on {device}; use graphs=False")
    registry = vars(denoiser).get("_diffusers_hook")
    # Pipelines leave an empty one behind.
    hooked = registry is not None and bool(registry.hooks)
    if graphs and (hasattr(denoiser, "_hf_hook") or hooked):
        raise TokenMergeError(
            "CUDA graphs fix where weights lie, and offload or a hook of the denoiser moves them; use graphs=False"
        )

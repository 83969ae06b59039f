"""compile and uncompile: one call that gives a pipeline its best speed, with or without techniques."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ..errors import TokenMergeError
from ..families import PARTS, denoisers_of, family_of
from ..runtime.state import APPLIED
from .graphs import GraphedForward, Recordable

Model = TypeVar("Model")

# The attribute of a denoiser in which `compile` keeps its `_Compiled`.
_COMPILED = "_tokenmerge_compiled"


@dataclass(frozen=True)
class _Compiled:
    blocks: tuple[nn.Module, ...]
    graphs: GraphedForward | None

    def __str__(self) -> str:
        if self.graphs is None:
            return f"{len(self.blocks)} blocks, no CUDA graphs"
        counts = f"{len(self.blocks)} blocks, {self.graphs.recordings} CUDA graphs so far"
        return "; ".join([counts, *(f"some calls cannot be recorded ({reason})" for reason in self.graphs.refusals)])


def compile(model: Model, *, blocks: bool = True, graphs: bool | None = None) -> Model:
    """Make a pipeline or denoiser fast, until `uncompile`. Works before `apply`, after it, or without it.

    blocks: compile each transformer block separately, in the first call of every size. That takes a fraction of the
    time of compiling a whole denoiser. graphs: replay whole denoiser calls as CUDA graphs, one for each kind of call
    (default: on a CUDA device). Calling `compile` again replaces the earlier choice.
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
        # Leave alone any block that somebody else has compiled.
        chosen = tuple(block.module for block in candidates if block.module._compiled_call_impl is None)
        for module in chosen:
            # Blocks of a model without a table may not fit into one graph.
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
    """Why calls of a denoiser that has run were not recorded as CUDA graphs; empty without graphs or reasons."""
    graphs = _graphs_of(denoiser)
    if graphs is None:
        return ()
    # A method that needs the host to make maps in every call is never recorded, so no recording of it ever fails.
    return graphs.refusals or (() if graphs.recordings else ("all of them need the host",))


def recordings(denoiser: nn.Module) -> int | None:
    """The number of kinds of call replayed as CUDA graphs so far; None without graphs."""
    graphs = _graphs_of(denoiser)
    return None if graphs is None else graphs.recordings


def _graphs_of(denoiser: nn.Module) -> GraphedForward | None:
    known = vars(denoiser).get(_COMPILED)
    return None if known is None else known.graphs


def compiled_state(denoiser: nn.Module) -> str:
    """What `compile` has done to a denoiser, as text."""
    return str(vars(denoiser).get(_COMPILED, "not by tokenmerge.compile"))


def _applied_state(denoiser: nn.Module) -> Recordable | None:
    known = vars(denoiser).get(APPLIED)
    return known.state if known is not None and (known.merging or known.holding) else None


def _check_compilable(model: Any, denoiser: nn.Module, device: str, graphs: bool) -> None:
    wrapped = hasattr(model, "_orig_mod") or any(hasattr(getattr(model, name, None), "_orig_mod") for name in PARTS)
    if wrapped or denoiser._compiled_call_impl is not None:
        raise TokenMergeError(
            "the denoiser is already compiled as a whole; remove torch.compile from it, so that its blocks can be "
            "compiled instead"
        )
    if not graphs:
        return
    if not device.startswith("cuda"):
        raise TokenMergeError(f"CUDA graphs need a CUDA device, but the denoiser is on {device}; use graphs=False")
    registry = vars(denoiser).get("_diffusers_hook")
    # Pipelines leave empty registries behind.
    if hasattr(denoiser, "_hf_hook") or (registry is not None and registry.hooks):
        raise TokenMergeError(
            "CUDA graphs need weights to stay where they are, but offloading or another hook of the denoiser moves "
            "them; use graphs=False"
        )

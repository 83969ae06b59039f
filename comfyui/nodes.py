"""The two nodes."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .applying import denoiser_of, with_technique
from .families import family_of
from .fields import SETTINGS, Setting, hold_of, merge_of

_CATEGORY = "model_patches/tokenmerge"


def _input(setting: Setting) -> Any:
    """The widget of a setting."""
    common = {"default": setting.default, "tooltip": setting.tooltip}
    if setting.kind == "combo":
        return io.Combo.Input(setting.name, options=list(setting.options), **common)
    kind = io.Float if setting.kind == "float" else io.Int
    return kind.Input(setting.name, min=setting.least, max=setting.most, step=setting.step, **common)


def _schema(node_id: str, name: str, description: str) -> io.Schema:
    return io.Schema(
        node_id=node_id,
        display_name=name,
        category=_CATEGORY,
        description=description,
        inputs=[io.Model.Input("model", tooltip="the model to make faster"), *map(_input, SETTINGS[node_id])],
        outputs=[io.Model.Output(tooltip="the faster model; tokenmerge nodes before this one act as well")],
    )


class TokenMergeHold(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "TokenMergeHold",
            "Hold (tokenmerge)",
            "Faster sampling: only some steps run in full. The others skip the blocks and estimate their effect.",
        )

    @classmethod
    def execute(cls, model: Any, **settings: Any) -> io.NodeOutput:
        return io.NodeOutput(with_technique(model, hold_of(**settings)))


class TokenMergeMerge(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "TokenMergeMerge",
            "Merge (tokenmerge)",
            "Faster steps on fewer tokens: similar tokens merge before a block and are spread out again after it.",
        )

    @classmethod
    def execute(cls, model: Any, preset: str, **settings: Any) -> io.NodeOutput:
        usual = family_of(denoiser_of(model)).merging
        return io.NodeOutput(with_technique(model, merge_of(preset, usual, **settings)))


NODES = [TokenMergeHold, TokenMergeMerge]

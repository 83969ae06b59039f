"""Writes the Python script that draws a picture again. The script runs as pasted."""

from __future__ import annotations

from ...config import Hold, Merge
from ..drawing.studio import Studio
from ..fields import changes
from ..loading import is_bundled, whole_path
from .orders import Order

_WIDTH = 100


def as_python(order: Order, studio: Studio) -> str:
    """A script for the fast picture of an order, in public calls of diffusers and tokenmerge."""
    techniques = [each for each in order.configuration.techniques if each is not None]
    bundled = is_bundled(studio.outline.model)
    imports = ["import torch", "from diffusers import DiffusionPipeline"]
    if bundled:
        imports.append("from tokenmerge_models import models")
    if techniques:
        names = sorted(type(each).__name__ for each in techniques)
        imports += ["", "import tokenmerge", f"from tokenmerge import {', '.join(names)}"]
    model = f'models()["{studio.outline.model}"]' if bundled else _quoted(whole_path(studio.outline.model))
    return "\n".join(
        [
            *imports,
            "",
            "pipe = DiffusionPipeline.from_pretrained(",
            f"    {model}, torch_dtype=torch.{studio.dtype}, use_safetensors=True",
            f").to({_quoted(str(studio.device))})",
            *_applied([written(each) for each in techniques]),
            *_call(order, studio),
            'image.save("picture.png")',
            *(["print(tokenmerge.summary(pipe))"] if techniques else []),
            "",
        ]
    )


def written(technique: Merge | Hold) -> str:
    """The call that makes a technique, with the fields that differ from the defaults."""
    arguments = [f"{name}={_quoted(value)}" for name, value in changes(technique, type(technique)()).items()]
    return f"{type(technique).__name__}({', '.join(arguments)})"


def _applied(techniques: list[str]) -> list[str]:
    if not techniques:
        return []
    line = f"tokenmerge.apply(pipe, {techniques[0] if len(techniques) == 1 else '[' + ', '.join(techniques) + ']'})"
    if len(line) <= _WIDTH:
        return [line]
    return ["tokenmerge.apply(", "    pipe,", "    [", *(f"        {each}," for each in techniques), "    ],", ")"]


def _call(order: Order, studio: Studio) -> list[str]:
    arguments = studio.request.arguments(studio.pipe) | {"prompt": order.prompt}
    lines = [f"    {name}={_quoted(value)}," for name, value in arguments.items()]
    return ["image = pipe(", *lines, f"    generator=torch.Generator().manual_seed({order.seed}),", ").images[0]"]


def _quoted(value: object) -> str:
    """A value as code. Strings get double quotes where that needs no escapes."""
    text = repr(value)
    return f'"{value}"' if isinstance(value, str) and text == f"'{value}'" and '"' not in value else text

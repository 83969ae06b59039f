"""The HTTP endpoint `draw`: the page's function, for programs."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import gradio as gr
from gradio.events import api

from ...errors import TokenMergeError
from ..drawing.pictures import as_png
from ..files import finite
from .orders import read_order, read_technique
from .pairs import Easel, Pair, Progress, Side

NAME = "draw"


def add_endpoint(easel: Easel, queue: str) -> None:
    """Add the endpoint to the page that is being built. queue: the name of the queue that both share."""

    def draw(prompt: str, technique: str, model: str, seed: int, steps: int, size: str) -> Iterator[dict[str, Any]]:
        """Draw a picture plain and fast. Streams progress, then both pictures as base64-encoded PNG."""
        try:
            order = read_order(
                easel.models,
                model=model,
                prompt=prompt,
                seed=seed,
                steps=steps,
                size=size,
                configuration=read_technique(technique),
            )
            for news in easel.draw(order):
                yield _result(news) if isinstance(news, Pair) else _progress(news)
        except TokenMergeError as error:
            raise gr.Error(str(error), print_exception=False) from error

    api(draw, api_name=NAME, concurrency_limit=1, concurrency_id=queue)


def _result(pair: Pair) -> dict[str, Any]:
    shots = {
        side: {key: value for key, value in shot.to_dict().items() if key != "cache"}
        | {"png": base64.b64encode(as_png(shot.picture)).decode()}
        for side, shot in (("plain", pair.plain), ("fast", pair.fast))
    }
    return finite({"done": True, **shots, "summary": pair.summary, "python": pair.python})


def _progress(progress: Progress) -> dict[str, Any]:
    return {"done": False, "doing": progress.doing, "plain": _side(progress.plain), "fast": _side(progress.fast)}


def _side(side: Side) -> dict[str, Any]:
    return {"steps": len(side.kinds), "seconds": side.seconds, "done": side.done}

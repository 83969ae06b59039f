"""The page's views of finished pairs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import gradio as gr

from . import looks
from .pairs import Pair


@dataclass(frozen=True)
class Views:
    """The widgets that show pairs."""

    status: gr.HTML
    figures: gr.HTML
    sides: gr.HTML
    slider: gr.ImageSlider
    drift: gr.Image
    merged: gr.Image
    merged_note: gr.HTML
    summary: gr.HTML
    python: gr.Code
    gallery: gr.Gallery

    @property
    def all(self) -> list[Any]:
        return [getattr(self, item.name) for item in fields(self)]

    @property
    def of_a_pair(self) -> list[Any]:
        """The views that show one pair."""
        return [each for each in self.all if each not in (self.status, self.gallery)]

    def show(self, pair: Pair) -> dict[Any, Any]:
        """Updates that show a pair in all views but the gallery."""
        return {
            self.status: looks.done(pair),
            self.figures: looks.figures(pair),
            self.sides: looks.sides(pair),
            self.slider: (pair.plain.picture, pair.fast.picture),
            self.drift: pair.drift,
            self.merged: gr.update(value=pair.fast.overlay, visible=pair.fast.overlay is not None),
            self.merged_note: looks.merged(pair),
            self.summary: looks.summary(pair),
            self.python: pair.python,
        }

    def show_gallery(self, pairs: list[Pair]) -> dict[Any, Any]:
        """An update that shows a visit's fast pictures."""
        pictures = [(pair.fast.picture, f"{pair.fast.speed_up:.2f}x") for pair in pairs]
        return {self.gallery: gr.update(value=pictures, visible=True)}


def make_views() -> Views:
    """Build the views inside the current Gradio layout."""
    status = gr.HTML(looks.WELCOME, elem_id="tm-status", min_height=72)
    figures = gr.HTML(elem_id="tm-figures")
    # Without Gradio's share button, which uploads the picture.
    picture: dict[str, Any] = {
        "show_label": False,
        "format": "png",
        "interactive": False,
        "buttons": ["download", "fullscreen"],
    }
    # Tabs wrap; in an overflow menu nobody would look for Python.
    with gr.Tabs(elem_id="tm-tabs", overflow_behavior="wrap"):
        with gr.Tab("Compare"):
            sides = gr.HTML(padding=False)
            slider = gr.ImageSlider(elem_id="tm-slider", max_height=620, **picture)
        with gr.Tab("Drift"):
            gr.HTML('<p class="tm-note">Black means equal. The brighter, the further from the plain picture.</p>')
            drift = gr.Image(elem_id="tm-drift", **picture)
        with gr.Tab("Merged"):
            merged_note = gr.HTML()
            merged = gr.Image(elem_id="tm-merged", visible=False, **picture)
        with gr.Tab("Summary"):
            summary = gr.HTML(elem_id="tm-summary")
        with gr.Tab("Python"):
            gr.HTML('<p class="tm-note">This script draws the fast picture again. It runs as pasted.</p>')
            python = gr.Code(language="python", show_label=False, interactive=False, elem_id="tm-python")
    gallery = gr.Gallery(
        show_label=False,
        columns=6,
        fit_columns=False,
        object_fit="cover",
        allow_preview=False,
        format="png",
        interactive=False,
        buttons=[],
        visible=False,
        elem_id="tm-gallery",
    )
    return Views(status, figures, sides, slider, drift, merged, merged_note, summary, python, gallery)

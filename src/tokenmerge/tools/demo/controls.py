"""The page's controls, from the prompt to every field of both techniques."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ...config import Hold, Merge, Techniques
from ..fields import write_value
from ..speeds import DEFAULT, SPEEDS
from .looks import title_of
from .models import Models
from .orders import LARGEST_SEED, LONGEST_PROMPT, Order, fields_of, read_order, read_values

Kind = type[Merge] | type[Hold]
_KINDS: tuple[Kind, ...] = (Hold, Merge)
_PROMPT = "a photo of a sunflower"
# Runs in the browser, without a call to the server.
_ANY_SEED = f"() => Math.floor(Math.random() * {LARGEST_SEED})"


@dataclass(frozen=True)
class Controls:
    """The widgets in which a visitor describes a picture."""

    model: gr.Dropdown
    prompt: gr.Textbox
    speed: gr.Radio
    size: gr.Dropdown
    steps: gr.Number
    seed: gr.Number
    chosen: dict[Kind, gr.Checkbox]  # which techniques are switched on
    values: dict[tuple[Kind, str], gr.Textbox]  # their fields
    draw: gr.Button
    stop: gr.Button

    @property
    def details(self) -> list[Any]:
        """The widgets that a choice of speed fills in."""
        return [*self.chosen.values(), *self.values.values()]

    @property
    def inputs(self) -> set[Any]:
        """The widgets that an order is read from."""
        return {self.model, self.prompt, self.size, self.steps, self.seed, *self.details}

    def order(self, models: Models, data: Mapping[Any, Any]) -> Order:
        """The order that the widgets describe. data: the values of all `inputs`."""
        return read_order(
            models,
            model=data[self.model],
            prompt=data[self.prompt],
            seed=data[self.seed],
            steps=data[self.steps],
            size=data[self.size],
            configuration=read_values(
                {kind: bool(data[box]) for kind, box in self.chosen.items()},
                {key: data[box] for key, box in self.values.items()},
            ),
        )

    def detail_values(self, techniques: Techniques) -> list[Any]:
        """Values of `details` for these techniques. A technique that is off shows its defaults."""
        shown = _by_kind(techniques)
        return [
            *(kind in shown for kind in self.chosen),
            *(write_value(getattr(shown.get(kind) or kind(), name)) for kind, name in self.values),
        ]


def make_controls(models: Models) -> Controls:
    """Build the controls inside the current Gradio layout."""
    first = models.names[0]
    with gr.Column(elem_classes="tm-ask"):
        prompt = gr.Textbox(
            _PROMPT, label="Prompt", lines=2, max_lines=6, max_length=LONGEST_PROMPT, elem_id="tm-prompt"
        )
        speed = gr.Radio(
            [(title_of(name), name) for name in SPEEDS],
            value=DEFAULT,
            label="Speed",
            info="Faster speeds change the picture more.",
            elem_id="tm-speed",
        )
        with gr.Row():
            draw = gr.Button("Draw", variant="primary", min_width=120, elem_id="tm-draw")
            stop = gr.Button("Stop", min_width=120, elem_id="tm-stop")
    with gr.Column(elem_classes="tm-more"):
        with gr.Row():
            model = gr.Dropdown(list(models.names), value=first, label="Model", min_width=140, elem_id="tm-model")
            size = gr.Dropdown(
                allow_custom_value=True, label="Size", min_width=140, elem_id="tm-size", **sizes_of(models, first)
            )
        with gr.Row():
            default_steps = models.studio(first).outline.defaults.steps
            steps = gr.Number(default_steps, label="Steps", precision=0, min_width=140, elem_id="tm-steps")
            seed = gr.Number(0, label="Seed", precision=0, min_width=140, elem_id="tm-seed")
        dice = gr.Button("Random seed", size="sm")
        dice.click(None, None, seed, js=_ANY_SEED, api_visibility="private")
        with gr.Accordion("Details: the settings behind the speed", open=False, elem_id="tm-details"):
            chosen, values = _details(SPEEDS[DEFAULT])
    return Controls(model, prompt, speed, size, steps, seed, chosen, values, draw, stop)


def _details(techniques: Techniques) -> tuple[dict[Kind, gr.Checkbox], dict[tuple[Kind, str], gr.Textbox]]:
    """A switch for each technique and a box for each field, with help from the technique's own documentation."""
    chosen: dict[Kind, gr.Checkbox] = {}
    values: dict[tuple[Kind, str], gr.Textbox] = {}
    shown = _by_kind(techniques)
    for kind in _KINDS:
        docs = kind.field_docs()
        with gr.Tab(kind.__name__):
            chosen[kind] = gr.Checkbox(
                kind in shown,
                label=f"Use {kind.__name__}",
                info=(kind.__doc__ or "").splitlines()[0],
                elem_id=f"tm-{kind.NAME}",
            )
            with gr.Group(elem_classes="tm-fields"):
                for name in fields_of(kind):
                    values[kind, name] = gr.Textbox(
                        write_value(getattr(shown.get(kind) or kind(), name)),
                        label=name,
                        info=docs[name],
                        elem_id=f"tm-{kind.NAME}-{name}",
                    )
    return chosen, values


def sizes_of(models: Models, name: str) -> dict[str, Any]:
    """Choices of size that the model draws well, its own size first."""
    width, height = models.studio(name).outline.own_size
    sizes = [(width, height), (width * 3 // 2, height), (width, height * 3 // 2), (width * 2, height * 2)]
    choices = [f"{across}x{down}" for across, down in sizes]
    return {"choices": choices, "value": choices[0]}


def _by_kind(techniques: Techniques) -> dict[Kind, Merge | Hold]:
    return {type(each): each for each in techniques if each is not None}

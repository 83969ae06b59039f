"""Controls: what a visitor chooses, from the prompt to every field of both techniques."""

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
# In the browser, without asking the server.
_ANY_SEED = f"() => Math.floor(Math.random() * {LARGEST_SEED})"


@dataclass(frozen=True)
class Controls:
    """What a visitor chooses."""

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
        """All that a speed stands for."""
        return [*self.chosen.values(), *self.values.values()]

    @property
    def inputs(self) -> set[Any]:
        """All that an order is made from."""
        return {self.model, self.prompt, self.size, self.steps, self.seed, *self.details}

    def order(self, models: Models, data: Mapping[Any, Any]) -> Order:
        """What was asked for. data: the values of all inputs."""
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
        """Techniques as the details show them; a technique that is off shows its defaults."""
        shown = _by_kind(techniques)
        return [
            *(kind in shown for kind in self.chosen),
            *(write_value(getattr(shown.get(kind) or kind(), name)) for kind, name in self.values),
        ]


def make_controls(models: Models) -> Controls:
    """The controls, in the place where a page is being built."""
    first = models.names[0]
    with gr.Column(elem_classes="tm-ask"):
        prompt = gr.Textbox(
            _PROMPT, label="Prompt", lines=2, max_lines=6, max_length=LONGEST_PROMPT, elem_id="tm-prompt"
        )
        speed = gr.Radio(
            [(title_of(name), name) for name in SPEEDS],
            value=DEFAULT,
            label="Speed",
            info="From the plain model's own picture to the fewest full steps",
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
            own = models.studio(first).outline.defaults.steps
            steps = gr.Number(own, label="Steps", precision=0, min_width=140, elem_id="tm-steps")
            seed = gr.Number(0, label="Seed", precision=0, min_width=140, elem_id="tm-seed")
        dice = gr.Button("Another seed", size="sm")
        dice.click(None, None, seed, js=_ANY_SEED, api_visibility="private")
        with gr.Accordion("Details: what the speed stands for", open=False, elem_id="tm-details"):
            chosen, values = _details(SPEEDS[DEFAULT])
    return Controls(model, prompt, speed, size, steps, seed, chosen, values, draw, stop)


def _details(techniques: Techniques) -> tuple[dict[Kind, gr.Checkbox], dict[tuple[Kind, str], gr.Textbox]]:
    """A switch for each technique, and a box for each field, from the classes and their own documentation."""
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
    """Sizes that a model draws well, its own first."""
    width, height = models.studio(name).outline.own_size
    sizes = [(width, height), (width * 3 // 2, height), (width, height * 3 // 2), (width * 2, height * 2)]
    told = [f"{across}x{down}" for across, down in sizes]
    return {"choices": told, "value": told[0]}


def _by_kind(techniques: Techniques) -> dict[Kind, Merge | Hold]:
    return {type(each): each for each in techniques if each is not None}

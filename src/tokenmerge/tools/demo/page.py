"""The page: controls beside views, and what happens when somebody presses Draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Event
from typing import Any

import gradio as gr

from ...errors import TokenMergeError
from ..speeds import SPEEDS
from . import looks
from .controls import Controls, make_controls, sizes_of
from .endpoint import add_endpoint
from .pairs import Easel, Pair, Progress
from .views import Views, make_views

# Pictures of a visit that are kept.
_KEPT = 12
_HOUR = 3600
# Seconds in which a drawing ends that is asked to.
_PATIENCE = 10
# One picture at a time, whoever asks for it.
_QUEUE = "model"
# In the browser, without asking the server.
_NONE_CHOSEN = "() => null"
_NOTHING = "() => Array({count}).fill(null)"


def build(easel: Easel) -> gr.Blocks:
    """The page, and the endpoint beside it."""
    with gr.Blocks(title="tokenmerge", analytics_enabled=False, delete_cache=(_HOUR, _HOUR), fill_width=True) as page:
        gr.HTML(looks.HEADER)
        with gr.Row(equal_height=False, elem_classes="tm-main"):
            with gr.Column(scale=4, min_width=330, elem_classes="tm-left"):
                controls = make_controls(easel.models)
            with gr.Column(scale=7, min_width=330, elem_classes="tm-right"):
                views = make_views()
        _connect(Visitor(easel, controls, views, gr.State([], time_to_live=_HOUR)))
        add_endpoint(easel, _QUEUE)
    return page


class _Drawing:
    """A picture that is being drawn for a visitor."""

    def __init__(self) -> None:
        self.stop = Event()
        self.ended = Event()


class Visitor:
    """Answers what a visitor does. All visitors share it: what is one's own is in `visit`."""

    def __init__(self, easel: Easel, controls: Controls, views: Views, visit: gr.State) -> None:
        self.models = easel.models
        self.easel = easel
        self.controls = controls
        self.views = views
        self.visit = visit  # pairs, the newest first
        self._drawing: dict[str | None, _Drawing] = {}  # by visitor

    def draws(self, data: Mapping[Any, Any], request: gr.Request) -> Iterator[dict[Any, Any]]:
        """Shows how far a pair is, and then the pair; or what is wrong with the order."""
        drawing = self._drawing[request.session_hash] = _Drawing()
        try:
            order = self.controls.order(self.models, data)
            pairs: list[Pair] = data[self.visit]
            known = next((pair.plain for pair in pairs if pair.order.sample == order.sample), None)
            for news in self.easel.draw(order, known):
                if drawing.stop.is_set():
                    yield {self.views.status: looks.STOPPED}
                    return
                yield self._shown(news, pairs)
        except TokenMergeError as error:
            yield {self.views.status: looks.problem(str(error))}
        finally:
            self._drawing.pop(request.session_hash, None)
            drawing.ended.set()

    def stops(self, request: gr.Request) -> None:
        """Ends what is being drawn. Returns when nothing more is shown of it, or that would hide that it has ended."""
        drawing = self._drawing.get(request.session_hash)
        if drawing is not None:
            drawing.stop.set()
            drawing.ended.wait(_PATIENCE)

    def _shown(self, news: Progress | Pair, pairs: list[Pair]) -> dict[Any, Any]:
        if not isinstance(news, Pair):
            return {self.views.status: looks.progress(news)}
        kept = [news, *pairs][:_KEPT]
        return {**self.views.show(news), **self.views.show_gallery(kept), self.visit: kept}

    def looks_back(self, pairs: list[Pair], event: gr.SelectData) -> dict[Any, Any]:
        return self.views.show(pairs[event.index])

    def chooses_model(self, name: str) -> dict[Any, Any]:
        steps = self.models.studio(name).outline.defaults.steps
        return {self.controls.size: gr.update(**sizes_of(self.models, name)), self.controls.steps: steps}

    def chooses_speed(self, name: str) -> list[Any]:
        return self.controls.detail_values(SPEEDS[name])


def _connect(visitor: Visitor) -> None:
    """Say what answers which control."""
    controls, views, visit = visitor.controls, visitor.views, visitor.visit
    asked = [controls.draw.click, controls.prompt.submit]
    # The last picture would look like the answer, even if there is none because something is wrong.
    nothing = _NOTHING.format(count=len(views.of_a_pair))
    gr.on(asked, None, None, views.of_a_pair, js=nothing, api_visibility="private")
    drawing = gr.on(
        asked,
        visitor.draws,
        {*controls.inputs, visit},
        [*views.all, visit],
        concurrency_limit=1,
        concurrency_id=_QUEUE,
        show_progress="full",
        show_progress_on=views.status,
        api_visibility="private",
    )
    # At once, whoever draws.
    quiet: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}
    # What waits in the queue is taken out of it.
    stopped = controls.stop.click(visitor.stops, cancels=[drawing], **quiet)
    stopped.then(lambda: looks.STOPPED, outputs=views.status, **quiet)
    views.gallery.select(visitor.looks_back, visit, views.all, **quiet)
    controls.model.change(visitor.chooses_model, controls.model, [controls.size, controls.steps], **quiet)
    controls.speed.input(visitor.chooses_speed, controls.speed, controls.details, **quiet)
    # Who changes a detail has left the speeds with a name.
    changed = [box.input for box in controls.details]
    gr.on(changed, None, None, controls.speed, js=_NONE_CHOSEN, api_visibility="private")

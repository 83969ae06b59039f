"""The page: controls beside views, and the handlers that connect them."""

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

# Pictures that the gallery keeps.
_KEPT = 12
_HOUR = 3600
# Seconds to wait for a stopped drawing to end.
_PATIENCE = 10
# One queue for all visitors and programs: a model draws one picture at a time.
_QUEUE = "model"
# These run in the browser, without a call to the server.
_NONE_CHOSEN = "() => null"
_NOTHING = "() => Array({count}).fill(null)"


def build(easel: Easel) -> gr.Blocks:
    """Build the page, with its endpoint."""
    with gr.Blocks(title="tokenmerge", analytics_enabled=False, delete_cache=(_HOUR, _HOUR), fill_width=True) as page:
        gr.HTML(looks.HEADER)
        with gr.Row(equal_height=False, elem_classes="tm-main"):
            with gr.Column(scale=4, min_width=330, elem_classes="tm-left"):
                controls = make_controls(easel.models)
            with gr.Column(scale=7, min_width=330, elem_classes="tm-right"):
                views = make_views()
        _connect(_Handlers(easel, controls, views, gr.State([], time_to_live=_HOUR)))
        add_endpoint(easel, _QUEUE)
    return page


class _Drawing:
    """A visitor's drawing in progress."""

    def __init__(self) -> None:
        self.stop = Event()
        self.ended = Event()


class _Handlers:
    """Event handlers. All visitors share them; `visit` holds what is a visitor's own."""

    def __init__(self, easel: Easel, controls: Controls, views: Views, visit: gr.State) -> None:
        self.models = easel.models
        self.easel = easel
        self.controls = controls
        self.views = views
        self.visit = visit  # the visitor's pairs, newest first
        self._drawings: dict[str | None, _Drawing] = {}  # by session

    def draw_pair(self, data: Mapping[Any, Any], request: gr.Request) -> Iterator[dict[Any, Any]]:
        """Show progress and then the pair, or what is wrong with the order."""
        drawing = self._drawings[request.session_hash] = _Drawing()
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
            self._drawings.pop(request.session_hash, None)
            drawing.ended.set()

    def stop(self, request: gr.Request) -> None:
        """End the visitor's drawing. Waits for its last update, which would hide the message that it has stopped."""
        drawing = self._drawings.get(request.session_hash)
        if drawing is not None:
            drawing.stop.set()
            drawing.ended.wait(_PATIENCE)

    def _shown(self, news: Progress | Pair, pairs: list[Pair]) -> dict[Any, Any]:
        if not isinstance(news, Pair):
            return {self.views.status: looks.progress(news)}
        kept = [news, *pairs][:_KEPT]
        return {**self.views.show(news), **self.views.show_gallery(kept), self.visit: kept}

    def look_back(self, pairs: list[Pair], event: gr.SelectData) -> dict[Any, Any]:
        return self.views.show(pairs[event.index])

    def choose_model(self, name: str) -> dict[Any, Any]:
        steps = self.models.studio(name).outline.defaults.steps
        return {self.controls.size: gr.update(**sizes_of(self.models, name)), self.controls.steps: steps}

    def choose_speed(self, name: str) -> list[Any]:
        return self.controls.detail_values(SPEEDS[name])


def _connect(handlers: _Handlers) -> None:
    """Attach the handlers to the controls."""
    controls, views, visit = handlers.controls, handlers.views, handlers.visit
    asked = [controls.draw.click, controls.prompt.submit]
    # Left in place, the last picture would look like the answer to an order that is refused.
    nothing = _NOTHING.format(count=len(views.of_a_pair))
    gr.on(asked, None, None, views.of_a_pair, js=nothing, api_visibility="private")
    drawing = gr.on(
        asked,
        # Gradio names routes by their functions, and `draw` is the endpoint's.
        handlers.draw_pair,
        {*controls.inputs, visit},
        [*views.all, visit],
        concurrency_limit=1,
        concurrency_id=_QUEUE,
        show_progress="full",
        show_progress_on=views.status,
        api_visibility="private",
    )
    # These answer immediately, even while a model draws.
    quiet: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}
    # `cancels` also takes a waiting order out of the queue.
    stopped = controls.stop.click(handlers.stop, cancels=[drawing], **quiet)
    stopped.then(lambda: looks.STOPPED, outputs=views.status, **quiet)
    views.gallery.select(handlers.look_back, visit, views.all, **quiet)
    controls.model.change(handlers.choose_model, controls.model, [controls.size, controls.steps], **quiet)
    controls.speed.input(handlers.choose_speed, controls.speed, controls.details, **quiet)
    # After a changed detail the settings are no longer those of a named speed.
    changed = [box.input for box in controls.details]
    gr.on(changed, None, None, controls.speed, js=_NONE_CHOSEN, api_visibility="private")

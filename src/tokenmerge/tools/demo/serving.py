"""Serves the page on this machine, until it is interrupted."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ..addresses import check_port
from .gate import Gate
from .models import Models
from .page import build
from .pairs import Easel

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# The most visitors that may wait.
_WAITING = 16
_FONT = ("system-ui", "sans-serif")
_MONO = ("ui-monospace", "monospace")


def serve(
    models: Sequence[str], host: str, port: int, device: str | None, dtype: str | None, threads: int | None
) -> None:
    """Serve until Ctrl-C."""
    check_port(host, port)
    named = Models(models, device, dtype, threads)
    # Now, so that the first visitor does not wait, and a broken model is reported at the start.
    named.load(named.names[0])
    with served(named, host, port) as address:
        print(f"tokenmerge demo: {address} (Ctrl-C to stop)", flush=True)
        threading.Event().wait()


@contextmanager
def served(models: Models, host: str, port: int) -> Iterator[str]:
    """Serve the page in its own threads; yields its address."""
    easel = Easel(models)
    with tempfile.TemporaryDirectory(prefix="tokenmerge-demo-") as folder:
        # Gradio writes pictures there for browsers to fetch. They go with the folder; nothing else can be fetched.
        os.environ["GRADIO_TEMP_DIR"] = os.environ["GRADIO_EXAMPLES_CACHE"] = folder
        page = build(easel).queue(max_size=_WAITING)
        gates = [Middleware(Gate)]
        if host in LOOPBACK:
            # Against DNS rebinding: otherwise a foreign site whose name points here could read our page.
            gates.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK)))
        try:
            _, address, _ = page.launch(
                server_name=host,
                server_port=port,
                share=False,
                quiet=True,
                prevent_thread_lock=True,
                inbrowser=False,
                ssr_mode=False,
                mcp_server=False,
                enable_monitoring=False,
                run_history=False,
                pwa=False,
                max_file_size=1,
                footer_links=[],
                state_session_capacity=100,
                theme=_theme(),
                css_paths=Path(__file__).with_name("page.css"),
                app_kwargs={"middleware": gates},
            )
            yield address
        finally:
            easel.close()
            page.close(verbose=False)


def _theme() -> gr.themes.Base:
    """System fonts, because web fonts would be fetched from elsewhere, and quiet labels."""
    theme = gr.themes.Soft(primary_hue="teal", neutral_hue="slate", font=_FONT, font_mono=_MONO)
    labels = {
        f"block_{part}_{name}": value
        for part in ("title", "label")
        for name, value in {
            "background_fill": "transparent",
            "background_fill_dark": "transparent",
            "text_color": "*body_text_color",
            "text_color_dark": "*body_text_color",
            "padding": "0",
        }.items()
    }
    return theme.set(
        **labels,
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        body_text_color_subdued="*neutral_500",
        block_border_width="1px",
        block_shadow="none",
        input_border_width="1px",
        input_border_color="*neutral_300",
        input_shadow="none",
        button_secondary_shadow="none",
    )

"""Gate: lets through what our page and endpoint need, and refuses Gradio's other routes.

Those would fetch addresses of a visitor's choice, take uploads, or forward requests.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import PlainTextResponse

_ROOT = r"|assets/.*|static/.*|config/?|theme\.css|favicon\.ico|manifest\.json|robots\.txt"
# Gradio itself says which of its own files may be read: those that it has written for the page.
_API = (
    r"info/?|theme\.css|app_id/?|user/?|startup-events|heartbeat/\w+|queue/(?:join|data)|cancel|reset/?"
    r"|call/\w+(?:/\w+)?|file=(?!https?:).*"
)
_OPEN = re.compile(rf"/(?:{_ROOT}|gradio_api/(?:{_API}))", flags=re.IGNORECASE)


class Gate:
    """An ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not _OPEN.fullmatch(scope["path"]):
            await PlainTextResponse("This page has no such address.", status_code=404)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

"""Blocks every Gradio route that our page and endpoint do not need.

Those routes would fetch addresses of a visitor's choice, take uploads, or forward requests.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import PlainTextResponse

_ROOT = r"|assets/.*|static/.*|config/?|theme\.css|favicon\.ico|manifest\.json|robots\.txt"
# Gradio itself serves only those files that it has written for the page.
_API = (
    r"info/?|theme\.css|app_id/?|user/?|startup-events|heartbeat/\w+|queue/(?:join|data)|cancel|reset/?"
    r"|call/\w+(?:/\w+)?|file=(?!https?:).*"
)
_OPEN = re.compile(rf"/(?:{_ROOT}|gradio_api/(?:{_API}))", flags=re.IGNORECASE)


class Gate:
    """ASGI middleware that answers 404 to all other routes."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not _OPEN.fullmatch(scope["path"]):
            await PlainTextResponse("There is nothing at this address.", status_code=404)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

"""What Ray's HTTP proxy answers when the front does not: while it starts, ends, or is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response

from .requests import Refusal

# The function that Ray's proxy imports and calls.
CALLBACK = f"{__name__}:middlewares"
HEALTH = "/healthz"
# The most seconds that a health check waits. Replacing a front takes longer.
_PATIENCE = 2.0
_SECONDS_TO_REPLACE = 5
# Prefix of Ray's own paths.
_RAYS = "/-/"

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


def middlewares() -> list[Middleware]:
    """The middleware between clients and the proxy."""
    return [Middleware(Deputy)]


class Deputy:
    """Passes the front's answers on, and replaces Ray's own answers.

    If a front dies, Ray breaks off without an answer. Ray's errors are plain text; all of the front's are JSON.
    """

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_RAYS):
            await self._app(scope, receive, send)
            return
        # Whether an answer was passed on, and the status of the latest answer, ours or Ray's.
        passed, status = False, 503

        async def pass_on(message: _Message) -> None:
            nonlocal passed, status
            if message["type"] == "http.response.start":
                passed = not _is_rays(message)
                status = message["status"]
            if passed:
                await send(message)

        patience = _PATIENCE if scope["path"] == HEALTH else None
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._app(scope, receive, pass_on), patience)
        if not passed:
            failed = Refusal(500, "the server failed on this request; its log says where")
            await refused(failed if status == 500 else away())(scope, receive, send)


def away() -> Refusal:
    """The refusal of requests that nobody can answer now."""
    return Refusal(503, "the server is starting or ending; send the request again", retry_after=_SECONDS_TO_REPLACE)


def refused(refusal: Refusal) -> Response:
    """A refusal as an HTTP response."""
    headers = {"Retry-After": str(refusal.retry_after)} if refusal.retry_after is not None else {}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(json.dumps(refusal.to_dict()), refusal.status, headers, "application/json")


def _is_rays(start: _Message) -> bool:
    kind = Headers(raw=start["headers"]).get("content-type", "")
    return start["status"] >= 400 and not kind.startswith("application/json")

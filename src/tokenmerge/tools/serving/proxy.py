"""What Ray's HTTP proxy answers where the front does not: while it starts, ends, or is gone."""

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

# What Ray imports in its proxy and calls there.
CALLBACK = f"{__name__}:middlewares"
HEALTH = "/healthz"
# Seconds that whoever asks for health waits at most. A front that is replaced takes longer.
_PATIENCE = 2.0
_SECONDS_TO_REPLACE = 5
# Paths of Ray's own.
_RAYS = "/-/"

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


def middlewares() -> list[Middleware]:
    """What stands between clients and the proxy."""
    return [Middleware(Deputy)]


class Deputy:
    """Passes the front's answers on, and puts one of ours in the place of Ray's.

    Ray breaks off without a word where a front dies, and has its errors in plain text. All of the front's are JSON.
    """

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_RAYS):
            await self._app(scope, receive, send)
            return
        # Of an answer that is passed on; or that Ray gave, and is not.
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
            failed = Refusal(500, "the server failed over this request; its log says where")
            await refused(failed if status == 500 else away())(scope, receive, send)


def away() -> Refusal:
    """Of requests that nobody answers now."""
    return Refusal(503, "the server is starting or ending; send it again", retry_after=_SECONDS_TO_REPLACE)


def refused(refusal: Refusal) -> Response:
    """A refusal as an answer."""
    headers = {"Retry-After": str(refusal.retry_after)} if refusal.retry_after is not None else {}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(json.dumps(refusal.to_dict()), refusal.status, headers, "application/json")


def _is_rays(start: _Message) -> bool:
    kind = Headers(raw=start["headers"]).get("content-type", "")
    return start["status"] >= 400 and not kind.startswith("application/json")

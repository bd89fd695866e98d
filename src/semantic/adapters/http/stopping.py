"""What a client is told whose request is cut off because the server stops.

Knows that only a server that stops cancels a request's task: who leaves is heard of otherwise.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.http.errors import RETRY_SECONDS, Problem, problem_response

_STOPPING: Final = Problem(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "the server is stopping",
    code="overloaded",
    retry_after=RETRY_SECONDS,
)


class Stopping:
    """Middleware: 503 for a request that is cancelled before its answer has begun.

    An answer that has begun just ends, without the mark of its end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if begun:
                raise
            response = problem_response(scope, _STOPPING)
            response.headers["connection"] = "close"
            await response(scope, receive, send)

"""How large a request may be, and how long its body may take. Knows sizes and clocks only.

What a connection does before its request is complete is `protocol`'s concern.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.http.errors import (
    Problem,
    TooLargeError,
    WireError,
    problem_of,
    problem_response,
)
from semantic.adapters.http.settings import ServerSettings

_VERSIONS: Final = frozenset({"1.0", "1.1"})


class Limits:
    """Middleware: 431 for too many headers, 413 for a large body, 408 for one that takes long.

    505 for what is not HTTP/1. What comes without a length is counted while it is read.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._problem(scope)
        if problem is None:
            body = _LimitedBody(receive, self._settings)
            await self._app(scope, body.receive, send)
        else:
            await problem_response(scope, problem)(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        if scope["http_version"] not in _VERSIONS:
            return Problem(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "expected HTTP/1.1 or HTTP/1.0")
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        n_bytes = sum(len(name) + len(value) for name, value in headers)
        limits = self._settings
        if len(headers) > limits.max_headers or n_bytes > limits.max_header_bytes:
            return Problem(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"expected at most {limits.max_headers} headers "
                f"and {limits.max_header_bytes} bytes of them",
                code="headers_too_large",
            )
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > limits.max_body_bytes:
            return problem_of(_too_large(limits.max_body_bytes))
        return None


class _LimitedBody:
    """A request's body, which ends in time and below its limit, or with a WireError."""

    def __init__(self, receive: Receive, settings: ServerSettings) -> None:
        self._receive = receive
        self._limit = settings.max_body_bytes
        self._timeout = settings.body_timeout
        self._deadline: float | None = None
        self._n_bytes = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()  # there is only a disconnect to wait for
        message = await self._in_time()
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        self._n_bytes += len(message.get("body", b""))
        if self._n_bytes > self._limit:
            raise _too_large(self._limit)
        return message

    async def _in_time(self) -> Message:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError as error:
            raise WireError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the body did not come within {self._timeout:g} seconds",
                code="request_timeout",
            ) from error


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"expected a body of at most {limit} bytes")

"""Streaming responses: server-sent events or lines with heartbeats, and cancellation on client
disconnect.

Knows how events are framed, and disconnects; not what the events contain.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Final, Generic, Self, TypeVar, cast

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from semantic_server.http.context import settings_of
from semantic_server.http.errors import ClientDisconnectedError

T = TypeVar("T")

NDJSON: Final = "application/x-ndjson"
"""The media type of a stream of JSON lines."""

_LINE_ENDS: Final = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})
"""Unicode line separators, at which some readers split lines; JSON can escape them."""
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def sse_event(data: object, event: str | None = None) -> bytes:
    """An event with `data` as JSON on one line; a text of one line is sent as it is.

    `event` is its name, without line ends.
    """
    if not isinstance(data, str):
        data = _encode(data).translate(_LINE_ENDS)
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {data}\n\n".encode()


def json_line(data: object) -> bytes:
    """`data` as JSON on one line with its end, as in a stream of such lines."""
    return f"{_encode(data).translate(_LINE_ENDS)}\n".encode()


def heartbeat() -> bytes:
    """A comment line, which clients ignore; keeps the connection alive."""
    return b": keep-alive\n\n"


def event_stream(
    request: Request,
    events: AsyncIterator[bytes],
    keep_alive: Callable[[], bytes] = heartbeat,
    media_type: str = "text/event-stream",
) -> Response:
    """A response that streams `events`, with a `keep_alive()` event in every idle interval. Of
    another `media_type` both are bytes in its form.

    On a disconnect `events` is cancelled where it waits, or closed. A client that stops reading is
    disconnected by the connection's send timeout.
    """
    factory = cast("Callable[[], ServerSentEvent]", keep_alive)  # bytes are sent as they are
    keep_alive_seconds = settings_of(request).keep_alive
    return EventSourceResponse(
        events, media_type=media_type, ping=keep_alive_seconds, ping_message_factory=factory
    )


async def until_disconnect(request: Request, work: Coroutine[object, object, T]) -> T:
    """Await `work`. Raises ClientDisconnectedError, and cancels it, if the client disconnects.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        await _cancel_and_wait(task)
        await _cancel_and_wait(disconnected)


class StartedStream(Generic[T]):
    """A stream whose errors before its first item can still become HTTP errors.

    Its first item has arrived, or is awaited by iteration. `aclose` closes the generator, whether
    or not iteration has started.
    """

    def __init__(self, first: asyncio.Future[T], rest: AsyncGenerator[T, None]) -> None:
        self._first: asyncio.Future[T] | None = first
        self._rest = rest

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        first, self._first = self._first, None
        return await (anext(self._rest) if first is None else first)

    async def aclose(self) -> None:
        """Close the generator, which cancels a request that still runs."""
        if self._first is not None:
            await _cancel_and_wait(self._first)
        await self._rest.aclose()


async def start_stream(request: Request, events: AsyncGenerator[T, None]) -> StartedStream[T]:
    """Wait for the first of `events`. Raises what `events` raises, and ClientDisconnectedError.

    Returns without it after the keep-alive interval, so that heartbeats can be sent; then `events`
    raises where it is iterated.
    """

    async def take_first() -> T:
        return await anext(events)

    first = asyncio.ensure_future(take_first())
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    started: StartedStream[T] | None = None
    try:
        await asyncio.wait(
            (first, disconnected),
            timeout=settings_of(request).keep_alive,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if first.done():
            first.result()
        elif disconnected.done():
            raise ClientDisconnectedError
        started = StartedStream(first, events)
    finally:
        await _cancel_and_wait(disconnected)
        if started is None:
            await _cancel_and_wait(first)
            await events.aclose()
    return started


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel_and_wait(task: asyncio.Future[T]) -> None:
    """Cancel `task` if it still runs, and wait for its end."""
    if task.done():
        return
    task.cancel()
    await asyncio.wait((task,))

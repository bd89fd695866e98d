"""Answers that take their time: streams of events, and work that ends when its client leaves.

Knows server-sent events and disconnects; not what the events say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Final, Generic, Self, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from semantic.adapters.http.context import settings_of
from semantic.adapters.http.errors import ClientDisconnectedError

T = TypeVar("T")

_LINE_ENDS: Final = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})
"""Readers that know Unicode end a line at these; in JSON they may stand as escapes."""
_SEPARATOR: Final = "\n"
"""Clients that split at an empty line look for two of these."""


def sse_event(data: object, event: str | None = None) -> ServerSentEvent:
    """An event with `data` as JSON in one line; a text stands as it is."""
    if not isinstance(data, str):
        data = json.dumps(data, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    return ServerSentEvent(data, event=event, sep=_SEPARATOR)


def heartbeat() -> ServerSentEvent:
    """A line that clients skip; it only shows that the connection lives."""
    return ServerSentEvent(comment="keep-alive", sep=_SEPARATOR)


def event_stream(
    request: Request,
    events: AsyncIterator[ServerSentEvent],
    keep_alive: Callable[[], ServerSentEvent] = heartbeat,
) -> Response:
    """A response that sends `events`, and `keep_alive()` while there are none for a time.

    When the client leaves, `events` is cancelled where it waits, or closed. A client that stops
    reading is made to leave by the connection's own deadline.
    """
    settings = settings_of(request)
    return EventSourceResponse(
        _encoded(events),
        sep=_SEPARATOR,
        ping=settings.keep_alive,
        ping_message_factory=keep_alive,
    )


async def until_disconnect(request: Request, work: Coroutine[object, object, T]) -> T:
    """What `work` returns. Raises ClientDisconnectedError, and cancels it, when the client leaves.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        await _cancel_and_wait(task)
        await _cancel_and_wait(gone)


class StartedStream(Generic[T]):
    """An answer that was begun: what it raised before is still an HTTP error.

    Its first event has come, or is waited for where this is iterated. `aclose` closes the
    generator, whether iterating has begun or not.
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
        """Close the generator: a request that still runs is cancelled."""
        if self._first is not None:
            await _cancel_and_wait(self._first)
        await self._rest.aclose()


async def start_stream(request: Request, events: AsyncGenerator[T, None]) -> StartedStream[T]:
    """`events` after the first one has come. Raises what it raises, and ClientDisconnectedError.

    When it lets clients wait too long they are shown at least that the connection lives: then this
    returns without it, and what `events` raises is raised where they are iterated.
    """

    async def take_first() -> T:
        return await anext(events)

    first = asyncio.ensure_future(take_first())
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    begun: StartedStream[T] | None = None
    try:
        await asyncio.wait(
            (first, gone),
            timeout=settings_of(request).keep_alive,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if first.done():
            first.result()
        elif gone.done():
            raise ClientDisconnectedError
        begun = StartedStream(first, events)
    finally:
        await _cancel_and_wait(gone)
        if begun is None:
            await _cancel_and_wait(first)
            await events.aclose()
    return begun


async def _encoded(events: AsyncIterator[ServerSentEvent]) -> AsyncGenerator[bytes, None]:
    """Bytes of `events`, which are closed with this generator."""
    if isinstance(events, AsyncGenerator):
        async with aclosing(events):
            async for event in events:
                yield _bytes(event)
        return
    async for event in events:
        yield _bytes(event)


def _bytes(event: ServerSentEvent) -> bytes:
    return event.encode().replace(b"\r\n", b"\n")


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel_and_wait(task: asyncio.Future[T]) -> None:
    """Cancel `task` if it still runs, and wait until it has ended."""
    if task.done():
        return
    task.cancel()
    await asyncio.wait((task,))

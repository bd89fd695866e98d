"""Answers requests with an ASGI application in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from typing import TypeAlias, cast

from semantic.domain.errors import BackendError
from semantic_fleet.replicas.fleet_port import Headers, PassedRequest, Piece, ResponseHead

Message: TypeAlias = MutableMapping[str, object]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[MutableMapping[str, object], Receive, Send], Awaitable[None]]


async def answer(app: AsgiApp, request: PassedRequest) -> AsyncGenerator[Piece, None]:
    """Yield the response of `app` to a request. Raises the errors of `app`. Closing this generator
    disconnects the client of `app`."""
    pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
    is_gone, is_read = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = cast(Headers, tuple(map(tuple, cast(Headers, message.get("headers", ())))))
            pieces.put_nowait(ResponseHead(cast(int, message["status"]), headers))
        elif body := message.get("body"):
            pieces.put_nowait(cast(bytes, body))

    async def run() -> None:
        await app(_scope(request), receive, send)

    task = asyncio.create_task(run())
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        is_over = False
        while not is_over:
            waiting = [await pieces.get()]
            while not pieces.empty():
                waiting.append(pieces.get_nowait())
            is_over = waiting[-1] is None
            for piece in _joined(waiting):
                yield piece
        task.result()
    finally:
        is_gone.set()
        await asyncio.wait((task,))  # frees the row of the batch before this returns


async def whole_answer(pieces: AsyncIterator[Piece]) -> tuple[ResponseHead, bytes]:
    """Return the response made of `pieces`. Raises BackendError if the head is missing."""
    head: ResponseHead | None = None
    body = bytearray()
    async for piece in pieces:
        if isinstance(piece, ResponseHead):
            head = piece
        else:
            body += piece
    if head is None:
        raise BackendError("the replica's application ended without an answer")
    return head, bytes(body)


def with_header(name: bytes, value: bytes, piece: Piece) -> Piece:
    """Return `piece` with another header if it is a head. Return any other piece unchanged."""
    if isinstance(piece, bytes):
        return piece
    return ResponseHead(piece.status, (*piece.headers, (name, value)))


def _joined(waiting: list[Piece | None]) -> list[Piece]:
    heads: list[Piece] = [one for one in waiting if isinstance(one, ResponseHead)]
    body = b"".join(one for one in waiting if isinstance(one, bytes))
    return [*heads, body] if body else heads


def _scope(request: PassedRequest) -> MutableMapping[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.raw_path,
        "root_path": "",
        "query_string": request.query,
        "headers": list(request.headers),
        "client": None,
        "server": None,
        "state": {"route": request.route},
    }

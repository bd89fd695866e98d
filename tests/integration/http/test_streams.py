"""Answers that take their time: a client that leaves, or does not read, costs no other anything."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message

from semantic.domain.errors import InvalidRequestError
from semantic_server.http.app import create_app
from semantic_server.http.context import event_stream, start_stream, until_disconnect
from semantic_server.http.errors import ClientDisconnectedError, sse_event
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing
from tests.support.http_server import RunningServer, running, until

pytestmark = pytest.mark.process

SETTINGS = ServerSettings(send_timeout=0.5, keep_alive=0.1, stop_timeout=1)
LARGE = "x" * (1 << 20)


@dataclass
class World:
    """What routes did."""

    produced: int = 0
    closed: list[str] = field(default_factory=list)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def server(world: World) -> Iterator[RunningServer]:
    with running(settings=SETTINGS, app=_app(world)) as found:
        yield found


def _app(world: World) -> FastAPI:
    async def stream(
        request: Request, n: int = 3, pause: float = 0.0, large: bool = False
    ) -> Response:
        first = await start_stream(
            request, _events(world, n, pause, LARGE if large else "\u2028 ü")
        )
        return event_stream(request, first)

    async def silent(request: Request) -> Response:
        return event_stream(
            request,
            _events(world, 2, 0.35, "late"),
            lambda: sse_event({"type": "ping"}, event="ping"),
        )

    async def task(request: Request) -> str:
        try:
            return await until_disconnect(request, _long(world))
        except ClientDisconnectedError:
            world.closed.append("gone")
            raise

    app = create_app(FakeServing(), SETTINGS)
    for route in (stream, silent, _refused, task):
        app.add_api_route(f"/{route.__name__.strip('_')}", route, response_model=None)
    return app


async def _events(world: World, n: int, pause: float, text: str) -> AsyncGenerator[bytes, None]:
    try:
        for number in range(n):
            await _pause(pause)
            world.produced += 1
            yield sse_event({"number": number, "text": text}, event="piece")
    finally:
        world.closed.append("events")


async def _pause(seconds: float) -> None:
    """In steps: however slow the machine is, signs of life have their turns between them."""
    n_steps = max(1, round(seconds / 0.03))
    for _ in range(n_steps):
        await asyncio.sleep(seconds / n_steps)


async def _refused(request: Request) -> Response:
    async def none() -> AsyncGenerator[bytes, None]:
        raise InvalidRequestError("not like this")
        yield sse_event("never")  # makes it a generator

    return event_stream(request, await start_stream(request, none()))


async def _long(world: World) -> str:
    try:
        await asyncio.sleep(600)
    finally:
        world.closed.append("work")
    return "done"


def test_a_stream_sends_its_events_and_splits_at_empty_lines(server: RunningServer) -> None:
    reply = server.ask("GET", "/stream")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-accel-buffering"] == "no"
    blocks = reply.body.decode().split("\n\n")
    assert blocks[0] == 'event: piece\ndata: {"number": 0, "text": "\\u2028 ü"}'
    assert (len(blocks), blocks[3]) == (4, "")
    assert b"\r" not in reply.body


def test_what_fails_before_the_first_event_is_an_ordinary_error(server: RunningServer) -> None:
    reply = server.ask("GET", "/refused")
    assert (reply.status, reply.json["error"]["message"]) == (400, "not like this")  # type: ignore[index]


def test_a_silent_stream_shows_that_it_lives(server: RunningServer) -> None:
    body = server.ask("GET", "/silent").body.decode()
    assert body.count("event: ping") >= 3
    assert body.count("event: piece") == 2


def test_a_client_that_leaves_ends_its_stream(server: RunningServer, world: World) -> None:
    with _open(server, "/stream?n=100000&pause=0.01") as one:
        assert b"200 OK" in one.recv(4096)
    until(lambda: world.closed == ["events"])


def test_a_client_that_leaves_before_the_first_event_cancels(
    server: RunningServer, world: World
) -> None:
    _open(server, "/stream?n=2&pause=600").close()
    until(lambda: world.closed == ["events"])


def test_a_client_that_leaves_cancels_work_without_a_stream(
    server: RunningServer, world: World
) -> None:
    _open(server, "/task").close()
    until(lambda: world.closed == ["work", "gone"])


def test_a_client_that_closes_its_sending_side_cancels(server: RunningServer, world: World) -> None:
    with _open(server, "/task") as one:
        one.shutdown(socket.SHUT_WR)
        until(lambda: world.closed == ["work", "gone"])


def test_a_client_that_does_not_read_is_left_and_holds_no_memory(
    server: RunningServer, world: World
) -> None:
    with _open(server, "/stream?n=1000&large=true"):
        until(lambda: world.closed == ["events"])
    # One event is held back, and the system's buffers took some.
    assert world.produced < 20
    assert server.ask("GET", "/health").status == 200


def test_a_client_that_leaves_while_it_is_sent_to_ends_its_stream(world: World) -> None:
    async def leave() -> None:
        is_sent_to = asyncio.Event()

        async def receive() -> Message:
            await is_sent_to.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                is_sent_to.set()
                await asyncio.Event().wait()

        scope = {"type": "http", "app": _app(world)}
        events = _events(world, 3, 0.0, "")
        await event_stream(Request(scope), events)(scope, receive, send)
        assert world.closed == ["events"]
        del events  # held until here: no garbage collection closed it

    asyncio.run(leave())


def test_a_server_that_stops_lets_a_short_stream_end_and_cuts_a_long_one(world: World) -> None:
    patient = SETTINGS.model_copy(update={"stop_timeout": 3})
    with running(settings=patient, app=_app(world)) as server:
        short = _open(server, "/stream?n=20&pause=0.02")
        long = _open(server, "/stream?n=100000&pause=0.02")
        with short, long:
            assert b"200 OK" in short.recv(4096)
            assert b"200 OK" in long.recv(4096)
            server.server.stop()
            assert b'"number": 19' in _all(short)
            assert b'"number": 99999' not in _all(long)
    assert world.closed == ["events", "events"]


def _open(server: RunningServer, path: str) -> socket.socket:
    one = server.connect()
    one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return one


def _all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_no_reader_finds_a_line_end_within_an_event() -> None:
    text = "a\u2028b\u2029c\x85d\re\nf\x0bg\x0ch"
    lines = sse_event({"text": text}).decode().splitlines()
    (data,) = [line for line in lines if line]
    assert json.loads(data.removeprefix("data: ")) == {"text": text}

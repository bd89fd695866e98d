"""Long prefills: every stream shows that it lives, as its clients count it, from the start."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from socket import socket

import pytest

from semantic.domain.answer import AnswerEnd, AnswerEvent, AnswerStarted, PromptProgress, TextDelta
from semantic.domain.answer import Usage as Tokens
from semantic.domain.errors import ContextOverflowError, SemanticError
from semantic.ports.serving import Ask
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing
from tests.support.http_server import RunningServer, running, until

pytestmark = pytest.mark.process

SETTINGS = ServerSettings(keep_alive=0.05, stop_timeout=1)
ASKED: dict[str, object] = {"model": "fake", "max_tokens": 5, "stream": True}
MESSAGES = {**ASKED, "messages": [{"role": "user", "content": "Hello"}]}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
COMMENT = b": keep-alive\n\n"
WIRES = [
    pytest.param("/v1/messages", MESSAGES, PING, id="messages"),
    pytest.param("/v1/chat/completions", MESSAGES, COMMENT, id="chat"),
    pytest.param("/v1/completions", {**ASKED, "prompt": "Hello"}, COMMENT, id="completions"),
]


@dataclass(slots=True)
class SlowServing(FakeServing):
    """Takes a request in, and ends its prefill, when the test says so."""

    taken_in: threading.Event = field(default_factory=threading.Event)
    prefilled: threading.Event = field(default_factory=threading.Event)
    refusal: SemanticError | None = None

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        try:
            await _set(self.taken_in)
            if self.refusal is not None:
                raise self.refusal
            yield AnswerStarted("request-0", "auto", 5)
            while not self.prefilled.is_set():
                yield PromptProgress(1, 5)
                await asyncio.sleep(0.01)
            yield TextDelta("Hi")
            yield AnswerEnd("stop", Tokens(5, 0, 1))
            self.asked.append(ask)
        finally:
            self.cancelled += [] if self.asked else ["request-0"]


async def _set(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.01)


@pytest.fixture
def slow() -> SlowServing:
    return SlowServing()


@pytest.fixture
def server(slow: SlowServing) -> Iterator[RunningServer]:
    with running(slow, SETTINGS) as found:
        yield found


def _asked(server: RunningServer, path: str, body: dict[str, object]) -> socket:
    connection = server.connect()
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def _until(connection: socket, so_far: bytes, found: bytes, times: int = 1) -> bytes:
    """All that came until `found` stood in it so often; fails at the end of the stream."""
    while so_far.count(found) < times:
        piece = connection.recv(1 << 16)
        assert piece, f"no {found!r} in {so_far!r}"
        so_far += piece
    return so_far


@pytest.mark.parametrize(("path", "body", "alive"), WIRES)
def test_a_stream_lives_before_and_during_a_long_prefill(
    server: RunningServer, slow: SlowServing, path: str, body: dict[str, object], alive: bytes
) -> None:
    with _asked(server, path, body) as connection:
        came = _until(connection, b"", alive, 3)
        assert came.startswith(b"HTTP/1.1 200 ")
        assert b"request-0" not in came
        assert came.count(b"data: ") == came.count(b'{"type": "ping"}')
        slow.taken_in.set()
        n_before = came.count(alive)
        came = _until(connection, came, b"data: ", came.count(b"data: ") + 1)
        came = _until(connection, came, alive, n_before + 4)
        assert b"Hi" not in came
        slow.prefilled.set()
        came = _until(connection, came, b"Hi")
    until(lambda: bool(slow.asked) and not slow.cancelled)


def test_a_stream_of_lines_lives_by_parts_without_content(
    server: RunningServer, slow: SlowServing
) -> None:
    """Ollama's clients read each line as a part: there are no comments between them."""
    body = {"model": "fake", "messages": MESSAGES["messages"]}
    with _asked(server, "/api/chat", body) as connection:
        came = _until(connection, b"", b'"done": false', 3)
        assert b"application/x-ndjson" in came
        slow.taken_in.set()
        slow.prefilled.set()
        came = _until(connection, came, b'"done": true')
    lines = [line for line in came.splitlines() if line.startswith(b'{"model"')]
    texts = [json.loads(line)["message"]["content"] for line in lines]
    assert "".join(texts) == "Hi"
    assert texts[:3] == ["", "", ""]


@pytest.mark.parametrize(("path", "body", "alive"), WIRES)
def test_what_is_refused_late_is_an_event_of_the_stream(
    server: RunningServer, slow: SlowServing, path: str, body: dict[str, object], alive: bytes
) -> None:
    slow.refusal = ContextOverflowError("no room for it", prompt_tokens=40, limit=30)
    with _asked(server, path, body) as connection:
        came = _until(connection, b"", alive)
        slow.taken_in.set()
        came = _until(connection, came, b"invalid_request_error")
        assert b'"error"' in came
        while connection.recv(1 << 16):  # to the end
            pass


@pytest.mark.parametrize(("path", "body", "alive"), WIRES)
def test_without_a_stream_it_is_an_ordinary_error_however_late(
    server: RunningServer, slow: SlowServing, path: str, body: dict[str, object], alive: bytes
) -> None:
    del alive
    slow.refusal = ContextOverflowError("no room for it", prompt_tokens=40, limit=30)
    threading.Timer(4 * SETTINGS.keep_alive, slow.taken_in.set).start()
    assert server.ask("POST", path, {**body, "stream": False}).status == 400


@pytest.mark.parametrize(("path", "body", "alive"), WIRES)
def test_who_leaves_before_the_first_event_is_no_longer_worked_for(
    server: RunningServer, slow: SlowServing, path: str, body: dict[str, object], alive: bytes
) -> None:
    with _asked(server, path, body) as connection:
        _until(connection, b"", alive)
    until(lambda: slow.cancelled == ["request-0"])

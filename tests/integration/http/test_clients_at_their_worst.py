"""Clients that stop in the middle: what is left of them ends in time, and is counted as it was."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import threading
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus

import pytest

from semantic.adapters.http.app import create_app
from semantic.adapters.http.context import ServerContext
from semantic.adapters.http.server import DeadlineProtocol
from semantic.adapters.http.settings import ServerSettings
from semantic.application.engine.engine_state import Figures
from tests.support.fake_serving import FakeServing
from tests.support.http_server import Reply, RunningServer, running, until
from tests.support.runnable_serving import RunnableFake

QUICK = ServerSettings(send_timeout=0.5, idle_timeout=1, stop_timeout=60)
LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_rest_that_is_never_read_does_not_hold_an_idle_connection_for_ever() -> None:
    with running(FakeServing(), QUICK) as server, server.connect() as one:
        _leave_a_rest(server, one)
        until(lambda: not _connections(server))


def test_a_rest_that_is_never_read_does_not_hold_up_a_server_that_stops() -> None:
    long = QUICK.model_copy(update={"idle_timeout": 600})
    with running(FakeServing(), long) as server, server.connect() as one:
        _leave_a_rest(server, one)
        server.server.stop()
        until(lambda: not _connections(server))


def test_the_store_does_not_keep_probes_waiting() -> None:
    released = threading.Event()
    opened = RunnableFake()

    def figures() -> Figures:
        released.wait(20)
        return opened.figures()

    context = ServerContext(opened, figures=figures)
    with running(app=create_app(context=context)) as server:
        statuses: list[int] = []
        ready = threading.Thread(target=lambda: statuses.append(server.ask("GET", "/ready").status))
        ready.start()
        until(lambda: len(_connections(server)) == 1)
        assert server.ask("GET", "/health").status == HTTPStatus.OK
        assert not statuses
        released.set()
        ready.join()
    assert statuses == [HTTPStatus.OK]


def test_an_allowed_page_may_ask_first_and_see_the_answer() -> None:
    settings = ServerSettings(allowed_origins=("https://app.lan",))
    wish = {
        "Origin": "https://app.lan",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    with running(FakeServing(), settings) as server:
        asked = server.ask("OPTIONS", "/v1/chat/completions", headers=wish)
        assert asked.status == HTTPStatus.NO_CONTENT
        assert asked.headers["access-control-allow-origin"] == "https://app.lan"
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        assert asked.headers["access-control-allow-private-network"] == "true"
        for body, status in (({"prompt": "a"}, 200), ({}, 400)):
            reply = server.ask("POST", "/tokenize", body, {"Origin": "https://app.lan"})
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == "https://app.lan"
            assert reply.headers["vary"] == "origin"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", ""])
def test_another_page_is_shown_nothing(origin: str) -> None:
    settings = ServerSettings(allowed_origins=("https://app.lan",))
    with running(FakeServing(), settings) as server:
        wish = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        asked = server.ask("OPTIONS", "/tokenize", headers=wish)
        assert asked.status == HTTPStatus.METHOD_NOT_ALLOWED
        seen = server.ask("GET", "/health", headers={"Origin": origin})
    assert not [name for name in asked.headers | seen.headers if name.startswith("access-control")]


@pytest.mark.parametrize("tools", [0, False, "", {}])
def test_tools_that_are_no_list_are_refused_where_prompts_are_counted(tools: object) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    with running(FakeServing()) as server:
        assert server.ask("POST", "/tokenize", body).status == HTTPStatus.BAD_REQUEST
        assert server.ask("POST", "/tokenize", {**body, "tools": None}).status == HTTPStatus.OK


def test_a_server_that_stops_tells_those_who_have_no_answer_yet() -> None:
    app = create_app(FakeServing(), QUICK.model_copy(update={"stop_timeout": 0}))
    begun = threading.Semaphore(0)

    async def wait() -> None:
        begun.release()
        await asyncio.sleep(60)

    app.add_api_route("/v1/wait", wait)
    app.add_api_route("/v1/messages/wait", wait)
    replies: dict[str, Reply] = {}
    with running(settings=QUICK.model_copy(update={"stop_timeout": 0}), app=app) as server:

        def ask(path: str) -> None:
            replies[path] = server.ask("GET", path)

        asked = [
            threading.Thread(target=ask, args=(path,)) for path in ("/v1/wait", "/v1/messages/wait")
        ]
        for one in asked:
            one.start()
        for _ in asked:
            assert begun.acquire(timeout=20)
        server.server.stop()
        for one in asked:
            one.join()
    for reply in replies.values():
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        assert "stopping" in str(reply.json["error"])
    assert replies["/v1/messages/wait"].json["type"] == "error"


def _leave_a_rest(server: RunningServer, one: socket.socket) -> None:
    """Let an answer lie unread, too little of it to make the server stop writing: the buffers of
    the system are filled one answer after the other, until some of it stays with the server."""
    until(lambda: len(_connections(server)) == 1)
    (connection,) = _connections(server)
    for end in (one, connection.transport.get_extra_info("socket")):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for _ in range(1000):
        before = connection.cycle
        one.sendall(LARGE)
        until(partial(_has_answered, connection, before))
        if connection.transport.get_write_buffer_size():
            break
    else:
        raise AssertionError("the system took everything")
    assert not connection.flow.write_paused
    assert re.match(rb"HTTP/1.1 200", one.recv(16))


def _has_answered(connection: DeadlineProtocol, before: object) -> bool:
    """Whether a request after `before` has its whole answer."""
    return connection.cycle is not before and connection.cycle.response_complete


def _connections(server: RunningServer) -> list[DeadlineProtocol]:
    return [
        found
        for found in server.server.server_state.connections
        if isinstance(found, DeadlineProtocol)
    ]


def test_connections_leave_files_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeServing()) as server, ExitStack() as crowd:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        server.server.refresh_connection_limits()
        for _ in range(15):
            crowd.enter_context(server.connect())
        assert server.ask("GET", "/health").status == HTTPStatus.SERVICE_UNAVAILABLE
        for _ in range(15):
            crowd.enter_context(server.connect())
        until(lambda: len(_connections(server)) == 20)

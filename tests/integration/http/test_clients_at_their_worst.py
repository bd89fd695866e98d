"""Clients that stop in the middle: what is left of them ends in time, and is counted as it was."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest
from pydantic import SecretStr

from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.ports.serving import Figures
from semantic_server.http.app import create_app
from semantic_server.http.connections import ConnectionLimits, Connections, DeadlineProtocol, Phase
from semantic_server.http.context import ServerContext
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing
from tests.support.http_server import Reply, RunningServer, running, until
from tests.support.runnable_serving import RunnableFake
from tests.support.served_store import served

pytestmark = pytest.mark.process

QUICK = ServerSettings(send_timeout=0.5, idle_timeout=1, stop_timeout=600)
_LONG = "a1 " * 80_000
SMALL = b"GET /page/chat.js HTTP/1.1\r\nHost: localhost\r\n\r\n"


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
        released.wait(60)
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
        await asyncio.sleep(600)

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
            assert begun.acquire(timeout=60)
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
        one.sendall(SMALL)
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
        for _ in range(30):
            crowd.enter_context(server.connect())
        until(lambda: len(_connections(server)) == 20)
        assert server.ask("GET", "/health").status == HTTPStatus.OK


FEW = ServerSettings(
    max_connections=4, api_keys=(SecretStr("secret"),), header_timeout=600, body_timeout=600
)
KEY = {"x-api-key": "secret"}


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_half_open_connections_do_not_keep_others_out(sent: bytes) -> None:
    with running(FakeServing(), FEW) as server, ExitStack() as crowd:
        for _ in range(80):
            crowd.enter_context(server.connect()).sendall(sent)
        assert server.ask("POST", "/tokenize", {"prompt": "a"}, KEY).status == HTTPStatus.OK
        assert server.ask("GET", "/health").status == HTTPStatus.OK
        assert len(_connections(server)) <= 16


def test_bodies_that_do_not_come_do_not_keep_others_out() -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    settings = FEW.model_copy(update={"api_keys": ()})
    with running(FakeServing(), settings) as server, ExitStack() as crowd:
        slow = [crowd.enter_context(server.connect()) for _ in range(5)]
        for n, one in enumerate(slow[:4], start=1):
            one.sendall(head)
            until(partial(_have_begun, server, n))
        assert server.ask("POST", "/tokenize", {"prompt": "a"}).status == HTTPStatus.OK
        answer = slow[0].recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in answer
        until(partial(_have_begun, server, 3))


def test_running_requests_are_never_closed_for_others_and_probes_find_a_place() -> None:
    app = create_app(FakeServing(), FEW)
    release = threading.Event()

    async def wait() -> str:
        await asyncio.to_thread(release.wait, 60)
        return "done"

    app.add_api_route("/v1/wait", wait)
    replies: list[Reply] = []
    with running(settings=FEW, app=app) as server, ExitStack() as crowd:
        asked = [
            threading.Thread(
                target=lambda: replies.append(server.ask("GET", "/v1/wait", headers=KEY))
            )
            for _ in range(4)
        ]
        for one in asked:
            one.start()
        until(lambda: _have_begun(server, 4))
        for _ in range(40):
            crowd.enter_context(server.connect())
        for probe, status in (("/health", 200), ("/ready", 200), ("/metrics", 403)):
            assert server.ask("GET", probe, headers=KEY).status == status
        refused = server.ask("GET", "/v1/models", headers=KEY)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert refused.json["error"]["code"] == "overloaded"  # type: ignore[index]  # its shape
        release.set()
        for one in asked:
            one.join()
    assert [reply.body for reply in replies] == [b'"done"'] * 4


def _have_begun(server: RunningServer, n: int) -> bool:
    """Whether the headers of exactly `n` requests have come that have no whole answer yet."""
    begun = [one.cycle for one in _connections(server) if hasattr(one.cycle, "response_complete")]
    return len([cycle for cycle in begun if not cycle.response_complete]) == n


class Held(DeadlineProtocol):
    """A connection of a peer without a socket."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.gave_way = False

    def give_way(self) -> None:
        self.gave_way = True


def test_a_peer_with_many_connections_displaces_its_own() -> None:
    connections = Connections(ConnectionLimits(10, 10, max_requests=2, max_open=4))
    quiet = Held("10.0.0.1")
    many = [Held("10.0.0.2") for _ in range(9)]
    assert all(connections.opened(one, float(n)) for n, one in enumerate([quiet, *many]))
    assert [one.gave_way for one in many] == [True] * 6 + [False] * 3
    assert not quiet.gave_way
    for one in many[6:]:
        connections.moved(one, Phase.RUNNING, 10.0)
    assert not connections.may_run(many[8], 10.0)
    assert connections.opened(Held("10.0.0.3"), 11.0)
    assert quiet.gave_way, "of peers with one connection each the oldest goes"


def test_a_hello_does_not_wait_for_long_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, begun, go = MLXTokenizer.encode, threading.Semaphore(0), threading.Event()

    def held(self: MLXTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > len(_LONG) // 2:
            begun.release()
            assert go.wait(60)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(MLXTokenizer, "encode", held)
    keys = (SecretStr("hostile"), SecretStr("other"))
    with served(tmp_path, settings=ServerSettings(api_keys=keys)) as server:

        def ask(key: str, prompt: str) -> Reply:
            body = {"model": "default", "prompt": prompt, "max_tokens": 1}
            return server.ask("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"})

        with ThreadPoolExecutor(8) as clients:
            refused = [clients.submit(ask, "hostile", _LONG) for _ in range(6)]
            for _ in range(2):
                assert begun.acquire(timeout=60)
            for key in ("other", "hostile"):
                assert ask(key, "Hello").status == HTTPStatus.OK
            go.set()
            assert {one.result().status for one in refused} == {HTTPStatus.BAD_REQUEST}

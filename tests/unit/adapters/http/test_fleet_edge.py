"""The edge of a fleet over real sockets: what passes, what does not, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from semantic.domain.errors import OverloadedError
from semantic_fleet.replicas.fleet_edge import create_edge, merged_metrics
from semantic_fleet.replicas.fleet_port import PassedRequest, Piece, ResponseHead
from semantic_server.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running, until

pytestmark = pytest.mark.process

HEAD = ResponseHead(200, ((b"content-type", b"text/plain"), (b"x-semantic-replica", b"1")))


@dataclass
class FakeReplicas:
    """Implements `ReplicasPort`: repeats the body; what a path names besides."""

    asked: list[tuple[str, PassedRequest]] = field(default_factory=list)
    left: int = 0
    head: ResponseHead = HEAD

    async def answer(self, key: str, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        self.asked.append((key, request))
        if request.path == "/full":
            raise OverloadedError("all replicas are full", retry_after=5)
        lost = OverloadedError("the fleet lost the answering replica", retry_after=1)
        if request.query == b"lost=at-once":
            raise lost
        yield self.head
        if request.query == b"lost=after-head":
            raise lost
        yield request.body
        if request.query == b"lost":
            raise lost
        if request.path == "/endless":
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1

    async def answers(self, request: PassedRequest) -> Mapping[str, tuple[ResponseHead, bytes]]:
        if request.method == "DELETE":
            missing = ResponseHead(404, ((b"content-length", b"2"),))
            here = ResponseHead(200, ((b"content-length", b"4"),))
            return {"0@a": (missing, b"no"), "1@a": (here, b"done")}
        text = b'# HELP n Number.\n# TYPE n gauge\nn{model="m"} %d\n'
        return {name: (HEAD, text % number) for number, name in enumerate(("0@a", "1@a"))}


@asynccontextmanager
async def no_life(_app: FastAPI) -> AsyncIterator[None]:
    yield


def edge(replicas: FakeReplicas, settings: ServerSettings) -> FastAPI:
    return create_edge(replicas, settings, no_life, "1")


@pytest.fixture
def replicas() -> FakeReplicas:
    return FakeReplicas()


@pytest.fixture
def server(replicas: FakeReplicas) -> object:
    settings = ServerSettings()
    with running(app=edge(replicas, settings), settings=settings) as one:
        yield one


def test_a_request_passes_whole_with_the_key_of_its_agent(
    server: RunningServer, replicas: FakeReplicas
) -> None:
    for path in ("/v1/messages?beta=true", "/v1/agents/ada%2Fb/why"):
        reply = server.ask("POST", path, b'{"a": 1}', {"X-Agent-ID": "ada/b"})
        assert (reply.status, reply.body) == (200, b'{"a": 1}')
        assert reply.headers["x-semantic-replica"] == "1"
    (one, first), (other, second) = replicas.asked
    assert one == other
    assert (first.method, first.path, first.query) == ("POST", "/v1/messages", b"beta=true")
    assert (second.path, second.raw_path) == ("/v1/agents/ada/b/why", b"/v1/agents/ada%2Fb/why")
    assert (b"x-agent-id", b"ada/b") in first.headers


def test_what_is_no_json_passes_too(server: RunningServer, replicas: FakeReplicas) -> None:
    for body in (b"{", b"[1]", b"\xff", b""):
        assert server.ask("POST", "/v1/messages", body).body == body
    assert len({key for key, _ in replicas.asked}) == 1


def test_a_full_fleet_says_when_to_come_back(server: RunningServer) -> None:
    reply = server.ask("POST", "/full", b"{}")
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")


LASTS = {
    "/v1/chat/completions": b'data: {"error": {"message": ',
    "/v1/completions": b'data: {"error": {"message": ',
    "/v1/messages": b'event: error\ndata: {"type": "error"',
    "/v1/responses": b'event: error\ndata: {"type": "error", "code": "server_error"',
    "/api/chat": b'{"error": ',
    "/api/generate": b'{"error": ',
}
"""Of each wire what the last event of a stream that fails begins with."""

LOST = "the fleet lost the answering replica"
_OPENAI: dict[str, object] = {
    "error": {"message": LOST, "type": "server_error", "param": None, "code": "overloaded"}
}
ERRORS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": _OPENAI,
    "/v1/completions": _OPENAI,
    "/v1/messages": {"type": "error", "error": {"type": "overloaded_error", "message": LOST}},
    "/v1/responses": _OPENAI,
    "/api/chat": {"error": LOST},
    "/api/generate": {"error": LOST},
}
"""Of each wire the body of an answer without a stream that fails."""


@pytest.mark.parametrize("path", ERRORS)
def test_a_whole_answer_of_a_lost_replica_is_an_error_that_may_be_repeated(
    path: str, server: RunningServer, replicas: FakeReplicas
) -> None:
    """However much of it has come. The edge itself does not repeat it."""
    kind, length = (b"content-type", b"application/json"), (b"content-length", b"9")
    replicas.head = ResponseHead(200, (kind, length))
    for when in ("lost=at-once", "lost=after-head", "lost"):
        reply = server.ask("POST", f"{path}?{when}", b"{}")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "x-should-retry" not in reply.headers
        assert {**ERRORS[path], **reply.json} == reply.json
    assert len(replicas.asked) == 3


@pytest.mark.parametrize("path", LASTS)
def test_a_stream_of_a_lost_replica_ends_with_the_reason(
    path: str, server: RunningServer, replicas: FakeReplicas
) -> None:
    kind = b"application/x-ndjson" if path.startswith("/api") else b"text/event-stream"
    replicas.head = ResponseHead(200, ((b"content-type", kind),))
    reply = server.ask("POST", f"{path}?lost", b"{}\n\n")
    assert reply.body.startswith(b"{}\n\n" + LASTS[path])
    assert b"the fleet lost the answering replica" in reply.body
    assert reply.body.endswith(b"}\n" if path.startswith("/api") else b"}\n\n")


def test_an_edge_that_stops_ends_streams_with_the_reason(replicas: FakeReplicas) -> None:
    settings = ServerSettings(stop_timeout=0)
    replicas.head = ResponseHead(200, ((b"content-type", b"text/event-stream"),))
    with (
        running(app=edge(replicas, settings), settings=settings) as server,
        server.connect() as client,
    ):
        client.sendall(b"POST /endless HTTP/1.1\r\nHost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        received = client.recv(8)
        server.server.stop()
        while piece := client.recv(1 << 16):
            received += piece
    assert b"the server is stopping" in received
    assert received.endswith(b"\r\n0\r\n\r\n")
    assert replicas.left == 1


def test_an_edge_that_stops_answers_what_was_not_whole(replicas: FakeReplicas) -> None:
    settings = ServerSettings(stop_timeout=0)
    with (
        running(app=edge(replicas, settings), settings=settings) as server,
        server.connect() as client,
    ):
        client.sendall(b"POST /endless HTTP/1.1\r\nHost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        until(lambda: bool(replicas.asked))
        server.server.stop()
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert received.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 5" in received
    assert received.endswith(b"}")
    assert replicas.left == 1


def test_a_client_that_leaves_ends_its_answer(
    server: RunningServer, replicas: FakeReplicas
) -> None:
    with server.connect() as client:
        client.sendall(b"POST /endless HTTP/1.1\r\nHost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        until(lambda: bool(replicas.asked))
    until(lambda: replicas.left == 1)


def test_archives_are_refused_and_health_is_the_edges(
    server: RunningServer, replicas: FakeReplicas
) -> None:
    for method, path in (("POST", "import"), ("GET", "ada/export")):
        reply = server.ask(method, f"/v1/agents/{path}", b"x")
        assert reply.status == 501
        assert b"--remote-store" in reply.body
    assert server.ask("GET", "/v1/overview/stream").status == 501
    assert server.ask("GET", "/health").json == {"status": "ok"}
    assert replicas.asked == []


def test_what_is_deleted_is_deleted_everywhere(server: RunningServer) -> None:
    for path in ("/v1/agents/team%2Fada", "/v1/requests/7"):
        reply = server.ask("DELETE", path)
        assert (reply.status, reply.body) == (200, b"done")


def test_metrics_are_those_of_all_replicas_and_for_operators(replicas: FakeReplicas) -> None:
    settings = ServerSettings(api_keys=(SecretStr("one"),), operator_keys=(SecretStr("op"),))
    with running(app=edge(replicas, settings), settings=settings) as server:
        assert server.ask("GET", "/metrics").status == 401
        assert server.ask("GET", "/metrics", headers={"x-api-key": "one"}).status == 403
        text = server.ask("GET", "/metrics", headers={"x-api-key": "op"}).body
        assert b'n{model="m",replica="1@a"} 1.0' in text
        assert server.ask("POST", "/v1/messages", b"{}").status == 401
        for key in ("one", "one"):
            server.ask("POST", "/v1/messages", b"{}", {"x-api-key": key})
    assert len(replicas.asked) == 2


def test_histograms_keep_their_form() -> None:
    text = (
        "# HELP h Seconds.\n# TYPE h histogram\n"
        'h_bucket{le="1.0"} 1.0\nh_bucket{le="+Inf"} 2.0\nh_count 2.0\nh_sum 3.0\n'
        "# HELP c_total Count.\n# TYPE c_total counter\nc_total 4.0\n"
    )
    merged = merged_metrics({"0": text}).decode()
    assert merged.replace(',replica="0"', "").replace('{replica="0"}', "") == text

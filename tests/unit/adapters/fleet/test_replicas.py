"""A replica without Ray: passed requests, slots, and how many there should be."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from semantic.domain.answer import AnswerEvent, TextDelta
from semantic.domain.errors import BackendError
from semantic.ports.serving import Ask
from semantic_fleet.cli.served_replica import ServedReplica
from semantic_fleet.replicas import replica as replicas
from semantic_fleet.replicas.autoscaling import by_queue, wanted_replicas
from semantic_fleet.replicas.fleet_port import PassedRequest, Piece, ResponseHead
from semantic_fleet.replicas.passed_requests import AsgiApp, Message, Receive, Send, answer
from semantic_fleet.replicas.ray_cluster import _reason
from semantic_fleet.replicas.replica import LOCK, Drain, Replica, taken_slot
from semantic_server.http.app import create_app
from tests.support.fake_serving import FakeServing, Script

JSON = ((b"content-type", b"application/json"), (b"host", b"localhost"))


def request(path: str, body: bytes = b"", method: str = "POST") -> PassedRequest:
    return PassedRequest(method, path, path.encode(), b"", JSON, body)


def run(app: AsgiApp, asked: PassedRequest) -> tuple[int, bytes]:
    async def all_of() -> list[Piece]:
        return [piece async for piece in answer(app, asked)]

    head, *rest = asyncio.run(all_of())
    assert isinstance(head, ResponseHead)
    return head.status, b"".join(one for one in rest if isinstance(one, bytes))


def test_our_application_answers_a_passed_request() -> None:
    serving = FakeServing(lambda _: Script((TextDelta("Hel"), TextDelta("lo."))))
    app = create_app(serving)
    body = b'{"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "stream": true}'
    status, text = run(app, request("/v1/chat/completions", body))
    assert status == 200
    assert text.endswith(b"data: [DONE]\n\n")
    assert run(app, request("/v1/chat/completions", b"{"))[0] == 400
    assert run(app, request("/nowhere", method="GET"))[0] == 404


def test_the_id_of_a_response_ends_with_the_route_of_its_request() -> None:
    body = b'{"model": "fake", "input": "Hi"}'
    _, text = run(create_app(FakeServing()), replace(request("/v1/responses", body), route="0bad"))
    assert json.loads(text)["id"].endswith("0bad")


def test_an_application_that_is_closed_sees_a_disconnect_and_ends_first() -> None:
    seen: list[Message] = []

    async def app(_scope: object, receive: Receive, send: Send) -> None:
        seen.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append(await receive())

    async def leave() -> None:
        async with aclosing(answer(app, request("/", b"body"))) as pieces:
            assert isinstance(await anext(pieces), ResponseHead)
            assert len(seen) == 1
        assert [one["type"] for one in seen] == ["http.request", "http.disconnect"]

    asyncio.run(leave())


def test_what_waits_together_is_one_piece_and_errors_come_last() -> None:
    async def app(_scope: object, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        raise BackendError("broken")

    async def collect() -> None:
        async with aclosing(answer(app, request("/"))) as pieces:
            assert await anext(pieces) == ResponseHead(200, ((b"a", b"b"),))
            assert await anext(pieces) == b"xxx"
            with pytest.raises(BackendError):
                await anext(pieces)

    asyncio.run(collect())


def test_a_replica_names_itself_reports_its_load_and_ends_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    @asynccontextmanager
    async def build(folder: str, sharing: int) -> AsyncIterator[ServedReplica]:
        app = create_app(FakeServing())
        assert sharing == 2
        yield ServedReplica(app, app.state.context)
        ended.append(folder)

    async def live() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__(build, str(tmp_path), 2, Drain(0, lambda: False))  # type: ignore[misc]
        async with aclosing(replica.answer(request("/health", method="GET"))) as pieces:
            head = await anext(pieces)
        assert isinstance(head, ResponseHead)
        assert (b"x-semantic-replica", b"0") in head.headers
        name, head, body = await replica.whole(request("/health", method="GET"))
        assert name.startswith("0@")
        assert (head.status, body) == (200, b'{"status":"ok"}')
        assert (await replica.record_autoscaling_stats())["rows"] == 32
        with pytest.raises(BackendError):
            await replica.check_health()  # it has no engine
        await replica.__del__()
        monkeypatch.delattr(Replica, "__del__")  # collecting it would make one more coroutine

    asyncio.run(live())
    assert ended == [str(tmp_path / "replica-0" / "store")]
    with taken_slot(tmp_path) as free:
        assert free.name == "0"


class Endless(FakeServing):
    """Answers that never end by themselves."""

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        async with aclosing(super().answer(ask)) as events:
            async for event in events:
                yield event
                if isinstance(event, TextDelta):
                    await asyncio.Event().wait()


SAYS: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}]}
ENDS: dict[str, tuple[dict[str, object], bytes]] = {
    "/v1/chat/completions": (SAYS, b'data: {"error": {"message": "the server is stopping'),
    "/v1/completions": ({"prompt": "Hi"}, b'data: {"error": {"message": "the server is stopping'),
    "/v1/responses": ({"input": "Hi"}, b"event: response.failed\n"),
    "/v1/messages": ({**SAYS, "max_tokens": 9}, b'event: error\ndata: {"type": "error"'),
    "/api/chat": (SAYS, b'{"error": "the server is stopping'),
    "/api/generate": ({"prompt": "Hi"}, b'{"error": "the server is stopping'),
}
"""Of each wire a request, and what the last event of its stream begins with."""


@pytest.mark.parametrize("path", ENDS)
def test_answers_of_a_replica_that_must_stop_end_with_a_reason(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once nothing has asked for its health for a while, and a replica is known to stop."""
    fields, last = ENDS[path]
    serving, is_any = Endless(lambda _: Script((TextDelta("Hello."),))), False
    monkeypatch.setattr(replicas, "SILENT", 0.0)
    monkeypatch.setattr(replicas, "_LOOK", 0.0)

    @asynccontextmanager
    async def build(_folder: str, _sharing: int) -> AsyncIterator[ServedReplica]:
        app = create_app(serving)
        yield ServedReplica(app, app.state.context)

    async def live() -> list[Piece]:
        nonlocal is_any
        replica = Replica.__new__(Replica)
        await replica.__init__(build, str(tmp_path), 1, Drain(0, lambda: is_any))  # type: ignore[misc]
        found: list[Piece] = []
        asked = {"model": "fake", "stream": True, **fields}
        whole = request(path, json.dumps({**asked, "stream": False}).encode())
        async with aclosing(replica.answer(request(path, json.dumps(asked).encode()))) as pieces:
            found.append(await anext(pieces))
            running = asyncio.create_task(replica.whole(whole))
            while len(serving.asked) < 2:
                await asyncio.sleep(0.001)
            async for piece in pieces:
                found.append(piece)
                is_any = is_any or b"Hello" in b"".join(f for f in found if isinstance(f, bytes))
        for _, head, body in (await running, await replica.whole(whole)):
            assert head.status == 503
            assert b"retry-after" in dict(head.headers)
            assert b"the server is stopping: send the request again" in body
        assert sorted(serving.cancelled) == ["request-0", "request-1"]
        await replica.__del__()
        monkeypatch.delattr(Replica, "__del__")  # collecting it would make one more coroutine
        return found

    head, *rest = asyncio.run(live())
    assert isinstance(head, ResponseHead)
    text = b"".join(one for one in rest if isinstance(one, bytes))
    separator = b"\n" if path.startswith("/api") else b"\n\n"
    assert text.endswith(separator)
    assert text.removesuffix(separator).split(separator)[-1].startswith(last)
    assert b"the server is stopping: send the request again" in text


def test_replicas_of_a_machine_have_slots_of_their_own(tmp_path: Path) -> None:
    with taken_slot(tmp_path) as first:
        with taken_slot(tmp_path) as second:
            assert [first.name, second.name] == ["0", "1"]
            lock = tmp_path / "replica-1" / LOCK
            assert (int(lock.read_text()), lock.stat().st_mode & 0o777) == (os.getpid(), 0o600)
        with taken_slot(tmp_path) as again:
            assert again.folder == second.folder


@pytest.mark.parametrize(
    ("current", "running", "waiting", "wanted"),
    [(2, 0, 0, 1), (1, 0, 0, 1), (1, 1, 5, 2), (1, 32, 64, 4), (4, 20, 0, 3), (2, 48, 0, 2),
     (2, 49, 0, 3), (3, 0, 1, 4)],
)  # fmt: skip
def test_replicas_follow_the_queue(
    current: int, running: float, waiting: float, wanted: int
) -> None:
    assert wanted_replicas(current, running, waiting, 32) == wanted


def test_the_policy_adds_up_what_replicas_report() -> None:
    metrics = {"running": {"a": 32.0, "b": 30.0}, "waiting": {"a": 3.0}, "rows": {"a": 32.0}}
    context = SimpleNamespace(
        current_num_replicas=2, aggregated_metrics=metrics, total_queued_requests=10.0
    )
    assert by_queue(context) == (4, {})
    context.aggregated_metrics = None
    assert by_queue(context) == (2, {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Traceback:\n  File x\nsemantic.errors.ModelNotFoundError: no model 'm'\n\n", "no model"),
        ("RuntimeError: a\nValueError: b\nLogs are in a file.", "ValueError: b"),
        ("not\nreachable", "reachable"),
        ("", "unknown"),
    ],
)
def test_of_an_error_of_rays_the_line_that_names_it_is_reported(text: str, reason: str) -> None:
    found = _reason(text)
    assert reason in found
    assert "\n" not in found

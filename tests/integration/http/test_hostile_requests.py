"""Requests that are slow, huge or nonsense: each is refused, and others are answered meanwhile."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import time
from collections.abc import Iterator

import pytest

from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing
from tests.support.http_server import RunningServer, running, until

pytestmark = pytest.mark.process

MIB = 1 << 20
PATIENT = ServerSettings(
    header_timeout=600, body_timeout=600, idle_timeout=1, max_body_mb=1, max_connections=20
)
QUICK = PATIENT.model_copy(update={"header_timeout": 2, "body_timeout": 2})
"""Yet others are to be answered beside it, whose headers must not be late on a slow machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(FakeServing(), PATIENT) as found:
        yield found


@pytest.fixture(scope="module")
def quick() -> Iterator[RunningServer]:
    with running(FakeServing(), QUICK) as found:
        yield found


def test_slow_headers_meet_their_deadline_and_others_are_answered(quick: RunningServer) -> None:
    with contextlib.ExitStack() as ends:
        slow = [ends.enter_context(quick.connect()) for _ in range(5)]
        for one in slow:
            one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")

        def answered() -> set[socket.socket]:
            """Those that the server has said something to; the others send one more header."""
            assert quick.ask("GET", "/health").status == 200
            time.sleep(0.02)
            found = set(select.select(slow, [], [], 0)[0])
            for one in slow:
                if one not in found:  # each byte alone must not put the deadline off
                    one.sendall(b"X-Slow: 1\r\n")
            return found

        until(lambda: len(answered()) == len(slow))
        for one in slow:
            assert _status(_some(one)) == 408


def test_a_silent_connection_is_closed(quick: RunningServer) -> None:
    with quick.connect() as silent:
        assert _all(silent) == b""  # no answer was owed


def test_an_idle_connection_is_closed_and_slow_headers_on_it_too(quick: RunningServer) -> None:
    with quick.connect() as one:
        one.sendall(_get("/health"))
        assert _status(_some(one)) == 200
        one.sendall(b"GET /hea")
        assert _status(_all(one)) == 408
    with quick.connect() as one:
        one.sendall(_get("/health"))
        assert _status(_some(one)) == 200
        assert _all(one) == b""


def test_a_slow_body_meets_its_deadline(quick: RunningServer) -> None:
    with quick.connect() as one:
        one.sendall(_post("/tokenize", length=1000))

        def answered() -> bool:
            one.sendall(b" ")
            return bool(select.select([one], [], [], 0.05)[0])

        until(answered)
        answer = one.recv(65536)
        assert _status(answer) == 408
        while b"request_timeout" not in answer:  # the body follows its headers
            more = one.recv(65536)
            assert more, answer
            answer += more


def test_a_large_body_is_refused_by_its_length_at_once(server: RunningServer) -> None:
    with server.connect() as one:
        one.sendall(_post("/tokenize", length=100 * MIB))
        assert _status(_some(one)) == 413


def test_a_hundred_megabytes_are_refused_and_the_client_can_read_so(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semantic_server.http.connections.DRAIN_SECONDS", 60)
    reply = server.ask("POST", "/tokenize", b" " * (100 * MIB))
    assert reply.status == 413
    assert reply.json["error"]["code"] == "request_too_large"  # type: ignore[index]  # its shape
    assert server.ask("GET", "/health").status == 200


def test_a_large_body_in_chunks_is_refused(server: RunningServer) -> None:
    with server.connect() as one:
        one.sendall(_post("/tokenize", chunked=True))
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(40):
            one.sendall(piece)
        assert _status(_some(one)) == 413


def test_the_rest_of_a_refused_body_is_not_waited_for_without_end(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semantic_server.http.connections.DRAIN_SECONDS", 0.3)
    with server.connect() as one:
        one.sendall(_post("/nowhere", length=1000))
        assert _status(_some(one)) == 404

        def is_over() -> bool:
            time.sleep(0.02)
            try:
                one.sendall(b" ")
            except OSError:  # reset, or a broken pipe
                return True
            return False

        until(is_over)


@pytest.mark.parametrize(
    "line", [b"a: b\r\n", b"x-" + b"n" * 200 + b": " + b"v" * 200 + b"\r\n"], ids=["short", "long"]
)
def test_a_hundred_thousand_headers_are_refused(server: RunningServer, line: bytes) -> None:
    with server.connect() as one:
        answer = _send_all(one, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + line * 100_000)
        assert _status(answer) == 431
    assert server.ask("GET", "/health").status == 200


def test_more_headers_than_allowed_are_refused(server: RunningServer) -> None:
    many = {f"x-{n}": "1" for n in range(300)}
    assert server.ask("GET", "/health", headers=many).status == 431


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e3\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: what\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n bad\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_our_shape(server: RunningServer, sent: bytes) -> None:
    with server.connect() as one:
        one.sendall(sent)
        answer = _all(one)
    assert 400 <= _status(answer) < 600
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert server.ask("GET", "/health").status == 200


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/9.9", b"HTTP/0.9"])
def test_another_version_of_http_is_refused(server: RunningServer, version: bytes) -> None:
    with server.connect() as one:
        one.sendall(b"GET /health " + version + b"\r\nHost: localhost\r\n\r\n")
        assert _status(_some(one)) == 505


def test_requests_that_come_together_are_answered_in_order_and_garbage_behind_them_is_refused(
    server: RunningServer,
) -> None:
    with server.connect() as one:
        one.sendall(_get("/health") + _get("/version") + b"\x00garbage\r\n\r\n")
        answer = _all(one)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]


def test_garbage_while_a_body_is_awaited_ends_the_connection(server: RunningServer) -> None:
    with server.connect() as one:
        one.sendall(_post("/tokenize", chunked=True) + b"1\r\n{\r\nnonsense\r\n")
        assert _status(_all(one)) == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"prompt": "\xc3\x28"}', "not JSON"),
        (b'{"prompt": "\\ud80"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "deeper than 64"),
        (b"[1]", "the body must be a JSON object, got a list"),
        (b'{"prompt": NaN}', "not JSON"),
        (b'{"prompt": 1e999}', "too large"),
        (b'{"prompt": 5}', "prompt"),
        (b"{}", "prompt"),
    ],
)
def test_a_body_that_is_wrong_is_explained(server: RunningServer, body: bytes, words: str) -> None:
    reply = server.ask("POST", "/tokenize", body)
    assert reply.status == 400
    assert words in str(reply.json["error"])


def test_a_body_of_very_many_values_is_refused_before_it_is_built() -> None:
    with running(FakeServing()) as server:
        reply = server.ask("POST", "/tokenize", b'{"a":[' + b"[]," * 9_000_000 + b"[]]}")
    assert reply.status == 413


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def test_two_lengths_of_one_body_end_the_connection(server: RunningServer) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    body = b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with server.connect() as one:
        one.sendall(head + body + _get("/health"))
        answer = _all(one)
    assert _status(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1, "what follows is no request"
    assert b"got both" in answer


def _post(path: str, *, length: int = 0, chunked: bool = False) -> bytes:
    size = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{size}\r\n\r\n".encode()


def _status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer[9:12])


def _some(connection: socket.socket) -> bytes:
    """One answer, whole."""
    answer = connection.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head)
    while found and len(body) < int(found[1]):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body if head else b""


def _all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def _send_all(connection: socket.socket, data: bytes) -> bytes:
    """Send as much as the server takes, and read what it says."""
    with contextlib.suppress(OSError):  # it has heard enough
        connection.sendall(data)
    try:
        return _some(connection)
    except ConnectionResetError:
        return b""

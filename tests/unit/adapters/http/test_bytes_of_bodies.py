"""Bodies as bytes: compressed ones, and texts with half a surrogate pair."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from semantic.domain.errors import InvalidRequestError
from semantic_server.http.errors import WireError
from semantic_server.http.middleware import RequestLimitsMiddleware
from semantic_server.http.request_body import parse_object
from semantic_server.http.settings import ServerSettings
from tests.support.lanes import examples

MOST = 1 << 20
"""Bytes of a body, in these tests."""
PIECES = (r"\ud83d", r"\uDE00", r"\uDBFF", r"\udc00", r"\\", r"\"", r"\n", "a", "ud83d", r"\u00e9")


class Route:
    """Implements ASGIApp: reads the body and replies 200 with the headers that it saw."""

    def __init__(self) -> None:
        self.body = b""
        self.largest = 0
        self.headers: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = [name for name, _ in scope["headers"]]
        more = True
        while more:
            message = await receive()
            self.largest = max(self.largest, len(message["body"]))
            self.body += message["body"]
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})


def sent(
    pieces: Sequence[bytes], encoding: str, path: str = "/v1/chat/completions"
) -> tuple[int, str, Route]:
    """Send a body in these pieces: the status, the error and what the route read."""
    route = Route()
    settings = ServerSettings(max_body_mb=MOST >> 20)
    headers = [(b"content-encoding", encoding.encode()), (b"content-length", b"9")]
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "headers": headers,
    }
    left = list(pieces)
    status, text = 0, ""

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        nonlocal status, text
        status = message.get("status", status)
        text += message.get("body", b"").decode()

    async def run() -> None:
        nonlocal status, text
        try:
            await RequestLimitsMiddleware(route, settings)(scope, receive, send)
        except WireError as error:
            status, text = error.status, str(error)

    asyncio.run(run())
    return status, text, route


def encoded(data: bytes, encoding: str) -> bytes:
    match encoding:
        case "gzip" | "x-gzip":
            return gzip.compress(data)
        case "deflate":
            return zlib.compress(data)
        case "raw":
            packed = zlib.compressobj(wbits=-zlib.MAX_WBITS)
            return packed.compress(data) + packed.flush()
        case _:
            return data


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(min(edge, len(data)) for edge in at), len(data)]
    return [data[first:last] for first, last in pairwise(edges)]


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "raw", "identity"])
@given(
    data=st.one_of(st.binary(max_size=300), st.integers(0, MOST).map(lambda n: b"ab" * (n // 2))),
    at=st.lists(st.integers(0, 400), max_size=5),
)
def test_a_compressed_body_is_read_in_any_pieces(encoding: str, data: bytes, at: list[int]) -> None:
    name = "deflate" if encoding == "raw" else encoding
    status, text, route = sent(cut(encoded(data, encoding), at), name)
    assert (status, text) == (200, "")
    assert route.body == data
    if encoding != "identity":
        assert route.largest <= 1 << 18
        assert route.headers == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_is_larger_decoded_than_a_body_may_be_is_refused(encoding: str) -> None:
    status, text, route = sent([encoded(b"\0" * (100 * MOST), encoding)], encoding)
    assert status == 413
    assert str(MOST) in text
    assert len(route.body) <= MOST


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (gzip.compress(b"{}" * 99)[:-9], "the compressed data ends early"),
        (gzip.compress(b"{}") + b"{}", "other data follows the compressed data"),
        (b"\x1f\x8b no gzip", "unknown compression method"),
    ],
)
def test_a_compressed_body_that_cannot_be_decoded_is_told(data: bytes, reason: str) -> None:
    status, text, _ = sent([data], "gzip")
    assert status == 400
    assert text.startswith("cannot decode the compressed body: ")
    assert reason in text


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip", "x" * 4000])
def test_another_encoding_is_refused_by_name(encoding: str) -> None:
    status, text, route = sent([b"{}"], encoding)
    assert status == 415
    assert encoding[:32] in text
    assert len(text) < 400
    assert route.body == b""


def test_an_uploaded_archive_is_read_as_it_is() -> None:
    status, _, _ = sent([gzip.compress(b"archive")], "gzip", "/v1/agents/import")
    assert status == 415


@given(st.lists(st.sampled_from(PIECES), max_size=examples(8, thorough=14)))
def test_half_of_a_surrogate_pair_is_a_replacement_character(pieces: list[str]) -> None:
    text = f'"{"".join(pieces)}"'
    whole = json.loads(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert parse_object(f'{{"value": [{text}], "k" : {{{text}: 1}}}}'.encode()) == {
        "value": [whole],
        "k": {whole: 1},
    }


def test_a_body_that_is_no_json_is_refused_with_half_a_pair_as_without() -> None:
    with pytest.raises(InvalidRequestError, match="the body is not JSON"):
        parse_object(rb'{"a": "\ud83d", }')
    with pytest.raises(InvalidRequestError, match="the body is not JSON"):
        parse_object(b'{"a": "\\ud83d\0"}')

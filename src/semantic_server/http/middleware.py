"""ASGI middleware: shutdown, request limits, and checks of Host and Origin."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import zlib
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic_server.http.errors import (
    RETRY_SECONDS,
    Problem,
    TooLargeError,
    WireError,
    problem_of,
    problem_response,
)
from semantic_server.http.settings import ServerSettings, is_loopback

_STOPPING: Final = Problem(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "the server is stopping",
    code="overloaded",
    retry_after=RETRY_SECONDS,
    closes=True,
)


class ShutdownMiddleware:
    """Replies 503 to a request that a shutdown cancels before its response has started."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if started:
                raise
            await problem_response(scope, _STOPPING)(scope, receive, send)


_VERSIONS: Final = frozenset({"1.0", "1.1"})


UPLOADS: Final = frozenset({("POST", "/v1/agents/import")})
"""Method and path of requests whose bodies may be larger than memory."""
_UPLOAD_STEP: Final = 1 << 20
"""The bytes of an upload that must arrive within the timeout of a whole body."""


class RequestLimitsMiddleware:
    """Replies 431 to too many header fields, 413 to a large body and 408 to a slow one.

    Also replies 505 to any other protocol than HTTP/1, and 415 to an unknown encoding. Uploads have
    no size limit here.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_upload = _is_upload(scope)
        encoding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        problem = self._problem(scope, "" if encoding == "identity" else encoding)
        if problem is not None:
            await problem_response(scope, problem)(scope, receive, send)
            return
        if encoding in _ENCODINGS:
            receive = _DecodedBody(receive).receive
            scope["headers"] = _without_length(scope["headers"])
        body = _LimitedBody(receive, self._settings, is_upload=is_upload)
        await self._app(scope, body.receive, send)

    def _problem(self, scope: Scope, encoding: str) -> Problem | None:
        if scope["http_version"] not in _VERSIONS:
            return Problem(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "expected HTTP/1.1 or HTTP/1.0")
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        n_bytes = sum(len(name) + len(value) for name, value in headers)
        limits = self._settings
        if len(headers) > limits.max_headers or n_bytes > limits.max_header_bytes:
            return Problem(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"expected at most {limits.max_headers} headers "
                f"and {limits.max_header_bytes} bytes of them",
                code="headers_too_large",
            )
        if encoding and (encoding not in _ENCODINGS or _is_upload(scope)):
            return Problem(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Encoding must be gzip, deflate or missing, got {encoding[:32]!r}",
                code="unsupported_encoding",
            )
        if _is_upload(scope):
            return None
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > limits.max_body_bytes:
            return problem_of(_too_large(limits.max_body_bytes))
        return None


def _is_upload(scope: Scope) -> bool:
    return (scope["method"], scope["path"]) in UPLOADS


class _LimitedBody:
    """A request body with a size limit and a deadline. `receive` raises WireError beyond either
    limit."""

    def __init__(self, receive: Receive, settings: ServerSettings, *, is_upload: bool) -> None:
        self._receive = receive
        self._is_upload = is_upload
        self._limit = settings.max_body_bytes
        self._timeout = settings.body_timeout
        self._deadline: float | None = None
        self._n_bytes = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()  # only a disconnect can follow
        message = await self._in_time()
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        self._n_bytes += len(message.get("body", b""))
        if self._is_upload:
            if self._n_bytes >= _UPLOAD_STEP:
                self._n_bytes, self._deadline = 0, None
        elif self._n_bytes > self._limit:
            raise _too_large(self._limit)
        return message

    async def _in_time(self) -> Message:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError as error:
            what = f"{_UPLOAD_STEP} bytes of the body" if self._is_upload else "the body"
            raise WireError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"{what} did not arrive within {self._timeout:g} seconds",
                code="request_timeout",
            ) from error


_ENCODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})
_DECODED_STEP: Final = 1 << 18
"""Bytes of a compressed body to decode at once, in less than a millisecond."""


def _without_length(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [one for one in headers if one[0] not in (b"content-encoding", b"content-length")]


class _DecodedBody:
    """A compressed request body, decoded piece by piece. Accepts "deflate" with and without zlib's
    header. `receive` raises WireError for malformed data."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._decoder: zlib._Decompress | None = None
        self._left = b""
        self._has_more = False  # more decoded bytes are in `_left` or in the decoder
        self._is_last = False

    async def receive(self) -> Message:
        if self._has_more:
            await asyncio.sleep(0)  # lets other tasks run
        else:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._left = message.get("body", b"")
            self._is_last = not message.get("more_body", False)
        body = self._decode()
        return {
            "type": "http.request",
            "body": body,
            "more_body": self._has_more or not self._is_last,
        }

    def _decode(self) -> bytes:
        if self._decoder is None:
            if not self._left:
                return b""
            is_raw = self._left[:1] != b"\x1f" and self._left[0] & 0xF != zlib.DEFLATED
            self._decoder = zlib.decompressobj(-zlib.MAX_WBITS if is_raw else zlib.MAX_WBITS | 32)
        try:
            body = self._decoder.decompress(self._left, _DECODED_STEP)
        except zlib.error as error:
            raise _not_decoded(str(error)) from error
        self._left = self._decoder.unconsumed_tail
        is_full = len(body) == _DECODED_STEP and not self._decoder.eof
        self._has_more = is_full or bool(self._left)
        if self._decoder.unused_data:
            raise _not_decoded("other data follows the compressed data")
        if self._is_last and not self._has_more and not self._decoder.eof:
            raise _not_decoded("the compressed data ends early")
        return body


def _not_decoded(reason: str) -> WireError:
    return WireError(HTTPStatus.BAD_REQUEST, f"cannot decode the compressed body: {reason}")


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"expected a body of at most {limit} bytes")


_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ANY: Final = "*"
_PREFLIGHT_MAX_AGE: Final = "600"


class HostMiddleware:
    """Replies 421 to a forbidden Host and 403 to a forbidden Origin. Answers CORS preflights.

    Prevents DNS rebinding and cross-origin posts from web pages. Allowed hosts are loopback names,
    the bound address and `names`. "*" allows all.
    """

    def __init__(
        self, app: ASGIApp, *, bound: str, names: Iterable[str] = (), origins: Iterable[str] = ()
    ) -> None:
        self._app = app
        self._bound = bound.lower()
        self._local = is_loopback(bound)
        self._names = frozenset(name.lower() for name in names)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _in_origin_form(scope)
        headers = Headers(scope=scope)
        problem = self._problem(scope, headers)
        origin = headers.get("origin", "")
        if problem is not None:
            await problem_response(scope, problem)(scope, receive, send)
        elif not self._is_allowed_origin(origin.lower()):
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight_response(origin, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_cors_headers(origin, send))

    def _problem(self, scope: Scope, headers: Headers) -> Problem | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            return _TWO_LENGTHS
        authority = headers.get("host", "")
        if not self._is_allowed_host(host_of(authority)):
            return Problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                "the Host header names a forbidden host; allow it with allowed_hosts",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or scope["method"] in _SAFE_METHODS or self._may_send(origin, authority):
            return None
        return Problem(
            HTTPStatus.FORBIDDEN,
            "the Origin header names a forbidden page; allow it with allowed_origins",
            code="origin_not_allowed",
        )

    def _is_allowed_host(self, host: str | None) -> bool:
        if ANY in self._names:
            return True
        if host is None:
            return False
        if is_loopback(host) or host == self._bound or host in self._names:
            return True
        return not self._local and _is_address(host)

    def _may_send(self, origin: str, authority: str) -> bool:
        origin = origin.lower()
        own = {f"http://{authority.lower()}", f"https://{authority.lower()}"}
        return self._is_allowed_origin(origin) or origin in own

    def _is_allowed_origin(self, origin: str) -> bool:
        return bool(origin) and (ANY in self._origins or origin in self._origins)


def _in_origin_form(scope: Scope) -> Scope:
    """Turn a proxy's request for http://HOST/PATH into a request for PATH, see RFC 9112, 3.2.2."""
    scheme, mark, rest = scope["path"].partition("://")
    if not mark or scheme.lower() not in ("http", "https"):
        return scope
    authority, _, path = rest.partition("/")
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    host = (b"host", authority.encode())
    raw_path = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
    return {**scope, "path": f"/{path}", "raw_path": raw_path, "headers": [host, *others]}


_TWO_LENGTHS: Final = Problem(
    HTTPStatus.BAD_REQUEST, "expected Content-Length or Transfer-Encoding, got both", closes=True
)
"""The error for a request with two lengths. A proxy could end the body at another byte."""


def _preflight_response(origin: str, requested: Headers) -> Response:
    headers = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": requested.get("access-control-request-headers", ""),
        "access-control-max-age": _PREFLIGHT_MAX_AGE,
        "vary": "origin, access-control-request-headers",
    }
    if requested.get("access-control-request-private-network") == "true":
        headers["access-control-allow-private-network"] = "true"
    return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)


def _with_cors_headers(origin: str, send: Send) -> Send:
    async def shown(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "x-request-id, request-id, retry-after"
            headers.add_vary_header("origin")
        await send(message)

    return shown


_AUTHORITY: Final = re.compile(r"(\[(?P<address>[^][]+)\]|(?P<name>[^][:/?#@\\\s]+))(:\d*)?")


def host_of(authority: str) -> str | None:
    """Return the host of a Host header without its port, or None for a malformed header."""
    found = _AUTHORITY.fullmatch(authority)
    return None if found is None else (found["address"] or found["name"]).lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

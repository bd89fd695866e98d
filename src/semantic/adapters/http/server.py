"""The process's HTTP server: one socket, one event loop, and how both end.

Knows uvicorn and signals; not what the application answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from types import FrameType
from typing import ClassVar, Final

import h11
import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from semantic.adapters.http.errors import (
    RETRY_SECONDS,
    Problem,
    logger,
    openai_error,
    problem_response,
)
from semantic.adapters.http.settings import ServerSettings
from semantic.domain.errors import OperatorError

KILLED_EXIT_CODE: Final = 130
"""The exit code after a second signal, as after Ctrl-C."""

_BACKLOG: Final = 512

_REFUSED_FACTOR: Final = 4
"""Beyond this many times the connections allowed there is not even an answer."""


class HttpServer(uvicorn.Server):
    """Ends after the first signal in good order, and at the second one at once.

    Nothing is lost by the latter but what was computed since: the store can be killed.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings, on_stop: Callable[[], None]) -> None:
        self._settings = settings
        self._protocol = protocol_with_limits(_limits(settings))
        super().__init__(_config(app, settings, self._protocol))
        self._on_stop = on_stop

    def refresh_connection_limits(self) -> None:
        """Look again how many connections there is room for: what loads a model may have changed
        the limit of open files."""
        self._protocol.limits = _limits(self._settings)

    def stop(self) -> None:
        """End in good order, as after a signal. Any thread may call it."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. Called between two instructions of the main thread."""
        del sig, frame
        if self.should_exit:
            os._exit(KILLED_EXIT_CODE)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, let those that run end, and save."""
        self._on_stop()
        await super().shutdown(sockets)


def make_server(
    app: FastAPI, settings: ServerSettings, on_stop: Callable[[], None] = lambda: None
) -> HttpServer:
    """A server of `app`; `run(sockets=[...])` runs it. `on_stop` is told when it ends."""
    # Streams get their time to end: uvicorn cancels what is left after `stop_timeout`.
    AppStatus.enable_automatic_graceful_drain = False
    return HttpServer(app, settings, on_stop)


def _config(
    app: FastAPI, settings: ServerSettings, protocol: type[DeadlineProtocol]
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        backlog=_BACKLOG,
        timeout_keep_alive=settings.idle_timeout,
        timeout_graceful_shutdown=settings.stop_timeout,
    )


def _limits(settings: ServerSettings) -> ConnectionLimits:
    """As many connections as are wanted, as far as the process may have so many files open."""
    wanted = settings.max_connections
    refused = connections_within_file_limit(wanted * _REFUSED_FACTOR)
    most = min(wanted, max(1, refused // 2))
    if most < wanted:
        logger.warning("the limit of open files leaves room for %d connections", most)
    return ConnectionLimits(settings.header_timeout, settings.send_timeout, most, refused)


def listen(settings: ServerSettings) -> socket.socket:
    """A socket that listens where `settings` say. Raises OperatorError when it cannot."""
    where = address(settings.host, settings.port)
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, own = found[0]
        return socket.create_server(own[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise OperatorError(
            f"cannot listen on {where}: {words}; --host and --port choose another address"
        ) from error


def address(host: str, port: int) -> str:
    """`host:port`, with brackets where the host has colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


DRAIN_SECONDS: Final = 10.0
"""How long the rest of a body that nobody wants may come in: a client that reads its answer only
after it has sent everything must find it, not a broken connection."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds that headers may take to come and written bytes to be read, and how many
    connections there may be; more get a 503, and beyond `max_refused` not even an answer."""

    header_timeout: float
    send_timeout: float
    max_connections: int
    max_refused: int


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for each part of a connection's life in which a client must act.

    One timer at a time waits for the client: for headers, for the rest of a body after its
    answer, or for the end of a connection that we have closed. Another waits for written bytes.
    """

    limits: ClassVar[ConnectionLimits]

    _idle = False
    _client_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        open_now = len(self.connections)
        if open_now > self.limits.max_refused:
            transport.abort()
        elif open_now > self.limits.max_connections:
            self.app = _refuse_connection
        self._set_client_timer(self.limits.header_timeout, self._on_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_client_timer(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._idle and self._client_timer is None:
            self._set_client_timer(self.limits.header_timeout, self._on_header_timeout)
        super().data_received(data)
        if self.cycle is not before:
            self._idle = False
            self._set_client_timer(None)

    def on_response_complete(self) -> None:
        answered = self.cycle
        self._idle = True
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self.cycle is answered and self.conn.their_state is h11.SEND_BODY:
            self._set_client_timer(DRAIN_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Aborting ends the request too: to it the client has left.
        self._write_timer = self.loop.call_later(self.limits.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; called where the parser's error is being handled."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(HTTPStatus(hint), msg.rstrip("."))

    def _on_header_timeout(self) -> None:
        received, _ = self.conn.trailing_data
        if not received:
            self._close()  # nothing was asked: an answer might be taken for another's
            return
        self._refuse(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the headers did not come within {self.limits.header_timeout:g} seconds",
        )

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_response_bytes(status, message))
        self._close()

    def _close(self) -> None:
        """Close the connection when all that is written has been read, and in time in any case:
        what is too little to pause writing would be waited for without end."""
        self.transport.close()
        self._set_client_timer(self.limits.send_timeout, self.transport.abort)

    def _set_client_timer(
        self, seconds: float | None, then: Callable[[], None] | None = None
    ) -> None:
        """Let only `then` be waited for, or nothing."""
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None
        if seconds is not None and then is not None:
            self._client_timer = self.loop.call_later(seconds, then)


def protocol_with_limits(limits: ConnectionLimits) -> type[DeadlineProtocol]:
    """The protocol with `limits`: uvicorn makes one for each connection, and knows no more."""
    return type("LimitedProtocol", (DeadlineProtocol,), {"limits": limits})


def _response_bytes(status: HTTPStatus, message: str) -> bytes:
    """A whole answer: what the parser has seen of the request is not fit to answer it with."""
    body = json.dumps(openai_error(Problem(status, message))).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers in place of the application while there are too many connections."""
    problem = Problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "too many connections",
        code="overloaded",
        retry_after=RETRY_SECONDS,
    )
    response = problem_response(scope, problem)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


_RESERVED_FILES: Final = 256
"""Files beside connections: the model's, the store's, the log."""


def connections_within_file_limit(wanted: int) -> int:
    """How many of `wanted` connections the process has room for; raises its limit where it may.

    Where the limit is low, connections get half of it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _raise_soft_limit(soft, hard, wanted + _RESERVED_FILES)
    return (
        wanted if limit is None else max(1, min(wanted, max(limit - _RESERVED_FILES, limit // 2)))
    )


def _raise_soft_limit(soft: int, hard: int, needed: int) -> int | None:
    """The limit as it is now; None for none, or none that matters."""
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if wanted <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # some systems allow less than they say
        return soft
    return wanted

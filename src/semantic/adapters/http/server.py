"""The HTTP server process: one socket, one event loop, connection limits and deadlines, shutdown.

Knows uvicorn, signals, bytes, clocks and open files; no routes.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
"""Up to this many times the connection limit get a 503; beyond it connections are aborted."""


class HttpServer(uvicorn.Server):
    """Shuts down gracefully on the first signal, and exits at once on the second one.

    The latter loses only what was computed since the last save: the store is crash-safe.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings, on_stop: Callable[[], None]) -> None:
        self._settings = settings
        self._protocol = protocol_with_limits(_limits(settings))
        super().__init__(_config(app, settings, self._protocol))
        self._on_stop = on_stop

    def refresh_connection_limits(self) -> None:
        """Recompute the connection limits: loading a model may have changed the limit of open
        files."""
        self._protocol.limits = _limits(self._settings)

    def stop(self) -> None:
        """Shut down gracefully, as after a signal. Thread-safe."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler; runs between two instructions of the main thread."""
        del sig, frame
        if self.should_exit:
            os._exit(KILLED_EXIT_CODE)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGINT, SIGTERM and SIGHUP, which a closed terminal sends; not under nohup."""
        with super().capture_signals():
            in_main = threading.current_thread() is threading.main_thread()
            if not in_main or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests, let running ones end, and save."""
        self._on_stop()
        await super().shutdown(sockets)


def make_server(
    app: FastAPI, settings: ServerSettings, on_stop: Callable[[], None] = lambda: None
) -> HttpServer:
    """Create a server of `app`; run it by `run(sockets=[...])`. Calls `on_stop` on shutdown."""
    # Running streams may finish: uvicorn cancels the rest after `stop_timeout`.
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
    """The configured number of connections, as far as the limit of open files allows."""
    configured = settings.max_connections
    refused = connections_within_file_limit(configured * _REFUSED_FACTOR)
    most = min(configured, max(1, refused // 2))
    if most < configured:
        logger.warning("the limit of open files allows only %d connections", most)
    return ConnectionLimits(settings.header_timeout, settings.send_timeout, most, refused)


def listen(settings: ServerSettings) -> socket.socket:
    """Open a listening socket at the configured address. Raises OperatorError on failure."""
    where = address(settings.host, settings.port)
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, _, _, own = found[0]
        bound = socket.create_server(own[:2], family=family, backlog=_BACKLOG)
        # Connections inherit the protocol, here of no name: asyncio sends at once, without waiting
        # for the acknowledgement of what was sent before, only where the protocol is TCP by name.
        return socket.socket(family, kind, socket.IPPROTO_TCP, fileno=bound.detach())
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OperatorError(
            f"cannot listen on {where}: {reason}; --host and --port choose another address"
        ) from error


def address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


DRAIN_SECONDS: Final = 10.0
"""Seconds to drain the rest of a rejected body: a client that reads the response only after sending
everything must receive it, not a connection reset."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Timeouts in seconds for receiving headers and for sending, and numbers of connections: more
    than `max_connections` get a 503, more than `max_refused` are aborted."""

    header_timeout: float
    send_timeout: float
    max_connections: int
    max_refused: int


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for each phase of a connection in which the client must act.

    uvicorn has none for headers, nor for a client that stops reading. One timer at a time waits for
    the client: for headers, for the rest of a body after the response, or for the end of a closed
    connection. Another one waits for written bytes to be read.
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
        # Aborting also ends the request, as a disconnect.
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
        """Reject malformed HTTP; called while the parser's error is being handled."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(HTTPStatus(hint), msg.rstrip("."))

    def _on_header_timeout(self) -> None:
        received, _ = self.conn.trailing_data
        if not received:
            self._close()  # no request was sent: a response might be matched with a later one
            return
        self._refuse(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the headers did not come within {self.limits.header_timeout:g} seconds",
        )

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Send an error response unless a response has started, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_response_bytes(status, message))
        self._close()

    def _close(self) -> None:
        """Close the connection once everything written has been read, or at the send timeout: an
        amount too small to pause writing would otherwise be waited for forever."""
        self.transport.close()
        self._set_client_timer(self.limits.send_timeout, self.transport.abort)

    def _set_client_timer(
        self, seconds: float | None, then: Callable[[], None] | None = None
    ) -> None:
        """Replace the client timer; None for no timer."""
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None
        if seconds is not None and then is not None:
            self._client_timer = self.loop.call_later(seconds, then)


def protocol_with_limits(limits: ConnectionLimits) -> type[DeadlineProtocol]:
    """A protocol class with `limits`: uvicorn instantiates it per connection without arguments."""
    return type("LimitedProtocol", (DeadlineProtocol,), {"limits": limits})


def _response_bytes(status: HTTPStatus, message: str) -> bytes:
    """A complete response: the parser's state cannot be used to send one."""
    body = json.dumps(openai_error(Problem(status, message))).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application of connections beyond the limit: replies 503."""
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
"""File descriptors reserved for the model, the store and the log."""


def connections_within_file_limit(wanted: int) -> int:
    """How many of `wanted` connections fit the limit of open files; raises the soft limit if it
    can.

    A process without free descriptors can neither accept a connection, not even to refuse it, nor
    read its store. Under a low limit connections get half of it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _raise_soft_limit(soft, hard, wanted + _RESERVED_FILES)
    return (
        wanted if limit is None else max(1, min(wanted, max(limit - _RESERVED_FILES, limit // 2)))
    )


def _raise_soft_limit(soft: int, hard: int, needed: int) -> int | None:
    """The soft limit after raising it as far as possible; None if it does not restrict `needed`."""
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if raised <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):  # some systems allow less than the hard limit
        return soft
    return raised

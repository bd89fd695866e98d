"""The process of the HTTP server: its socket, its event loop and its shutdown."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI

from semantic.domain.errors import OperatorError
from semantic_server.http.activity import SENDING
from semantic_server.http.connections import (
    ConnectionLimits,
    Connections,
    DeadlineProtocol,
    protocol_of,
)
from semantic_server.http.context import ServerContext
from semantic_server.http.errors import logger
from semantic_server.http.settings import ServerSettings

KILLED_EXIT_CODE: Final = 130
"""The exit code after a second signal."""

_BACKLOG: Final = 512

_ITERATIONS_TO_OPEN: Final = 3
"""Iterations of asyncio's loop in which it accepts and opens all waiting connections."""

_OPEN_FACTOR: Final = 4
"""The number of open connections per connection with a request."""


class HttpServer(uvicorn.Server):
    """Shuts down gracefully on the first signal, and exits at once on the second one."""

    def __init__(self, app: FastAPI, settings: ServerSettings, on_stop: Callable[[], None]) -> None:
        context: ServerContext = app.state.context
        self._settings = settings
        self._connections = Connections(_limits(settings))
        super().__init__(_config(app, settings, protocol_of(self._connections)))
        self._on_stop = on_stop
        self._watch = context.watch
        self._ending = context.ending

    def refresh_connection_limits(self) -> None:
        """Recompute the connection limits after the limit on open files has changed."""
        self._connections.limits = _limits(self._settings)

    def stop(self) -> None:
        """Shut down gracefully, as after a signal. Thread-safe."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. Python calls this between two instructions of the main thread."""
        del sig, frame
        if self.should_exit:
            os._exit(KILLED_EXIT_CODE)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGINT, SIGTERM and SIGHUP. Under nohup, SIGHUP stays ignored."""
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
        """Refuse new requests, let running requests finish, and save."""
        self._on_stop()
        self._watch.close()  # an open page never ends by itself
        await self._finish_accepting()
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._settings.stop_timeout, self._ending.begin)
        await super().shutdown(sockets)
        ending.cancel()

    async def _finish_accepting(self) -> None:
        """Accept no more connections. asyncio opens an accepted connection two iterations later,
        and an earlier close would miss the connection."""
        loop = asyncio.get_running_loop()
        for server in self.servers:
            for listening in server.sockets:
                loop.remove_reader(listening)
        for _ in range(_ITERATIONS_TO_OPEN):
            await asyncio.sleep(0)


def make_server(
    app: FastAPI, settings: ServerSettings, on_stop: Callable[[], None] = lambda: None
) -> HttpServer:
    """Create a server of `app`. Run the server with `run(sockets=[...])`."""
    return HttpServer(app, settings, on_stop)


def _config(
    app: FastAPI, settings: ServerSettings, protocol: type[DeadlineProtocol]
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",  # shutdown depends on how this loop accepts
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        headers=[("x-content-type-options", "nosniff")],
        h11_max_incomplete_event_size=settings.max_header_bytes,
        backlog=_BACKLOG,
        timeout_keep_alive=settings.idle_timeout,
        timeout_graceful_shutdown=settings.stop_timeout + SENDING,
    )


def _limits(settings: ServerSettings) -> ConnectionLimits:
    configured = settings.max_connections
    most_open = connections_within_file_limit(configured * _OPEN_FACTOR)
    most = min(configured, max(1, most_open // 2))
    if most < configured:
        logger.warning("the limit on open files allows only %d connections", most)
    return ConnectionLimits(settings.header_timeout, settings.send_timeout, most, most_open)


def listen(settings: ServerSettings) -> socket.socket:
    """Open a listening socket at the configured address. Raises OperatorError on failure."""
    where = address(settings.host, settings.port)
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, _, _, own = found[0]
        bound = socket.create_server(own[:2], family=family, backlog=_BACKLOG)
        # Connections inherit the protocol, here one without a name. asyncio disables Nagle's
        # algorithm only if the protocol has the name TCP.
        return socket.socket(family, kind, socket.IPPROTO_TCP, fileno=bound.detach())
    except (OSError, UnicodeError) as error:
        reason = (error.strerror or "") if isinstance(error, OSError) else str(error)
        reason = reason.partition(" (while")[0]  # Python adds the address again
        raise OperatorError(
            f"cannot listen on {where}: {reason}; choose another address with --host and --port"
        ) from error


def address(host: str, port: int) -> str:
    """Return `host:port`, with brackets for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_RESERVED_FILES: Final = 256
"""File descriptors reserved for the model, the store and the log."""


def connections_within_file_limit(wanted: int) -> int:
    """Return the number of connections that the limit on open files allows, at most `wanted`.
    Raises the soft limit if possible. Under a low limit, connections get half of the files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _raise_soft_limit(soft, hard, wanted + _RESERVED_FILES)
    return (
        wanted if limit is None else max(1, min(wanted, max(limit - _RESERVED_FILES, limit // 2)))
    )


def _raise_soft_limit(soft: int, hard: int, needed: int) -> int | None:
    """Return the new limit on open files, or None if the limit stays."""
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

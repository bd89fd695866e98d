"""The process's HTTP server: one socket, one event loop, and how both end.

Knows uvicorn and signals; not what the application answers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus

from semantic.adapters.http.errors import logger
from semantic.adapters.http.open_files import room_for
from semantic.adapters.http.protocol import ConnectionLimits, GuardedProtocol, guarded_protocol
from semantic.adapters.http.settings import ServerSettings
from semantic.domain.errors import OperatorError

STOPPED_AT_ONCE: Final = 130
"""The exit code after a second signal, as after Ctrl-C."""

_BACKLOG: Final = 512

_REFUSED: Final = 4
"""Beyond this many times the connections allowed there is not even an answer."""


class HttpServer(uvicorn.Server):
    """Ends after the first signal in good order, and at the second one at once.

    Nothing is lost by the latter but what was computed since: the store can be killed.
    """

    def __init__(
        self, app: FastAPI, settings: ServerSettings, stopping: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._protocol = guarded_protocol(_limits(settings))
        super().__init__(_config(app, settings, self._protocol))
        self._stopping = stopping

    def make_room(self) -> None:
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
            os._exit(STOPPED_AT_ONCE)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, let those that run end, and save."""
        self._stopping()
        await super().shutdown(sockets)


def make_server(
    app: FastAPI, settings: ServerSettings, stopping: Callable[[], None] = lambda: None
) -> HttpServer:
    """A server of `app`; `run(sockets=[...])` runs it. `stopping` is told when it ends."""
    # Streams get their time to end: uvicorn cancels what is left after `stop_timeout`.
    AppStatus.enable_automatic_graceful_drain = False
    return HttpServer(app, settings, stopping)


def _config(
    app: FastAPI, settings: ServerSettings, protocol: type[GuardedProtocol]
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
    refused = room_for(wanted * _REFUSED)
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

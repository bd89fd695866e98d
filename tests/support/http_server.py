"""A real HTTP server in a thread, on a free port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Final

import uvicorn.server
from fastapi import FastAPI

from semantic.ports.serving import ServingPort
from semantic_server.http.app import create_app
from semantic_server.http.server import HttpServer, listen, make_server
from semantic_server.http.settings import ServerSettings

_SECONDS = 60.0
_LOOK: Final = 0.01


async def _look_soon(seconds: float) -> None:
    """Sleep as uvicorn does between two looks at whether to stop or to end, but shorter.

    Hundreds of servers of the tests would wait a fifth of a second each for their end.
    """
    await asyncio.sleep(min(seconds, _LOOK))


uvicorn.server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": _look_soon})  # type: ignore[assignment,attr-defined]


@dataclass(frozen=True)
class Reply:
    """A response as received; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.body)
        return found


def error(reply: Reply) -> tuple[int, str]:
    """Status and message."""
    found = reply.json["error"]
    assert isinstance(found, dict)
    return reply.status, found["message"]


@dataclass(frozen=True)
class Address:
    """A server on this machine, and requests to it."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send one request on a new connection; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)
        try:
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """A bare socket, for what no client library would send."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=_SECONDS)


@dataclass(frozen=True)
class RunningServer(Address):
    """One in this process."""

    app: FastAPI
    server: HttpServer


@contextmanager
def running(
    serving: ServingPort | None = None,
    settings: ServerSettings | None = None,
    *,
    app: FastAPI | None = None,
    port: int = 0,
) -> Iterator[RunningServer]:
    """A server for `serving`, or of `app`; ends with the `with` block. `port` 0 is a free one.

    Unless `settings` say how long it waits at its end, that is longer than it is waited for here.
    """
    settings = settings or ServerSettings()
    patient = {} if "stop_timeout" in settings.model_fields_set else {"stop_timeout": 10 * _SECONDS}
    settings = settings.model_copy(update={"port": port, **patient})
    app = app or create_app(serving, settings)
    bound = listen(settings)
    server = make_server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        until(lambda: server.started)
        yield RunningServer(bound.getsockname()[1], app, server)
    finally:
        server.should_exit = True
        thread.join(_SECONDS)
        if thread.is_alive():
            raise TimeoutError("the server did not stop")


def until(condition: Callable[[], bool], seconds: float = _SECONDS) -> None:
    """Wait until `condition` holds. Raises TimeoutError when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.005)

"""A server that stops closes each connection, also one that a browser opens in that moment."""

from __future__ import annotations

import asyncio
import socket

import pytest

from semantic_server.http.app import create_app
from semantic_server.http.server import listen, make_server
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing

pytestmark = pytest.mark.process

SETTINGS = ServerSettings(port=0, stop_timeout=600)
SECONDS = 60.0
"""More than a server takes to stop, and less than it waits for a connection."""


async def stopped(iterations: int) -> tuple[socket.socket, int]:
    """A client that connected so many iterations of the loop before the shutdown began, and the
    connections that the server has left."""
    bound = listen(SETTINGS)
    server = make_server(create_app(FakeServing(), SETTINGS), SETTINGS)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[bound])
    client = socket.create_connection(bound.getsockname(), timeout=SECONDS)
    for _ in range(iterations):
        await asyncio.sleep(0)
    async with asyncio.timeout(SECONDS):
        await server.shutdown([bound])
    return client, len(server.server_state.connections)


@pytest.mark.parametrize("iterations", range(6))
def test_a_connection_is_closed_however_late_it_was_opened(iterations: int) -> None:
    client, left = asyncio.run(stopped(iterations))
    with client:
        try:
            received = client.recv(1)
        except ConnectionResetError:  # it was never accepted
            received = b""
    assert (left, received) == (0, b"")

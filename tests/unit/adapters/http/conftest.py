"""A server of real agents, for tests of their routes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from tests.support.fake_serving import FakeServing
from tests.support.http_server import RunningServer, running
from tests.support.served_agents import AgentsWorld


@pytest.fixture
def served() -> AgentsWorld:
    return AgentsWorld()


@pytest.fixture
def server(served: AgentsWorld) -> Iterator[RunningServer]:
    app = create_app(context=ServerContext(FakeServing(), agents=served.agents))
    with running(app=app) as found:
        yield found

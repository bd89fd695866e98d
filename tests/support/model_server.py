"""A server of several fake models over HTTP, and what loads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from semantic.application.models.model_manager import RunnableServing
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.lifecycle import Lifecycle
from semantic_server.http.settings import ServerSettings
from tests.support.fake_models import FakeLoader, fake_models
from tests.support.http_server import Reply, RunningServer, running, until

NAMES = ("org/qwen", "llama")
KEY, OPERATOR = "key-of-a-tenant", "key-of-an-operator"


@dataclass
class Several:
    """A server of several models, and what loads them."""

    server: RunningServer
    loader: FakeLoader
    loop: asyncio.AbstractEventLoop

    def ask(self, method: str, path: str, body: object = None, key: str | None = None) -> Reply:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.server.ask(method, path, body, headers)

    def state(self, name: str) -> object:
        return self.ask("GET", f"/v1/models/{name}").json["state"]

    def open(self) -> None:
        """Let loads end."""
        self.loop.call_soon_threadsafe(self.loader.open.set)


@contextmanager
def several(
    settings: ServerSettings | None = None,
    *,
    names: Sequence[str] = NAMES,
    opened: bool = True,
    capacity: int = 1,
) -> Iterator[Several]:
    """`capacity` of the models fit together."""
    loader = FakeLoader()
    loops: list[asyncio.AbstractEventLoop] = []

    async def load() -> RunnableServing:
        loops.append(asyncio.get_running_loop())
        if opened:
            loader.open.set()
        return fake_models(loader, *names, capacity=capacity)[1]

    context = ServerContext()
    app = create_app(context=context, lifecycle=Lifecycle(context, load), settings=settings)
    with running(app=app, settings=settings) as server:
        until(lambda: server.ask("GET", "/health").status == 200 and context.serving is not None)
        yield Several(server, loader, loops[0])

"""A server's life: it answers probes at once, loads its model beside that, and saves at the end.

Knows that a model takes time to load and to leave; not how either is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Protocol

from anyio import to_thread
from fastapi import FastAPI

from semantic.adapters.http.context import ServerContext
from semantic.application.engine.engine_state import Figures
from semantic.domain.errors import SemanticError
from semantic.ports.agents import AgentsPort
from semantic.ports.serving import ServingPort


class RunnableServing(ServingPort, Protocol):
    """A served model that takes requests, until it is closed."""

    @property
    def agents(self) -> AgentsPort:
        """The agents that it has."""
        ...

    def figures(self) -> Figures:
        """Of this moment. Any thread may call it."""
        ...

    async def close(self) -> None:
        """Cancel what runs, save every agent, end all threads. Raises SemanticError."""
        ...


Load = Callable[[], Coroutine[None, None, RunnableServing]]
"""Loads a model without holding up the event loop. Is cancelled when the server stops first."""


class Lifecycle:
    """Brings a served model up in the background and takes it down.

    `ready` is told when requests can come. `failure` is why it could not be brought up, or not
    be taken down in good order.
    """

    def __init__(
        self,
        context: ServerContext,
        load: Load,
        ready: Callable[[ServingPort], None] = lambda _: None,
    ) -> None:
        self._context = context
        self._load = load
        self._ready = ready
        self._failed: Callable[[], None] = lambda: None
        self._serving: RunnableServing | None = None
        self.failure: BaseException | None = None

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the model cannot be brought up."""
        self._failed = callback

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """From the first probe to the last saved agent."""
        task = asyncio.create_task(self._load_model())
        task.add_done_callback(self._record_failure)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            await self._close()

    async def _load_model(self) -> None:
        serving = await self._load()
        self._serving = serving
        await to_thread.run_sync(import_sdks)
        self._context.figures = serving.figures
        self._context.agents = serving.agents
        self._context.serving = serving
        self._ready(serving)

    def _record_failure(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        self.failure = task.exception()
        if self.failure is not None:
            self._failed()

    async def _close(self) -> None:
        self._context.serving = self._context.agents = None
        if self._serving is None:
            return
        try:
            await self._serving.close()
        except SemanticError as error:
            self.failure = error  # the server ends as it should; its caller must know


def import_sdks() -> None:
    """Takes a second or two; any thread may do it."""
    from semantic.adapters.http.anthropic import sdk_types
    from semantic.adapters.http.openai import sdk_types as openai_types

    sdk_types.load()
    openai_types.chat_adapter()
    openai_types.completion_adapter()
    openai_types.response_adapter()

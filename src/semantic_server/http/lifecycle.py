"""Loads the model in the background while probes are answered, and saves on shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from anyio import to_thread
from fastapi import FastAPI

from semantic.application.models.model_manager import RunnableServing
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import InvalidRequestError, SemanticError
from semantic.ports.serving import Figures
from semantic_server.http.anthropic.validators import validators
from semantic_server.http.context import ServerContext
from semantic_server.http.openai.conversation import messages_of, tools_of
from semantic_server.http.openai.validators import (
    chat_adapter,
    completion_adapter,
    message_adapters,
    response_adapter,
)
from semantic_server.http.request_body import parse_object

Load = Callable[[], Coroutine[None, None, RunnableServing]]
"""Loads a model without blocking the event loop."""

_LOOK_SECONDS = 1.0
"""Seconds between two checks of the process's memory."""


class Lifecycle:
    """Loads a model in the background, and closes it on shutdown. `failure` is the error that
    prevented the loading or closing."""

    def __init__(
        self,
        context: ServerContext,
        load: Load,
        ready: Callable[[RunnableServing], None] = lambda _: None,
    ) -> None:
        self._context = context
        self._load = load
        self._ready = ready
        self._failed: Callable[[], None] = lambda: None
        self._serving: RunnableServing | None = None
        self.failure: BaseException | None = None
        self._is_over = asyncio.Event()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` if the model fails to load."""
        self._failed = callback

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Run the ASGI lifespan. It ends once the server has saved every agent."""
        task = asyncio.create_task(self._load_model())
        task.add_done_callback(self._record_failure)
        looking = asyncio.create_task(self._look_at_memory())
        try:
            yield
        finally:
            task.cancel()
            self._is_over.set()  # a check in progress must end before the process does
            await asyncio.wait((task, looking))
            await self._close()

    async def _load_model(self) -> None:
        building = asyncio.ensure_future(to_thread.run_sync(build_validators))
        serving = await self._load()
        self._serving = serving
        await building
        self._context.figures = partial(_figures, serving)
        self._context.memory = serving.memory
        self._context.agents = serving.agents
        self._context.models = serving.models
        self._context.embedding = serving.embedding
        self._context.serving = serving
        self._ready(serving)

    async def _look_at_memory(self) -> None:
        """Measure memory even while the engine is idle, because other programs may need it."""
        while not self._is_over.is_set():
            if self._context.memory is not None:
                await self._context.memory.look_at_memory()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._is_over.wait()

    def _record_failure(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        self.failure = task.exception()
        if self.failure is not None:
            self._failed()

    async def _close(self) -> None:
        context = self._context
        context.serving = context.agents = context.models = None
        context.embedding = context.memory = None
        if self._serving is None:
            return
        try:
            await self._serving.close()
        except SemanticError as error:
            self.failure = error  # the server still exits in order; the caller reports the error


def _figures(serving: RunnableServing) -> Figures:
    memory = None if serving.memory is None else serving.memory.memory
    return replace(serving.figures(), memory=memory)


def read_public_prefix(path: Path) -> Chat:
    """Read the start of a conversation whose cache all tenants share. A .json file has the field
    `messages`, and may have `tools`. Any other file is a system message. Raises InvalidRequestError
    for an unusable file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"public_prefix: {path}: {error.strerror}") from error
    try:
        if path.suffix != ".json":
            return Chat((Message("system", data.decode()),))
        fields = parse_object(data)
        return Chat(messages_of(fields.get("messages")), tools_of(fields.get("tools", [])))
    except (InvalidRequestError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"public_prefix: {path}: {error}") from error


def build_validators() -> None:
    """Build the validators of requests before the first request. Takes 0.1 seconds. Thread-safe."""
    validators()
    chat_adapter()
    completion_adapter()
    response_adapter()
    for adapter in message_adapters.values():
        adapter()

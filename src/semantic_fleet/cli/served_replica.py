"""The server of a replica. It is the application of `semantic serve` in a Ray process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from semantic import __version__
from semantic.composition.framework import be_program
from semantic.composition.process_stores import open_responses
from semantic.domain.errors import BackendError, StoreError
from semantic_fleet.replicas.autoscaling import ROWS, RUNNING, WAITING
from semantic_server.cli.serve import engine_settings, load_model, notify_store_unavailable

if TYPE_CHECKING:
    from fastapi import FastAPI

    from semantic.application.models.model_manager import RunnableServing
    from semantic_fleet.replicas.fleet_port import PassedRequest, Piece
    from semantic_server.http.context import ServerContext
    from semantic_server.http.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class BuildServedReplica:
    """Implements `BuildReplica` with the application of `semantic serve`."""

    settings: ServerSettings

    @asynccontextmanager
    async def __call__(self, folder: str, sharing: int) -> AsyncIterator[ServedReplica]:
        """See `BuildReplica`. Raises the same errors as `load_model`."""
        from semantic_server.http.app import create_app
        from semantic_server.http.context import ServerContext
        from semantic_server.http.errors import logger
        from semantic_server.http.lifecycle import Lifecycle
        from semantic_server.http.logs import configure_logs

        be_program()
        settings = self.settings
        configure_logs(settings.log_format, settings.log_level)
        if not settings.no_store:
            settings = settings.model_copy(update={"store": Path(folder)})
        responses = open_responses(engine_settings(settings), logger.warning)

        def store_unavailable(error: StoreError) -> None:
            responses.disable_disk()
            notify_store_unavailable(error)

        async def load() -> RunnableServing:
            return await load_model(settings, store_unavailable, sharing)

        over, context = asyncio.Event(), ServerContext(version=__version__)
        lifecycle = Lifecycle(context, load, lambda _: over.set())
        lifecycle.on_failure(over.set)
        app = create_app(
            settings=settings, lifecycle=lifecycle, context=context, responses=responses
        )
        try:
            async with lifecycle.lifespan(app):
                await over.wait()
                if lifecycle.failure is not None:
                    raise lifecycle.failure
                yield ServedReplica(app, context)
                context.watch.close()
        finally:
            await asyncio.to_thread(responses.close)
        if lifecycle.failure is not None:
            raise lifecycle.failure


class ServedReplica:
    """Implements `ReplicaPort` with a server's application."""

    def __init__(self, app: FastAPI, context: ServerContext) -> None:
        self._app = app
        self._context = context

    def answer(self, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        from semantic_fleet.replicas.passed_requests import answer

        return answer(self._app, request)

    def load(self) -> Mapping[str, float]:
        figures = self._context.figures
        engine = None if figures is None else figures().engine
        running, waiting = (0, 0) if engine is None else (engine.running, engine.waiting)
        inbox = 0 if engine is None else engine.inbox
        rows = self._context.settings.max_batch
        return {RUNNING: float(running), WAITING: float(waiting + inbox), ROWS: float(rows)}

    def end(self) -> None:
        self._context.ending.begin()

    def check(self) -> None:
        figures = self._context.figures
        if figures is None or figures().engine.state.is_over:
            raise BackendError("the engine has stopped")
        if self._context.ending.has_begun:
            raise BackendError("the replica is ending its answers")

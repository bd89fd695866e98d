"""A real server over a store folder: started again, it finds what the folder holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from semantic.composition.engine_settings import Settings
from semantic.domain.value_objects import ExactBatch
from semantic.serve import ServeSettings, load_serving
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.settings import ServerSettings
from tests.support.http_server import RunningServer, running
from tests.support.model_folder import small_model


@contextmanager
def served(
    folder: Path,
    model: Path | None = None,
    settings: ServerSettings | None = None,
    events: tuple[str, str] | None = None,
    exact_batch: ExactBatch = "auto",
) -> Iterator[RunningServer]:
    """A server of `model`, or of a small one, with what is in the store in `folder`. `events` as in
    `ServeSettings`."""
    engine = Settings(
        model=str(model or small_model(folder / "small")),
        pool_blocks=400,
        use_disk=True,
        store=folder / "store",
        disk_bytes=1 << 28,
        exact_batch=exact_batch,
    )
    serving = asyncio.run(load_serving(ServeSettings(engine, events=events)))
    try:
        context = ServerContext(serving, agents=serving.agents)
        app = create_app(settings=settings or ServerSettings(), context=context)
        with running(settings=settings, app=app) as server:
            yield server
    finally:
        asyncio.run(serving.close())

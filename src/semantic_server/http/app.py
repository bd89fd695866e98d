"""The ASGI application: the middleware stack in request order, and all routes.

Knows which parts there are; passes each one only what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from fastapi.telemetry import TelemetryConfig
from starlette.middleware import Middleware

from semantic.application.chat.memory_responses import MemoryResponses
from semantic.ports.serving import ServingPort
from semantic.ports.store import ResponsesPort
from semantic_server.http import agents, anthropic, health, models, ollama, openai, requests
from semantic_server.http.context import ServerContext
from semantic_server.http.errors import add_error_handlers
from semantic_server.http.lifecycle import Lifecycle
from semantic_server.http.logs import ProgressLog, RequestLogMiddleware
from semantic_server.http.metrics import Metrics, Observer
from semantic_server.http.middleware import (
    OPEN_PATHS,
    ApiKeys,
    AuthMiddleware,
    HostMiddleware,
    RequestLimitsMiddleware,
    ShutdownMiddleware,
)
from semantic_server.http.openai import embeddings
from semantic_server.http.openai import responses as openai_responses
from semantic_server.http.openapi import (
    AnthropicError,
    OllamaError,
    OpenAIError,
    describe,
    documented,
    page,
)
from semantic_server.http.page import assets, overview, process_memory
from semantic_server.http.request_body import LargeBodies
from semantic_server.http.settings import ServerSettings

NO_TELEMETRY: Final[TelemetryConfig] = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
"""FastAPI's own telemetry may record request contents and export them; it stays off."""

RESPONSE_BYTES: Final = 64 << 20
"""Byte limit of stored responses where they are held in memory."""
_LARGE_BODIES: Final = 8
"""Requests with the largest body whose bodies may be in memory at the same time."""


def create_app(
    serving: ServingPort | None = None,
    settings: ServerSettings | None = None,
    *,
    lifecycle: Lifecycle | None = None,
    context: ServerContext | None = None,
    progress: Observer | None = None,
    responses: ResponsesPort | None = None,
) -> FastAPI:
    """Create the application that serves `serving`, or the model that `lifecycle` loads.

    `context` is the one that `lifecycle` fills. `progress` displays prefills; by default they are
    logged. Responses are stored in `responses`, by default in memory.
    """
    settings = settings or ServerSettings()
    context = context or ServerContext(serving)
    context.settings = settings
    name = (*settings.served_model_name, *settings.model)[0]
    metrics = Metrics(name, lambda: context.figures() if context.figures else None)
    context.observers += [metrics, progress or ProgressLog()]
    app = FastAPI(
        title="semantic",
        version=context.version,
        middleware=_middleware(settings, name),
        lifespan=lifecycle.lifespan if lifecycle is not None else None,
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        telemetry=NO_TELEMETRY,
    )
    app.state.context = context
    app.state.metrics = metrics
    app.state.bodies = large_bodies(settings)
    app.state.responses = responses or MemoryResponses(RESPONSE_BYTES)
    add_error_handlers(app)
    _add_routes(app)
    describe(app, version=context.version, with_keys=bool(settings.api_keys))
    return app


def _middleware(settings: ServerSettings, model: str) -> Sequence[Middleware]:
    """Outermost first. The handler of unexpected errors wraps the whole stack: see `errors`."""
    return (Middleware(RequestLogMiddleware, model=model), *guarding_middleware(settings))


def guarding_middleware(settings: ServerSettings) -> Sequence[Middleware]:
    """What keeps requests out: sizes, deadlines, hosts and keys, outermost first."""
    keys = ApiKeys(key.get_secret_value() for key in settings.api_keys)
    operators = ApiKeys(key.get_secret_value() for key in settings.operator_keys)
    return (
        Middleware(ShutdownMiddleware),
        Middleware(RequestLimitsMiddleware, settings=settings),
        Middleware(
            HostMiddleware,
            bound=settings.host,
            names=settings.allowed_hosts,
            origins=settings.allowed_origins,
        ),
        Middleware(
            AuthMiddleware,
            keys=keys,
            operators=operators,
            max_requests=settings.max_connections,
            open_paths=OPEN_PATHS | assets.FILES.keys(),
        ),
    )


def large_bodies(settings: ServerSettings) -> LargeBodies:
    """The bound of the large bodies that are in memory at once."""
    return LargeBodies(_LARGE_BODIES * settings.max_body_bytes, settings.body_timeout)


def _add_routes(app: FastAPI) -> None:
    for module in (
        *(health, models, openai, openai_responses, embeddings, agents, requests),
        *(overview, process_memory),
    ):
        app.include_router(module.router, responses=documented(OpenAIError))
    app.include_router(assets.router)
    app.include_router(anthropic.router, responses=documented(AnthropicError))
    for router in ollama.ROUTERS:
        app.include_router(router, responses=documented(OllamaError))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return page(app)

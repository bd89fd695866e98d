"""The ASGI application: its middleware, its routes and its OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from http import HTTPStatus
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated, Final, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.telemetry import TelemetryConfig
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.middleware import Middleware

from semantic.application.chat.memory_responses import MemoryResponses
from semantic.ports.serving import ServingPort
from semantic.ports.store import ResponsesPort
from semantic_server.http import (
    agents,
    anthropic,
    checkpoints,
    health,
    models,
    ollama,
    openai,
    overview,
)
from semantic_server.http.answer_records import Observer
from semantic_server.http.context import ServerContext
from semantic_server.http.errors import add_error_handlers
from semantic_server.http.identity import OPEN_PATHS, ApiKeys, AuthMiddleware
from semantic_server.http.lifecycle import Lifecycle
from semantic_server.http.logs import ProgressLog, RequestLogMiddleware
from semantic_server.http.metrics import Metrics
from semantic_server.http.middleware import (
    HostMiddleware,
    RequestLimitsMiddleware,
    ShutdownMiddleware,
)
from semantic_server.http.request_body import LargeBodies
from semantic_server.http.settings import ServerSettings

files_router: Final = APIRouter(include_in_schema=False)

_HTML, _STYLE, _IMAGE = "text/html", "text/css", "image/svg+xml"
_MODULE: Final = "text/javascript"

MODULES: Final = (
    "agent.js",
    "agents.js",
    "budgets.js",
    "chat.js",
    "client.js",
    "confirm.js",
    "connect.js",
    "dom.js",
    "main.js",
    "markdown.js",
    "models.js",
    "requests.js",
    "savings.js",
    "state.js",
    "tiles.js",
    "timeline.js",
)
FILES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "/": ("index.html", _HTML),
        "/page/style.css": ("style.css", _STYLE),
        "/page/icon.svg": ("icon.svg", _IMAGE),
        **{f"/page/{name}": (name, _MODULE) for name in MODULES},
    }
)
"""The name and media type of the web page's file for each path."""

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "content-security-policy": _POLICY,
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True)
class _Asset:
    body: bytes
    media_type: str
    etag: str


@cache
def _asset(path: str) -> _Asset:
    name, media_type = FILES[path]
    body = files("semantic_server.http").joinpath("page", "static", name).read_bytes()
    return _Asset(body, media_type, f'"{sha256(body).hexdigest()[:32]}"')


async def serve(request: Request) -> Response:
    """Return a file of the web page, or 304 if the client has the current version."""
    asset = _asset(request.scope["path"])
    headers = {**HEADERS, "etag": asset.etag}
    known = request.headers.get("if-none-match", "")
    if asset.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)


for _path in FILES:
    files_router.add_api_route(_path, serve, methods=["GET", "HEAD"])


class OpenAIErrorFacts(BaseModel):
    """An error; `param` is the invalid field, if any."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """The error body of OpenAI's API."""

    error: OpenAIErrorFacts


class AnthropicErrorFacts(BaseModel):
    """An error."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The error body of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorFacts
    request_id: Annotated[str | None, Field(default=None)]


class OllamaError(BaseModel):
    """The error body of Ollama's API."""

    error: str


STATUSES: Final[Mapping[int, str]] = {
    400: "A field is invalid; the message names it and the expected value.",
    401: "No valid API key.",
    403: "Forbidden for this key or page, or above the tenant's limit on pinned agents.",
    404: "No agent, model, response or route of that name.",
    405: "The path does not support this method.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    421: "The server does not allow the host in the Host header.",
    429: "The tenant has used up its share; see Retry-After.",
    431: "Too many headers, or too large ones.",
    500: "A bug; the server's log has the details.",
    503: "The queue is full, or the model is loading or failed to load; see Retry-After.",
}

_REFERENCE: Final = "#/components/schemas/{model}"


def documented(model: type[BaseModel]) -> dict[int | str, dict[str, object]]:
    """Return every status that a route may return, with `model` as the response body. `model` is a
    name, because FastAPI builds some 600 serializers for a class."""
    body = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
    return {status: {"content": body, "description": text} for status, text in STATUSES.items()}


def describe(app: FastAPI, *, version: str, with_keys: bool) -> None:
    """Install the OpenAPI schema of `app`. `with_keys` adds API keys to the schema."""

    def openapi() -> dict[str, object]:
        if not app.openapi_schema:
            schema = get_openapi(
                title="semantic",
                version=version,
                description="Agents that share one local model.",
                routes=app.routes,
            )
            _drop_unused_status(schema["paths"])
            schema["components"]["schemas"] |= _errors()
            if with_keys:
                schema["components"]["securitySchemes"] = _KEYS
                schema["security"] = [{name: []} for name in _KEYS]
                for path in OPEN_PATHS & schema["paths"].keys():
                    for operation in schema["paths"][path].values():
                        operation["security"] = []
            app.openapi_schema = schema
        return app.openapi_schema

    app.__dict__["openapi"] = openapi  # the documented way to extend the schema


def page(app: FastAPI) -> HTMLResponse:
    """Return the routes of `app` as an HTML page."""
    rows = "\n".join(_row(*operation) for operation in _operations(app.openapi()))
    policy = {"content-security-policy": _ROUTES_POLICY}
    return HTMLResponse(_PAGE.format(version=escape(app.version), rows=rows), headers=policy)


_ROUTES_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>semantic: the API</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
td {{ padding: .4rem 1rem .4rem 0; vertical-align: top }} code {{ white-space: nowrap }}
</style></head><body><h1>semantic {version}</h1>
<p>The whole description, with every field and status, is <a href="/openapi.json">openapi.json</a>.
</p><table>
{rows}
</table></body></html>
"""


def _operations(schema: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    paths = schema.get("paths")
    for path, methods in paths.items() if isinstance(paths, dict) else ():
        for method, operation in methods.items():
            yield method.upper(), path, operation.get("description", operation.get("summary", ""))


def _row(method: str, path: str, description: str) -> str:
    cells = escape(method), f"<code>{escape(path)}</code>", escape(description)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _drop_unused_status(paths: Mapping[str, Mapping[str, dict[str, dict[str, object]]]]) -> None:
    """Remove status 422, which FastAPI adds to routes with parameters. This server answers 400."""
    for methods in paths.values():
        for operation in methods.values():
            operation["responses"].pop("422", None)


def _errors() -> dict[str, object]:
    bodies = (OpenAIError, AnthropicError, OllamaError)
    _, found = models_json_schema([(one, "validation") for one in bodies], ref_template=_REFERENCE)
    schemas: dict[str, object] = jsonable_encoder(found["$defs"], exclude_none=True)
    return schemas


NO_TELEMETRY: Final[TelemetryConfig] = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
"""Turns off FastAPI's telemetry, which may export the content of requests."""

RESPONSE_BYTES: Final = 64 << 20
"""The maximum size of all stored responses in memory, in bytes."""
_LARGE_BODIES: Final = 8
"""The maximum number of request bodies of maximum size in memory at once."""


def create_app(
    serving: ServingPort | None = None,
    settings: ServerSettings | None = None,
    *,
    lifecycle: Lifecycle | None = None,
    context: ServerContext | None = None,
    progress: Observer | None = None,
    responses: ResponsesPort | None = None,
) -> FastAPI:
    """Create the application for `serving`, or for the model that `lifecycle` loads. `progress`
    shows prefills. `responses` stores the replies of the responses API."""
    settings = settings or ServerSettings()
    context = context or ServerContext(serving)
    context.settings = settings
    name = (*settings.served_model_name, *settings.model)[0]
    metrics = Metrics(name, lambda: context.figures() if context.figures else None)
    context.observers += [metrics, progress or ProgressLog()]
    app = FastAPI(
        title="semantic",
        version=context.version,
        middleware=(
            Middleware(RequestLogMiddleware, model=name, on_refusal=context.watch.recorder.refuse),
            *guarding_middleware(settings),
        ),
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


def guarding_middleware(settings: ServerSettings) -> Sequence[Middleware]:
    """Return the middleware that checks requests, outermost first."""
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
            open_paths=OPEN_PATHS | FILES.keys(),
        ),
    )


def large_bodies(settings: ServerSettings) -> LargeBodies:
    """Return the limiter of memory for large request bodies."""
    return LargeBodies(_LARGE_BODIES * settings.max_body_bytes, settings.body_timeout)


def _add_routes(app: FastAPI) -> None:
    for one in (
        *(health.router, models.router, *openai.ROUTERS, checkpoints.router, agents.router),
        *(overview.requests, overview.router, health.memory),
    ):
        app.include_router(one, responses=documented(OpenAIError))
    app.include_router(files_router)
    app.include_router(anthropic.router, responses=documented(AnthropicError))
    for one in ollama.ROUTERS:
        app.include_router(one, responses=documented(OllamaError))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return page(app)

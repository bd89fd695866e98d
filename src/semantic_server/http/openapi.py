"""The OpenAPI description with every possible status, and an HTML page of the routes.

The page is a single document without scripts or external resources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Annotated, Final, Literal

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from semantic_server.http.middleware import OPEN_PATHS


class OpenAIErrorFacts(BaseModel):
    """What went wrong; `param` is the invalid field, if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """The error body of OpenAI's API."""

    error: OpenAIErrorFacts


class AnthropicErrorFacts(BaseModel):
    """What went wrong."""

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
    400: "A field is wrong; the message names it and what was expected.",
    401: "No valid API key.",
    403: "Not with this key or from this page, or more would be pinned than a tenant may.",
    404: "No agent, model, response or route of that name.",
    405: "The path does not support this method.",
    408: "The request was not received in time.",
    413: "The body is too large.",
    421: "The Host header names a host that is not allowed.",
    429: "The tenant has its part of what all share; see Retry-After.",
    431: "Too many headers, or too large ones.",
    500: "A bug; the server's log has the details.",
    503: "The queue is full, or the model is being loaded or cannot be; see Retry-After.",
}

_REFERENCE: Final = "#/components/schemas/{model}"


def documented(model: type[BaseModel]) -> dict[int | str, dict[str, object]]:
    """Every status that any route may return, with a body of `model`, by name: of a class FastAPI
    would build some 600 serializers while the first request waits."""
    body = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
    return {status: {"content": body, "description": text} for status, text in STATUSES.items()}


def describe(app: FastAPI, *, version: str, with_keys: bool) -> None:
    """Install the OpenAPI schema of `app`; `with_keys` adds its authentication schemes."""

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
    """The routes of `app` as an HTML page."""
    rows = "\n".join(_row(*operation) for operation in _operations(app.openapi()))
    policy = {"content-security-policy": _POLICY}
    return HTMLResponse(_PAGE.format(version=escape(app.version), rows=rows), headers=policy)


_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
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
    """(method, path, description) of every route."""
    paths = schema.get("paths")
    for path, methods in paths.items() if isinstance(paths, dict) else ():
        for method, operation in methods.items():
            yield method.upper(), path, operation.get("description", operation.get("summary", ""))


def _row(method: str, path: str, description: str) -> str:
    cells = escape(method), f"<code>{escape(path)}</code>", escape(description)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _drop_unused_status(paths: Mapping[str, Mapping[str, dict[str, dict[str, object]]]]) -> None:
    """Drop 422, which FastAPI adds to routes with parameters; an invalid one is a 400 here."""
    for methods in paths.values():
        for operation in methods.values():
            operation["responses"].pop("422", None)


def _errors() -> dict[str, object]:
    """The schemas of the bodies of errors, as FastAPI writes them."""
    bodies = (OpenAIError, AnthropicError, OllamaError)
    _, found = models_json_schema([(one, "validation") for one in bodies], ref_template=_REFERENCE)
    schemas: dict[str, object] = jsonable_encoder(found["$defs"], exclude_none=True)
    return schemas

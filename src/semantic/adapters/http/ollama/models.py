"""/api/tags, /api/show, /api/ps, /api/version and /api/pull: the served model as Ollama's clients
read it.

Each name of the model is listed with a tag, as Ollama's are. Knows Ollama's shapes; what is not
known of a model is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from semantic.adapters.http.errors import WireError
from semantic.adapters.http.models import (
    AnyModel,
    context_length,
    is_loaded,
    listed_models,
    model_called,
)
from semantic.adapters.http.ollama.fields import MODEL_FIELDS, PULL_FIELDS
from semantic.adapters.http.ollama.options import read_flag
from semantic.adapters.http.ollama.request import LATEST, untagged
from semantic.adapters.http.openai.fields import Json, warnings
from semantic.adapters.http.request_body import read_json
from semantic.adapters.http.request_fields.table import Field, fields_of
from semantic.adapters.http.streaming import NDJSON, json_line
from semantic.domain.errors import ModelNotFoundError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.models import ModelStatus
from semantic.ports.serving import ServedModel

router: Final = APIRouter(tags=["Ollama"])

API_VERSION: Final = "0.12.11"
"""The version of Ollama whose interface this is: clients compare it before they use a field."""

_NEVER: Final = "9999-12-31T23:59:59Z"
"""When a model is unloaded that the server keeps."""

_PARAMETERS: Final = ("temperature", "top_p", "top_k", "min_p")
_UNITS: Final = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def described(reply: str, *, streams: bool = False) -> dict[str, object]:
    """The OpenAPI description of a route whose body names a model."""
    schema = {
        "type": "object",
        "description": "As Ollama documents it.",
        "required": ["model"],
        "properties": {"model": {"type": "string"}},
    }
    content = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content[NDJSON] = {"schema": {"type": "string"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": reply, "content": content}},
    }


@router.get("/api/version")
async def version() -> dict[str, str]:
    """The version of Ollama whose interface this is."""
    return {"version": API_VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, list[dict[str, object]]]:
    """The names that requests may use, as Ollama lists its models."""
    rows = listed_models(request)
    return {"models": [_listed(name, served) for served, _ in rows for name in served.names]}


@router.get("/api/ps")
async def ps(request: Request) -> dict[str, list[dict[str, object]]]:
    """The loaded models, as Ollama lists those that run."""
    rows = listed_models(request)
    return {"models": [_running(one, status) for one, status in rows if is_loaded(status)]}


def _running(served: AnyModel, status: ModelStatus | None) -> Json:
    found = _listed(served.id, served)
    seconds = None if status is None else status.expires_in
    details = served.details
    memory = 0 if details is None else details.memory_bytes
    found |= {
        "size": memory,
        "size_vram": memory if details is not None and details.on_gpu else 0,
        "context_length": context_length(served),
        "expires_at": _NEVER if seconds is None else _time(time.time() + seconds),
    }
    del found["modified_at"]
    return found


@router.post("/api/show", openapi_extra=described("What is known of the model."))
async def show(request: Request) -> Response:
    """What is known of a model, as Ollama shows it."""
    body = await read_json(request)
    served = _accepting(_name(body, MODEL_FIELDS), request)
    details = served.details
    parameters = _parameters(served.sampling) if isinstance(served, ServedModel) else ()
    found: Json = {
        "modelfile": f"FROM {served.id}\n",
        "parameters": "\n".join(parameters),
        "template": "" if details is None else details.template,
        "details": _details(served),
        "model_info": dict(_model_info(served)),
        "capabilities": list(_capabilities(served)),
        "modified_at": _time(served.created if details is None else details.modified),
    }
    return JSONResponse(found)


@router.post("/api/pull", openapi_extra=described("That the model is there.", streams=True))
async def pull(request: Request) -> Response:
    """That a served model is there. Nothing is fetched: that is `semantic models pull`."""
    body = await read_json(request)
    name = _name(body, PULL_FIELDS)
    stream = read_flag(body, "stream", default=True)
    try:
        _accepting(name, request)
    except ModelNotFoundError as error:
        raise WireError(
            HTTPStatus.FORBIDDEN,
            f"{error}; it fetches none: run `semantic models pull` and start it with --model",
            param="model",
        ) from error
    done = {"status": "success"}
    return Response(json_line(done), media_type=NDJSON) if stream else JSONResponse(done)


def _name(body: Mapping[str, object], table: Mapping[str, Field]) -> object:
    """The model that a body names, which older clients do in `name`."""
    known = fields_of(body, table, {}, warnings)
    return known.get("model") or known.get("name")


def _accepting(name: object, request: Request) -> AnyModel:
    """The model of that name, with or without a tag. Raises FieldError and ModelNotFoundError."""
    return model_called(request, untagged(name))[0]


def _listed(name: str, served: AnyModel) -> Json:
    tagged = name if ":" in name else name + LATEST
    details = served.details
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _time(served.created if details is None else details.modified),
        "size": 0 if details is None else details.file_bytes,
        "digest": "" if details is None else details.digest,
        "details": _details(served),
    }


def _details(served: AnyModel) -> Json:
    details = served.details
    family = "" if details is None else details.architecture
    return {
        "parent_model": (served.parent or "") if isinstance(served, ServedModel) else "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if details is None else in_short(details.parameters),
        "quantization_level": "" if details is None else details.stored_as,
    }


def _model_info(served: AnyModel) -> Iterator[tuple[str, object]]:
    """Ollama's facts, under the names that clients look for; the context is what is served."""
    details = served.details
    if details is None:  # of several models one that was not loaded yet
        return
    arch = details.architecture
    yield "general.architecture", arch
    yield "general.basename", served.id
    yield "general.parameter_count", details.parameters
    yield f"{arch}.context_length", context_length(served)
    if details.width is not None:
        yield f"{arch}.embedding_length", details.width
    if details.layers is not None:
        yield f"{arch}.block_count", details.layers
    if isinstance(served, ServedModel):
        yield f"{arch}.vocab_size", served.vocab_size


def _capabilities(served: AnyModel) -> Iterator[str]:
    if not isinstance(served, ServedModel):
        yield "embedding"
        return
    details = served.details
    yield "completion"
    if details is None or details.template:
        yield "tools"
    if details is not None and details.thinks:
        yield "thinking"


def _parameters(sampling: SamplingParams) -> Iterator[str]:
    for name in _PARAMETERS:
        yield f"{name:<30} {getattr(sampling, name)}"


def in_short(count: int) -> str:
    """A number of parameters in three digits: 3.7M, 8.0B, 137M."""
    for unit, letter in _UNITS:
        if count >= unit:
            value = count / unit
            return f"{value:.0f}{letter}" if value >= 100 else f"{value:.1f}{letter}"  # noqa: PLR2004
    return str(count)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

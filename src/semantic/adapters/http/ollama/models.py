"""/api/tags, /api/show, /api/ps, /api/version and /api/pull: the served model as Ollama's clients
read it.

Each name of the model is listed with a tag, as Ollama's are. Knows Ollama's shapes; what is not
known of a model is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from semantic.adapters.http.context import serving_of
from semantic.adapters.http.errors import WireError
from semantic.adapters.http.ollama.fields import MODEL_FIELDS, PULL_FIELDS
from semantic.adapters.http.ollama.options import read_flag
from semantic.adapters.http.ollama.request import LATEST, check_name
from semantic.adapters.http.openai.fields import Json, warnings
from semantic.adapters.http.request_body import read_json
from semantic.adapters.http.request_fields.table import Field, fields_of
from semantic.adapters.http.streaming import NDJSON, json_line
from semantic.domain.errors import ModelNotFoundError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import ModelDetails, ServedModel

router: Final = APIRouter(tags=["Ollama"])

API_VERSION: Final = "0.12.11"
"""The version of Ollama whose interface this is: clients compare it before they use a field."""

_NEVER: Final = "9999-12-31T23:59:59Z"
"""When a model is unloaded that the server keeps."""

_PARAMETERS: Final = ("temperature", "top_p", "top_k", "min_p")
_UNITS: Final = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def _described(reply: str, *, streams: bool = False) -> dict[str, object]:
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
    served = serving_of(request).model
    return {"models": [_listed(name, served) for name in served.names]}


@router.get("/api/ps")
async def ps(request: Request) -> dict[str, list[dict[str, object]]]:
    """The loaded model, as Ollama lists those that run."""
    served = serving_of(request).model
    found = _listed(served.id, served)
    details = served.details
    memory = 0 if details is None else details.memory_bytes
    found |= {
        "size": memory,
        "size_vram": memory if details is not None and details.on_gpu else 0,
        "context_length": served.context_tokens,
        "expires_at": _NEVER,
    }
    del found["modified_at"]
    return {"models": [found]}


@router.post("/api/show", openapi_extra=_described("What is known of the model."))
async def show(request: Request) -> Response:
    """What is known of a model, as Ollama shows it."""
    body = await read_json(request)
    served = serving_of(request).model
    name = _name(body, MODEL_FIELDS)
    check_name(name, served)
    details = served.details
    found: Json = {
        "modelfile": f"FROM {served.id}\n",
        "parameters": "\n".join(_parameters(served.sampling)),
        "template": "" if details is None else details.template,
        "details": _details(details),
        "model_info": dict(_model_info(served)),
        "capabilities": list(_capabilities(details)),
        "modified_at": _time(served.created if details is None else details.modified),
    }
    return JSONResponse(found)


@router.post("/api/pull", openapi_extra=_described("That the model is there.", streams=True))
async def pull(request: Request) -> Response:
    """That a served model is there. Nothing is fetched: that is `semantic models pull`."""
    body = await read_json(request)
    name = _name(body, PULL_FIELDS)
    stream = read_flag(body, "stream", default=True)
    try:
        check_name(name, serving_of(request).model)
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


def _listed(name: str, served: ServedModel) -> Json:
    tagged = name if ":" in name else name + LATEST
    details = served.details
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _time(served.created if details is None else details.modified),
        "size": 0 if details is None else details.file_bytes,
        "digest": "" if details is None else details.digest,
        "details": _details(details),
    }


def _details(details: ModelDetails | None) -> Json:
    family = "" if details is None else details.architecture
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if details is None else in_short(details.parameters),
        "quantization_level": "" if details is None else details.stored_as,
    }


def _model_info(served: ServedModel) -> Iterator[tuple[str, object]]:
    """Ollama's facts, under the names that clients look for; the context is what is served."""
    details = served.details
    if details is None:
        return
    arch = details.architecture
    yield "general.architecture", arch
    yield "general.basename", served.id
    yield "general.parameter_count", details.parameters
    yield f"{arch}.context_length", served.context_tokens
    if details.width is not None:
        yield f"{arch}.embedding_length", details.width
    if details.layers is not None:
        yield f"{arch}.block_count", details.layers
    yield f"{arch}.vocab_size", served.vocab_size


def _capabilities(details: ModelDetails | None) -> Iterator[str]:
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

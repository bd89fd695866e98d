"""Routes of Ollama's API that list, show and download models. Also refuses Ollama's other
routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from semantic.domain.errors import ModelNotFoundError, OperatorError, SemanticError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.models import Arrived, ModelsPort, ModelStatus, OnArrived
from semantic.ports.serving import ServedModel
from semantic_server.http.context import (
    StartedStream,
    context_of,
    event_stream,
    settings_of,
    start_stream,
    until_disconnect,
)
from semantic_server.http.errors import NDJSON, WireError, json_line, ollama_error, problem_of
from semantic_server.http.identity import require_operator
from semantic_server.http.models import (
    AnyModel,
    context_length,
    is_loaded,
    listed_models,
    model_called,
)
from semantic_server.http.ollama.options import MODEL_FIELDS, PULL_FIELDS
from semantic_server.http.ollama.request import LATEST, untagged
from semantic_server.http.openai.fields import Json, warnings
from semantic_server.http.request_body import described, read_json
from semantic_server.http.request_fields.table import Field, fields_of, flag_at

router: Final = APIRouter(tags=["Ollama"])

API_VERSION: Final = "0.12.11"
"""The version of Ollama whose API this is. Clients compare it."""

_NEVER: Final = "9999-12-31T23:59:59Z"
"""The expiry date of a model that stays loaded."""

_SHORT: Final = 12
"""The number of characters of a model's version in a download's status."""
_PULLING: Final[Json] = {"status": "pulling manifest"}
_SUCCESS: Final[Json] = {"status": "success"}

_PARAMETERS: Final = ("temperature", "top_p", "top_k", "min_p")
_INSTEAD: Final = {
    "create": "this server creates no models: start it with --model FOLDER",
    "copy": "give a model another name with `semantic models alias` or --served-model-name",
    "delete": "delete a model with `semantic models rm`",
    "push": "this server publishes nothing",
}
_UNITS: Final = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def of_a_model(reply: str, *, streams: bool = False) -> dict[str, object]:
    """Return the OpenAPI description of a route that names a model in its body."""
    stream = NDJSON if streams else None
    required = {"model": {"type": "string"}}
    return described(required, {}, reply, body="As Ollama documents it.", stream=stream)


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def version() -> dict[str, str]:
    """Return the version of Ollama that has this interface."""
    return {"version": API_VERSION}


@router.get("/api/tags")
@router.head("/api/tags", include_in_schema=False)
async def tags(request: Request) -> dict[str, list[dict[str, object]]]:
    """Return the names that requests may use, as Ollama lists its models."""
    rows = listed_models(request)
    return {"models": [_listed(name, served) for served, _ in rows for name in served.names]}


@router.get("/api/ps")
async def ps(request: Request) -> dict[str, list[dict[str, object]]]:
    """Return the loaded models, as Ollama lists running ones."""
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


@router.post("/api/show", openapi_extra=of_a_model("The facts about the model."))
async def show(request: Request) -> Response:
    """Return the facts about a model, as Ollama shows them."""
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


@router.post("/api/pull", openapi_extra=of_a_model("The progress of the download.", streams=True))
async def pull(request: Request) -> Response:
    """Download a model that `--allow-pull` permits, and serve it; succeed at once if the model is
    already served. A server with keys requires an operator's key."""
    body = await read_json(request)
    name = _name(body, PULL_FIELDS)
    stream = flag_at("stream", body.get("stream", True))
    hub_id = untagged(name)
    try:
        _accepting(name, request)
    except ModelNotFoundError as error:
        models = _may_fetch(request, hub_id, error)
    else:
        return _succeeded(stream=stream)
    if not stream:
        await until_disconnect(request, _fetch(models, hub_id, lambda _: None))
        return _succeeded(stream=False)
    arrivals = await start_stream(request, _arrivals(models, hub_id))
    return event_stream(request, _pulled(arrivals), lambda: json_line(_PULLING), NDJSON)


def _succeeded(*, stream: bool) -> Response:
    return Response(json_line(_SUCCESS), media_type=NDJSON) if stream else JSONResponse(_SUCCESS)


def _may_fetch(request: Request, hub_id: str, unknown: ModelNotFoundError) -> ModelsPort:
    models, settings = context_of(request).models, settings_of(request)
    if models is None or not settings.allow_pull:
        raise WireError(
            HTTPStatus.FORBIDDEN,
            f"{unknown}; this server pulls no models: run `semantic models pull` and restart with "
            "--model, or restart with --allow-pull",
            param="model",
        )
    if not any(fnmatchcase(hub_id, pattern) for pattern in settings.allow_pull):
        raise WireError(
            HTTPStatus.FORBIDDEN,
            f"cannot pull {hub_id!r:.200}: expected one of {', '.join(settings.allow_pull)}",
            param="model",
        )
    if settings.api_keys:
        require_operator(request, "models belong to all tenants")
    return models


async def _fetch(models: ModelsPort, hub_id: str, on_arrived: OnArrived) -> None:
    try:
        await models.fetch(hub_id, on_arrived)
    except OperatorError as error:
        raise WireError(HTTPStatus.BAD_GATEWAY, str(error)) from error


async def _arrivals(models: ModelsPort, hub_id: str) -> AsyncGenerator[Arrived, None]:
    """Yield the progress of a download. Closing this generator stops the download."""
    queue: asyncio.Queue[Arrived | None] = asyncio.Queue()
    fetching = asyncio.ensure_future(_fetch(models, hub_id, queue.put_nowait))
    fetching.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (one := await queue.get()) is not None:
            yield one
        await fetching
    finally:
        fetching.cancel()
        await asyncio.wait((fetching,))


async def _pulled(arrivals: StartedStream[Arrived]) -> AsyncGenerator[bytes, None]:
    yield json_line(_PULLING)
    async with aclosing(arrivals):
        try:
            async for one in arrivals:
                yield json_line(_arrived(one))
        except (SemanticError, WireError) as error:
            yield json_line(ollama_error(problem_of(error)))
            return
    for status in ("verifying sha256 digest", "writing manifest", "success"):
        yield json_line({"status": status})


def _arrived(one: Arrived) -> Json:
    return {
        "status": f"pulling {one.version[:_SHORT]}",
        "digest": one.version,
        "total": one.total_bytes,
        "completed": one.n_bytes,
    }


@router.post("/api/create", include_in_schema=False)
@router.post("/api/copy", include_in_schema=False)
@router.delete("/api/delete", include_in_schema=False)
@router.post("/api/push", include_in_schema=False)
async def refuse(request: Request) -> Response:
    """Refuse the requests with which Ollama's clients change models. Raises WireError."""
    await request.body()
    route = request.url.path.rpartition("/")[2]
    raise WireError(HTTPStatus.FORBIDDEN, f"/api/{route}: {_INSTEAD[route]}")


def _name(body: Mapping[str, object], table: Mapping[str, Field]) -> object:
    """Return the model's name from a body. Older clients send it in the field `name`."""
    known = fields_of(body, table, {}, warnings)
    return known.get("model") or known.get("name")


def _accepting(name: object, request: Request) -> AnyModel:
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
    details = served.details
    if details is None:  # one of several models, not loaded yet
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
    """Return a number of parameters as a short text such as 8.0B."""
    for unit, letter in _UNITS:
        if count >= unit:
            value = count / unit
            return f"{value:.0f}{letter}" if value >= 100 else f"{value:.1f}{letter}"  # noqa: PLR2004
    return str(count)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

"""Probes, metrics and the memory limit."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from semantic.domain.errors import InvalidRequestError, OverloadedError
from semantic.ports.serving import MemoryFigures, MemoryLimit
from semantic_server.http.context import context_of, serving_of, settings_of
from semantic_server.http.errors import RETRY_SECONDS
from semantic_server.http.identity import require_operator
from semantic_server.http.metrics import Metrics
from semantic_server.http.request_body import read_as

memory: Final = APIRouter(prefix="/v1/memory", tags=["health"])

_GIB: Final = 1 << 30


class NewLimit(BaseModel):
    """The new memory limit."""

    model_config = ConfigDict(extra="forbid", strict=True)

    limit_gb: Annotated[
        float | None,
        Field(gt=0, le=1 << 20, description="In GiB; null for the limit at the server's start."),
    ]


class Memory(BaseModel):
    """The memory of the process, as the system counts it."""

    object: Literal["memory"] = "memory"
    used_bytes: int
    limit_bytes: Annotated[
        int, Field(description="Current limit: lower while the system is short of memory.")
    ]
    max_bytes: Annotated[int, Field(description="Limit without a shortage.")]
    steps: Annotated[
        list[str], Field(description="Steps against a shortage in the last minute, in order.")
    ]
    counts: Annotated[dict[str, int], Field(description="Number of each step since the start.")]


_NEW_LIMIT: Final = TypeAdapter(NewLimit)


@memory.get("")
async def show(request: Request) -> Memory:
    """Return the memory of the process. A server with keys requires an operator's key."""
    return _memory(_limit_of(request).memory)


@memory.post("")
async def change(request: Request) -> Memory:
    """Set another memory limit. The server frees all memory above it, but ends no running answer. A
    server with keys requires an operator's key."""
    limit = _limit_of(request)
    wanted = (await read_as(_NEW_LIMIT, request)).limit_gb
    return _memory(await limit.limit_memory(None if wanted is None else int(wanted * _GIB)))


def _limit_of(request: Request) -> MemoryLimit:
    if settings_of(request).api_keys:
        require_operator(request, "memory belongs to all tenants")
    serving_of(request)  # 503 while the model loads
    limit = context_of(request).memory
    if limit is None:
        raise InvalidRequestError("this server has no memory limit")
    return limit


def _memory(found: MemoryFigures | None) -> Memory:
    if found is None:
        raise InvalidRequestError("this server has no memory limit")
    return Memory(
        used_bytes=found.used_bytes,
        limit_bytes=found.limit_bytes,
        max_bytes=found.max_bytes,
        steps=list(found.steps),
        counts=dict(found.counts),
    )


router: Final = APIRouter(tags=["health"])


class Status(BaseModel):
    """A status in one word."""

    status: str


class Ready(Status):
    """Readiness; `model` is the id of the served model."""

    model: str


class Version(BaseModel):
    """The program's version."""

    version: str


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Status:
    """Liveness: the process responds. Independent of the model: see /ready."""
    return Status(status="ok")


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Ready:
    """Readiness: the model is loaded and accepts requests; 503 until then."""
    figures = context_of(request).figures
    # Off the event loop, as for /metrics: figures of the store may block on its locks.
    if (
        figures is not None
        and not (await to_thread.run_sync(figures)).engine.state.accepts_submissions
    ):
        raise OverloadedError("the engine does not accept requests", retry_after=RETRY_SECONDS)
    return Ready(status="ready", model=serving_of(request).model.id)


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version(request: Request) -> Version:
    """Return the program's version."""
    return Version(version=context_of(request).version)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus' text format. A server with keys requires an operator's key."""
    if settings_of(request).api_keys:
        require_operator(request, "metrics cover all tenants")
    found: Metrics = request.app.state.metrics
    # Off the event loop: figures of the store may block on its locks.
    return Response(await to_thread.run_sync(found.text), media_type=CONTENT_TYPE_LATEST)


@router.head("/api/hello", include_in_schema=False)
@router.get("/api/hello", include_in_schema=False)
async def hello(request: Request) -> Status:
    """Reachability check that clients send before anything else; any 200 will do."""
    return Status(status="loading" if context_of(request).serving is None else "ok")

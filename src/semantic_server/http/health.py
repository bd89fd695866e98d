"""Probes and metrics: liveness, readiness, version, Prometheus."""

from __future__ import annotations

from typing import Final

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from semantic.domain.errors import OverloadedError
from semantic_server.http.context import context_of, serving_of, settings_of
from semantic_server.http.errors import RETRY_SECONDS
from semantic_server.http.identity import require_operator
from semantic_server.http.metrics import Metrics

router: Final = APIRouter(tags=["health"])


class Status(BaseModel):
    """A status in one word."""

    status: str


class Ready(Status):
    """`model` is the id of the served model."""

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
        raise OverloadedError("the engine takes no requests", retry_after=RETRY_SECONDS)
    return Ready(status="ready", model=serving_of(request).model.id)


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version(request: Request) -> Version:
    """The program's version."""
    return Version(version=context_of(request).version)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format; on a server with keys for its operators only."""
    if settings_of(request).api_keys:
        require_operator(request, "metrics are about all tenants")
    found: Metrics = request.app.state.metrics
    # Off the event loop: figures of the store may block on its locks.
    return Response(await to_thread.run_sync(found.text), media_type=CONTENT_TYPE_LATEST)


@router.head("/api/hello", include_in_schema=False)
@router.get("/api/hello", include_in_schema=False)
async def hello(request: Request) -> Status:
    """Reachability check that clients send before anything else; any 200 will do."""
    return Status(status="loading" if context_of(request).serving is None else "ok")

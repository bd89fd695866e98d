"""What probes ask for: whether the process lives, whether it can answer, what it is."""

from __future__ import annotations

from typing import Final

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from semantic.adapters.http.context import context_of, serving_of
from semantic.adapters.http.errors import RETRY_SECONDS
from semantic.adapters.http.metrics import Metrics
from semantic.domain.errors import OverloadedError

router: Final = APIRouter(tags=["health"])


class Status(BaseModel):
    """A word that says it all."""

    status: str


class Ready(Status):
    """`model` is the id of the model that answers."""

    model: str


class Version(BaseModel):
    """The program's version."""

    version: str


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Status:
    """The process lives. Says nothing of the model: see /ready."""
    return Status(status="ok")


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Ready:
    """The model is loaded and takes requests; 503 until then."""
    figures = context_of(request).figures
    # As for /metrics: figures of the store may wait for its locks.
    if (
        figures is not None
        and not (await to_thread.run_sync(figures)).engine.state.accepts_submissions
    ):
        raise OverloadedError("the engine takes no requests", retry_after=RETRY_SECONDS)
    return Ready(status="ready", model=serving_of(request).model.id)


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version(request: Request) -> Version:
    """Which version of the program answers."""
    return Version(version=context_of(request).version)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    found: Metrics = request.app.state.metrics
    # Figures of the store may wait for its locks; probes and answers go on meanwhile.
    return Response(await to_thread.run_sync(found.text), media_type=CONTENT_TYPE_LATEST)


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
@router.head("/api/hello", include_in_schema=False)
@router.get("/api/hello", include_in_schema=False)
async def hello(request: Request) -> Status:
    """Clients try these before anything else; any answer will do."""
    return Status(status="loading" if context_of(request).serving is None else "ok")

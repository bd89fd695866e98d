"""/v1/memory: what the process has, may have and gave up; an operator may change the limit."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from semantic.application.engine.engine_state import MemoryFigures, MemoryLimit
from semantic.domain.errors import InvalidRequestError
from semantic_server.http.context import context_of, serving_of, settings_of
from semantic_server.http.identity import require_operator
from semantic_server.http.request_body import read_as

router: Final = APIRouter(prefix="/v1/memory", tags=["health"])

_GIB: Final = 1 << 30


class NewLimit(BaseModel):
    """The limit from now on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    limit_gb: Annotated[
        float | None,
        Field(gt=0, le=1 << 20, description="In GiB; null: that of the server's start."),
    ]


class Memory(BaseModel):
    """The process' memory, as the system counts it."""

    object: Literal["memory"] = "memory"
    used_bytes: int
    limit_bytes: Annotated[
        int, Field(description="What it may have now: less while the system is short of memory.")
    ]
    max_bytes: Annotated[int, Field(description="What it may have otherwise.")]
    steps: Annotated[
        list[str], Field(description="What shortage has taken in the last minute, in order.")
    ]
    counts: Annotated[
        dict[str, int], Field(description="How often each was taken since the start.")
    ]


_NEW_LIMIT: Final = TypeAdapter(NewLimit)


@router.get("")
async def show(request: Request) -> Memory:
    """The process' memory. A server with keys requires an operator's."""
    return _memory(_limit_of(request).memory)


@router.post("")
async def change(request: Request) -> Memory:
    """Have another limit from now on; what exceeds it is given up, but no running answer. A server
    with keys requires an operator's."""
    limit = _limit_of(request)
    wanted = (await read_as(_NEW_LIMIT, request)).limit_gb
    return _memory(await limit.limit_memory(None if wanted is None else int(wanted * _GIB)))


def _limit_of(request: Request) -> MemoryLimit:
    if settings_of(request).api_keys:
        require_operator(request, "memory is all tenants'")
    serving_of(request)  # 503 while it is being loaded
    memory = context_of(request).memory
    if memory is None:
        raise InvalidRequestError("this server has no limit of memory")
    return memory


def _memory(found: MemoryFigures | None) -> Memory:
    if found is None:
        raise InvalidRequestError("this server has no limit of memory")
    return Memory(
        used_bytes=found.used_bytes,
        limit_bytes=found.limit_bytes,
        max_bytes=found.max_bytes,
        steps=list(found.steps),
        counts=dict(found.counts),
    )

"""/v1/requests: what runs and what waits, without texts and tokens; a request can be cancelled.

A tenant sees its own requests, an operator those of all tenants or of one.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from semantic.ports.agents import RequestState, RunningRequest, TenantId
from semantic_server.http.agents import TenantParameter
from semantic_server.http.context import agents_of
from semantic_server.http.errors import WireError
from semantic_server.http.identity import is_operator, require_operator, tenant_of

router: Final = APIRouter(prefix="/v1/requests", tags=["Agents"])


class Running(BaseModel):
    """A request that runs or waits. `read_tokens` of its prompt are computed or reused, of which
    `cached_tokens` are reused."""

    object: Literal["request"] = "request"
    id: str
    agent: str
    model: Annotated[str, Field(description="The id of its model.")]
    state: RequestState
    prompt_tokens: int
    read_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: Annotated[float, Field(description="Since the engine has it.")]
    preemptions: Annotated[int, Field(description="How often it was preempted.")]
    tenant: Annotated[str | None, Field(description="Its tenant's id, for operators.")] = None


class Requests(BaseModel):
    """All requests, in the order of their arrival."""

    object: Literal["list"] = "list"
    data: list[Running]


@router.get("", response_model_exclude_none=True)
async def list_requests(request: Request, tenant: TenantParameter = None) -> Requests:
    """The requests that run or wait now."""
    if tenant is not None:
        require_operator(request, "tenant")
    operator = is_operator(request)
    given = None if tenant is None else TenantId(tenant)
    found = await agents_of(request).requests(given if operator else tenant_of(request))
    return Requests(data=[running(one, operator=operator) for one in found])


class Cancelled(BaseModel):
    """A request that ends at the engine's next step."""

    object: Literal["request.cancelled"] = "request.cancelled"
    id: str


@router.delete("/{request_id}")
async def cancel(request: Request, request_id: str) -> Cancelled:
    """Cancel a request that runs or waits; its client gets a 499, which it does not repeat, and
    what it computed is kept."""
    owner = None if is_operator(request) else tenant_of(request)
    if not await agents_of(request).cancel(request_id, owner):
        raise WireError(
            HTTPStatus.NOT_FOUND,
            "expected the id of a request that runs or waits",
            code="not_found",
        )
    return Cancelled(id=request_id)


def running(one: RunningRequest, *, operator: bool) -> Running:
    """A request as it is sent, with the id of its tenant for an operator."""
    return Running(
        id=one.uid,
        agent=one.agent_id,
        model=one.model,
        state=one.state,
        prompt_tokens=one.prompt_tokens,
        read_tokens=one.read_tokens,
        cached_tokens=one.cached_tokens,
        generated_tokens=one.generated_tokens,
        seconds=round(one.seconds, 3),
        preemptions=one.preemptions,
        tenant=one.tenant.id if operator else None,
    )

"""/v1/requests: what runs and what waits, without texts and tokens.

A tenant sees its own requests, an operator those of all tenants or of one.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from semantic.adapters.http.agents import TenantParameter
from semantic.adapters.http.context import agents_of
from semantic.adapters.http.identity import is_operator, require_operator, tenant_of
from semantic.ports.agents import RequestState, RunningRequest, TenantId

router: Final = APIRouter(prefix="/v1/requests", tags=["Agents"])


class Running(BaseModel):
    """A request that runs or waits. `read_tokens` of its prompt are computed or reused, of which
    `cached_tokens` are reused."""

    object: Literal["request"] = "request"
    agent: str
    state: RequestState
    prompt_tokens: int
    read_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: Annotated[float, Field(description="Since the engine has it.")]
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
    return Requests(data=[_running(one, operator=operator) for one in found])


def _running(one: RunningRequest, *, operator: bool) -> Running:
    return Running(
        agent=one.agent_id,
        state=one.state,
        prompt_tokens=one.prompt_tokens,
        read_tokens=one.read_tokens,
        cached_tokens=one.cached_tokens,
        generated_tokens=one.generated_tokens,
        seconds=round(one.seconds, 3),
        tenant=one.tenant.id if operator else None,
    )

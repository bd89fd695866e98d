"""/v1/agents: checkpoints, forks, families and differences of agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.responses import JSONResponse, Response

from semantic.application.cache.agent_notes import part_words
from semantic.ports.agents import AgentSummary, Branch, Tenant
from semantic_server.http.agents import (
    Agent,
    AgentId,
    Agents,
    BlockCounts,
    TenantParameter,
    check_action,
    forget,
    gives,
    is_action,
    model_parameter,
    owner_of,
    show,
    summary,
    takes,
    text_of,
)
from semantic_server.http.context import agents_of, model_in_query, serving_of
from semantic_server.http.errors import FieldError
from semantic_server.http.identity import tenant_of
from semantic_server.http.request_body import read_as

router = APIRouter(prefix="/v1/agents", tags=["Agents"], dependencies=[Depends(model_parameter)])

Turn = Annotated[int | None, Field(description="A turn in the history, from 1; null: the last.")]


class Fork(BaseModel):
    """One new agent in `new_id`, or several in `new_ids`. They begin with the agent's last turn,
    an earlier `turn`, or a `checkpoint`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    new_id: str | None = None
    new_ids: list[str] | None = None
    checkpoint: str | None = None
    turn: Turn = None


class NewCheckpoint(BaseModel):
    """The name of a new checkpoint. `pinned` exempts its blocks from eviction."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    turn: Turn = None
    pinned: bool = False


class Restore(BaseModel):
    """The checkpoint to restore."""

    model_config = ConfigDict(strict=True, extra="forbid")

    checkpoint: str


class Checkpoint(BaseModel):
    """A checkpoint: the agent's history at one moment, under a name."""

    object: Literal["agent.checkpoint"]
    name: str
    agent: str
    tokens: int
    turns: int
    blocks: BlockCounts
    bytes: int
    shared_bytes: int
    pinned: bool
    created: Annotated[float | None, Field(description="Seconds since 1970.")]


class TurnLength(BaseModel):
    """A turn in an agent's history: the tokens of its prompt, and those after its answer."""

    turn: int
    prompt_tokens: int
    tokens: int


class Checkpoints(BaseModel):
    """An agent's checkpoints, oldest first, and the turns at which new ones can begin."""

    object: Literal["list"]
    data: list[Checkpoint]
    turns: list[TurnLength]


class Relative(Agent):
    """An agent of a family. `depth` is its distance from the first."""

    depth: int


class Family(BaseModel):
    """An agent and its descendants, each after its parent."""

    object: Literal["list"]
    data: list[Relative]


class Diff(BaseModel):
    """How the history of agent `other` differs from that of agent `id`. They share the first
    `common_tokens`, and `shared_blocks` blocks. `part` names the first part of the prompts that
    differs. The texts are null where a history ends."""

    object: Literal["agent.diff"]
    id: str
    other: str
    tokens: int
    other_tokens: int
    common_tokens: int
    shared_blocks: int
    text: str | None
    other_text: str | None
    part: str | None


_FORK: Final = TypeAdapter(Fork)
_NEW_CHECKPOINT: Final = TypeAdapter(NewCheckpoint)
_RESTORE: Final = TypeAdapter(Restore)


@router.post(
    "/{agent_id:path}/checkpoints", openapi_extra=takes(NewCheckpoint), responses=gives(Checkpoint)
)
async def checkpoint(request: Request, agent_id: AgentId) -> Response:
    """Name the agent's history after its last turn, or an earlier one; copies nothing. The reply
    comes once the checkpoint is on disk."""
    check_action(request, "checkpoints")
    body = await read_as(_NEW_CHECKPOINT, request)
    branch = Branch(agent_id, turn=body.turn)
    saved = await agents_of(request).checkpoint(
        branch, body.name, tenant_of(request), pinned=body.pinned
    )
    return JSONResponse(_checkpoint(saved, agent_id))


@router.get("/{agent_id:path}/checkpoints", responses=gives(Checkpoints))
async def list_checkpoints(
    request: Request, agent_id: AgentId, tenant: TenantParameter = None
) -> Response:
    """Return the agent's checkpoints, and the turns in its history."""
    if not is_action(request, "checkpoints"):
        return await show(request, f"{agent_id}/checkpoints", tenant)
    found = await agents_of(request).checkpoints(agent_id, owner_of(request, tenant))
    turns = [
        TurnLength(turn=i, prompt_tokens=one.prompt_tokens, tokens=one.tokens).model_dump()
        for i, one in enumerate(found.turns, 1)
    ]
    data = [_checkpoint(one, agent_id) for one in found.saved]
    return JSONResponse({"object": "list", "data": data, "turns": turns})


@router.delete("/{agent_id:path}/checkpoints")
async def delete_checkpoint(
    request: Request,
    agent_id: AgentId,
    name: Annotated[str | None, Query(description="Name of the checkpoint.")] = None,
    tenant: TenantParameter = None,
    family: Annotated[bool, Query(include_in_schema=False)] = False,
) -> Response:
    """Delete a checkpoint. The agent stays as it is."""
    if not is_action(request, "checkpoints"):
        return await forget(request, f"{agent_id}/checkpoints", tenant, family)
    if name is None:
        raise FieldError("name must be the name of a checkpoint", param="name")
    owner = owner_of(request, tenant)
    await agents_of(request).delete_checkpoint(agent_id, name, owner)
    return JSONResponse({"object": "agent.checkpoint.deleted", "name": name, "deleted": True})


@router.post("/{agent_id:path}/restore", openapi_extra=takes(Restore), responses=gives(Agent))
async def restore(request: Request, agent_id: AgentId) -> Response:
    """Give the agent the history of its checkpoint, without the later turns. Works without the
    agent too."""
    check_action(request, "restore")
    body = await read_as(_RESTORE, request)
    back = await agents_of(request).restore(agent_id, body.checkpoint, tenant_of(request))
    return JSONResponse(summary(back))


@router.post(
    "/{agent_id:path}/fork", openapi_extra=takes(Fork), responses={200: {"model": Agent | Agents}}
)
async def fork(request: Request, agent_id: AgentId) -> Response:
    """Create agents that start with this one's state: all or none. Copies nothing. `new_ids` gives
    a list.

    A fork announces a request: the server reads the shared blocks from disk into memory.
    """
    check_action(request, "fork")
    body = await read_as(_FORK, request)
    if (body.new_id is None) == (body.new_ids is None):
        raise FieldError("expected either new_id or new_ids", param="new_id")
    names = [body.new_id] if body.new_id is not None else body.new_ids or []
    branch = Branch(agent_id, body.checkpoint, body.turn)
    data = [
        summary(one) for one in await agents_of(request).fork(branch, names, tenant_of(request))
    ]
    if body.new_id is not None:
        return JSONResponse(data[0])
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return JSONResponse({"object": "list", "data": data, **ends})


@router.get("/{agent_id:path}/family", responses=gives(Family))
async def family(request: Request, agent_id: AgentId, tenant: TenantParameter = None) -> Response:
    """Return the agent and its descendants, each after its parent, with `depth`."""
    if not is_action(request, "family"):
        return await show(request, f"{agent_id}/family", tenant)
    owner = owner_of(request, tenant)
    found = await agents_of(request).family(agent_id, owner)
    data = [{**summary(one, owner), "depth": depth} for one, depth in found]
    return JSONResponse({"object": "list", "data": data})


@router.get("/{agent_id:path}/diff", responses=gives(Diff))
async def diff(
    request: Request,
    agent_id: AgentId,
    other: Annotated[str | None, Query(description="Name of the agent to compare with.")] = None,
) -> Response:
    """Return where the history of `other` leaves that of this agent, and why."""
    if not is_action(request, "diff"):
        return await show(request, f"{agent_id}/diff", None)
    if other is None:
        raise FieldError("other must be the name of an agent", param="other")
    found = await agents_of(request).compare(agent_id, other, tenant_of(request))
    serving = serving_of(request, model_in_query(request))
    reply = Diff(
        object="agent.diff",
        id=found.agent,
        other=found.other,
        tokens=found.tokens,
        other_tokens=found.other_tokens,
        common_tokens=found.common_tokens,
        shared_blocks=found.shared_blocks,
        text=await text_of(found.expected, serving),
        other_text=await text_of(found.got, serving),
        part=None if found.part is None else part_words(found.part),
    )
    return JSONResponse(reply.model_dump(mode="json"))


def _checkpoint(saved: AgentSummary, agent_id: str, tenant: Tenant = "") -> Mapping[str, object]:
    given = summary(saved, tenant)
    copied = ("tokens", "turns", "blocks", "bytes", "shared_bytes", "pinned")
    return {
        "object": "agent.checkpoint",
        "name": saved.id,
        "agent": agent_id,
        **{name: given[name] for name in copied},
        "created": saved.last_used,
    }

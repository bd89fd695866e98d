"""/v1/agents: list, show, pin, delete, export and import agents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from semantic.application.cache.agent_notes import cache_miss_reason, end_reason
from semantic.domain.errors import AgentNotFoundError, InvalidRequestError, SemanticError
from semantic.domain.match import MatchEnd, MatchReport
from semantic.ports.agents import (
    AgentArchive,
    AgentFilter,
    AgentPage,
    AgentsPort,
    AgentState,
    AgentSummary,
    Place,
    Tenant,
    TenantId,
)
from semantic.ports.serving import ServingPort
from semantic_server.http.answer_records import LostTokens, lost_tokens
from semantic_server.http.context import (
    agents_of,
    agents_of_named,
    model_in_query,
    serving_of,
    settings_of,
    until_disconnect,
)
from semantic_server.http.errors import ClientDisconnectedError, FieldError, logger, request_id_of
from semantic_server.http.identity import is_operator, require_operator, tenant_of
from semantic_server.http.request_body import read_as


def model_parameter(
    model: Annotated[
        str | None, Query(description="Model of the agents; by default the first.")
    ] = None,
) -> None:
    """Document the parameter, which `agents_of` reads."""
    del model


router = APIRouter(prefix="/v1/agents", tags=["Agents"], dependencies=[Depends(model_parameter)])

AgentId = Annotated[str, Path(description="The agent's name, percent-encoded.")]
TenantParameter = Annotated[
    str | None, Query(description="With an operator's key: id of the agent's tenant.")
]


class Pin(BaseModel):
    """True to exempt an agent's blocks from eviction."""

    model_config = ConfigDict(strict=True, extra="forbid")

    pinned: bool


class LastTurn(BaseModel):
    """The prompt of an agent's last turn: its tokens, how many were cached, why not more, and the
    cached tokens that the engine computed again. All fields are null before the first turn."""

    prompt_tokens: int | None
    cached_tokens: int | None
    cached_share: float | None
    seconds: Annotated[float | None, Field(description="Seconds of the prefill.")]
    reason: str | None
    lost_tokens: int | None
    lost_seconds: float | None


class BlockCounts(BaseModel):
    """The number of an agent's blocks in each tier."""

    pool: int
    memory: int
    disk: int
    missing: int


class Agent(BaseModel):
    """An agent. Agents form a tree: `parent` spawned this agent, or was forked into it."""

    object: Literal["agent"]
    id: str
    model: str
    client: Annotated[
        str | None, Field(description="Client program: claude-code, codex, opencode, …")
    ]
    session: Annotated[str | None, Field(description="Session id of the client.")]
    parent: str | None
    children: Annotated[list[str], Field(description="Agents whose parent is this one.")]
    state: AgentState
    tokens: int
    blocks: BlockCounts
    bytes: int
    shared_bytes: int
    pool_bytes: int
    pinned: bool
    turns: int
    last_turn: LastTurn
    last_used: Annotated[float | None, Field(description="Seconds since 1970.")]
    tenant: Annotated[str | None, Field(description="Id of its tenant, for operators.")] = None


class Match(BaseModel):
    """An agent's last prompt: how much of it the cache supplied, and why not more."""

    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    seconds: float
    end: MatchEnd
    reason: str
    source: str
    differs_at: int | None
    expected: int | None
    expected_text: str | None
    got: int | None
    got_text: str | None
    lost: Annotated[
        LostTokens | None,
        Field(description="Cached tokens that the engine computed again, and why."),
    ]


class Why(BaseModel):
    """How an agent's last prompt matched its cache. `match` is null before the first prompt."""

    object: Literal["agent.match"]
    id: str
    match: Match | None


class Block(BaseModel):
    """A block of an agent: tokens `start` to `stop`."""

    start: int
    stop: int
    hash: str
    place: Place
    n_bytes: int
    shared: bool
    checkpoint: Annotated[bool, Field(description="True if windows or states can resume after it.")]


class ShownAgent(Agent):
    """An agent with its blocks in order."""

    chain: list[Block]


class Agents(BaseModel):
    """A page of agents. Both ids are null for a page of several tenants; `first_id` is also null
    for an empty page."""

    object: Literal["list"]
    data: list[Agent]
    first_id: Annotated[str | None, Field(description="Id of the first agent.")]
    last_id: Annotated[str | None, Field(description="Value of `after` for the next page.")]
    has_more: Annotated[bool, Field(description="True if more agents follow.")]


_PIN: Final = TypeAdapter(Pin)


def takes(model: type[BaseModel]) -> dict[str, object]:
    """Return a route's OpenAPI fields for a body of `model`."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def gives(model: type[BaseModel]) -> dict[int | str, dict[str, object]]:
    """Return a route's OpenAPI responses for a reply of `model`."""
    return {200: {"model": model}}


@router.get("", responses=gives(Agents))
async def list_agents(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of saved agents.")] = 20,
    after: Annotated[str | None, Query(description="Only agents after this one.")] = None,
    tenant: TenantParameter = None,
    prefix: Annotated[str | None, Query(description="Only names with this prefix.")] = None,
    pinned: Annotated[bool | None, Query(description="Only pinned, or only unpinned ones.")] = None,
    state: Annotated[AgentState | None, Query(description="Only agents in this state.")] = None,
    parent: Annotated[str | None, Query(description="Only children of this agent.")] = None,
) -> Response:
    """Return a page of agents: first those in their first turn, then the most recently used.

    A call examines a few hundred agents. With a filter, the page may be empty although more agents
    follow `last_id`. An operator gets the agents of `tenant`, or without `tenant` and `after` the
    first agents of each tenant in turn.
    """
    agents, only = agents_of(request), AgentFilter(prefix, pinned, state, parent)
    if tenant is None and after is None and is_operator(request):
        pages, is_of_all = await _first_of_all(agents, limit, only), True
    else:
        owner = owner_of(request, tenant)
        pages, is_of_all = [(owner, await agents.page(owner, limit, after, only))], False
    data = [summary(one, of) for of, page in pages for one in page.agents]
    first = None if is_of_all or not data else data[0]["id"]
    last = None if is_of_all else pages[0][1].last or (data[-1]["id"] if data else None)
    found = {"first_id": first, "last_id": last, "has_more": any(one.has_more for _, one in pages)}
    return JSONResponse({"object": "list", "data": data, **found})


async def _first_of_all(
    agents: AgentsPort, limit: int, only: AgentFilter
) -> list[tuple[Tenant, AgentPage]]:
    pages = list[tuple[Tenant, AgentPage]]()
    for tenant in await agents.tenants():
        if limit <= 0:
            return [*pages, (tenant, AgentPage((), has_more=True))]
        with suppress(AgentNotFoundError):  # a request deleted its last agent meanwhile
            pages.append((tenant, await agents.page(tenant, limit, None, only)))
            limit -= len(pages[-1][1].agents)
    return pages


_TAR: Final = "application/x-tar"
_BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
_TAKES_BYTES: Final[dict[str, object]] = {
    "requestBody": {"required": True, "content": {"application/octet-stream": _BINARY}}
}
_GIVES_TAR: Final[dict[int | str, dict[str, object]]] = {200: {"content": {_TAR: _BINARY}}}


@router.post("/import", openapi_extra=_TAKES_BYTES, responses=gives(Agent))
async def import_agent(
    request: Request,
    name: Annotated[str | None, Query(description="Name of the agent; by default its own.")] = None,
    tenant: TenantParameter = None,
) -> Response:
    """Create the agent of an export, with its blocks. A server with keys requires an operator's
    key; a server with several models requires `model`.

    The server checks the archive for damage only, so import only from a trusted source. Only
    requests that name the agent find its blocks. Imports run one at a time.
    """
    owner = _owner_of_archive(request, tenant)
    agent = await agents_of_named(request).import_(_uploaded(request), owner, name)
    return JSONResponse(summary(agent, owner))


# Register longer paths first: `{agent_id:path}` matches slashes too.


@router.get("/{agent_id:path}/export", response_class=Response, responses=_GIVES_TAR)
async def export_agent(
    request: Request, agent_id: AgentId, tenant: TenantParameter = None
) -> Response:
    """Return the agent with its stored blocks as a tar file, which contains its whole conversation.
    A server with keys requires an operator's key; a server with several models requires `model`."""
    if not is_action(request, "export"):
        return await show(request, f"{agent_id}/export", tenant)
    owner = _owner_of_archive(request, tenant)
    archive = await until_disconnect(request, agents_of_named(request).export(agent_id, owner))
    return _Download(archive)


@router.get("/{agent_id:path}/why", responses=gives(Why))
async def why(request: Request, agent_id: AgentId, tenant: TenantParameter = None) -> Response:
    """Return how much of the agent's last prompt the cache supplied, and why not more. Refuses
    operators, because the reply contains texts of the prompt."""
    if not is_action(request, "why"):
        return await show(request, f"{agent_id}/why", tenant)
    if tenant is not None:
        require_operator(request, "tenant")
    detail = await agents_of(request).show(agent_id, tenant_of(request))
    serving = serving_of(request, model_in_query(request))
    match = None if detail.match is None else await _match(detail.match, serving)
    found = Why(object="agent.match", id=agent_id, match=match)
    return JSONResponse(found.model_dump(mode="json"))


@router.post("/{agent_id:path}/pin", openapi_extra=takes(Pin), responses=gives(Agent))
async def pin(request: Request, agent_id: AgentId, tenant: TenantParameter = None) -> Response:
    """Exempt the agent's blocks from eviction, or allow their eviction again."""
    check_action(request, "pin")
    body = await read_as(_PIN, request)
    owner = owner_of(request, tenant)
    pinned = await agents_of(request).pin(agent_id, owner, pinned=body.pinned)
    return JSONResponse(summary(pinned, owner))


@router.get("/{agent_id:path}", responses=gives(ShownAgent))
async def show(request: Request, agent_id: AgentId, tenant: TenantParameter = None) -> Response:
    """Return the agent with its blocks in order."""
    owner = owner_of(request, tenant)
    detail = await agents_of(request).show(agent_id, owner)
    blocks = [asdict(block) for block in detail.blocks]
    return JSONResponse({**summary(detail.summary, owner), "chain": blocks})


@router.delete("/{agent_id:path}")
async def forget(
    request: Request,
    agent_id: AgentId,
    tenant: TenantParameter = None,
    family: Annotated[bool, Query(description="Delete its descendants too.")] = False,
) -> Response:
    """Delete the agent and its checkpoints. The server evicts their blocks when it needs space."""
    owner = owner_of(request, tenant)
    gone = await agents_of(request).forget(agent_id, owner, family=family)
    descendants = {"descendants": list(gone[1:])} if family else {}
    return JSONResponse({"object": "agent.deleted", "id": agent_id, "deleted": True, **descendants})


def is_action(request: Request, action: str) -> bool:
    """Return False if the slash before `action` is percent-encoded: a part of the agent's name."""
    path: bytes = request.scope["raw_path"]
    return path.endswith(f"/{action}".encode())


def check_action(request: Request, action: str) -> None:
    """Raise InvalidRequestError unless `is_action`."""
    if not is_action(request, action):
        raise InvalidRequestError(f"expected an unencoded /{action} after the agent's name")


def owner_of(request: Request, given: str | None) -> Tenant:
    """Return the tenant of the request, or the tenant `given` by an operator."""
    if given is not None:
        require_operator(request, "tenant")
        return TenantId(given)
    if is_operator(request):
        raise FieldError("tenant must be the id of the agent's tenant", param="tenant")
    return tenant_of(request)


def _owner_of_archive(request: Request, given: str | None) -> Tenant:
    if settings_of(request).api_keys:
        require_operator(request, "exports and imports")
    return owner_of(request, given)


async def _uploaded(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect as error:
        raise ClientDisconnectedError from error


class _Download(StreamingResponse):
    """An archive as a response. A read error ends the body before its stated length."""

    def __init__(self, archive: AgentArchive) -> None:
        headers = {
            "content-length": str(archive.n_bytes),
            "content-disposition": 'attachment; filename="agent.tar"',
        }
        super().__init__(archive.pieces, headers=headers, media_type=_TAR)
        self._archive = archive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SemanticError as error:
            logger.warning("request %s: the export was cut short: %s", request_id_of(scope), error)
        finally:
            self._archive.close()


def summary(agent: AgentSummary, tenant: Tenant = "") -> Mapping[str, object]:
    """Return an agent's fields on the wire."""
    return {
        "object": "agent",
        "id": agent.id,
        "model": agent.model,
        "client": agent.client,
        "session": agent.session,
        "parent": agent.parent,
        "children": list(agent.children),
        "state": agent.state,
        "tokens": agent.tokens,
        "blocks": {place: agent.blocks.get(place, 0) for place in _PLACES},
        "bytes": agent.n_bytes,
        "shared_bytes": agent.shared_bytes,
        "pool_bytes": agent.pool_bytes,
        "pinned": agent.pinned,
        "turns": agent.turns,
        "last_turn": _last_turn(agent.match, for_operator=isinstance(tenant, TenantId)),
        "last_used": agent.last_used,
        **({"tenant": tenant.id} if isinstance(tenant, TenantId) else {}),
    }


def _last_turn(match: MatchReport | None, *, for_operator: bool) -> Mapping[str, object]:
    """Return the last turn. Operators do not see the changed part, which may name a tool."""
    if match is None:
        return dict.fromkeys(LastTurn.model_fields)
    lost = match.lost
    return {
        "prompt_tokens": match.prompt_tokens,
        "cached_tokens": match.reused_tokens,
        "cached_share": match.reused_tokens / match.prompt_tokens,
        "seconds": match.seconds,
        "reason": end_reason(match) if for_operator else cache_miss_reason(match),
        "lost_tokens": 0 if lost is None else lost.tokens,
        "lost_seconds": 0.0 if lost is None else lost.seconds,
    }


_PLACES: Final = ("pool", "memory", "disk", "remote", "missing")


async def _match(match: MatchReport, serving: ServingPort) -> Match:
    return Match(
        prompt_tokens=match.prompt_tokens,
        reused_tokens=match.reused_tokens,
        computed_tokens=match.computed_tokens,
        seconds=match.seconds,
        end=match.end,
        reason=end_reason(match),
        source=match.source,
        differs_at=match.differs_at,
        expected=match.expected,
        expected_text=await text_of(match.expected, serving),
        got=match.got,
        got_text=await text_of(match.got, serving),
        lost=lost_tokens(match),
    )


async def text_of(token: int | None, serving: ServingPort) -> str | None:
    """Return a token's text; None without a token."""
    return None if token is None else (await serving.token_texts([token]))[0]

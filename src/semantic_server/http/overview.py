"""/v1/overview and /v1/requests: the server's figures and requests. A tenant sees only its own
requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from semantic.domain.stored import StoreStats, Wear
from semantic.domain.value_objects import Lane
from semantic.ports.agents import AgentsPort, RequestState, RunningRequest, TenantId
from semantic.ports.models import ModelState, ModelStatus
from semantic.ports.serving import EngineFigures, EngineState, ServedModel
from semantic_server.http.activity import LiveRequest, PhaseName, Sample, Savings, Span, of_tenant
from semantic_server.http.agents import TenantParameter
from semantic_server.http.context import agents_of, context_of, event_stream, settings_of
from semantic_server.http.errors import WireError, sse_event
from semantic_server.http.identity import is_operator, require_operator, tenant_of

requests: Final = APIRouter(prefix="/v1/requests", tags=["Agents"])


class Running(BaseModel):
    """A running or waiting request. `read_tokens` counts the prompt's tokens in the cache: the
    tokens computed so far, and the `cached_tokens` that were there before."""

    object: Literal["request"] = "request"
    id: str
    agent: str
    model: Annotated[str, Field(description="Id of its model.")]
    state: RequestState
    prompt_tokens: int
    read_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: Annotated[float, Field(description="Seconds since the engine accepted it.")]
    preemptions: Annotated[int, Field(description="Number of preemptions.")]
    tenant: Annotated[str | None, Field(description="Id of its tenant, for operators.")] = None


class Requests(BaseModel):
    """All requests, in the order of their arrival."""

    object: Literal["list"] = "list"
    data: list[Running]


@requests.get("", response_model_exclude_none=True)
async def list_requests(request: Request, tenant: TenantParameter = None) -> Requests:
    """Return the running and waiting requests."""
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


@requests.delete("/{request_id}")
async def cancel(request: Request, request_id: str) -> Cancelled:
    """Cancel a running or waiting request. Its client gets a 499, after which it does not repeat
    the request, and the cache keeps the computed tokens."""
    owner = None if is_operator(request) else tenant_of(request)
    if not await agents_of(request).cancel(request_id, owner):
        raise WireError(
            HTTPStatus.NOT_FOUND,
            "expected the id of a running or waiting request",
            code="not_found",
        )
    return Cancelled(id=request_id)


def running(one: RunningRequest, *, operator: bool) -> Running:
    """Return a request in the form of replies. An operator also sees the request's tenant."""
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


router: Final = APIRouter(prefix="/v1/overview", tags=["Agents"])

Bytes = tuple[int, int]
"""Bytes in use, and the most allowed."""

Role = Literal["local", "tenant", "operator"]

MOST_SPANS: Final = 300
"""The maximum number of requests in one document. The newest requests are in it."""
MOST_REQUESTS: Final = 200


class Saved(BaseModel):
    """Prompt tokens of answers, and the cached tokens among them."""

    since: Annotated[float, Field(description="Seconds since 1970.")]
    prompt_tokens: int
    cached_tokens: int
    seconds: Annotated[
        float,
        Field(
            description="Time to prefill the cached tokens, at the speed of such prefills."
            " At most the time of all cores."
        ),
    ]


class SavedTokens(BaseModel):
    """Savings since the server's start, and since midnight if that was later."""

    start: Saved
    today: Saved


class BudgetSample(BaseModel):
    """Use of the pool, of each tier of the store and of the process's memory at one time."""

    at: Annotated[float, Field(description="Seconds since 1970.")]
    tiers: dict[str, Bytes]
    running: int
    waiting: int
    preemptions: int
    pressure: Annotated[
        list[str],
        Field(description="Steps against a memory shortage in the last minute, in order."),
    ] = []


class Written(BaseModel):
    """Bytes that all processes of the store wrote to its drive."""

    today: int
    total: int
    since: Annotated[str, Field(description="Day of the first write: 2026-01-31.")]
    days: Annotated[dict[str, int], Field(description="The last days with writes, oldest first.")]
    max_a_day: Annotated[int | None, Field(description="Daily limit; null without one.")]
    held_back: Annotated[bool, Field(description="True once the limit is reached.")]
    failed: Annotated[int, Field(description="Failed writes, as on a full disk.")]
    rated_share: Annotated[
        float | None, Field(description="Share of the drive's rated writes; null without a rating.")
    ]


class LiveRow(Running):
    """A request that runs or waits."""

    tokens_per_second: Annotated[
        float | None, Field(description="Speed of the last second; null at first.")
    ]


class TimelineSpan(BaseModel):
    """A request on the time line. Times are in seconds since 1970."""

    id: str
    agent: str
    model: Annotated[str, Field(description="Id of its model.")]
    phases: Annotated[list[tuple[PhaseName, float]], Field(description="Each phase and its start.")]
    end: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finish: str | None
    status: Annotated[int, Field(description="Status of the reply; 499 if cancelled.")] = 200
    error: Annotated[str | None, Field(description="The error, as its client sees it.")] = None
    route: Annotated[
        str | None, Field(description="Method and path of a refused request, which has no agent.")
    ] = None
    tenant: Annotated[str | None, Field(description="Id of its tenant, for operators.")] = None


class ModelFacts(BaseModel):
    """A model's limit on prompt plus answer, its size, the type of its weights, and the lane of its
    decode steps; null if unknown."""

    context_tokens: int
    parameters: int | None = None
    stored_as: str | None = None
    lane: Lane | None = None


class ModelRow(BaseModel):
    """A model. The load of all tenants is visible only to operators, and to all
    clients of a server without keys."""

    id: str
    parent: Annotated[str | None, Field(description="Base model, if this one is an adapter on it.")]
    state: ModelState
    memory_bytes: Annotated[
        int, Field(description="Bytes of weights and pool, or the bytes to load it.")
    ]
    pinned: Annotated[bool, Field(description="True if it stays loaded.")]
    expires_in: Annotated[
        float | None, Field(description="Seconds until the server unloads it if no request comes.")
    ]
    idle_for: Annotated[
        float | None, Field(description="Seconds since its last request; null while one uses it.")
    ] = None
    running: Annotated[int | None, Field(description="Requests that use it.")] = None
    waiting: Annotated[int | None, Field(description="Requests that wait for its load.")] = None
    agents: Annotated[int | None, Field(description="Agents running or cached in its pool.")] = None
    weights_bytes: Annotated[
        int | None, Field(description="Bytes of its memory without its pool; null if not loaded.")
    ] = None
    pool: Annotated[Bytes | None, Field(description="null while not loaded.")] = None
    tokens_per_second: Annotated[float | None, Field(description="Sum over answers.")] = None
    facts: ModelFacts


class Changes(BaseModel):
    """The figures that may change every second."""

    now: Annotated[float, Field(description="Time of the server in seconds since 1970.")]
    state: str
    saved: SavedTokens
    requests: list[LiveRow]
    more_requests: Annotated[int, Field(description="Number of further requests.")]
    spans: list[TimelineSpan]
    samples: Annotated[
        list[BudgetSample] | None, Field(description="null for a tenant: they cover all tenants.")
    ]
    written: Annotated[
        Written | None, Field(description="null without a disk, and for a tenant.")
    ] = None
    models: Annotated[
        list[ModelRow] | None, Field(description="null on a server of a single model.")
    ] = None
    only: Annotated[
        ModelRow | None, Field(description="The model of a server of a single one, once loaded.")
    ] = None


class Overview(BaseModel):
    """The server, and its record of the last minutes."""

    object: Literal["overview"] = "overview"
    started: Annotated[float, Field(description="Seconds since 1970.")]
    version: str
    model: Annotated[str | None, Field(description="null while it loads.")]
    role: Annotated[Role, Field(description="local: the server has no keys.")]
    tenants: Annotated[
        list[str] | None, Field(description="Ids of tenants with agents, for operators.")
    ]
    changes: Changes


@router.get("")
async def overview(request: Request) -> Overview:
    """Return the savings, contents and activity of the server, now and in the last minutes."""
    viewer, watch = _Viewer(request), context_of(request).watch
    with watch.watching(viewer.tenant):
        await watch.next()
        return await viewer.overview()


@router.get("/stream", include_in_schema=False)
async def stream(request: Request) -> Response:
    """Send an event `overview`, then each second an event `changes`, until the server stops."""
    viewer = _Viewer(request)
    context_of(request).watch.require_room(viewer.tenant)
    return event_stream(request, viewer.events())


class _Viewer:
    """The user who sees the figures. `tenant` is None for an operator, and without keys."""

    def __init__(self, request: Request) -> None:
        self._operator = is_operator(request)
        self._context = context_of(request)
        self._has_keys = bool(settings_of(request).api_keys)
        self.tenant = None if self._sees_all else tenant_of(request)
        self._version = 0
        self._sampled = 0.0

    async def events(self) -> AsyncGenerator[bytes, None]:
        watch = self._context.watch
        with watch.watching(self.tenant):
            await watch.next()
            yield sse_event((await self.overview()).model_dump(mode="json"), "overview")
            while await watch.next():
                yield sse_event(self.changes().model_dump(mode="json"), "changes")

    async def overview(self) -> Overview:
        context, agents = self._context, self._context.agents
        ids = await agents.tenants() if self._operator and agents is not None else None
        keyed: Role = "operator" if self._operator else "tenant"
        return Overview(
            started=context.watch.recorder.started,
            version=context.version,
            model=None if context.serving is None else context.serving.model.id,
            role=keyed if self._has_keys else "local",
            tenants=None if ids is None else [one.id for one in ids],
            changes=self.changes(),
        )

    def changes(self) -> Changes:
        watch = self._context.watch
        spans = watch.recorder.spans(self.tenant, self._version)[-MOST_SPANS:]
        self._version = max([self._version, *(one.version for one in spans)])
        live = of_tenant(watch.live, self.tenant, self._context.agents)
        start, today = watch.recorder.savings(self.tenant)
        return Changes(
            now=watch.now(),
            state=self._state(),
            saved=SavedTokens(start=_saved(start), today=_saved(today)),
            requests=[self._live_row(one) for one in live[:MOST_REQUESTS]],
            more_requests=max(0, len(live) - MOST_REQUESTS),
            spans=[self._span(one) for one in spans],
            samples=self._samples(),
            models=self._models(),
            only=self._only(),
            written=self._written(),
        )

    def _state(self) -> str:
        if self._context.serving is None:
            return EngineState.LOADING
        samples = self._context.watch.samples
        return samples[-1].figures.engine.state if samples else EngineState.READY

    def _written(self) -> Written | None:
        samples = self._context.watch.samples
        stores = samples[-1].figures.stores if samples and self._sees_all else ()
        return next((_written(one, one.wear) for one in stores if one.wear is not None), None)

    def _samples(self) -> list[BudgetSample] | None:
        if not self._sees_all:
            return None
        new = [one for one in self._context.watch.samples if one.at > self._sampled]
        self._sampled = max([self._sampled, *(one.at for one in new)])
        return [_budget_sample(one) for one in new]

    @property
    def _sees_all(self) -> bool:
        return self._operator or not self._has_keys

    def _models(self) -> list[ModelRow] | None:
        models, watch = self._context.models, self._context.watch
        if models is None:
            return None
        engines = watch.samples[-1].figures.models if watch.samples else {}
        rows = []
        for status in models.statuses():
            rows.append(_model_row(status))
            if self._sees_all:
                _add_load(rows[-1], status, engines.get(status.served.id), watch.live)
        return rows

    def _only(self) -> ModelRow | None:
        serving, samples = self._context.serving, self._context.watch.samples
        if serving is None or self._context.models is not None:
            return None
        row = _only_row(serving.model)
        if samples and self._sees_all:
            engine = samples[-1].figures.engine
            row.memory_bytes += engine.pool_bytes
            row.pool = engine.pool_used_bytes, engine.pool_bytes
            row.running, row.waiting = engine.running, engine.inbox + engine.waiting
            row.agents = engine.idle + engine.running
        return row

    def _live_row(self, one: LiveRequest) -> LiveRow:
        row = running(one.request, operator=self._operator)
        return LiveRow(**dict(row), tokens_per_second=one.tokens_per_second)

    def _span(self, one: Span) -> TimelineSpan:
        agents = self._context.agents
        return TimelineSpan(
            id=one.uid,
            agent=one.agent,
            model=one.model,
            phases=one.phases,
            end=one.end,
            prompt_tokens=one.prompt_tokens,
            cached_tokens=one.cached_tokens,
            generated_tokens=one.generated_tokens,
            finish=one.finish,
            tenant=_tenant_id(agents, one.tenant) if self._operator else None,
            status=one.status,
            error=one.error,
            route=one.route,
        )


def _tenant_id(agents: AgentsPort | None, tenant: str | None) -> str | None:
    return None if agents is None or tenant is None else agents.id_of(tenant).id


def _facts(served: ServedModel) -> ModelFacts:
    details = served.details
    if details is None:
        return ModelFacts(context_tokens=served.context_tokens)
    return ModelFacts(
        context_tokens=served.context_tokens,
        parameters=details.parameters,
        stored_as=details.stored_as,
        lane=details.lane,
    )


def _only_row(served: ServedModel) -> ModelRow:
    details = served.details
    n_bytes = 0 if details is None else details.memory_bytes
    return ModelRow(
        id=served.id,
        parent=served.parent,
        state="loaded",
        memory_bytes=n_bytes,
        pinned=True,
        expires_in=None,
        weights_bytes=n_bytes,
        facts=_facts(served),
    )


def _model_row(one: ModelStatus) -> ModelRow:
    return ModelRow(
        id=one.served.id,
        parent=one.served.parent,
        facts=_facts(one.served),
        state=one.state,
        memory_bytes=one.n_bytes,
        pinned=one.pinned,
        expires_in=one.expires_in,
    )


def _add_load(
    row: ModelRow, one: ModelStatus, engine: EngineFigures | None, live: Sequence[LiveRequest]
) -> None:
    """Add the load of all tenants to `row`. `engine` is None if the model is not loaded."""
    row.idle_for, row.running, row.waiting = one.idle_for, one.running, one.waiting
    row.tokens_per_second = sum(
        request.tokens_per_second or 0.0 for request in live if request.request.model == row.id
    )
    if engine is not None and one.state == "loaded":
        row.agents = engine.idle + engine.running
        row.weights_bytes = max(0, one.n_bytes - engine.pool_bytes)
        row.pool = engine.pool_used_bytes, engine.pool_bytes


def _saved(one: Savings) -> Saved:
    return Saved(
        since=one.since,
        prompt_tokens=one.prompt_tokens,
        cached_tokens=one.cached_tokens,
        seconds=one.seconds,
    )


def _written(tier: StoreStats, wear: Wear) -> Written:
    return Written(
        failed=tier.counts.get("write_errors", 0),
        today=wear.today,
        total=wear.total,
        since=wear.since,
        days=dict(wear.days),
        max_a_day=wear.max_a_day,
        held_back=wear.holds_back,
        rated_share=wear.share,
    )


def _budget_sample(one: Sample) -> BudgetSample:
    engine = one.figures.engine
    tiers = {str(tier.tier): (tier.n_bytes, tier.max_bytes) for tier in one.figures.stores}
    memory = one.figures.memory
    if memory is not None:
        tiers["process"] = memory.used_bytes, memory.limit_bytes
    return BudgetSample(
        at=one.at,
        tiers={"pool": (engine.pool_used_bytes, engine.pool_bytes), **tiers},
        running=engine.running,
        waiting=engine.inbox + engine.waiting,
        preemptions=engine.preemptions,
        pressure=[] if memory is None else list(memory.steps),
    )

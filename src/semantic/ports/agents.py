"""AgentsPort: lists, shows, forks, pins, deletes and moves the agents of a served model.

Every call is for one tenant; other tenants' agents do not exist for it. An operator names a tenant
by its id. Runs on an event loop and never blocks it; the calls of `ExchangePort` may wait for the
disk and belong on another thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from semantic.domain.match import MatchReport
from semantic.domain.stored import Manifest

Check = Callable[[], None]
"""Called before each piece of work; what it raises ends the work."""


class OutgoingArchive(Protocol):
    """An archive to send."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all pieces."""

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes in order, at most a MiB at once, with one block's body in memory. Raises
        StoreError when a block has changed, as after an eviction."""


class IncomingArchive(Protocol):
    """An incoming archive. The store has nothing of it before `put`."""

    def write(self, data: bytes) -> None:
        """The next bytes. Raises InvalidRequestError at the first that cannot belong to it, and
        CapacityError without room for them."""

    def put(self, tenant: bytes, name: str | None, check: Check) -> Manifest:
        """Verify everything, store it for the tenant with this tag, and save the agent under `name`
        or its own. A failure leaves nothing. Raises InvalidRequestError for an incomplete or
        damaged archive, and CapacityError when the store does not take it."""

    def close(self) -> None:
        """Delete the received bytes."""


class ExchangePort(Protocol):
    """Writes and reads archives of one model's agents. Thread-safe."""

    def export(self, manifest: Manifest, check: Check) -> OutgoingArchive:
        """Return the agent with its stored blocks, after reading each once."""

    def receive(self, accept: Callable[[str], None]) -> IncomingArchive:
        """Begin to receive. Call `accept` with the agent's own name before taking any body, before
        storing them, and before saving the agent; it may raise."""


RequestState = Literal["queued", "prefill", "decode"]
AgentState = Literal["idle", "queued", "prefill", "decode"]

Place = Literal["pool", "memory", "disk", "remote", "missing"]
"""The fastest place that holds a block; "missing" after its eviction."""


@dataclass(frozen=True, slots=True)
class TenantId:
    """A tenant as operators name it: see `tenant_id`."""

    id: str


Tenant: TypeAlias = str | TenantId
"""A tenant's own name, or its id."""


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """An agent after its last turn.

    `tokens` counts its history, `blocks` its blocks by place; `n_bytes` are the bytes of their
    stored bodies, `shared_bytes` those shared with other agents, `pool_bytes` those in the pool.
    `turns` counts its own turns, not those before a fork; `last_used` is the Unix time of its last
    save in seconds, `match` the match report of its last prompt; both are None before the first.
    The client names `session` and `client`. `parent` is the agent that forked or started it,
    `children` are the agents whose parent it is.
    """

    id: str
    model: str
    state: AgentState
    tokens: int
    blocks: Mapping[Place, int]
    n_bytes: int
    shared_bytes: int
    pool_bytes: int
    pinned: bool
    turns: int
    parent: str | None = None
    last_used: float | None = None
    match: MatchReport | None = None
    session: str | None = None
    client: str | None = None
    children: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentBlock:
    """One of an agent's blocks: tokens `start` to `stop`. `hash` is in hexadecimal. `checkpoint`:
    the store has the rest for a window or a state to resume after its last token."""

    start: int
    stop: int
    hash: str
    place: Place
    n_bytes: int
    shared: bool
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class AgentDetail:
    """An agent with its blocks in order, and the match report of its last prompt."""

    summary: AgentSummary
    blocks: tuple[AgentBlock, ...]
    match: MatchReport | None


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """The agents that agree with all members that are not None."""

    prefix: str | None = None
    pinned: bool | None = None
    state: AgentState | None = None
    parent: str | None = None

    def accepts(self, name: str, state: AgentState, parent: str | None, *, pinned: bool) -> bool:
        """Return whether the agent `name` is one of them."""
        return (
            name.startswith(self.prefix or "")
            and self.pinned in {None, pinned}
            and self.state in {None, state}
            and self.parent in {None, parent}
        )


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in the engine for `seconds`, with `preemptions`. It has computed or reused
    `read_tokens` of its prompt, and reused `cached_tokens`. `model` is the id of its model."""

    uid: str
    agent_id: str
    tenant: TenantId
    state: RequestState
    prompt_tokens: int
    read_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: float
    preemptions: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class AgentPage:
    """Some of the agents in a list; `has_more` come after the saved agent `last`."""

    agents: tuple[AgentSummary, ...]
    has_more: bool
    last: str | None = None


@dataclass(frozen=True, slots=True)
class AgentArchive:
    """An agent as a stream of `n_bytes`. `pieces` raises StoreError when a block leaves the store
    before its read. The caller closes it once, also before its end."""

    n_bytes: int
    pieces: AsyncGenerator[bytes, None]
    close: Callable[[], None]


EVERY_AGENT: Final = AgentFilter()


class AgentsPort(Protocol):
    """The agents of the served model. Any number of tasks of one event loop may call it. Methods
    that name an agent raise AgentNotFoundError if the tenant has none of that name, and methods
    that take an id if there is no such tenant."""

    def id_of(self, tenant: str) -> TenantId:
        """The id by which operators name `tenant`. Thread-safe."""

    async def tenants(self) -> Sequence[TenantId]:
        """The tenants with agents, saved or with a request; sorted."""

    async def requests(self, tenant: Tenant | None) -> Sequence[RunningRequest]:
        """The requests that run or wait, in the order of their arrival; None: of all tenants."""

    async def cancel(self, uid: str, tenant: Tenant | None) -> bool:
        """End a request of `tenant` (None: any) at the next step; keep its tokens. False without
        one."""

    async def page(
        self,
        tenant: Tenant,
        limit: int,
        after: str | None = None,
        only: AgentFilter = EVERY_AGENT,
    ) -> AgentPage:
        """Return at most `limit` saved agents after `after`, last saved first. The cost grows with
        the agents that `only` passes over, not with their number. The first page begins with the
        agents in their first turn. Raises AgentNotFoundError if the store lacks `after`."""

    async def show(self, agent_id: str, tenant: Tenant) -> AgentDetail:
        """An agent's details, without texts and tokens."""

    async def fork(self, agent_id: str, new_id: str, tenant: str) -> AgentSummary:
        """Create an agent that shares the cache `agent_id` had after its last turn. Raises
        InvalidRequestError if `new_id` exists, or if no turn has ended yet."""

    async def pin(self, agent_id: str, tenant: Tenant, *, pinned: bool) -> AgentSummary:
        """Exempt its blocks from eviction, or undo that. Raises InvalidRequestError before its
        first save, and PinLimitError for pins beyond the tenant's part of the store."""

    async def forget(self, agent_id: str, tenant: Tenant) -> None:
        """Delete the agent. Raises InvalidRequestError while it has a request."""

    async def export(self, agent_id: str, tenant: Tenant) -> AgentArchive:
        """Return the agent after its last saved turn, with its stored blocks. Raises
        OverloadedError while too many exports run."""

    async def import_(
        self, archive: AsyncIterable[bytes], tenant: Tenant, name: str | None = None
    ) -> AgentSummary:
        """Create the agent of an archive, under `name` or its own: all of it or nothing. Only
        requests that name it find its blocks.

        A tenant id must be one that can send requests. Raises InvalidRequestError for the name of
        another agent, another model's agent and a damaged archive, CapacityError when the store
        does not take it, OverloadedError during another import, and the errors of `archive`.
        """

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
"""Called before each piece of work; an exception that it raises ends the work."""


class OutgoingArchive(Protocol):
    """An archive to be sent."""

    @property
    def n_bytes(self) -> int:
        """Total bytes of all pieces."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the archive's bytes in order, at most 1 MiB at a time, holding one block's body in
        memory. Raises StoreError if a block has changed, as after an eviction."""


class IncomingArchive(Protocol):
    """An archive being received. Nothing of it is in the store before `put`."""

    def write(self, data: bytes) -> None:
        """Take the next bytes. Raises InvalidRequestError at the first byte that cannot belong to
        an archive, and CapacityError if there is no room for the bytes."""

    def put(self, tenant: bytes, name: str | None, check: Check) -> Manifest:
        """Verify the whole archive, store it for the tenant with this tag, and save the agent under
        `name` or its own name. A failure leaves nothing in the store. Raises InvalidRequestError
        for an incomplete or damaged archive, and CapacityError if the store has no room for it."""

    def close(self) -> None:
        """Delete the received bytes."""


class ExchangePort(Protocol):
    """Writes and reads archives of one model's agents. Thread-safe."""

    def export(self, manifest: Manifest, check: Check) -> OutgoingArchive:
        """Read each stored block of an agent once, then return an archive of all."""

    def receive(self, accept: Callable[[str], None]) -> IncomingArchive:
        """Begin to receive an archive. `accept` is called with the agent's own name before any body
        is received, before bodies are stored, and before the agent is saved; it may raise to
        refuse."""


RequestState = Literal["queued", "prefill", "decode"]
AgentState = Literal["idle", "queued", "prefill", "decode"]

Place = Literal["pool", "memory", "disk", "remote", "missing"]
"""The fastest place that holds a block; "missing" once the block is evicted."""


@dataclass(frozen=True, slots=True)
class TenantId:
    """A tenant by the id that operators use: see `tenant_id`."""

    id: str


Tenant: TypeAlias = str | TenantId
"""A tenant, by its own name or by its id."""


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """An agent after its last turn.

    `tokens` counts its history, `blocks` its blocks by place. `n_bytes` is the size of the stored
    bodies, `shared_bytes` the part shared with other agents, `pool_bytes` the part in the pool.
    `turns` counts its own turns, not those before a fork. `last_used` is the Unix time of its last
    save in seconds, `match` the report on its last prompt; both are None before its first turn.
    The client's headers name `session` and `client`. `parent` is the agent that forked or started
    it, `children` are the agents that it forked or started.
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
    """One block of an agent: tokens `start` to `stop`. `hash` is in hexadecimal. `checkpoint`: the
    store also has the state or window edge needed to resume after the block's last token."""

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
    """Matches the agents that agree with every field that is not None."""

    prefix: str | None = None
    pinned: bool | None = None
    state: AgentState | None = None
    parent: str | None = None

    def accepts(self, name: str, state: AgentState, parent: str | None, *, pinned: bool) -> bool:
        """Return whether the agent `name` matches."""
        return (
            name.startswith(self.prefix or "")
            and self.pinned in {None, pinned}
            and self.state in {None, state}
            and self.parent in {None, parent}
        )


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that has been in the engine for `seconds` and was preempted `preemptions` times. It
    has computed or reused `read_tokens` of its prompt; `cached_tokens` of them were reused. `model`
    is the id of its model."""

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
    """One page of a list of agents. `has_more`: more agents follow after `last`, a saved agent."""

    agents: tuple[AgentSummary, ...]
    has_more: bool
    last: str | None = None


@dataclass(frozen=True, slots=True)
class AgentArchive:
    """An agent as a stream of `n_bytes` bytes. `pieces` raises StoreError if a block is gone from
    the store before it is read. The caller calls `close` once, even before the end of the
    stream."""

    n_bytes: int
    pieces: AsyncGenerator[bytes, None]
    close: Callable[[], None]


EVERY_AGENT: Final = AgentFilter()


class AgentsPort(Protocol):
    """The agents of the served model. Any number of tasks of one event loop may call it. Methods
    that name an agent raise AgentNotFoundError if the tenant has no such agent; methods that take a
    tenant's id raise it if there is no such tenant."""

    def id_of(self, tenant: str) -> TenantId:
        """Return the id by which operators name `tenant`. Thread-safe."""

    async def tenants(self) -> Sequence[TenantId]:
        """Return the tenants that have a saved agent or a request, sorted."""

    async def requests(self, tenant: Tenant | None) -> Sequence[RunningRequest]:
        """Return running and waiting requests of `tenant` (None: of all) in order of arrival."""

    async def cancel(self, uid: str, tenant: Tenant | None) -> bool:
        """End a request of `tenant` (None: any tenant) at the next step and keep its tokens.
        Returns False if there is no such request."""

    async def page(
        self, tenant: Tenant, limit: int, after: str | None = None, only: AgentFilter = EVERY_AGENT
    ) -> AgentPage:
        """Return at most `limit` saved agents, last saved first, beginning after the agent `after`.
        The cost grows with the agents that `only` skips, not with all agents. The first page begins
        with the agents in their first turn. Raises AgentNotFoundError if the store lacks
        `after`."""

    async def show(self, agent_id: str, tenant: Tenant) -> AgentDetail:
        """Return an agent's details, without texts and tokens."""

    async def fork(self, agent_id: str, new_id: str, tenant: str) -> AgentSummary:
        """Create an agent that shares the cache that `agent_id` had after its last turn. Raises
        InvalidRequestError if `new_id` exists, or if `agent_id` has not finished a turn yet."""

    async def pin(self, agent_id: str, tenant: Tenant, *, pinned: bool) -> AgentSummary:
        """Exempt the agent's blocks from eviction, or lift the exemption. Raises
        InvalidRequestError if the agent was never saved, and PinLimitError if its pins exceed the
        tenant's part of the store."""

    async def forget(self, agent_id: str, tenant: Tenant) -> None:
        """Delete the agent. Raises InvalidRequestError while the agent has a request."""

    async def export(self, agent_id: str, tenant: Tenant) -> AgentArchive:
        """Return an archive of the agent as of its last saved turn, with its stored blocks. Raises
        OverloadedError if too many exports are running."""

    async def import_(
        self, archive: AsyncIterable[bytes], tenant: Tenant, name: str | None = None
    ) -> AgentSummary:
        """Create the agent in an archive, under `name` or its own name, as a whole or not at all.
        Only requests that name the agent find its blocks.

        A tenant id must be of a tenant that can send requests. Raises InvalidRequestError if the
        name is taken, the agent belongs to another model or the archive is damaged, CapacityError
        if the store has no room, OverloadedError during another import, and the errors of
        `archive`.
        """

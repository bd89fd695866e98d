"""AgentsPort: lists, shows, forks, pins, deletes and moves the agents of a served model.

A call is for one tenant and does not see other tenants' agents. An operator names a tenant by its
id. Calls run on an event loop and never block it; `ExchangePort` may wait for the disk, so another
thread calls it.
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
    """An archive of an agent, ready to send."""

    @property
    def n_bytes(self) -> int:
        """Total bytes of all pieces."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the archive's bytes in order, in pieces of at most 1 MiB; only one block's body is
        in memory at a time. Raises StoreError if a block has changed or is gone, for example
        evicted."""


class IncomingArchive(Protocol):
    """An archive that arrives in pieces. Before `put`, the store has none of its bytes."""

    def write(self, data: bytes) -> None:
        """Take the next bytes. Raises InvalidRequestError at the first byte that cannot belong to
        an archive, and CapacityError if the disk lacks space."""

    def put(self, tenant: bytes, name: str | None, check: Check) -> Manifest:
        """Verify the whole archive, store it for the tenant with the tag `tenant`, and save the
        agent as `name`, by default under the archive's name. A failure leaves nothing in the store.
        Raises InvalidRequestError for an incomplete or damaged archive, and CapacityError if the
        store lacks space."""

    def close(self) -> None:
        """Delete the received bytes."""


class ExchangePort(Protocol):
    """Writes and reads archives of one model's agents. Thread-safe."""

    def export(self, manifest: Manifest, check: Check) -> OutgoingArchive:
        """Check each stored block of the agent of `manifest` by reading it once, then return an
        archive of these blocks."""

    def receive(self, accept: Callable[[str], None]) -> IncomingArchive:
        """Begin to receive an archive. The archive calls `accept` with the agent's name three
        times: before receiving bodies, before storing bodies, and before saving the agent. An
        exception from `accept` refuses the archive."""


RequestState = Literal["queued", "prefill", "decode"]
AgentState = Literal["idle", "queued", "prefill", "decode"]

Place = Literal["pool", "memory", "disk", "remote", "missing"]
"""The fastest place that holds a block; "missing" once the block is evicted."""


@dataclass(frozen=True, slots=True)
class TenantId:
    """A tenant, given by the id that operators use: see `tenant_id`."""

    id: str


Tenant: TypeAlias = str | TenantId
"""A tenant's own name, or its id."""


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """An agent after its last turn. `tokens` is the length of its history, `blocks` the number of
    its blocks in each place. `n_bytes` is the size of its stored bodies, `shared_bytes` the part of
    these bytes that other agents share, `pool_bytes` the size of its cache in the pool. `turns`
    does not count the turns before a fork. `last_used` is the Unix time in seconds of its last
    save, `match` the report on its last prompt; before its first turn, `last_used` and `match` are
    None. `session` and `client` are from the client's headers. `parent` is the agent that started
    this agent, or a fork's source; `children` are the agents with this agent as parent."""

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
    """One block of an agent, with tokens `start` to `stop` of its history. `hash` is in
    hexadecimal. `checkpoint` is true if the store also has the state or window edge that resuming
    after the block needs."""

    start: int
    stop: int
    hash: str
    place: Place
    n_bytes: int
    shared: bool
    checkpoint: bool


@dataclass(frozen=True, slots=True)
class AgentDetail:
    """An agent, its blocks in order, and the match report on its last prompt."""

    summary: AgentSummary
    blocks: tuple[AgentBlock, ...]
    match: MatchReport | None


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """Selects agents: an agent must have the value of each field that is not None."""

    prefix: str | None = None
    pinned: bool | None = None
    state: AgentState | None = None
    parent: str | None = None

    def accepts(self, name: str, state: AgentState, parent: str | None, *, pinned: bool) -> bool:
        """Return whether the filter selects an agent with these values."""
        return (
            name.startswith(self.prefix or "")
            and self.pinned in {None, pinned}
            and self.state in {None, state}
            and self.parent in {None, parent}
        )


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in the engine: `seconds` is its age, `preemptions` counts how often the engine
    preempted it. Its cache contains `read_tokens` of its prompt, computed or reused;
    `cached_tokens` counts the reused tokens. `model` is a model's id."""

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
    """One page of a list of agents. `has_more` is true if more agents follow after `last`, the
    page's last saved agent."""

    agents: tuple[AgentSummary, ...]
    has_more: bool
    last: str | None = None


@dataclass(frozen=True, slots=True)
class AgentArchive:
    """An agent as a stream of `n_bytes` bytes. `pieces` raises StoreError if the store loses a
    block before sending it. The caller calls `close` once, even before the end of the stream."""

    n_bytes: int
    pieces: AsyncGenerator[bytes, None]
    close: Callable[[], None]


EVERY_AGENT: Final = AgentFilter()


class AgentsPort(Protocol):
    """The agents of the served model. Any number of tasks of one event loop may call its methods.
    Methods raise AgentNotFoundError for an unknown agent of the tenant or an unknown tenant id."""

    def id_of(self, tenant: str) -> TenantId:
        """Return the id that operators use for `tenant`. Thread-safe."""

    async def tenants(self) -> Sequence[TenantId]:
        """Return, sorted, the ids of all tenants with a saved agent or a request."""

    async def requests(self, tenant: Tenant | None) -> Sequence[RunningRequest]:
        """Return the requests of `tenant`, or of all tenants if None, in order of arrival."""

    async def cancel(self, uid: str, tenant: Tenant | None) -> bool:
        """End a request of `tenant` (of any tenant if None) at the next step; the cache keeps its
        tokens. Returns False for an unknown request."""

    async def page(
        self, tenant: Tenant, limit: int, after: str | None = None, only: AgentFilter = EVERY_AGENT
    ) -> AgentPage:
        """Return at most `limit` saved agents, last saved first, beginning after the agent `after`.
        The cost grows with the agents that `only` skips, not with all agents. The first page begins
        with agents in their first turn, which the store does not have yet. Raises
        AgentNotFoundError if the store lacks `after`."""

    async def show(self, agent_id: str, tenant: Tenant) -> AgentDetail:
        """Return an agent's details, without texts and tokens."""

    async def fork(self, agent_id: str, new_id: str, tenant: str) -> AgentSummary:
        """Create an agent that shares the cache of `agent_id` after its last turn. Raises
        InvalidRequestError if `new_id` exists, or if `agent_id` has not finished a turn yet."""

    async def pin(self, agent_id: str, tenant: Tenant, *, pinned: bool) -> AgentSummary:
        """Pin the agent, which protects its blocks from eviction, or unpin it. Raises
        InvalidRequestError before the agent's first save, and PinLimitError if the tenant's pins
        would exceed its part of the store."""

    async def forget(self, agent_id: str, tenant: Tenant) -> None:
        """Delete the agent. Raises InvalidRequestError while the agent has a request."""

    async def export(self, agent_id: str, tenant: Tenant) -> AgentArchive:
        """Return an archive of the agent after its last saved turn, with the stored blocks. Raises
        OverloadedError if too many exports are running."""

    async def import_(
        self, archive: AsyncIterable[bytes], tenant: Tenant, name: str | None = None
    ) -> AgentSummary:
        """Create the archive's agent completely or not at all, under `name` or else the name in the
        archive. Only requests that name the agent find its blocks. A tenant given by its id must
        have an API key. Raises InvalidRequestError if the name is taken, the agent belongs to
        another model or the archive is damaged. Also raises CapacityError if the store lacks space,
        OverloadedError during another import, and the errors of `archive`."""

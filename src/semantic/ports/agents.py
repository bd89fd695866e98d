"""The agents of a served model: list, show, fork, pin, delete and move them.

A call sees only the agents of its own tenant. Calls run on an event loop and never block it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from semantic.domain.match import MatchReport
from semantic.domain.request_parts import Difference
from semantic.domain.stored import Manifest, TurnEnd

Check = Callable[[], None]
"""Called before each part of the work. An exception ends the work."""


class OutgoingArchive(Protocol):
    """An archive of an agent that is ready to be sent."""

    @property
    def n_bytes(self) -> int:
        """The total size of all pieces in bytes."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the archive's bytes in order, in pieces of at most 1 MiB. Raises StoreError if the
        store has lost a block."""


class IncomingArchive(Protocol):
    """An archive that arrives in pieces. The store has no part of it before `put`."""

    def write(self, data: bytes) -> None:
        """Add the next bytes to the archive. Raises InvalidRequestError if they cannot belong to an
        archive, and CapacityError if the disk lacks space."""

    def put(self, tenant: bytes, name: str | None, check: Check) -> Manifest:
        """Verify the archive, and store its agent as `name` or by default under its own name. A
        failure stores nothing. Raises InvalidRequestError for a damaged archive, and CapacityError
        if the store lacks space."""

    def close(self) -> None:
        """Delete the received bytes of the archive."""


class ExchangePort(Protocol):
    """Writes and reads archives of the agents of one model. Thread-safe."""

    def export(self, manifest: Manifest, check: Check) -> OutgoingArchive:
        """Read and check each stored block of an agent. Return an archive with these blocks."""

    def receive(self, accept: Callable[[str], None]) -> IncomingArchive:
        """Begin to receive an archive. Calls `accept` with the agent's name before each phase. An
        exception from `accept` refuses the archive."""


RequestState = Literal["queued", "prefill", "decode"]
AgentState = Literal["idle", "queued", "prefill", "decode"]

Place = Literal["pool", "memory", "disk", "remote", "missing"]
"""The fastest place that has a block. It is "missing" after the block's eviction."""


@dataclass(frozen=True, slots=True)
class TenantId:
    """A tenant, by the id that operators use."""

    id: str


Tenant: TypeAlias = str | TenantId
"""The name of a tenant itself, or the tenant's id."""


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """An agent after its last turn. `last_used` and `match` are None before the first turn."""

    id: str
    model: str
    state: AgentState
    tokens: int
    """The number of tokens in its history."""
    blocks: Mapping[Place, int]
    """The number of its blocks in each place."""
    n_bytes: int
    """The size of its stored blocks in bytes."""
    shared_bytes: int
    """The part of `n_bytes` that other agents also use."""
    pool_bytes: int
    """The size of its cache in the pool, in bytes."""
    pinned: bool
    turns: int
    """The number of its turns."""
    parent: str | None = None
    """The agent that started it or from which it was forked."""
    last_used: float | None = None
    """The Unix time of its last save."""
    match: MatchReport | None = None
    """The report on its last prompt."""
    session: str | None = None
    """The session in the client's headers. `client` comes from the headers too."""
    client: str | None = None
    children: tuple[str, ...] = ()
    """The agents that have this agent as parent."""


@dataclass(frozen=True, slots=True)
class AgentBlock:
    """A block of an agent's history, from token `start` to token `stop`."""

    start: int
    stop: int
    hash: str
    """The block's hash in hexadecimal."""
    place: Place
    n_bytes: int
    shared: bool
    checkpoint: bool
    """True if the store has everything needed to resume after the block."""


@dataclass(frozen=True, slots=True)
class AgentDetail:
    """An agent, its blocks in order, and the report on its last prompt."""

    summary: AgentSummary
    blocks: tuple[AgentBlock, ...]
    match: MatchReport | None


@dataclass(frozen=True, slots=True)
class Branch:
    """The moment of an agent's history at which a branch begins: a checkpoint, or else the end of a
    turn, counted from 1. Without both, it is the end of the last turn."""

    agent_id: str
    checkpoint: str | None = None
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """An agent's checkpoints, oldest first, with their own names as ids, and the turns in the
    agent's history: none without the agent itself."""

    saved: tuple[AgentSummary, ...]
    turns: tuple[TurnEnd, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the history of the agent `other` differs from that of `agent`."""

    agent: str
    other: str
    tokens: int
    other_tokens: int
    common_tokens: int
    """The number of tokens that both histories begin with."""
    shared_blocks: int
    """The number of whole blocks that both agents use."""
    expected: int | None
    """The next token of `agent`, and in `got` that of `other`. None at the end of a history."""
    got: int | None
    part: Difference | None = None
    """The first part of the prompts that differs, if the agents' notes tell."""


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """Selects agents by the fields that are not None."""

    prefix: str | None = None
    pinned: bool | None = None
    state: AgentState | None = None
    parent: str | None = None

    def accepts(self, name: str, state: AgentState, parent: str | None, *, pinned: bool) -> bool:
        """Return True if the filter selects an agent with these properties."""
        return (
            name.startswith(self.prefix or "")
            and self.pinned in {None, pinned}
            and self.state in {None, state}
            and self.parent in {None, parent}
        )


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in the engine. `seconds` is its age. `read_tokens` of its prompt are in its cache.
    `cached_tokens` of these came from an earlier cache."""

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
    """One page of a list of agents. `has_more` is true if more agents follow after `last`."""

    agents: tuple[AgentSummary, ...]
    has_more: bool
    last: str | None = None


@dataclass(frozen=True, slots=True)
class AgentArchive:
    """An agent as a stream of `n_bytes` bytes. Iterating `pieces` raises StoreError if the store
    loses a block. The caller must call `close` once."""

    n_bytes: int
    pieces: AsyncGenerator[bytes, None]
    close: Callable[[], None]


EVERY_AGENT: Final = AgentFilter()


class AgentsPort(Protocol):
    """The agents of the served model. Tasks of one event loop may call its methods concurrently.
    Methods raise AgentNotFoundError for an unknown agent or tenant id."""

    def id_of(self, tenant: str) -> TenantId:
        """Return the id that operators use for `tenant`. Thread-safe."""

    async def tenants(self) -> Sequence[TenantId]:
        """Return the sorted ids of all tenants with an agent or a request."""

    async def requests(self, tenant: Tenant | None) -> Sequence[RunningRequest]:
        """Return the requests of a tenant in the order of their arrival. None means all tenants."""

    async def cancel(self, uid: str, tenant: Tenant | None) -> bool:
        """End a request at the next step. The cache keeps the request's tokens. If `tenant` is
        None, any tenant's request may end. Returns False for an unknown request."""

    async def page(
        self, tenant: Tenant, limit: int, after: str | None = None, only: AgentFilter = EVERY_AGENT
    ) -> AgentPage:
        """Return at most `limit` agents that follow the agent `after`, last saved first. The first
        page begins with agents in their first turn. Raises AgentNotFoundError if `after` is not
        stored."""

    async def show(self, agent_id: str, tenant: Tenant) -> AgentDetail:
        """Return an agent's details."""

    async def fork(self, at: Branch, new_ids: Sequence[str], tenant: str) -> Sequence[AgentSummary]:
        """Create agents that share the cache of an agent, and read it into memory. Creates none if
        one of `new_ids` exists, or before the agent's first turn has ended, and raises
        InvalidRequestError."""

    async def checkpoint(self, at: Branch, name: str, tenant: str, *, pinned: bool) -> AgentSummary:
        """Save a part of an agent's history as the checkpoint `name`, and return once the
        checkpoint is durable. Raises InvalidRequestError for an invalid or known name."""

    async def checkpoints(self, agent_id: str, tenant: Tenant) -> Checkpoints:
        """Return the checkpoints of an agent."""

    async def delete_checkpoint(self, agent_id: str, name: str, tenant: Tenant) -> None:
        """Delete a checkpoint. Its agent need not exist."""

    async def restore(self, agent_id: str, name: str, tenant: str) -> AgentSummary:
        """Replace the agent's history by that of its checkpoint `name`. Raises InvalidRequestError
        while the agent has a request."""

    async def family(self, agent_id: str, tenant: Tenant) -> Sequence[tuple[AgentSummary, int]]:
        """Return an agent and its descendants, each after its parent, with the distance from the
        agent."""

    async def compare(self, agent_id: str, other_id: str, tenant: str) -> Comparison:
        """Compare the histories of two agents."""

    async def pin(self, agent_id: str, tenant: Tenant, *, pinned: bool) -> AgentSummary:
        """Exempt the agent's blocks from eviction, or undo this. Raises InvalidRequestError before
        the agent's first save, and PinLimitError if the tenant has pinned too much."""

    async def forget(self, agent_id: str, tenant: Tenant, *, family: bool = False) -> Sequence[str]:
        """Delete the agent with its checkpoints, and with `family` its descendants. Returns the
        names of the deleted agents. Raises InvalidRequestError while one of them has a request."""

    async def export(self, agent_id: str, tenant: Tenant) -> AgentArchive:
        """Return an archive of the agent as of its last saved turn. Raises OverloadedError if too
        many exports are in progress."""

    async def import_(
        self, archive: AsyncIterable[bytes], tenant: Tenant, name: str | None = None
    ) -> AgentSummary:
        """Create the archive's agent as `name`, or by default under its own name. A failure stores
        nothing. Raises InvalidRequestError for a taken name or a damaged archive, CapacityError if
        the store lacks space, and OverloadedError during another import."""

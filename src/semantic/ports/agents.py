"""AgentsPort: lists, shows, forks, pins, deletes and moves the agents of a served model.

Every call is for one tenant; other tenants' agents do not exist for it. An operator names a tenant
by its id. Runs on an event loop and never blocks it; the calls of `ExchangePort`, agents as
archives of bytes, may wait for the disk and belong on another thread.
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
    """An archive to be sent."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all pieces."""
        ...

    def pieces(self) -> Iterator[bytes]:
        """Its bytes in order, at most a MiB at once, and one block's body in memory.

        Raises StoreError when a block is not what it was, as one that was evicted meanwhile.
        """
        ...


class IncomingArchive(Protocol):
    """An archive that is being received. Nothing of it is in the store before `put`."""

    def write(self, data: bytes) -> None:
        """The next bytes. Raises InvalidRequestError at the first that cannot be part of it, and
        CapacityError when there is no room for them."""
        ...

    def put(self, tenant: bytes, name: str | None, check: Check) -> Manifest:
        """Verify everything, store it for the tenant with this tag, and save the agent under
        `name` or its own. What fails leaves nothing.

        Raises InvalidRequestError for an archive that is incomplete or damaged, and CapacityError
        when the store does not take it.
        """
        ...

    def close(self) -> None:
        """Delete what was received."""
        ...


class ExchangePort(Protocol):
    """Writes and reads archives of one model's agents. Thread-safe."""

    def export(self, manifest: Manifest, check: Check) -> OutgoingArchive:
        """The agent with those of its blocks that are stored, all of which it reads once."""
        ...

    def receive(self, accept: Callable[[str], None]) -> IncomingArchive:
        """Begin to receive. `accept` is called with the agent's own name before any of its bodies
        is taken, before they are stored, and before the agent is saved; it may raise."""
        ...


RequestState = Literal["queued", "prefill", "decode"]
AgentState = Literal["idle", "queued", "prefill", "decode"]

Place = Literal["pool", "memory", "disk", "remote", "missing"]
"""The fastest place that holds a block; "missing" if it was evicted."""


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
    stored bodies, `shared_bytes` those shared with other agents, `pool_bytes` its bytes in the
    pool. `turns` counts its own turns, not those before a fork; `last_used` is the Unix time of its
    last save in seconds, None before the first. `match` is the match report of its last prompt,
    None before the first.

    `session` and `client` are named by the client. `parent` is the agent that it was forked from or
    started by, `children` are the agents whose parent it is.
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
    """One of an agent's blocks: tokens `start` to `stop`. `hash` is in hexadecimal.

    `checkpoint`: what a window or a state needs to resume after its last token is stored.
    """

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
    """Which agents a list has: those that agree with all that is not None."""

    prefix: str | None = None
    pinned: bool | None = None
    state: AgentState | None = None
    parent: str | None = None

    def accepts(self, name: str, state: AgentState, parent: str | None, *, pinned: bool) -> bool:
        """Whether the agent `name` is one of them."""
        return (
            name.startswith(self.prefix or "")
            and self.pinned in {None, pinned}
            and self.state in {None, state}
            and self.parent in {None, parent}
        )


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in the engine. Of its prompt `read_tokens` are computed or reused, of which
    `cached_tokens` are reused; it is there for `seconds`, and was preempted `preemptions` times.
    `model` is the id of its model."""

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
    """An agent as a stream of `n_bytes`. `pieces` raises StoreError when a block is evicted before
    it is read. `close` must be called once, whether or not all of it was read."""

    n_bytes: int
    pieces: AsyncGenerator[bytes, None]
    close: Callable[[], None]


EVERY_AGENT: Final = AgentFilter()


class AgentsPort(Protocol):
    """The agents of the served model. Any number of tasks of one event loop may call it.

    Methods that name an agent raise AgentNotFoundError if the tenant has none of that name, and
    methods that take an id if there is no such tenant.
    """

    def id_of(self, tenant: str) -> TenantId:
        """The id by which operators name `tenant`. Thread-safe."""
        ...

    async def tenants(self) -> Sequence[TenantId]:
        """The tenants that have agents, saved or with a request; sorted."""
        ...

    async def requests(self, tenant: Tenant | None) -> Sequence[RunningRequest]:
        """The requests that run or wait, in the order of their arrival; None: of all tenants."""
        ...

    async def cancel(self, uid: str, tenant: Tenant | None) -> bool:
        """End a request of `tenant` (None: of any) at the next step; what it computed is kept.

        False if there is none that runs or waits.
        """
        ...

    async def page(
        self,
        tenant: Tenant,
        limit: int,
        after: str | None = None,
        only: AgentFilter = EVERY_AGENT,
    ) -> AgentPage:
        """At most `limit` saved agents, last saved first: those that come after `after`.

        Its cost does not depend on how many agents there are, but on how many `only` passes over.
        The first page begins with the agents whose first turn has not ended. Raises
        AgentNotFoundError if `after` is not saved.
        """
        ...

    async def show(self, agent_id: str, tenant: Tenant) -> AgentDetail:
        """An agent's details, without texts and tokens."""
        ...

    async def fork(self, agent_id: str, new_id: str, tenant: str) -> AgentSummary:
        """Create an agent that shares the cache `agent_id` had after its last turn.

        Raises InvalidRequestError if `new_id` exists, or if no turn has ended yet.
        """
        ...

    async def pin(self, agent_id: str, tenant: Tenant, *, pinned: bool) -> AgentSummary:
        """Exempt its blocks from eviction, or undo that.

        Raises InvalidRequestError if the agent has not been saved yet, and PinLimitError if the
        tenant would have pinned more than its part of the store.
        """
        ...

    async def forget(self, agent_id: str, tenant: Tenant) -> None:
        """Delete the agent. Raises InvalidRequestError while it has a request."""
        ...

    async def export(self, agent_id: str, tenant: Tenant) -> AgentArchive:
        """The agent after its last turn that is saved, with those of its blocks that are stored.

        Raises OverloadedError while too many are exported.
        """
        ...

    async def import_(
        self, archive: AsyncIterable[bytes], tenant: Tenant, name: str | None = None
    ) -> AgentSummary:
        """Create the agent of an archive, under `name` or its own; unless all of it can be stored
        nothing is. Only requests that name it find its blocks.

        A tenant that is given by id must be one that can send requests. Raises InvalidRequestError
        for a name that is taken, another model's agent and a damaged archive, CapacityError when
        the store does not take it, OverloadedError while another one is imported, and what
        `archive` raises.
        """
        ...

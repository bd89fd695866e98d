"""What a server shows of its agents, and what may be done with them.

Everything is one tenant's: to anybody else an agent does not exist. Runs on an event loop and
never blocks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from semantic.domain.match import MatchReport

AgentState = Literal["idle", "queued", "prefill", "decode"]

Place = Literal["pool", "memory", "disk", "missing"]
"""Where a block is: ready in the pool, or stored; nowhere when it was evicted."""


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """An agent, as after its last turn.

    `tokens` are those of its history, `blocks` counts its blocks by place, `n_bytes` are those of
    their stored bodies and `shared_bytes` how many of these other agents have as well.
    `pool_bytes` is what it holds of the pool now. `turns` counts how often it was saved, and
    `last_used` is when (seconds since 1970; None before the first time). `last_prompt` and
    `last_cached` are tokens of its last turn's prompt: all, and those that were not computed.

    `session` and `client` are whose it is by its client's own account. `parent` is the agent that
    it was forked from or begun by, `children` are those of which it is the parent.
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
    last_prompt: int | None = None
    last_cached: int | None = None
    session: str | None = None
    client: str | None = None
    children: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentBlock:
    """One of an agent's blocks: tokens `start` to `stop`. `hash` is its name in hexadecimal."""

    start: int
    stop: int
    hash: str
    place: Place
    n_bytes: int
    shared: bool


@dataclass(frozen=True, slots=True)
class AgentDetail:
    """An agent with its blocks in order, and what became of its last prompt."""

    summary: AgentSummary
    blocks: tuple[AgentBlock, ...]
    match: MatchReport | None


class AgentsPort(Protocol):
    """The agents of the served model. Methods may be called by any number of tasks of one loop.

    Those that name an agent raise AgentNotFoundError when the tenant has none of that name.
    """

    async def list(self, tenant: str) -> Sequence[AgentSummary]:
        """All agents of `tenant`: first those that have a request, then the last used first."""
        ...

    async def show(self, agent_id: str, tenant: str) -> AgentDetail:
        """All that is known of an agent, its texts and tokens left out."""
        ...

    async def fork(self, agent_id: str, new_id: str, tenant: str) -> AgentSummary:
        """Let a new agent begin with all that `agent_id` had after its last turn.

        Raises InvalidRequestError when `new_id` is taken, or there was no turn yet.
        """
        ...

    async def pin(self, agent_id: str, tenant: str, *, pinned: bool) -> AgentSummary:
        """Keep its blocks whatever else needs the room, or let them be evicted again.

        Raises InvalidRequestError when nothing of it was saved yet.
        """
        ...

    async def forget(self, agent_id: str, tenant: str) -> None:
        """Forget it. Raises InvalidRequestError while it has a request."""
        ...

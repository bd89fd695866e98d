"""Fake of a `RunnableServing`: a `FakeServing` with a life cycle, agents and scripted metrics."""

from __future__ import annotations

from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field

from semantic.domain.errors import AgentNotFoundError
from semantic.domain.stored import StoreStats, Tier, Wear
from semantic.ports.agents import (
    EVERY_AGENT,
    AgentArchive,
    AgentDetail,
    AgentFilter,
    AgentPage,
    AgentsPort,
    AgentSummary,
    Branch,
    Checkpoints,
    Comparison,
    RunningRequest,
    Tenant,
    TenantId,
)
from semantic.ports.embedding import EmbeddingPort
from semantic.ports.models import ModelsPort
from semantic.ports.serving import EngineFigures, EngineState, Figures, MemoryLimit
from tests.support.fake_serving import FakeServing


class NoAgents:
    """Implements `AgentsPort` for a server that has none."""

    def id_of(self, tenant: str) -> TenantId:
        """See `AgentsPort.id_of`."""
        return TenantId(f"id of {tenant}")

    async def tenants(self) -> Sequence[TenantId]:
        """See `AgentsPort.tenants`."""
        return ()

    async def requests(self, tenant: Tenant | None) -> Sequence[RunningRequest]:
        """See `AgentsPort.requests`."""
        del tenant
        return ()

    async def cancel(self, uid: str, tenant: Tenant | None) -> bool:
        """See `AgentsPort.cancel`."""
        del uid, tenant
        return False

    async def page(
        self, tenant: Tenant, limit: int, after: str | None = None, only: AgentFilter = EVERY_AGENT
    ) -> AgentPage:
        """See `AgentsPort.page`."""
        del tenant, limit, after, only
        return AgentPage((), has_more=False)

    async def show(self, agent_id: str, tenant: Tenant) -> AgentDetail:
        """See `AgentsPort.show`."""
        raise _not_found(agent_id, tenant)

    async def fork(self, at: Branch, new_ids: Sequence[str], tenant: str) -> Sequence[AgentSummary]:
        """See `AgentsPort.fork`."""
        del new_ids
        raise _not_found(at.agent_id, tenant)

    async def checkpoint(self, at: Branch, name: str, tenant: str, *, pinned: bool) -> AgentSummary:
        """See `AgentsPort.checkpoint`."""
        del name, pinned
        raise _not_found(at.agent_id, tenant)

    async def checkpoints(self, agent_id: str, tenant: Tenant) -> Checkpoints:
        """See `AgentsPort.checkpoints`."""
        raise _not_found(agent_id, tenant)

    async def delete_checkpoint(self, agent_id: str, name: str, tenant: Tenant) -> None:
        """See `AgentsPort.delete_checkpoint`."""
        del name
        raise _not_found(agent_id, tenant)

    async def restore(self, agent_id: str, name: str, tenant: str) -> AgentSummary:
        """See `AgentsPort.restore`."""
        del name
        raise _not_found(agent_id, tenant)

    async def family(self, agent_id: str, tenant: Tenant) -> Sequence[tuple[AgentSummary, int]]:
        """See `AgentsPort.family`."""
        raise _not_found(agent_id, tenant)

    async def compare(self, agent_id: str, other_id: str, tenant: str) -> Comparison:
        """See `AgentsPort.compare`."""
        del other_id
        raise _not_found(agent_id, tenant)

    async def pin(self, agent_id: str, tenant: Tenant, *, pinned: bool) -> AgentSummary:
        """See `AgentsPort.pin`."""
        del pinned
        raise _not_found(agent_id, tenant)

    async def forget(self, agent_id: str, tenant: Tenant, *, family: bool = False) -> Sequence[str]:
        """See `AgentsPort.forget`."""
        del family
        raise _not_found(agent_id, tenant)

    async def export(self, agent_id: str, tenant: Tenant) -> AgentArchive:
        """See `AgentsPort.export`."""
        raise _not_found(agent_id, tenant)

    async def import_(
        self, archive: AsyncIterable[bytes], tenant: Tenant, name: str | None = None
    ) -> AgentSummary:
        """See `AgentsPort.import_`."""
        del archive
        raise _not_found(name or "", tenant)


def _not_found(agent_id: str, tenant: Tenant) -> AgentNotFoundError:
    return AgentNotFoundError(f"{tenant!r} has no agent {agent_id!r}")


@dataclass(slots=True)
class RunnableFake(FakeServing):
    """Implements `RunnableServing` with fixed figures."""

    state: EngineState = EngineState.READY
    closed: bool = False
    agents: AgentsPort = field(default_factory=NoAgents)
    models: ModelsPort | None = None
    embedding: EmbeddingPort | None = None
    memory: MemoryLimit | None = None

    @property
    def has_failed(self) -> bool:
        """See `RunnableServing.has_failed`."""
        return self.state is EngineState.FAILED

    def figures(self) -> Figures:
        """See `RunnableServing.figures`."""
        wear = Wear("2026-01-02", "2026-01-01", 70, {"2026-01-01": 20, "2026-01-02": 50}, 50, 1000)
        counts = {"hits": 2, "damaged": 1, "dropped": 4}
        stats = StoreStats(Tier.DISK, 3, 300, 1000, counts=counts, wear=wear)
        engine = EngineFigures(self.state, running=1, pool_used_bytes=25, pool_bytes=100)
        return Figures(engine, (stats,))

    async def close(self) -> None:
        """See `RunnableServing.close`."""
        self.closed = True

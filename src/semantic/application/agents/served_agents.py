"""ServedAgents: lists, shows, forks, pins, deletes and moves agents for event loops (`AgentsPort`).

Reads the engine between two of its steps and the store on worker threads. Knows no transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Collection, Sequence
from typing import Final, TypeVar

from semantic.application.agents.agent_transfers import AgentTransfers, EngineCalls
from semantic.application.agents.directory import Activity, AgentDirectory, Owner
from semantic.application.agents.finder import AgentFinder
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.fair_threads import FairThreads
from semantic.domain.stored import Manifest, StoreStats
from semantic.ports.agents import (
    EVERY_AGENT,
    AgentArchive,
    AgentDetail,
    AgentFilter,
    AgentPage,
    AgentSummary,
    RunningRequest,
    Tenant,
    TenantId,
)

_OPERATORS: Final = "operators\0"
"""No tenant has this name."""

T = TypeVar("T")


class ServedAgents:
    """Calls an `AgentDirectory` on the threads that it requires."""

    def __init__(
        self,
        thread: EngineCalls,
        directory: AgentDirectory,
        finder: AgentFinder,
        workers: FairThreads,
        transfers: AgentTransfers,
    ) -> None:
        self._thread = thread
        self._directory = directory
        self._finder = finder
        self._workers = workers
        self._transfers = transfers

    def close(self) -> None:
        """End the exports and imports that run: the store is about to be closed."""
        self._transfers.close()

    def stores(self) -> tuple[StoreStats, ...]:
        """Statistics of each tier of the store. Thread-safe."""
        return tuple(self._directory.stores())

    def id_of(self, tenant: str) -> TenantId:
        return self._directory.id_of(tenant)

    async def tenants(self) -> Sequence[TenantId]:
        owners = await self._call(self._directory.owners)
        return sorted(owners, key=lambda one: one.id)

    async def requests(self, tenant: Tenant | None) -> Sequence[RunningRequest]:
        directory = self._directory
        return await self._call(
            lambda engine: directory.requests(
                engine, None if tenant is None else directory.owner(engine, tenant)
            )
        )

    async def cancel(self, uid: str, tenant: Tenant | None) -> bool:
        directory = self._directory
        return await self._call(
            lambda engine: directory.cancel(
                engine, uid, None if tenant is None else directory.owner(engine, tenant)
            )
        )

    async def page(
        self,
        tenant: Tenant,
        limit: int,
        after: str | None = None,
        only: AgentFilter = EVERY_AGENT,
    ) -> AgentPage:
        owner = await self._owner(tenant)
        asking = {} if only.state is None else await self._activity(owner, ())
        saved, has_more, last = await self._work(
            tenant,
            lambda: self._directory.saved(owner, limit, after, only, asking),
            is_short=False,
        )
        seen = await self._activity(owner, [one.agent_id for one in saved])
        is_first = after is None
        agents = await self._work(
            tenant, lambda: self._directory.page(owner, saved, seen, is_first=is_first, only=only)
        )
        return AgentPage(tuple(agents), has_more, last)

    async def show(self, agent_id: str, tenant: Tenant) -> AgentDetail:
        owner = await self._owner(tenant)
        seen = await self._activity(owner, [agent_id])
        return await self._work(tenant, lambda: self._directory.show(agent_id, owner, seen))

    async def saved(self, agent_id: str, tenant: str) -> Manifest:
        """The agent after its last turn. Raises AgentNotFoundError if it is not saved."""
        return await self._work(tenant, lambda: self._directory.saved_agent(agent_id, tenant))

    async def fork(self, agent_id: str, new_id: str, tenant: str) -> AgentSummary:
        await self._call(lambda engine: self._directory.fork(engine, agent_id, new_id, tenant))
        return (await self.show(new_id, tenant)).summary

    async def pin(self, agent_id: str, tenant: Tenant, *, pinned: bool) -> AgentSummary:
        directory = self._directory
        if pinned:
            owner = await self._owner(tenant)
            await self._work(tenant, lambda: directory.require_pinnable(agent_id, owner))
        await self._call(
            lambda engine: directory.pin(
                engine, agent_id, directory.owner(engine, tenant), pinned=pinned
            )
        )
        return (await self.show(agent_id, tenant)).summary

    async def forget(self, agent_id: str, tenant: Tenant) -> None:
        def forget(engine: BlockPoolBatchEngine) -> Owner:
            owner = self._directory.owner(engine, tenant)
            self._directory.forget(engine, agent_id, owner)
            return owner

        self._finder.forget(agent_id, await self._call(forget))

    async def export(self, agent_id: str, tenant: Tenant) -> AgentArchive:
        return await self._transfers.export(agent_id, await self._owner(tenant))

    async def import_(
        self, archive: AsyncIterable[bytes], tenant: Tenant, name: str | None = None
    ) -> AgentSummary:
        return (
            await self.show(await self._transfers.import_(archive, tenant, name), tenant)
        ).summary

    async def _owner(self, tenant: Tenant) -> Owner:
        if isinstance(tenant, str):
            return tenant
        return await self._call(lambda engine: self._directory.owner(engine, tenant))

    async def _activity(
        self, tenant: Owner, names: Collection[str] | None = None
    ) -> dict[str, Activity]:
        return await self._call(lambda engine: self._directory.activity(engine, tenant, names))

    async def _call(self, function: Callable[[BlockPoolBatchEngine], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    async def _work(self, tenant: Tenant, function: Callable[[], T], *, is_short: bool = True) -> T:
        """What `function` returns, on the time of a tenant or, for others' agents, of operators."""
        name = tenant if isinstance(tenant, str) else _OPERATORS
        return await self._workers.run(name, function, is_short=is_short)

"""ServedAgents: lists, shows, forks, pins and deletes agents for event loops (`AgentsPort`).

Reads the engine between two of its steps and the store on worker threads. Knows no transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol, TypeVar

from semantic.application.agents.directory import Activity, AgentDirectory
from semantic.application.agents.finder import AgentFinder
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.calls import guarded
from semantic.domain.stored import StoreStats
from semantic.ports.agents import AgentDetail, AgentPage, AgentSummary

T = TypeVar("T")


class EngineCalls(Protocol):
    """Calls functions with an engine between two of its steps."""

    def call(self, function: Callable[[BlockPoolBatchEngine], T]) -> Future[T]:
        """Call `function` on the engine's thread; the future has its result or exception."""
        ...


class ServedAgents:
    """Calls an `AgentDirectory` on the threads that it requires."""

    def __init__(
        self,
        thread: EngineCalls,
        directory: AgentDirectory,
        finder: AgentFinder,
        workers: Executor,
    ) -> None:
        self._thread = thread
        self._directory = directory
        self._finder = finder
        self._workers = workers

    def stores(self) -> tuple[StoreStats, ...]:
        """Statistics of each tier of the store. Thread-safe."""
        return tuple(self._directory.stores())

    async def list(self, tenant: str) -> Sequence[AgentSummary]:
        """See `AgentsPort.list`."""
        seen = await self._activity(tenant)
        return await self._work(lambda: self._directory.list(tenant, seen))

    async def page(self, tenant: str, limit: int, after: str | None = None) -> AgentPage:
        """See `AgentsPort.page`."""
        saved, has_more = await self._work(lambda: self._directory.saved(tenant, limit, after))
        seen = await self._activity(tenant, [one.agent_id for one in saved])
        is_first = after is None
        agents = await self._work(
            lambda: self._directory.page(tenant, saved, seen, is_first=is_first)
        )
        return AgentPage(tuple(agents), has_more)

    async def show(self, agent_id: str, tenant: str) -> AgentDetail:
        """See `AgentsPort.show`."""
        seen = await self._activity(tenant, [agent_id])
        return await self._work(lambda: self._directory.show(agent_id, tenant, seen))

    async def fork(self, agent_id: str, new_id: str, tenant: str) -> AgentSummary:
        """See `AgentsPort.fork`."""
        await self._call(lambda engine: self._directory.fork(engine, agent_id, new_id, tenant))
        return (await self.show(new_id, tenant)).summary

    async def pin(self, agent_id: str, tenant: str, *, pinned: bool) -> AgentSummary:
        """See `AgentsPort.pin`."""
        await self._call(
            lambda engine: self._directory.pin(engine, agent_id, tenant, pinned=pinned)
        )
        return (await self.show(agent_id, tenant)).summary

    async def forget(self, agent_id: str, tenant: str) -> None:
        """See `AgentsPort.forget`."""
        await self._call(lambda engine: self._directory.forget(engine, agent_id, tenant))
        self._finder.forget(agent_id, tenant)

    async def _activity(
        self, tenant: str, names: Collection[str] | None = None
    ) -> dict[str, Activity]:
        return await self._call(lambda engine: self._directory.activity(engine, tenant, names))

    async def _call(self, function: Callable[[BlockPoolBatchEngine], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    async def _work(self, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, guarded, function)

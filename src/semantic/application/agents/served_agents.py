"""ServedAgents: the agents of one server, for callers on event loops (`AgentsPort`).

AgentTransfers exports agents as archives, and imports them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from semantic.application.agents.branches import compare, require_name
from semantic.application.agents.directory import Activity, AgentDirectory, Owner
from semantic.application.agents.finder import AgentFinder
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.fair_threads import FairThreads, guarded
from semantic.domain.errors import (
    AgentNotFoundError,
    CapacityError,
    InvalidRequestError,
    OverloadedError,
    StoreError,
)
from semantic.domain.stored import Manifest, StoreStats
from semantic.ports.agents import (
    EVERY_AGENT,
    AgentArchive,
    AgentDetail,
    AgentFilter,
    AgentPage,
    AgentSummary,
    Branch,
    Checkpoints,
    Comparison,
    ExchangePort,
    IncomingArchive,
    OutgoingArchive,
    RunningRequest,
    Tenant,
    TenantId,
)

T = TypeVar("T")

_THREADS: Final = 2
"""The number of threads: one for the import, one for exports."""
_MOST_EXPORTS: Final = 4
_RETRY_SECONDS: Final = 5
_BATCH_BYTES: Final = 1 << 20
"""The number of received bytes to collect before each call of a thread."""


class EngineCalls(Protocol):
    """Calls functions with an engine, between two steps of the engine."""

    def call(self, function: Callable[[BlockPoolBatchEngine], T]) -> Future[T]:
        """Call `function` on the engine's thread; return the future of its result or exception."""


class AgentTransfers:
    """Exports and imports the agents of one server. Only one import runs at a time."""

    def __init__(
        self,
        thread: EngineCalls,
        directory: AgentDirectory,
        exchange: ExchangePort,
        tenants: Mapping[TenantId, str],
    ) -> None:
        """`tenants` maps the ids of tenants that have API keys to their names."""
        self._thread = thread
        self._directory = directory
        self._exchange = exchange
        self._tenants = tenants
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="exchange")
        self._n_exports = 0
        self._is_importing = False
        self._is_closed = False

    def close(self) -> None:
        """Cancel all transfers, and wait until no transfer uses the store."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)

    async def export(self, agent_id: str, tenant: Owner) -> AgentArchive:
        if self._n_exports >= _MOST_EXPORTS:
            raise _busy(f"{_MOST_EXPORTS} exports are already running")
        stopped = threading.Event()

        def begin() -> OutgoingArchive:
            manifest = self._directory.saved_agent(agent_id, tenant)
            return self._exchange.export(manifest, lambda: self._require_open(stopped))

        self._n_exports += 1
        with ExitStack() as undo:
            undo.callback(self._end_export)
            archive = await self._work(begin, stopped)
            undo.pop_all()
        return AgentArchive(archive.n_bytes, self._pieces(archive), self._end_export)

    async def import_(self, pieces: AsyncIterable[bytes], tenant: Tenant, name: str | None) -> str:
        """See `AgentsPort.import_`."""
        owner = self._receiving(tenant)
        if self._is_importing:
            raise _busy("an import is already running")
        self._is_importing = True
        try:
            return await self._import(pieces, owner, name)
        except StoreError as error:
            raise CapacityError(str(error)) from error
        finally:
            self._is_importing = False

    # Inside

    def _receiving(self, tenant: Tenant) -> str:
        """Return the tenant's name. Raises AgentNotFoundError if the tenant has no API key."""
        if isinstance(tenant, str):
            return tenant
        if tenant not in self._tenants:
            raise AgentNotFoundError(
                f"there is no tenant {tenant.id!r:.80} with a key: the server logs all tenants "
                "with keys when it starts"
            )
        return self._tenants[tenant]

    async def _import(self, pieces: AsyncIterable[bytes], owner: str, name: str | None) -> str:
        stopped = threading.Event()

        def require_free(own: str) -> None:
            self._require_free(own if name is None else name, owner)

        def put() -> str:
            tag = self._directory.scope(owner).tenant
            saved = incoming.put(tag, name, lambda: self._require_open(stopped))
            return saved.agent_id

        incoming: IncomingArchive = self._exchange.receive(require_free)
        try:
            async for batch in _batches(pieces):
                await self._work(partial(incoming.write, batch), stopped)
            return await self._work(put, stopped)
        finally:
            incoming.close()

    def _require_free(self, name: str, owner: str) -> None:
        require_name(name)
        directory = self._directory
        seen = self._thread.call(lambda engine: directory.activity(engine, owner, (name,))).result()
        if name in seen or directory.is_saved(name, owner):
            raise InvalidRequestError(
                f"agent {name!r} already exists: choose another name with name= in the query"
            )

    def _require_open(self, stopped: threading.Event) -> None:
        if stopped.is_set() or self._is_closed:
            raise _busy("the server is stopping")

    async def _pieces(self, archive: OutgoingArchive) -> AsyncGenerator[bytes, None]:
        stopped = threading.Event()
        pieces = archive.pieces()
        while (piece := await self._work(lambda: next(pieces, None), stopped)) is not None:
            yield piece

    def _end_export(self) -> None:
        self._n_exports -= 1

    async def _work(self, function: Callable[[], T], stopped: threading.Event) -> T:
        """Run `function` on a thread. If the task is cancelled, set `stopped` and wait for the
        thread."""
        if self._is_closed:
            raise _busy("the server is stopping")
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._threads, guarded, function)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.wait((working,))
            raise


def _busy(reason: str) -> OverloadedError:
    return OverloadedError(f"{reason}: retry later", retry_after=_RETRY_SECONDS)


async def _batches(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    batch = bytearray()
    async for piece in pieces:
        batch += piece
        if len(batch) >= _BATCH_BYTES:
            yield bytes(batch)
            batch.clear()
    yield bytes(batch)


_OPERATORS: Final = "operators\0"
"""The name for work of operators; no tenant can have it."""


@dataclass(frozen=True, slots=True)
class ServedAgents:
    """Calls each method of an `AgentDirectory` on the right thread."""

    _thread: EngineCalls
    _directory: AgentDirectory
    _finder: AgentFinder
    _workers: FairThreads
    _transfers: AgentTransfers

    def close(self) -> None:
        """End running exports and imports."""
        self._transfers.close()

    def stores(self) -> tuple[StoreStats, ...]:
        """Return the statistics of each tier of the store. Thread-safe."""
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
        self, tenant: Tenant, limit: int, after: str | None = None, only: AgentFilter = EVERY_AGENT
    ) -> AgentPage:
        owner = await self._owner(tenant)
        asking = {} if only.state is None else await self._activity(owner, ())
        saved, has_more, last = await self._work(
            tenant, lambda: self._directory.saved(owner, limit, after, only, asking), is_short=False
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
        """Return the manifest of a saved agent's last turn, or raise AgentNotFoundError."""
        return await self._work(tenant, lambda: self._directory.saved_agent(agent_id, tenant))

    async def fork(self, at: Branch, new_ids: Sequence[str], tenant: str) -> Sequence[AgentSummary]:
        await self._call(lambda engine: self._directory.fork(engine, at, new_ids, tenant))
        seen = await self._activity(tenant, new_ids)
        return await self._work(
            tenant, lambda: self._directory.summaries(new_ids, tenant, seen), is_short=False
        )

    async def checkpoint(self, at: Branch, name: str, tenant: str, *, pinned: bool) -> AgentSummary:
        save = partial(self._directory.checkpoint, at, name, tenant, time.time(), pinned=pinned)
        return await self._work(tenant, save, is_short=False)

    async def checkpoints(self, agent_id: str, tenant: Tenant) -> Checkpoints:
        owner = await self._owner(tenant)
        seen = await self._activity(owner, [agent_id])
        return await self._work(
            tenant, lambda: self._directory.checkpoints(agent_id, owner, seen), is_short=False
        )

    async def delete_checkpoint(self, agent_id: str, name: str, tenant: Tenant) -> None:
        owner = await self._owner(tenant)
        await self._work(tenant, lambda: self._directory.delete_checkpoint(agent_id, name, owner))

    async def restore(self, agent_id: str, name: str, tenant: str) -> AgentSummary:
        await self._call(lambda engine: self._directory.restore(engine, agent_id, name, tenant))
        self._finder.forget(agent_id, tenant)
        self._finder.restore([await self.saved(agent_id, tenant)])
        return (await self.show(agent_id, tenant)).summary

    async def family(self, agent_id: str, tenant: Tenant) -> Sequence[tuple[AgentSummary, int]]:
        owner = await self._owner(tenant)
        seen = await self._activity(owner)
        return await self._work(
            tenant, lambda: self._directory.family(agent_id, owner, seen), is_short=False
        )

    async def compare(self, agent_id: str, other_id: str, tenant: str) -> Comparison:
        one, other = await self.saved(agent_id, tenant), await self.saved(other_id, tenant)
        return await self._work(tenant, lambda: compare(one, other), is_short=False)

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

    async def forget(self, agent_id: str, tenant: Tenant, *, family: bool = False) -> Sequence[str]:
        owner = await self._owner(tenant)
        forget = partial(
            self._directory.forget, agent_id=agent_id, tenant=owner, with_family=family
        )
        names = await self._call(forget)
        for name in names:
            self._finder.forget(name, owner)
        return names

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
        """Run `function` on a worker thread."""
        name = tenant if isinstance(tenant, str) else _OPERATORS
        return await self._workers.run(name, function, is_short=is_short)

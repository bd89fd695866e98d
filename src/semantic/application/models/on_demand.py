"""A model that loads on demand, behind the same ports as a loaded model."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from semantic.application.models.model_manager import ModelManager, RunnableServing
from semantic.domain.answer import AnswerEvent
from semantic.domain.errors import AgentNotFoundError
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
from semantic.ports.models import ModelsPort, ModelStatus, OnArrived
from semantic.ports.serving import Ask, Figures, MemoryLimit, Prompt, ServedModel, ServingPort

T = TypeVar("T")


class OnDemandServing:
    """Implements `ServingPort` for one model of a manager."""

    def __init__(self, manager: ModelManager, name: str) -> None:
        self._manager = manager
        self._name = name
        self._answers = 0

    @property
    def model(self) -> ServedModel:
        return self._manager.served(self._name)

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        async with self._manager.use(self._name) as unit, aclosing(unit.answer(ask)) as events:
            self._answers += 1
            try:
                async for event in events:
                    yield event
            finally:
                self._answers -= 1

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        async with self._used() as unit:
            return await unit.tokenize(prompt, add_special_tokens=add_special_tokens, tenant=tenant)

    async def detokenize(self, tokens: Sequence[int], tenant: str = "") -> str:
        async with self._used() as unit:
            return await unit.detokenize(tokens, tenant)

    async def token_texts(self, tokens: Sequence[int], tenant: str = "") -> tuple[str, ...]:
        async with self._used() as unit:
            return await unit.token_texts(tokens, tenant)

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[RunnableServing]:
        # The loaded model at once: a change of models would wait for the answer.
        if not self._answers:
            async with self._manager.use(self._name) as unit:
                yield unit
            return
        release = self._manager.hold(self._name)
        try:
            yield self._manager.loaded()[self._name]
        finally:
            release()


class OnDemandAgents:
    """Implements `AgentsPort` for one model. `requests` and `tenants` cover all loaded models."""

    def __init__(self, manager: ModelManager, name: str, id_of: Callable[[str], TenantId]) -> None:
        self._manager = manager
        self._name = name
        self._id_of = id_of

    def id_of(self, tenant: str) -> TenantId:
        return self._id_of(tenant)

    async def tenants(self) -> Sequence[TenantId]:
        found = [await one.tenants() for one in self._loaded()]
        return sorted({one for some in found for one in some}, key=lambda one: one.id)

    async def requests(self, tenant: Tenant | None) -> Sequence[RunningRequest]:
        found = [await one.requests(tenant) for one in self._loaded()]
        return sorted((one for some in found for one in some), key=lambda one: -one.seconds)

    async def cancel(self, uid: str, tenant: Tenant | None) -> bool:
        return any([await one.cancel(uid, tenant) for one in self._loaded()])

    async def page(
        self, tenant: Tenant, limit: int, after: str | None = None, only: AgentFilter = EVERY_AGENT
    ) -> AgentPage:
        nothing = AgentPage((), has_more=False)
        return await self._of_tenant(
            tenant, lambda agents: agents.page(tenant, limit, after, only), nothing
        )

    async def show(self, agent_id: str, tenant: Tenant) -> AgentDetail:
        return await self._call(lambda agents: agents.show(agent_id, tenant))

    async def fork(self, at: Branch, new_ids: Sequence[str], tenant: str) -> Sequence[AgentSummary]:
        return await self._call(lambda agents: agents.fork(at, new_ids, tenant))

    async def checkpoint(self, at: Branch, name: str, tenant: str, *, pinned: bool) -> AgentSummary:
        return await self._call(lambda agents: agents.checkpoint(at, name, tenant, pinned=pinned))

    async def checkpoints(self, agent_id: str, tenant: Tenant) -> Checkpoints:
        return await self._call(lambda agents: agents.checkpoints(agent_id, tenant))

    async def delete_checkpoint(self, agent_id: str, name: str, tenant: Tenant) -> None:
        await self._call(lambda agents: agents.delete_checkpoint(agent_id, name, tenant))

    async def restore(self, agent_id: str, name: str, tenant: str) -> AgentSummary:
        return await self._call(lambda agents: agents.restore(agent_id, name, tenant))

    async def family(self, agent_id: str, tenant: Tenant) -> Sequence[tuple[AgentSummary, int]]:
        return await self._call(lambda agents: agents.family(agent_id, tenant))

    async def compare(self, agent_id: str, other_id: str, tenant: str) -> Comparison:
        return await self._call(lambda agents: agents.compare(agent_id, other_id, tenant))

    async def pin(self, agent_id: str, tenant: Tenant, *, pinned: bool) -> AgentSummary:
        return await self._call(lambda agents: agents.pin(agent_id, tenant, pinned=pinned))

    async def forget(self, agent_id: str, tenant: Tenant, *, family: bool = False) -> Sequence[str]:
        return await self._call(lambda agents: agents.forget(agent_id, tenant, family=family))

    async def export(self, agent_id: str, tenant: Tenant) -> AgentArchive:
        """Export an agent. The model stays in use until the archive closes."""
        async with self._manager.use(self._name) as unit:
            archive = await unit.agents.export(agent_id, tenant)
            release = self._manager.hold(self._name)

        def close() -> None:
            archive.close()
            release()

        return AgentArchive(archive.n_bytes, archive.pieces, close)

    async def import_(
        self, archive: AsyncIterable[bytes], tenant: Tenant, name: str | None = None
    ) -> AgentSummary:
        return await self._call(lambda agents: agents.import_(archive, tenant, name))

    def _loaded(self) -> Sequence[AgentsPort]:
        return [unit.agents for unit in self._manager.loaded().values()]

    async def _of_tenant(
        self, tenant: Tenant, function: Callable[[AgentsPort], Awaitable[T]], nothing: T
    ) -> T:
        """Return the result of `function`; `nothing` if the tenant's agents are of other models."""
        try:
            return await self._call(function)
        except AgentNotFoundError:
            if tenant in await self.tenants():
                return nothing
            raise

    async def _call(self, function: Callable[[AgentsPort], Awaitable[T]]) -> T:
        async with self._manager.use(self._name) as unit:
            return await function(unit.agents)


class ManagedModels(OnDemandServing):
    """Implements `RunnableServing` for the first model of a manager, and `ModelsPort` for all."""

    def __init__(self, manager: ModelManager, id_of: Callable[[str], TenantId]) -> None:
        super().__init__(manager, manager.id_of(None))
        self._id_of = id_of
        self.agents: AgentsPort = self.agents_of()
        self.embedding: EmbeddingPort | None = None
        self.memory: MemoryLimit | None = None

    @property
    def models(self) -> ModelsPort:
        return self

    @property
    def loads(self) -> int:
        return self._manager.loads

    @property
    def has_failed(self) -> bool:
        """Always False: the manager reloads a failed model."""
        return False

    def figures(self) -> Figures:
        return self._manager.figures()

    async def close(self) -> None:
        await self._manager.close()

    def serving_of(self, name: str | None = None) -> ServingPort:
        return OnDemandServing(self._manager, self._manager.id_of(name))

    def agents_of(self, name: str | None = None) -> AgentsPort:
        return OnDemandAgents(self._manager, self._manager.id_of(name), self._id_of)

    def statuses(self) -> Sequence[ModelStatus]:
        return self._manager.statuses()

    def status(self, name: str) -> ModelStatus:
        return self._manager.status(self._manager.id_of(name))

    def keep(self, name: str, seconds: float | None) -> None:
        self._manager.keep(name, seconds)

    async def load(self, name: str) -> ModelStatus:
        return await self._manager.load(name)

    async def unload(self, name: str) -> ModelStatus:
        return await self._manager.unload(name)

    async def fetch(self, hub_id: str, on_arrived: OnArrived) -> ModelStatus:
        return await self._manager.fetch(hub_id, on_arrived)

"""`ServedAgents` over an engine on fakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from semantic.adapters.exchange.archive import AgentArchives
from semantic.adapters.stores.memory import MemoryStore
from semantic.application.agents.directory import AgentDirectory
from semantic.application.agents.finder import AgentFinder
from semantic.application.agents.served_agents import AgentTransfers, ServedAgents
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.fair_threads import FairThreads, settle
from semantic.domain.block_hash import namespace_of, tenant_tag
from semantic.domain.errors import SemanticError
from semantic.domain.value_objects import LayerSpec, ModelCacheSpec
from semantic.ports.agents import TenantId
from semantic.ports.store import StorePort
from tests.support.fake_backend import FULL
from tests.unit.application.world import World

T = TypeVar("T")

MODEL = "/folders/models/tiny"
"""What the engine's model is said to be loaded from."""


def path(agent: str, action: str = "") -> str:
    """The path of an agent's route."""
    return f"/v1/agents/{quote(agent, safe='')}{action}"


class AtOnce(FairThreads):
    """Runs what it is given at once: steps have an order, and can be counted."""

    def __init__(self) -> None:
        """There are no threads."""

    def submit(self, tenant: str, function: Callable[[], T], *, is_short: bool) -> Future[T]:
        del tenant, is_short
        result: Future[T] = Future()
        settle(result, function)
        return result


class AgentsWorld:
    """An engine that steps only on request, its store, and its `ServedAgents`."""

    def __init__(
        self,
        store: StorePort | None = None,
        *,
        total_blocks: int = 100,
        layers: tuple[LayerSpec, ...] = (FULL, FULL),
        durable: StorePort | None = None,
        tenants: Mapping[TenantId, str] | None = None,
    ) -> None:
        """`tenants` are those with keys, for imports."""
        self.store = store or MemoryStore(64 << 20)
        self.world = World(ModelCacheSpec(layers), total_blocks, prefix_store=self.store)
        self.engine = self.world.engine
        backend = self.world.backend
        self.namespace = namespace_of(backend.model_id, backend.layout().name)
        directory: AgentDirectory = AgentDirectory(
            self.store, durable or self.store, self.namespace, "tiny"
        )
        finder = AgentFinder(partial(tenant_tag, self.store.secret))
        archives = AgentArchives(
            self.store,
            self.store,
            self.namespace,
            backend.layout(),
            None,
            model=MODEL,
            model_name="tiny",
        )
        self.transfers = AgentTransfers(self, directory, archives, tenants or {})
        self.agents = ServedAgents(self, directory, finder, AtOnce(), self.transfers)

    def call(self, function: Callable[[BlockPoolBatchEngine], T]) -> Future[T]:
        """As `EngineThread.call`, but at once on the calling thread."""
        result: Future[T] = Future()
        try:
            result.set_result(function(self.engine))
        except SemanticError as error:
            result.set_exception(error)
        return result

    def submit(
        self, agent: str, n: int, *, tenant: str = "", first: int = 0, note: str = ""
    ) -> str:
        """Submit a prompt of `n` tokens; prompts with the same `first` share their prefix."""
        tokens = [(first + i * i) % 40 for i in range(n)]
        return self.engine.submit(agent, tokens, max_tokens=4, tenant=tenant, note=note)

    def turn(self, agent: str, n: int, *, tenant: str = "", first: int = 0, note: str = "") -> None:
        """Submit such a prompt and run it to its end."""
        self.submit(agent, n, tenant=tenant, first=first, note=note)
        self.world.finish()

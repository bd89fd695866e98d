"""Fake of the `ModelLoader`: models that answer at once, whose loads end when a test says so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from semantic.application.models.model_manager import ModelManager
from semantic.application.models.on_demand import ManagedModels
from semantic.application.models.residency import Patience, Residency, Weights
from semantic.domain.answer import AnswerEvent
from semantic.domain.errors import WeightsTooLargeError
from semantic.domain.stored import StoreStats
from semantic.ports.agents import AgentsPort, TenantId
from semantic.ports.models import Arrived, OnArrived
from semantic.ports.serving import Ask, ServedModel
from tests.support.runnable_serving import NoAgents, RunnableFake


@dataclass(slots=True)
class FakeUnit(RunnableFake):
    """A loaded model that notes when it is used after it was closed."""

    served: ServedModel | None = None
    held: asyncio.Event | None = None
    """Answers wait for it before their first event."""

    @property
    def model(self) -> ServedModel:
        """See `ServingPort.model`."""
        assert self.served is not None
        return self.served

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        assert not self.closed
        if self.held is not None:
            await self.held.wait()
        async for event in RunnableFake.answer(self, ask):
            assert not self.closed, "closed under a request"
            yield event


@dataclass
class FakeLoader:
    """Implements `ModelLoader`. Loads wait for `open` if it is not set."""

    models: dict[str, ServedModel] = field(default_factory=dict)
    loads: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)
    failures: dict[str, Exception] = field(default_factory=dict)
    agents: dict[str, AgentsPort] = field(default_factory=dict)
    """Of models that have any."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event | None = None
    cancelled: int = 0
    estimates: dict[str, int] = field(default_factory=dict)
    """What the files of a model look like; one byte each."""
    sizes: dict[str, int] = field(default_factory=dict)
    """What a model takes, where that is something else."""

    async def size(self, name: str) -> tuple[int, Weights]:
        """See `ModelLoader.size`."""
        return 0, Weights(name, self.estimates.get(name, 1))

    async def load(self, name: str, room: int) -> tuple[FakeUnit, Weights]:
        """See `ModelLoader.load`."""
        self.loads[name] += 1
        self.events.append(f"load {name}")
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if name in self.failures:
            raise self.failures[name]
        self.estimates[name] = n_bytes = self.sizes.get(name, self.estimates.get(name, 1))
        if n_bytes > room:
            raise WeightsTooLargeError(f"{n_bytes} of {room}", n_bytes=n_bytes)
        agents = self.agents.get(name) or NoAgents()
        unit = FakeUnit(served=self.models[name], held=self.held, agents=agents)
        return unit, Weights(name, n_bytes)

    async def fetch(self, hub_id: str, on_arrived: OnArrived) -> ServedModel:
        """See `ModelLoader.fetch`."""
        self.events.append(f"fetch {hub_id}")
        on_arrived(Arrived("c" * 40, 3, 9))
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if hub_id in self.failures:
            raise self.failures[hub_id]
        on_arrived(Arrived("c" * 40, 9, 9))
        self.models[hub_id] = ServedModel((hub_id,), 512, 0x110000, 1)
        return self.models[hub_id]

    async def free(self) -> None:
        """See `ModelLoader.free`."""
        self.events.append("free")

    def stores(self) -> tuple[StoreStats, ...]:
        """See `ModelLoader.stores`."""
        return ()

    async def close(self) -> None:
        """See `ModelLoader.close`."""
        self.events.append("close")


def fake_models(
    loader: FakeLoader,
    *names: str,
    capacity: int = 1,
    ttl: float | None = None,
    max_waiting: int = 256,
) -> tuple[ModelManager, ManagedModels]:
    """A manager of models of one byte each, which waits for nothing; started on this loop."""
    of = Residency(capacity, Patience(residence=0.0, linger=0.0))
    for i, name in enumerate(names):
        accepted = (name,) if i else (name, "default")
        loader.models[name] = ServedModel(
            accepted, 512, 0x110000, 1, aliases=frozenset({f"./{name}"})
        )
        of.add(name, 0, weights=Weights(name, 1), ttl=ttl)
    manager = ModelManager(list(loader.models.values()), of, loader, max_waiting=max_waiting)
    manager.start()
    return manager, ManagedModels(manager, lambda tenant: TenantId(f"id of {tenant}"))

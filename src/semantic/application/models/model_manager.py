"""ModelManager: loads and unloads the models of a server as requests need them.

For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Protocol

from semantic.application.models.model_names import unknown_model
from semantic.application.models.residency import Change, Residency, Ticket, Weights
from semantic.domain.errors import (
    CapacityError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    OverloadedError,
    SemanticError,
    WeightsTooLargeError,
)
from semantic.domain.stored import StoreStats, Tier
from semantic.ports.agents import AgentsPort
from semantic.ports.embedding import EmbeddingPort
from semantic.ports.generation import Clock
from semantic.ports.models import ModelsPort, ModelStatus, OnArrived
from semantic.ports.serving import (
    EngineFigures,
    EngineState,
    Figures,
    MemoryLimit,
    ServedModel,
    ServingPort,
)

logger = logging.getLogger("semantic.server")

_RETRY_AFTER = 5


class RunnableServing(ServingPort, Protocol):
    """A served model that accepts requests until `close`."""

    embedding: EmbeddingPort | None
    memory: MemoryLimit | None

    @property
    def agents(self) -> AgentsPort:
        """The port for the model's agents."""

    def figures(self) -> Figures:
        """Return the current figures. Thread-safe."""

    @property
    def has_failed(self) -> bool:
        """True if the engine has failed for good."""

    @property
    def models(self) -> ModelsPort | None:
        """The models of the server; None if the server has only this model."""

    async def close(self) -> None:
        """Cancel running requests, save every agent, end all threads. Raises SemanticError."""


class ModelLoader(Protocol):
    """Loads the models of a server."""

    async def size(self, name: str) -> tuple[int, Weights | None]:
        """Return the size in bytes and the weights of a model. They are estimates before the first
        load. Raises SemanticError."""

    async def load(self, name: str, room: int) -> tuple[RunnableServing, Weights | None]:
        """Load the model `name`; return it with its measured weights. Raises WeightsTooLargeError
        if the weights need more than `room` bytes, or SemanticError."""

    async def fetch(self, hub_id: str, on_arrived: OnArrived) -> ServedModel:
        """Download a hub model without reading its weights. See `ModelsPort.fetch`."""

    async def free(self) -> None:
        """Return the memory of closed models to the system."""

    def stores(self) -> tuple[StoreStats, ...]:
        """Return the statistics of each tier of the store. Thread-safe."""

    async def close(self) -> None:
        """Close the parts that the models share. Raises SemanticError."""


class ModelManager:
    """Implements `ModelsPort` and, for its first model, `ServingPort`."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        residency: Residency,
        loader: ModelLoader,
        *,
        max_waiting: int = 256,
        ttl: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """At most `max_waiting` requests wait for each model. `ttl` (in seconds) applies to
        fetched models."""
        self._served = {one.id: one for one in models}
        self._residency = residency
        self._loader = loader
        self._max_waiting = max_waiting
        self._ttl = ttl
        self._clock = clock
        self._fetching = asyncio.Lock()
        self._units: dict[str, RunnableServing] = {}
        self._arrivals: dict[str, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.loads = 0

    def start(self) -> None:
        """Begin to load and unload models."""
        self._event_loop = asyncio.get_running_loop()
        self._tasks.append(asyncio.create_task(self._run()))

    def preload(self, names: Sequence[str]) -> None:
        """Load the models with the ids `names` in the background, or as many as fit."""
        self._tasks.append(asyncio.create_task(self._preload(names)))

    # Names

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of all models, in order."""
        return tuple(self._served)

    def id_of(self, name: str | None) -> str:
        """Return the id of the model `name`; None is the first model. Raises ModelNotFoundError."""
        if name is None:
            return self.names[0]
        for one in self._served.values():
            if one.accepts(name):
                return one.id
        known = [listed for one in self._served.values() for listed in one.names]
        raise ModelNotFoundError(unknown_model(name, known))

    def served(self, name: str) -> ServedModel:
        return self._served[name]

    # Requests

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[RunnableServing]:
        """Yield a model, which stays loaded within the `with` block. Raises ModelLoadError, and
        OverloadedError if too many requests wait."""
        ticket = await self._opened(name)
        self._residency.leave(ticket)
        release = self.hold(name)
        try:
            yield self._units[name]
        finally:
            release()

    def hold(self, name: str) -> Callable[[], None]:
        """Keep an open model loaded until a call of the returned function."""
        self._residency.begin(name, self._clock())

        unit = self._units[name]

        def release() -> None:
            self._residency.end(name, self._clock())
            if unit.has_failed and self._units.get(name) is unit:
                self._residency.unload(name)  # the next request loads it again
            self._changed.set()

        return release

    def loaded(self) -> dict[str, RunnableServing]:
        return dict(self._units)

    # The operator

    def statuses(self) -> Sequence[ModelStatus]:
        return [self.status(name) for name in self._served]

    def status(self, name: str) -> ModelStatus:
        of = self._residency
        running, waiting = of.requests(name)
        now, used, expires = self._clock(), of.last_used(name), of.expires(name)
        return ModelStatus(
            self._served[name],
            of.state(name),
            of.n_bytes(name),
            running,
            waiting,
            of.is_pinned(name),
            None if expires is None else max(0.0, expires - now),
            None if used is None else max(0.0, now - used),
        )

    def keep(self, name: str, seconds: float | None) -> None:
        self._residency.keep(self.id_of(name), seconds)
        self._changed.set()

    async def load(self, name: str) -> ModelStatus:
        own = self.id_of(name)
        self._residency.leave(await self._opened(own))
        self._changed.set()
        return self.status(own)

    async def unload(self, name: str) -> ModelStatus:
        own = self.id_of(name)
        self._residency.unload(own)
        self._changed.set()
        if self._residency.state(own) in {"loaded", "unloading"}:
            await asyncio.shield(self._arrival(f"end of {own}"))
        return self.status(own)

    def give_up_idle(self, n_bytes: int) -> bool:
        """Start to unload idle models, to free `n_bytes`. Returns False if no model is idle.
        Thread-safe."""
        names = self._residency.idle(n_bytes)
        if not names or self._event_loop is None:
            return False
        with suppress(RuntimeError):  # the loop may have closed meanwhile
            self._event_loop.call_soon_threadsafe(self._unload_idle, names)
        return True

    def limit(self, capacity: int) -> None:
        """Limit all models together to `capacity` bytes. Thread-safe."""
        if self._event_loop is not None:
            with suppress(RuntimeError):  # the loop may have closed meanwhile
                self._event_loop.call_soon_threadsafe(self._residency.limit, capacity)

    def _unload_idle(self, names: Sequence[str]) -> None:
        for name in names:
            if not any(self._residency.requests(name)):
                self._residency.unload(name)
        self._changed.set()

    async def fetch(self, hub_id: str, on_arrived: OnArrived) -> ModelStatus:
        async with self._fetching:
            for one in self._served.values():
                if one.accepts(hub_id):
                    return self.status(one.id)
            served = await self._loader.fetch(hub_id, on_arrived)
            n_bytes, weights = await self._loader.size(served.id)
            self._residency.add(served.id, n_bytes, weights=weights, ttl=self._ttl)
            self._served[served.id] = served
            return self.status(served.id)

    # Figures and the end

    def figures(self) -> Figures:
        """Return the figures of all loaded models and of the store. Thread-safe."""
        found = {name: unit.figures().engine for name, unit in tuple(self._units.items())}
        return Figures(_total(tuple(found.values())), self._loader.stores(), found)

    async def close(self) -> None:
        """Close every model, and the parts that they share. Raises SemanticError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for arrival in self._arrivals.values():
            _fail(arrival, OverloadedError("the server is stopping", retry_after=_RETRY_AFTER))
        self._arrivals.clear()
        try:
            while self._units:
                await self._units.popitem()[1].close()
        finally:
            await self._loader.close()

    # Inside

    async def _opened(self, name: str) -> Ticket:
        """Wait until the model accepts requests. Raises ModelLoadError."""
        if self._residency.state(name) == "unloaded":
            error = await _error_of(self._resize(name))
            if error is not None:
                raise _load_error(name, error)
        if self._residency.requests(name)[1] >= self._max_waiting:
            raise OverloadedError(
                f"the queue is full: at most {self._max_waiting} requests may wait for {name}",
                retry_after=_RETRY_AFTER,
            )
        ticket = self._residency.wait(name, self._clock())
        self._changed.set()
        with ExitStack() as undo:
            undo.callback(self._changed.set)
            undo.callback(self._residency.leave, ticket)
            while not self._residency.is_open(name):
                await asyncio.shield(self._arrival(name))
            undo.pop_all()
        return ticket

    def _arrival(self, key: str) -> asyncio.Future[None]:
        if key not in self._arrivals:
            self._arrivals[key] = asyncio.get_running_loop().create_future()
        return self._arrivals[key]

    def _arrived(self, key: str) -> None:
        arrival = self._arrivals.pop(key, None)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    async def _run(self) -> None:
        while True:
            now = self._clock()
            change = self._residency.next_change(now)
            if change is not None:
                await self._make(change)
                continue
            for name in self._served:
                if self._residency.is_open(name):
                    self._arrived(name)
            next_time = self._residency.next_time(now)
            self._changed.clear()
            try:
                async with asyncio.timeout(None if next_time is None else next_time - now):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _preload(self, names: Sequence[str]) -> None:
        for name in names:
            if self._residency.fits(name):
                with suppress(SemanticError):  # it is in the log
                    await self.load(name)

    async def _make(self, change: Change) -> None:
        self._residency.changing(change)
        if not change.loads:
            await self._unload(change.name)
            return
        error = await _error_of(self._load(change.name))
        if isinstance(error, WeightsTooLargeError):
            logger.info("the model %s needs more memory than expected: %s", change.name, error)
            self._residency.unloaded(change.name)  # others may make room, if it fits at all
            error = await _error_of(self._resize(change.name))
        if error is not None:
            error = _load_error(change.name, error)
            arrival = self._arrivals.pop(change.name, None)
            self._residency.failed(change.name)
            await self._loader.free()
            if arrival is not None:
                _fail(arrival, error)

    async def _resize(self, name: str) -> None:
        """Update the model's bytes from its files. Raises SemanticError."""
        self._residency.resize(name, *await self._loader.size(name))

    async def _load(self, name: str) -> None:
        started = self._clock()
        unit, weights = await self._loader.load(name, self._residency.room_for(name))
        self._units[name], self._served[name] = unit, unit.model
        now = self._clock()
        self.loads += 1
        self._residency.loaded(name, now, now - started, weights)
        logger.info("loaded the model %s in %.1f s", name, now - started)
        self._arrived(name)

    async def _unload(self, name: str) -> None:
        error = await _error_of(self._units.pop(name).close())
        if error is not None:
            logger.error("the model %s: %s: %s", name, type(error).__name__, error)
        await self._loader.free()
        self._residency.unloaded(name)
        logger.info("unloaded the model %s", name)
        self._arrived(f"end of {name}")


async def _error_of(work: Coroutine[object, object, None]) -> BaseException | None:
    """Return the exception of `work`, or None."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,))
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    return task.exception()


def _load_error(name: str, error: BaseException) -> BaseException:
    """Return the error for the waiting requests. Its public text contains no path."""
    words = f"the model {name} cannot be loaded: "
    logger.warning("%s%s: %s", words, type(error).__name__, error)
    if isinstance(error, CapacityError) or not isinstance(error, SemanticError | OSError):
        return error
    reason = error if isinstance(error, InvalidRequestError) else "see the server's log"
    return ModelLoadError(f"{words}{error}", public=f"{words}{reason}")


def _fail(arrival: asyncio.Future[None], error: BaseException) -> None:
    if not arrival.done():
        arrival.set_exception(error)
        arrival.exception()  # all who waited may have left


def _total(found: Sequence[EngineFigures]) -> EngineFigures:
    # READY even without an engine, because a request loads a model

    def add(of: Callable[[EngineFigures], int]) -> int:
        return sum(of(one) for one in found)

    restored: dict[Tier, int] = {}
    for one in found:
        for tier, n_bytes in one.restored_bytes.items():
            restored[tier] = restored.get(tier, 0) + n_bytes
    return EngineFigures(
        EngineState.READY,
        inbox=add(lambda one: one.inbox),
        waiting=add(lambda one: one.waiting),
        running=add(lambda one: one.running),
        idle=add(lambda one: one.idle),
        queued=add(lambda one: one.queued),
        queued_bytes=add(lambda one: one.queued_bytes),
        pool_used_bytes=add(lambda one: one.pool_used_bytes),
        pool_bytes=add(lambda one: one.pool_bytes),
        preemptions=add(lambda one: one.preemptions),
        rebuilds=add(lambda one: one.rebuilds),
        restored_bytes=restored,
    )

"""Composition root of several models. They have one thread, one store and one memory budget."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from semantic.application.engine.admission import limit_bytes
from semantic.application.engine.step_loop import StepLoop
from semantic.application.models.model_manager import ModelManager, RunnableServing
from semantic.application.models.model_names import unknown_model
from semantic.application.models.on_demand import ManagedModels
from semantic.application.models.residency import Patience, Residency, Weights
from semantic.application.serving import Serving
from semantic.bootstrap import OnStoreUnavailable, Shared, make_pool, open_shared
from semantic.composition.engine_settings import Settings
from semantic.composition.framework import free_memory
from semantic.composition.memory_shares import (
    default_memory_tier_bytes,
    default_pool_bytes,
    give_up_under_pressure,
    guarded_loop,
    memory_of,
    planned_bytes,
    pool_share,
)
from semantic.composition.named_models import (
    describe_model,
    fetch_model,
    file_states,
    find_model,
    find_remote,
)
from semantic.domain.block_hash import tenant_id, tenant_tag
from semantic.domain.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    SemanticError,
    WeightsTooLargeError,
)
from semantic.domain.stored import StoreStats
from semantic.ports.agents import TenantId
from semantic.ports.serving import ServedModel
from semantic.serve import (
    ServeSettings,
    context_limit,
    load_serving,
    log_tenants,
    sampling_of,
    served_names,
)

if TYPE_CHECKING:
    from semantic.adapters.hub.remote import RemoteModel
    from semantic.ports.models import Arrived, OnArrived

logger = logging.getLogger("semantic.server")

_TIER_FRACTION = 8
"""The divisor that turns the budget into the limit of the store's memory tier."""
_MIN_TIER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelsSettings:
    """The settings of several models. The first model serves requests without a model's name."""

    models: Sequence[ServeSettings]
    loaded: int = 1
    """Models to load at the start. Other models load at their first request."""
    kept: Sequence[str] = ()
    """The names of models that always stay loaded."""
    max_bytes: int | None = None
    """The limit on weights, pools and the store's memory together, in bytes."""
    reserved_bytes: int = 0
    """The memory in bytes for other parts of the process."""
    ttl: float | None = None
    """Seconds without a request after which a model unloads. None means never."""
    max_waiting: int = 256
    patience: Patience = field(default_factory=Patience)


async def load_models(
    settings: ModelsSettings,
    on_store_unavailable: OnStoreUnavailable | None = None,
    loop: StepLoop | None = None,
) -> ManagedModels:
    """Load the first model. Other models load in the background. Raises the same errors as
    `serve.load_serving`. Raises InvalidRequestError for a duplicate or unknown name, or a model
    that exceeds the budget."""
    first = settings.models[0].engine
    loop = loop or guarded_loop(first, logger.info)

    def open_all() -> tuple[Shared, int]:
        engine, capacity = _shares(settings)
        return open_shared(engine, loop, logger.warning, on_store_unavailable), capacity

    shared, capacity = await asyncio.wrap_future(loop.call(open_all))
    give_up_under_pressure(loop, shared.store)
    loader = _Loader(shared, capacity)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(loader.close)
        known = [await loader.add(one) for one in settings.models]
        await loader.freeze()
        residency = _residency(settings, known, loader, capacity)
        manager = ModelManager(
            known, residency, loader, max_waiting=settings.max_waiting, ttl=settings.ttl
        )
        undo.pop_all()
    if loop.guard is not None:
        loop.guard.add("idle models", manager.give_up_idle)
        tier = shared.settings.memory_bytes or 0
        loop.guard.on_limit = lambda n_bytes: manager.limit(planned_bytes(n_bytes) - tier)
    secret = shared.store.secret
    log_tenants(secret, settings.models[0].tenants)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(manager.close)
        manager.start()
        await manager.load(known[0].id)
        undo.pop_all()
    manager.preload([one.id for one in known[1 : settings.loaded]])
    return ManagedModels(manager, lambda one: TenantId(tenant_id(secret, tenant_tag(secret, one))))


@dataclass(frozen=True, slots=True)
class ModelsPlan:
    """The bytes that the models need, and the limit `capacity` on them."""

    models: Sequence[KnownModel]
    capacity: int

    @property
    def n_bytes(self) -> int:
        """The bytes of all models together. Weights that models share count once."""
        weights = {one.weights.key: one.weights.n_bytes for one in self.models}
        return sum(weights.values()) + sum(one.n_bytes for one in self.models)


def plan_models(settings: ModelsSettings) -> ModelsPlan:
    """Return the plan of `load_models` without loading any model. Call this on MLX's thread. Raises
    the same errors as `load_models`."""
    store, capacity = _shares(settings)
    known = []
    for number, one in enumerate(settings.models):
        own = replace(one, is_first=not number)
        known.append(_describe(own, find_model(one.engine.model), store, capacity)[1])
    return ModelsPlan(known, capacity)


def _shares(settings: ModelsSettings) -> tuple[Settings, int]:
    first = settings.models[0].engine
    budget = (settings.max_bytes or planned_bytes(memory_of(first))) - settings.reserved_bytes
    tier = first.memory_bytes or _tier_bytes(budget)
    return replace(first, memory_bytes=tier), budget - tier


class ResidentModels:
    """Models that stay loaded until `close`."""

    def __init__(self, servings: Sequence[Serving] = (), shared: Shared | None = None) -> None:
        """`servings` are the models. `close` also closes `shared`."""
        self.servings = list(servings)
        self._shared = shared

    def number(self, name: str | None) -> int:
        """Return a model's index, 0 for the name None. Raises ModelNotFoundError."""
        for number, one in enumerate(self.servings):
            if name is None or one.model.accepts(name):
                return number
        known = [one.model.id for one in self.servings]
        raise ModelNotFoundError(unknown_model(str(name), known, "this engine"))

    async def flush(self) -> None:
        """Call `Serving.flush` of every model."""
        for one in self.servings:
            await one.flush()

    async def close(self) -> None:
        """Call `Serving.close` of every model, and close the shared parts."""
        for one in self.servings:
            await one.close()
        await asyncio.to_thread(self._close_shared)

    def end(self) -> None:
        """Close all models, on a thread without an event loop. Blocks."""
        for one in self.servings:
            one.end()
        self._close_shared()

    def _close_shared(self) -> None:
        if self._shared is not None:
            self._shared.turns.close()
            self._shared.loop.call(self._shared.store.close).result()


async def load_resident(
    models: Sequence[ServeSettings], on_store_unavailable: OnStoreUnavailable | None = None
) -> ResidentModels:
    """Load models that share weights. Each gets an equal part of the pool. Raises the same errors
    as `serve.load_serving`."""
    if len(models) == 1:
        return ResidentModels([await load_serving(models[0], on_store_unavailable)])
    first = models[0].engine
    loop = guarded_loop(first, logger.info)

    def open_all() -> tuple[Shared, Settings]:
        of_one = pool_share(first, len(models))
        return open_shared(first, loop, logger.warning, on_store_unavailable), of_one

    shared, of_one = await asyncio.wrap_future(loop.call(open_all))
    give_up_under_pressure(loop, shared.store)
    loaded = ResidentModels((), shared)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(loaded.close)
        for one in models:
            engine = replace(of_one, adapter=one.engine.adapter, use_disk=shared.settings.use_disk)
            own = replace(one, engine=engine)
            loaded.servings.append(await load_serving(own, shared=shared))
        undo.pop_all()
    return loaded


def _residency(
    settings: ModelsSettings, known: Sequence[ServedModel], loader: _Loader, capacity: int
) -> Residency:
    _require_different(known)
    kept = {_named(name, known).id for name in settings.kept}
    residency = Residency(capacity, settings.patience)
    for one in known:
        residency.add(
            one.id,
            loader.known[one.id].n_bytes,
            weights=loader.known[one.id].weights,
            ttl=settings.ttl,
            pinned=one.id in kept,
        )
    return residency


def _tier_bytes(budget: int) -> int:
    return min(default_memory_tier_bytes(budget), max(_MIN_TIER_BYTES, budget // _TIER_FRACTION))


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be loaded. It needs `n_bytes` in addition to its weights. `states` are the
    states of the model's files."""

    settings: ServeSettings
    n_bytes: int
    weights: Weights
    states: Mapping[str, object]


class _Loader:
    """Implements `ModelLoader` for models that share an open store."""

    def __init__(self, shared: Shared, capacity: int) -> None:
        """All models together may use `capacity` bytes."""
        self._shared = shared
        self._capacity = capacity
        self._given: dict[str, ServeSettings] = {}
        self.known: dict[str, KnownModel] = {}
        self._has_frozen = False

    async def add(self, settings: ServeSettings) -> ServedModel:
        """Add a model, without reading its weights. Raises the same errors as `load`."""
        settings = replace(settings, is_first=not self.known)
        served, known = await self._described(settings)
        self._given[served.id], self.known[served.id] = settings, known
        return served

    async def fetch(self, hub_id: str, on_arrived: OnArrived) -> ServedModel:
        remote = await asyncio.to_thread(find_remote, hub_id)
        await self._require_fits(remote)
        loop, stopped = asyncio.get_running_loop(), threading.Event()

        def arrived(one: Arrived) -> None:
            loop.call_soon_threadsafe(on_arrived, one)

        work = asyncio.to_thread(fetch_model, remote, arrived, stopped.is_set)
        fetching = asyncio.ensure_future(work)
        try:
            await asyncio.shield(fetching)
        finally:
            stopped.set()
            await asyncio.wait((fetching,))  # the next download needs the same locks
        first = next(iter(self._given.values()))
        engine = replace(first.engine, model=hub_id, adapter=None)
        own = replace(first, engine=engine, names=(hub_id,), aliases=frozenset(), parent=None)
        return await self.add(own)

    async def _require_fits(self, remote: RemoteModel) -> None:
        own = self._shared.settings

        def describe(folder: Path) -> int:
            found = describe_model(folder, remote.weights_bytes)
            engine = _with_pool(own, own, self._capacity, found.weights_bytes)
            return found.weights_bytes + limit_bytes(make_pool(engine, found.spec))

        with ExitStack() as stack:
            from semantic.adapters.hub.remote import remote_config

            folder = await asyncio.to_thread(stack.enter_context, remote_config(remote))
            n_bytes = await asyncio.wrap_future(self._shared.loop.call(lambda: describe(folder)))
        if n_bytes > self._capacity:
            raise InvalidRequestError(
                f"{remote.hub_id} does not fit: its weights and its pool need {n_bytes >> 20} MiB, "
                f"but all models may use {self._capacity >> 20}; nothing was downloaded"
            )

    async def size(self, name: str) -> tuple[int, Weights]:
        given = self._given[name]
        if self.known[name].states != await asyncio.to_thread(_states, given.engine):
            self.known[name] = (await self._described(given))[1]
        known = self.known[name]
        return known.n_bytes, known.weights

    async def _described(self, settings: ServeSettings) -> tuple[ServedModel, KnownModel]:
        folder = await asyncio.to_thread(find_model, settings.engine.model)
        return await asyncio.wrap_future(
            self._shared.loop.call(
                lambda: _describe(settings, folder, self._shared.settings, self._capacity)
            )
        )

    async def freeze(self) -> None:
        """Exempt existing objects from garbage collection until `close`, because a collection stops
        all models."""
        await self.free()
        self._has_frozen = gc.get_freeze_count() == 0
        if self._has_frozen:
            gc.freeze()

    async def load(self, name: str, room: int) -> tuple[RunnableServing, Weights]:
        known = self.known[name]
        engine = replace(known.settings.engine, weights_bytes=room)
        try:
            serving = await load_serving(
                replace(known.settings, engine=engine), shared=self._shared
            )
        except WeightsTooLargeError as error:
            self._weigh(known.weights, error.n_bytes)
            raise
        if serving.model.details is not None and known.settings.engine.adapter is None:
            self._weigh(known.weights, serving.model.details.memory_bytes)
        return serving, self.known[name].weights

    def _weigh(self, weights: Weights, n_bytes: int) -> None:
        for name, known in self.known.items():
            if known.weights == weights:
                self.known[name] = replace(known, weights=replace(weights, n_bytes=n_bytes))

    async def free(self) -> None:
        await asyncio.wrap_future(self._shared.loop.call(free_memory))

    def stores(self) -> tuple[StoreStats, ...]:
        return tuple(self._shared.store.stats())

    async def close(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        await asyncio.to_thread(self._shared.turns.close)
        await asyncio.wrap_future(self._shared.loop.call(self._shared.store.close))


def _describe(
    settings: ServeSettings, folder: Path, store: Settings, capacity: int
) -> tuple[ServedModel, KnownModel]:
    states = _states(settings.engine)
    found = describe_model(folder, adapter=settings.engine.adapter_folder)
    own = 0 if found.adapter is None else found.adapter.n_bytes
    # Weights from other files count as different.
    files = hash(frozenset(_states(replace(settings.engine, adapter=None)).items()))
    weights = Weights(f"{folder.resolve()} {files}", found.weights_bytes)
    engine = _with_pool(settings.engine, store, capacity, weights.n_bytes + own)
    pool = make_pool(engine, found.spec)
    most = context_limit(pool, found.context_tokens, None)
    context = min(most, settings.max_context or most)
    chosen = replace(settings, engine=engine, max_context=context)
    names, aliases = served_names(chosen)
    served = ServedModel(
        names,
        context,
        found.vocab_size,
        int(time.time()),
        sampling_of(chosen, folder),
        aliases=aliases,
        parent=settings.parent,
    )
    return served, KnownModel(chosen, own + limit_bytes(pool), weights, states)


def _with_pool(own: Settings, store: Settings, capacity: int, weights: int) -> Settings:
    """Return a model's settings with a pool. Its size does not depend on other models."""
    if own.pool_bytes is None and own.pool_blocks is None:
        own = replace(own, pool_bytes=default_pool_bytes(capacity, weights))
    return replace(own, use_disk=store.use_disk, memory_bytes=store.memory_bytes)


def _states(settings: Settings) -> Mapping[str, object]:
    with suppress(OSError, SemanticError):
        return file_states(settings)
    return {}


def _require_different(models: Sequence[ServedModel]) -> None:
    seen: set[str] = set()
    for model in models:
        for name in (*model.names, *model.aliases):
            if name in seen:
                raise InvalidRequestError(
                    f"two models have the name {name}: expected folders of different names"
                )
            seen.add(name)


def _named(name: str, models: Sequence[ServedModel]) -> ServedModel:
    for one in models:
        if one.accepts(name):
            return one
    known = ", ".join(one.id for one in models)
    raise InvalidRequestError(f"--keep-model {name}: expected one of {known}")

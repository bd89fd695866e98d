"""Composition root: builds an engine from settings and chooses the adapter for each port. Imports
adapters only inside functions, so `import semantic` loads no framework."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from semantic.composition.engine_settings import DEFAULT_MODEL, Settings
from semantic.composition.framework import mlx_provider, read_device
from semantic.composition.memory_shares import default_pool_of, memory_left, promised
from semantic.composition.named_models import model_of, suggesting
from semantic.composition.process_stores import new_step_observer, open_store, open_turns
from semantic.domain.errors import InvalidRequestError, SemanticError, StoreError
from semantic.domain.value_objects import BLOCK_TOKENS

if TYPE_CHECKING:
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
    from semantic.application.chat.turn_cache import TurnCache
    from semantic.application.engine.batch_engine import BlockPoolBatchEngine
    from semantic.application.engine.step_loop import StepLoop
    from semantic.domain.services import BlockPool
    from semantic.domain.value_objects import ExactBatch, KvBits, ModelCacheSpec
    from semantic.ports.generation import (
        BatchBackend,
        DraftSource,
        ModelProviderPort,
        Slices,
        Tokenizer,
    )
    from semantic.ports.store import BlockObserver, StorePort

logger = logging.getLogger("semantic.server")

_GIB = 1 << 30
_DRAFTS_BYTES = 128 << 20
"""The limit on the memory of the histories from which a model's drafts come: 8 M tokens."""


@dataclass(frozen=True, slots=True)
class App:
    engine: BlockPoolBatchEngine
    model: BatchBackend
    tokenizer: Tokenizer
    pool: BlockPool
    spec: ModelCacheSpec
    store: StorePort
    settings: Settings


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that all models of one server share."""

    loop: StepLoop
    provider: ModelProviderPort
    store: StorePort
    turns: TurnCache
    settings: Settings


OnStoreUnavailable = Callable[[StoreError], None]
"""Called with the reason if the disk tier does not open. The store then has only a memory tier."""


def build_engine(
    settings: Settings,
    on_store_unavailable: OnStoreUnavailable | None = None,
    observer: BlockObserver | None = None,
) -> App:
    """Load the model and build its engine. Raises the same errors as `load`. Raises
    InvalidRequestError for a pool smaller than a block. Raises StoreError if the disk tier fails
    and `on_store_unavailable` is None."""
    return assemble(settings, mlx_provider(settings), on_store_unavailable, observer)


def assembling(
    settings: Settings,
    provider: ModelProviderPort,
    on_store_unavailable: OnStoreUnavailable | None = None,
    observer: BlockObserver | None = None,
) -> Slices[App]:
    """Build an engine as `build_engine` does, with a model from `provider`, in slices."""
    with suggesting(settings.model):
        model, tokenizer = yield from provider.load_in_slices(
            settings.model, settings.adapter_folder, kv_bits=settings.kv_bits
        )
    spec = provider.extract_spec(model)
    pool: BlockPool = make_pool(settings, spec)
    store, settings = _open_or_report(settings, on_store_unavailable, observer)
    if settings.ranks is not None:
        from semantic.adapters.mlx.ranks.leading import LeadingBackend

        if isinstance(model, LeadingBackend):
            model.before_end(store.flush)
    return _new_app(model, tokenizer, pool, store, settings)


def assemble(
    settings: Settings,
    provider: ModelProviderPort,
    on_store_unavailable: OnStoreUnavailable | None = None,
    observer: BlockObserver | None = None,
) -> App:
    """Do as `assembling` does, in one call."""
    from semantic.ports.generation import at_once

    return at_once(assembling(settings, provider, on_store_unavailable, observer))


def follow_first(settings: Settings) -> None:
    """Compute as a rank other than rank 0. Returns once rank 0 ends normally. Raises the same
    errors as `load`."""
    from semantic.adapters.mlx.ranks.following import follow, wait_for_end

    settings = promised(settings)
    provider = mlx_provider(settings)
    try:
        model, _ = provider.load_model(settings.model, kv_bits=settings.kv_bits)
    except SemanticError:
        if provider.ranks is None or not wait_for_end(provider.ranks):
            raise
    else:
        if provider.ranks is not None:
            provider.ranks.links.left = partial(memory_left, settings)
            follow(model, provider.ranks)


def build_in_slices(settings: Settings, shared: Shared) -> Slices[App]:
    """Build the engine of one of several models, with the work in slices. Raises the same errors as
    `load`, and WeightsTooLargeError."""
    provider = shared.provider
    with suggesting(settings.model):
        model, tokenizer = yield from provider.load_in_slices(
            settings.model, settings.adapter_folder, settings.weights_bytes,
            kv_bits=settings.kv_bits,
        )  # fmt: skip
    pool: BlockPool = make_pool(settings, provider.extract_spec(model))
    return _new_app(model, tokenizer, pool, shared.store, settings)


def open_shared(
    settings: Settings,
    loop: StepLoop,
    warn: Callable[[str], None],
    on_store_unavailable: OnStoreUnavailable | None = None,
) -> Shared:
    """Open the parts that several models share. Call this on the thread of the step loop `loop`.
    Raises the same errors as `build_engine`."""
    store, settings = _open_or_report(settings, on_store_unavailable)
    provider = mlx_provider(settings)
    return Shared(loop, provider, store, open_turns(settings, warn), settings)


def _open_or_report(
    settings: Settings,
    on_store_unavailable: OnStoreUnavailable | None,
    observer: BlockObserver | None = None,
) -> tuple[StorePort, Settings]:
    try:
        return open_store(settings, observer), settings
    except StoreError as error:
        if on_store_unavailable is None:
            raise
        on_store_unavailable(error)
    settings = replace(settings, use_disk=False)
    return open_store(settings, observer), settings


def rebuild_app(app: App) -> App:
    """Replace a failed engine by an engine with the same weights, pool size and store. Do not use
    the old engine afterwards. Raises InvalidRequestError for a model that `load` did not return."""
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.model.provider import wrap_model
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
    from semantic.domain.services import BlockPool

    if not (isinstance(app.model, MLXBackend) and isinstance(app.tokenizer, MLXTokenizer)):
        raise InvalidRequestError(f"expected a loaded model, got {type(app.model).__name__}")
    app.model.abandon()  # frees the old pool before the new one
    model = wrap_model(
        app.model.model, app.model.model_id, app.tokenizer,
        exact_batch=app.settings.exact_batch, kv_bits=app.settings.kv_bits,
    )  # fmt: skip
    model.grammars = app.model.grammars  # including compiled and checked grammars
    pool: BlockPool = BlockPool(app.spec, app.pool.total_blocks, max_bytes=app.pool.max_bytes)
    return _new_app(model, app.tokenizer, pool, app.store, app.settings)


def _new_app(
    model: BatchBackend, tokenizer: Tokenizer, pool: BlockPool, store: StorePort, settings: Settings
) -> App:
    from semantic.application.engine.batch_engine import BlockPoolBatchEngine

    engine = BlockPoolBatchEngine(
        model,
        tokenizer,
        pool,
        pool.spec,
        store=store,
        max_batch=settings.max_batch,
        model_name=settings.label,
    )
    engine.report_steps(new_step_observer(store))
    drafts = _open_drafts(settings, model)
    if drafts is not None:
        engine.draft_from(drafts)
    return App(engine, model, tokenizer, pool, pool.spec, store, settings)


def _open_drafts(settings: Settings, model: BatchBackend) -> DraftSource | None:
    if settings.drafts == "off" or model.drafts_problem:
        return None
    from semantic.adapters.stores.histories import Histories

    return Histories(_DRAFTS_BYTES)


def make_pool(settings: Settings, spec: ModelCacheSpec) -> BlockPool:
    """Return the pool for a loaded model. Raises InvalidRequestError for a pool smaller than a
    block or larger than the device's memory."""
    from semantic.domain.services import BlockPool

    max_bytes, most = settings.pool_bytes, read_device().memory_bytes
    if max_bytes is not None and max_bytes > most:
        raise InvalidRequestError(
            f"pool_bytes must be at most the device's memory, {most / _GIB:.1f} GiB, got "
            f"{max_bytes / _GIB:.1f} GiB"
        )
    block = spec.bytes_for(BLOCK_TOKENS)
    if settings.use_disk and settings.disk_bytes is not None and settings.disk_bytes < block:
        logger.warning(
            "disk_bytes: the disk keeps no block of this model: one has %d bytes, the limit is %d",
            block, settings.disk_bytes,
        )  # fmt: skip
    if max_bytes is None and settings.pool_blocks is None:
        max_bytes = default_pool_of(settings)
    return BlockPool(spec, settings.pool_blocks, max_bytes=max_bytes)


def load(
    model_id: str = DEFAULT_MODEL,
    *,
    any_chip: bool = False,
    exact_batch: ExactBatch = "auto",
    kv_bits: KvBits = 16,
    kv_bits_force: bool = False,
) -> tuple[MLXBackend, MLXTokenizer]:
    """Return a model and its tokenizer, by folder, hub id or alias. Its caches have `kv_bits`, with
    `kv_bits_force` whatever they change. Raises ModelNotFoundError, UnsupportedModelError, and
    OperatorError if MLX is not usable."""
    model = model_of(model_id)
    with suggesting(model):
        settings = Settings(any_chip=any_chip, exact_batch=exact_batch, kv_bits_force=kv_bits_force)
        return mlx_provider(settings).load_model(model, kv_bits=kv_bits)

"""The one place where ports meet adapters.

Adapters are imported when they are needed: importing `semantic` loads no framework.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from semantic.application.chat.turn_cache import TurnCache
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.domain.errors import InvalidRequestError, OperatorError, StoreError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import ModelCacheSpec
from semantic.ports.outbound import BatchBackend, ModelProviderPort, Tokenizer
from semantic.ports.store import CacheStorePort

if TYPE_CHECKING:
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.blas import BlasStatus
    from semantic.adapters.mlx.device import Device
    from semantic.adapters.mlx.model.provider import MLXModelProvider
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
    from semantic.adapters.stores.disk.store import DiskStore
    from semantic.adapters.stores.disk_responses import SteadyResponses as Responses


DEFAULT_MODEL = "semantic-tiny"
"""The model that ships with the package."""

_SHARE = 4
"""One part in this many of the memory goes to the pool: the weights, what a step computes and
everybody else on the machine need the rest."""
_LEAST_POOL_BYTES = 64 << 20

_WARM_SHARE = 16
"""One part in this many of the memory goes to blocks that were saved or read lately."""
_LEAST_WARM_BYTES = 64 << 20
_QUEUE_SHARE = 4
"""Blocks that wait to be written may take one part in this many of what the warm ones may."""
_LEAST_QUEUE_BYTES = 64 << 20

_MOST_DISK_BYTES = 32 << 30
_FREE_SHARE = 10
"""The store on disk takes at most one part in this many of what is free there."""

_FILE_BYTES = 8 << 10
"""What a file takes beside its bytes: the rest of its last page, its name, its row in an index."""
_INDEX_BYTES = 4 << 20
"""What an open index takes beside its rows."""

RESPONSES_FILE = "responses.db"
_RESPONSE_BYTES = 512 << 20
"""Of responses on disk; each has its own request's texts once, and the tools it was told of."""
_RESPONSE_MEMORY_BYTES = 64 << 20

TURNS_FILE = "turns.db"
_TURN_DISK_BYTES = 512 << 20
"""Of the tokens in which conversations were computed; four bytes each, and each once."""
_TURN_BYTES = 64 << 20

STORE_VARIABLE = "SEMANTIC_STORE"
"""Environment variable that names the store's folder."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to build. With neither limit the pool gets `default_pool_bytes`.

    At most `max_batch` requests decode together.

    The store keeps blocks in memory, and on disk only when `use_disk` asks for it: in the folder
    `store`, or `default_store_folder`. Without limits `disk_bytes` is `default_disk_bytes` and
    `memory_bytes` is `default_warm_bytes`.
    """

    model: str = DEFAULT_MODEL
    pool_bytes: int | None = None
    pool_blocks: int | None = None
    use_disk: bool = False
    store: Path | None = None
    disk_bytes: int | None = None
    memory_bytes: int | None = None
    max_batch: int = 32


@dataclass(frozen=True, slots=True)
class App:
    """An engine and what it was made of."""

    engine: BlockPoolBatchEngine
    model: BatchBackend
    tokenizer: Tokenizer
    pool: BlockPool
    spec: ModelCacheSpec
    store: CacheStorePort
    settings: Settings


StoreOff = Callable[[StoreError], None]
"""Told that the disk cannot be used; caches are then kept in memory only."""


def build_engine(settings: Settings, store_off: StoreOff | None = None) -> App:
    """Load the model and put an engine around it; `engine.close` ends the store's threads.

    Raises as `load`, InvalidRequestError for a pool without room, and StoreError when the store
    cannot be opened and nobody is there to be told.
    """
    return assemble(settings, _provider(), store_off)


def assemble(
    settings: Settings, provider: ModelProviderPort, store_off: StoreOff | None = None
) -> App:
    """An engine around the model that `provider` finds. Raises as `build_engine`."""
    model, tokenizer = provider.load_model(settings.model)
    spec = provider.extract_spec(model)
    pool: BlockPool = make_pool(settings, spec)
    try:
        store = open_store(settings)
    except StoreError as error:
        if store_off is None:
            raise
        store_off(error)
        settings = replace(settings, use_disk=False)
        store = open_store(settings)
    return _around(model, tokenizer, pool, store, settings)


def rebuilt(app: App) -> App:
    """Another engine for one that failed: with a pool as large, around the same weights and the
    same open store, where every idle agent still is.

    The old engine is not used afterwards. Raises InvalidRequestError for a model of another kind
    than `load` gives.
    """
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.model.provider import wrap_model
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer

    if not (isinstance(app.model, MLXBackend) and isinstance(app.tokenizer, MLXTokenizer)):
        raise InvalidRequestError(f"expected a loaded model, got {type(app.model).__name__}")
    app.model.abandon()  # or there would be two pools for a while
    model = wrap_model(app.model.model, app.model.model_id, app.tokenizer)
    pool: BlockPool = BlockPool(app.spec, app.pool.total_blocks, max_bytes=app.pool.max_bytes)
    return _around(model, app.tokenizer, pool, app.store, app.settings)


def _around(
    model: BatchBackend,
    tokenizer: Tokenizer,
    pool: BlockPool,
    store: CacheStorePort,
    settings: Settings,
) -> App:
    engine = BlockPoolBatchEngine(
        model,
        tokenizer,
        pool,
        pool.spec,
        store=store,
        max_batch=settings.max_batch,
        model_name=settings.model,
    )
    return App(engine, model, tokenizer, pool, pool.spec, store, settings)


def make_pool(settings: Settings, spec: ModelCacheSpec) -> BlockPool:
    """The pool for a model that is already loaded. Raises InvalidRequestError if it is empty."""
    max_bytes = settings.pool_bytes
    if max_bytes is None and settings.pool_blocks is None:
        device = read_device()
        max_bytes = default_pool_bytes(device.memory_bytes, device.used_bytes)
    return BlockPool(spec, settings.pool_blocks, max_bytes=max_bytes)


def default_pool_bytes(memory: int, weights: int) -> int:
    """The pool's budget on a device of `memory` bytes that holds `weights` bytes already.

    A quarter of the memory, at most what the weights leave, at least 64 MiB.
    """
    return max(_LEAST_POOL_BYTES, min(memory // _SHARE, memory - weights))


def open_store(settings: Settings) -> CacheStorePort:
    """The store that `settings` describe. Raises StoreError when its folder cannot be used."""
    from semantic.adapters.stores.background import BackgroundStore
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.adapters.stores.tiered import TieredStore

    warm_bytes = settings.memory_bytes
    if warm_bytes is None:
        warm_bytes = default_warm_bytes(read_device().memory_bytes)
    if not settings.use_disk:
        return MemoryStore(warm_bytes)
    disk = open_disk(settings)
    queue_bytes = max(_LEAST_QUEUE_BYTES, warm_bytes // _QUEUE_SHARE)
    warm = MemoryStore(warm_bytes, secret=disk.secret)
    return TieredStore(warm, BackgroundStore(disk, queue_bytes))


def open_disk(settings: Settings) -> DiskStore:
    """The part of the store that is on disk. Raises StoreError when its folder cannot be used."""
    from semantic.adapters.stores.disk.store import DiskStore

    folder = store_folder(settings)
    disk_bytes = settings.disk_bytes
    if disk_bytes is None:
        disk_bytes = default_disk_bytes(_free_bytes(folder), _held_bytes(folder))
    return DiskStore.open(folder, disk_bytes)


def open_responses(settings: Settings, tell: Callable[[str], None]) -> Responses:
    """Where responses are kept that clients can go on from: in the store's folder, or in memory.

    Nothing is opened before it is needed, and the store must be open by then. `tell` gets a
    sentence when they cannot be kept on disk.
    """
    from semantic.adapters.stores.disk_responses import SqliteResponses, SteadyResponses
    from semantic.application.chat.memory_responses import MemoryResponses

    memory = MemoryResponses(_RESPONSE_MEMORY_BYTES)
    folder: Path | None = None
    if settings.use_disk:
        with suppress(StoreError):  # who opens the store tells why there is none
            folder = store_folder(settings)
    path = (folder or Path()) / RESPONSES_FILE
    responses = SteadyResponses(SqliteResponses(path, _RESPONSE_BYTES, tell), memory, tell)
    if folder is None:
        responses.keep_in_memory()
    return responses


def open_turns(settings: Settings, tell: Callable[[str], None]) -> TurnCache:
    """The turns of conversations: in memory, and in the store's folder where there is one.

    `tell` gets a sentence when they cannot be kept on disk.
    """
    from semantic.adapters.stores.disk_turns import DiskTurns

    below = None
    if settings.use_disk:
        with suppress(StoreError):  # who opens the store tells why there is none
            below = DiskTurns(store_folder(settings) / TURNS_FILE, _TURN_DISK_BYTES, tell)
    return TurnCache(_TURN_BYTES, below)


def store_folder(settings: Settings) -> Path:
    """Where the store of `settings` is. Raises StoreError when nobody has a home folder."""
    return default_store_folder() if settings.store is None else settings.store


def default_store_folder() -> Path:
    """$SEMANTIC_STORE, else "semantic/store" where the user's caches are.

    Raises StoreError when nothing says where that is.
    """
    given = os.environ.get(STORE_VARIABLE)
    if given:
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches:
        return Path(caches) / "semantic" / "store"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise StoreError(f"there is no home folder: set {STORE_VARIABLE}") from error
    user = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return user / "semantic" / "store"


def default_disk_bytes(free: int, held: int) -> int:
    """The budget of a store that takes `held` bytes on a file system with `free` more.

    A tenth of what is free beside what it has, at most 32 GiB. Never less than it has: nothing
    is deleted because a limit was left out.
    """
    return max(held, min(_MOST_DISK_BYTES, free // _FREE_SHARE + held))


def default_warm_bytes(memory: int) -> int:
    """What blocks saved or read lately may take of a memory of that size: a sixteenth.

    At least 64 MiB. The pool holds what agents use; this saves a reading after an eviction.
    """
    return max(_LEAST_WARM_BYTES, memory // _WARM_SHARE)


def load(model_id: str = DEFAULT_MODEL) -> tuple[MLXBackend, MLXTokenizer]:
    """A model and its tokenizer, from a folder, a hub id or the embedded model.

    Raises ModelNotFoundError or UnsupportedModelError, and OperatorError when MLX is not usable.
    """
    return _provider().load_model(model_id)


def load_tokenizer(model_id: str) -> MLXTokenizer:
    """A model's tokenizer without its weights. Raises as `load`."""
    _provider()
    from semantic.adapters.mlx.model.provider import load_tokenizer

    return load_tokenizer(model_id)


def read_device() -> Device:
    """What models run on here. Raises OperatorError when MLX is not usable."""
    _provider()
    from semantic.adapters.mlx import device

    return device.read_device()


def blas_status() -> BlasStatus:
    """Which BLAS the CPU computes with; see `adapters.mlx.blas`."""
    from semantic.adapters.mlx import BLAS_STATUS

    return BLAS_STATUS


def read_bare_model(model: object) -> ModelCacheSpec | None:
    """The spec of a framework's own model object; None when no framework knows it."""
    from semantic.adapters.mlx.kv_cache.spec_reader import read_spec

    return read_spec(model)


def register_readers() -> None:
    """Let `ModelCacheSpec.from_model` read bare models. Doing it again changes nothing."""
    if read_bare_model not in ModelCacheSpec.readers:
        ModelCacheSpec.readers.append(read_bare_model)


def _provider() -> MLXModelProvider:
    try:
        from semantic.adapters.mlx.model.provider import MLXModelProvider
    except ImportError as error:
        raise OperatorError(
            f"MLX cannot be loaded: {error}. On Linux install semantic[cpu] or semantic[cuda]"
        ) from error
    return MLXModelProvider()


def _free_bytes(folder: Path) -> int:
    """Bytes free where `folder` is or will be. Raises StoreError when that cannot be told."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    try:
        return shutil.disk_usage(there).free
    except OSError as error:
        raise StoreError(f"cannot use {folder}: {error.strerror}") from error


def _held_bytes(folder: Path) -> int:
    """Bytes that a store in `folder` takes, rather too many; what cannot be read counts nothing."""
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                total += Path(parent, name).lstat().st_size + _FILE_BYTES
            except OSError:
                continue  # gone meanwhile
    return total + _INDEX_BYTES if total else 0

"""Composition root: builds an engine from settings and chooses the adapter for each port.

Adapters and the engine are imported inside functions: importing `semantic` loads no framework, and
a command that only prints its help not even the engine. What HTTP needs besides it is in `serve`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from semantic.application.models.model_names import most_similar
from semantic.domain.errors import (
    CapacityError,
    InvalidRequestError,
    ModelNotFoundError,
    OperatorError,
    StoreError,
)

if TYPE_CHECKING:
    from semantic.adapters.hub.remote import RemoteModel
    from semantic.adapters.mlx import BlasStatus
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.device import Device
    from semantic.adapters.mlx.model.description import ModelDescription
    from semantic.adapters.mlx.model.provider import MLXModelProvider
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
    from semantic.adapters.stores.disk.store import DiskStore
    from semantic.adapters.stores.disk_responses import FallbackResponses
    from semantic.adapters.stores.remote.objects import Objects
    from semantic.adapters.stores.remote.remote_records import Records, SharedResponses
    from semantic.adapters.stores.remote.remote_store import RemoteStore
    from semantic.application.chat.turn_cache import TurnCache
    from semantic.application.engine.batch_engine import BlockPoolBatchEngine
    from semantic.application.engine.step_loop import StepLoop
    from semantic.domain.services import BlockPool
    from semantic.domain.value_objects import ModelCacheSpec
    from semantic.ports.models import OnArrived
    from semantic.ports.outbound import BatchBackend, ModelProviderPort, Tokenizer
    from semantic.ports.slices import Slices
    from semantic.ports.store import CacheStorePort, LookUpPort

DEFAULT_MODEL = "semantic-tiny"
"""The model inside the package."""

STORE_VARIABLE = "SEMANTIC_STORE"
"""Environment variable with the store's folder."""
FLEET_VARIABLE = "SEMANTIC_FLEET_SECRET_FILE"
"""Environment variable with the path of the file of the fleet's secret."""
RESPONSES_FILE = "responses.db"
"""In the store's folder."""
TURNS_FILE = "turns.db"
"""In the store's folder."""

_ADAPTER_MARK = "+"
"""Between the names of a model and of its adapter."""
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)

_HUB_CACHE = "models--"
"""Before a hub id's name in the hub's cache."""

_MIB = 1 << 20
_GIB = 1 << 30

# Defaults, in bytes or as 1/N of the memory or of the free disk space.

# All memory of the process, of what the system says that it may have: some is for files, and for
# what other programs take later.
_PROCESS_SHARE = 9, 10
# Of that, what nothing is planned for: what a step takes, and what the guard keeps free.
_UNPLANNED_FRACTION = 8
# The interpreter, libraries, turns, responses and other small parts.
_BASE_BYTES = 384 * _MIB

# Block pool: the weights, the activations of a step and other parts need the rest.
_POOL_FRACTION = 4
_MIN_POOL_BYTES = 64 * _MIB

# Memory tier of the store: saves a read from disk after an eviction from the pool.
_MEMORY_TIER_FRACTION = 16
_MIN_MEMORY_TIER_BYTES = 64 * _MIB

# Write-behind queue in front of the disk tier, as a part of the memory tier: all of it. What is
# queued is the newest in the memory tier, and both hold the same bytes.
_QUEUE_FRACTION = 1
_MIN_QUEUE_BYTES = 64 * _MIB

# Uploads to a fleet's object store, bytes a second: encrypting and sending takes the processor from
# decoding, so the rate is bounded by the cores (benchmarks/moves.py measures what is left of it).
_UPLOAD_BYTES_PER_CORE = 8 * _MIB

# Disk tier: a part of the free space, so that a forgotten store does not fill a disk.
_DISK_FRACTION = 10
_MAX_DISK_BYTES = 32 * _GIB
_INDEX_GROWTH_BYTES = 4 * _MIB  # of a store that is never to evict what it has

# Responses that clients can continue: the text of each request once, and its tools.
_RESPONSES_DISK_BYTES = 512 * _MIB
_RESPONSES_MEMORY_BYTES = 64 * _MIB

# Tokens of past turns: four bytes each, each turn stored once.
_TURNS_DISK_BYTES = 512 * _MIB
_TURNS_MEMORY_BYTES = 64 * _MIB


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter in `folder`, by the name that its model has behind that of its base."""

    name: str
    folder: Path

    def named(self, base: str) -> str:
        """The name of the model that is `base` under the adapter."""
        return f"{base}{_ADAPTER_MARK}{self.name}"


def parse_adapter(given: str) -> tuple[str | None, NamedAdapter]:
    """An adapter as `[[BASE+]NAME=]PATH`: the name of its base, if there is one, and the adapter,
    by default named after its folder. Raises InvalidRequestError."""
    named, mark, path = given.partition("=")
    if not mark:
        named, path = model_path(given).name, given
    base, _, name = named.rpartition(_ADAPTER_MARK)
    if not path or not _ADAPTER_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"--adapter {given[:200]}: expected NAME=PATH, a name of letters, digits, dots, "
            "underscores and hyphens, and the folder of an adapter"
        )
    return base or None, NamedAdapter(name, Path(path).expanduser())


@dataclass(frozen=True, slots=True)
class Settings:
    """What to build: `model`, or what it is under an `adapter`.

    The pool is limited by `pool_bytes` and `pool_blocks`; without either by `default_pool_bytes`.
    At most `max_batch` requests decode in one step.

    The store has a memory tier of `memory_bytes` (`default_memory_tier_bytes`) and, with
    `use_disk`, a disk tier of `disk_bytes` (`default_disk_bytes`) in the folder `store`
    (`default_store_folder`). Once `disk_bytes_a_day` are written only ends of turns are; its drive
    is rated for `disk_rated_bytes`.

    `process_bytes` is the memory that the process may have: of a server see `guarded_loop`, and of
    it the defaults are parts. The weights of one of several models may take `weights_bytes`.

    `any_chip` shares blocks with other kinds of chips: see `fingerprint`. `fleet_secret` is the
    file with the secret of tenants' tags, by default that in $SEMANTIC_FLEET_SECRET_FILE; without
    one every store has its own secret. `remote` is the URL of the object store that a fleet shares.
    """

    model: str = DEFAULT_MODEL
    pool_bytes: int | None = None
    pool_blocks: int | None = None
    use_disk: bool = False
    store: Path | None = None
    disk_bytes: int | None = None
    disk_bytes_a_day: int | None = None
    disk_rated_bytes: int | None = None
    memory_bytes: int | None = None
    max_batch: int = 32
    process_bytes: int | None = None
    any_chip: bool = False
    fleet_secret: Path | None = None
    adapter: NamedAdapter | None = None
    weights_bytes: int | None = None
    remote: str | None = None

    @property
    def label(self) -> str:
        """What agents are saved with as their model; `load_tokenizer` takes it."""
        return self.model if self.adapter is None else self.adapter.named(self.model)

    @property
    def adapter_folder(self) -> Path | None:
        return None if self.adapter is None else self.adapter.folder


@dataclass(frozen=True, slots=True)
class App:
    """An engine and its parts."""

    engine: BlockPoolBatchEngine
    model: BatchBackend
    tokenizer: Tokenizer
    pool: BlockPool
    spec: ModelCacheSpec
    store: CacheStorePort
    settings: Settings


@dataclass(frozen=True, slots=True)
class Shared:
    """What the models of one server have in common: the thread, the open store and its turns, and
    the weights of those that `provider` loads from the same files. `settings` are those of the
    store, as it could be opened."""

    loop: StepLoop
    provider: ModelProviderPort
    store: CacheStorePort
    turns: TurnCache
    settings: Settings


OnStoreUnavailable = Callable[[StoreError], None]
"""Called when the disk tier cannot be opened; the store then has its memory tier only."""


def build_engine(settings: Settings, on_store_unavailable: OnStoreUnavailable | None = None) -> App:
    """Load the model and build its engine; `engine.close` also stops the store's threads.

    Raises as `load`, InvalidRequestError for a pool without a block, and StoreError when the disk
    tier cannot be opened and there is no `on_store_unavailable`.
    """
    return assemble(settings, _provider(settings), on_store_unavailable)


def assemble(
    settings: Settings,
    provider: ModelProviderPort,
    on_store_unavailable: OnStoreUnavailable | None = None,
) -> App:
    """`build_engine` with a model from `provider`."""
    with _suggesting(settings.model):
        model, tokenizer = provider.load_model(settings.model, settings.adapter_folder)
    spec = provider.extract_spec(model)
    pool: BlockPool = make_pool(settings, spec)
    store, settings = _open_or_report(settings, on_store_unavailable)
    return _new_app(model, tokenizer, pool, store, settings)


def build_in_slices(settings: Settings, shared: Shared) -> Slices[App]:
    """`build_engine` for one of several models: in slices, around a store that is open. Raises as
    `load`, and WeightsTooLargeError."""
    provider = shared.provider
    with _suggesting(settings.model):
        model, tokenizer = yield from provider.load_in_slices(
            settings.model, settings.adapter_folder, settings.weights_bytes
        )
    pool: BlockPool = make_pool(settings, provider.extract_spec(model))
    return _new_app(model, tokenizer, pool, shared.store, settings)


def open_shared(
    settings: Settings,
    loop: StepLoop,
    warn: Callable[[str], None],
    on_store_unavailable: OnStoreUnavailable | None = None,
) -> Shared:
    """What several models share; call it on the thread of `loop`. Raises as `build_engine`."""
    store, settings = _open_or_report(settings, on_store_unavailable)
    provider = _provider(settings)
    return Shared(loop, provider, store, open_turns(settings, warn), settings)


def _open_or_report(
    settings: Settings, on_store_unavailable: OnStoreUnavailable | None
) -> tuple[CacheStorePort, Settings]:
    """The store, and the settings that it has: without a disk if that was reported."""
    try:
        return open_store(settings), settings
    except StoreError as error:
        if on_store_unavailable is None:
            raise
        on_store_unavailable(error)
    settings = replace(settings, use_disk=False)
    return open_store(settings), settings


def rebuild_app(app: App) -> App:
    """Replace a failed engine: a new pool of the same size, the same weights and the same open
    store, which still has every idle agent.

    The old engine must not be used afterwards. Raises InvalidRequestError for a model that `load`
    did not return.
    """
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.model.provider import wrap_model
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
    from semantic.domain.services import BlockPool

    if not (isinstance(app.model, MLXBackend) and isinstance(app.tokenizer, MLXTokenizer)):
        raise InvalidRequestError(f"expected a loaded model, got {type(app.model).__name__}")
    app.model.abandon()  # frees the old pool before the new one is allocated
    model = wrap_model(app.model.model, app.model.model_id, app.tokenizer)
    model.grammars = app.model.grammars  # with what is compiled and checked
    pool: BlockPool = BlockPool(app.spec, app.pool.total_blocks, max_bytes=app.pool.max_bytes)
    return _new_app(model, app.tokenizer, pool, app.store, app.settings)


def _new_app(
    model: BatchBackend,
    tokenizer: Tokenizer,
    pool: BlockPool,
    store: CacheStorePort,
    settings: Settings,
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
    return App(engine, model, tokenizer, pool, pool.spec, store, settings)


def model_name(model: str) -> str:
    """What a model is called that is loaded from `model`: a folder by its last part, one of the
    hub's cache by its hub id, anything else by itself. Needs no such folder to exist."""
    path = model_path(model)
    if not model.startswith(("/", "~", ".")) and not path.is_dir():
        return model
    name = path.name
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith(_HUB_CACHE):
        name = path.parent.parent.name.removeprefix(_HUB_CACHE).replace("--", "/")
    return name if name and name.isprintable() else "model"


def model_path(model: str) -> Path:
    """The absolute path that `model` is if it is a folder; its links keep their own names."""
    path = Path(model)
    with suppress(RuntimeError):  # of a home folder that is not known
        path = path.expanduser()
    return path.resolve() if ".." in path.parts else path.absolute()


def model_of(name: str) -> str:
    """The model that `name` means: an alias's, else `name` itself. A folder goes before an alias.

    Raises InvalidRequestError if `name` may be an alias and their file cannot be read.
    """
    from semantic.adapters.hub.aliases import is_alias_name, read_aliases

    if name == DEFAULT_MODEL or not is_alias_name(name) or model_path(name).is_dir():
        return name
    return read_aliases().all().get(name, name)


def remember_served(model: str, names: Sequence[str]) -> None:
    """Make `names` aliases of `model`, but for those of the user and those that cannot be one.

    Raises InvalidRequestError for a file of aliases that cannot be read, OperatorError when it
    cannot be written.
    """
    from semantic.adapters.hub.aliases import is_alias_name, read_aliases, set_alias

    of_user = read_aliases().aliases if names else {}
    meant = permanent_name(model_of(model))
    for name in names:
        if is_alias_name(name) and name not in of_user and name not in (DEFAULT_MODEL, meant):
            set_alias(name, meant, "served")


def permanent_name(model: str) -> str:
    """`model` as it is written down: a folder by its absolute path, from wherever it is used."""
    path = model_path(model)
    return str(path) if model != DEFAULT_MODEL and path.is_dir() else model


@contextmanager
def _suggesting(model: str) -> Iterator[None]:
    """Add the most similar name that is known to a ModelNotFoundError about `model`."""
    try:
        yield
    except ModelNotFoundError as error:
        alike = None if model_path(model).exists() else similar_model(model)
        if alike is None:
            raise
        raise ModelNotFoundError(f"{error}; did you mean {alike}?") from error


def similar_model(name: str) -> str | None:
    """The most similar of all aliases and models on this machine, whole or behind its slash; None
    if none is."""
    from semantic.adapters.hub.aliases import read_aliases
    from semantic.adapters.hub.hub_cache import cached_ids

    known = [DEFAULT_MODEL, *cached_ids()]
    with suppress(InvalidRequestError):  # of a file of aliases that cannot be read
        known += read_aliases().all()
    return most_similar(name, known)


def make_pool(settings: Settings, spec: ModelCacheSpec) -> BlockPool:
    """The pool for a loaded model. Raises InvalidRequestError for a pool without a block."""
    from semantic.domain.services import BlockPool

    max_bytes = settings.pool_bytes
    if max_bytes is None and settings.pool_blocks is None:
        max_bytes = default_pool_bytes(memory_of(settings), read_device().used_bytes)
    return BlockPool(spec, settings.pool_blocks, max_bytes=max_bytes)


def default_pool_bytes(memory: int, weights: int) -> int:
    """The pool's limit in a process that may have `memory` bytes, of which `weights` are used.

    A quarter of the memory, at most what the weights, the memory tier and what is not planned
    leave, at least 64 MiB.
    """
    left = planned_bytes(memory) - default_memory_tier_bytes(memory) - weights
    return max(_MIN_POOL_BYTES, min(memory // _POOL_FRACTION, left))


def planned_bytes(memory: int) -> int:
    """What weights, pools and memory tier may take together in a process of `memory` bytes."""
    return memory - memory // _UNPLANNED_FRACTION - _BASE_BYTES


def open_store(settings: Settings) -> CacheStorePort:
    """The store of `settings`. Raises StoreError when its folder cannot be used."""
    from semantic.adapters.stores.background import BackgroundStore
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.adapters.stores.tiered import SharedTiers, TieredStore
    from semantic.domain.stored import Tier

    memory_bytes = settings.memory_bytes
    if memory_bytes is None:
        memory_bytes = default_memory_tier_bytes(memory_of(settings))
    queue_bytes = max(_MIN_QUEUE_BYTES, memory_bytes // _QUEUE_FRACTION)
    remote = open_remote(settings)
    if settings.use_disk:
        disk = open_disk(settings)
        memory = MemoryStore(memory_bytes, secret=disk.secret)
        own: CacheStorePort = TieredStore(memory, BackgroundStore(disk, queue_bytes))
    else:
        own = MemoryStore(memory_bytes, secret=fleet_secret(settings))
    if remote is None:
        return own
    rate = _UPLOAD_BYTES_PER_CORE * (os.cpu_count() or 1)
    uploads = BackgroundStore(remote, queue_bytes, tier=Tier.UPLOADS, bytes_per_second=rate)
    return SharedTiers(own, uploads)


def open_remote(settings: Settings) -> RemoteStore | None:
    """The tier that a fleet shares; None without one. Asks it nothing.

    Raises InvalidRequestError for a URL that is none, or without the fleet's secret, and
    OperatorError if the packages for it are missing.
    """
    opened = _open_objects(settings)
    if opened is None:
        return None
    from semantic.adapters.stores.remote.remote_store import RemoteStore

    return RemoteStore(*opened)


def _open_objects(settings: Settings) -> tuple[Objects, bytes] | None:
    """The object store of a fleet, and the fleet's secret. Raises as `open_remote`."""
    if settings.remote is None:
        return None
    secret = fleet_secret(settings)
    if secret is None:
        raise InvalidRequestError(
            "remote_store: expected fleet_secret_file too, the same for every replica"
        )
    try:
        from semantic.adapters.stores.remote.objects import Objects
    except ImportError as error:
        raise OperatorError(f"remote_store: {error}; install semantic-engine[fleet]") from error
    return Objects.open(settings.remote), secret


def try_remote(settings: Settings) -> float:
    """Write, read and delete an object of the fleet's store; the seconds that it took.

    Raises as `open_remote`, and StoreError if the object store fails.
    """
    opened = _open_objects(settings)
    if opened is None:
        raise InvalidRequestError("remote_store: expected a URL")
    from semantic.adapters.stores.remote.objects import UnavailableError

    objects, path, data = opened[0], f"probes/{os.urandom(8).hex()}", os.urandom(64)
    started = time.monotonic()
    try:
        was_new = objects.create(path, data)
        again, found = objects.create(path, b""), bytes(objects.get(path))
        objects.delete(path)
    except (UnavailableError, FileNotFoundError) as error:
        raise StoreError(f"the object store failed: {error}") from error
    if not was_new or again or found != data:
        raise StoreError("the object store replaces objects that are to be created only once")
    return time.monotonic() - started


def remote_tier(store: CacheStorePort) -> LookUpPort | None:
    """The tier of a store of `open_store` that is asked before requests are queued, if any."""
    from semantic.adapters.stores.background import BackgroundStore
    from semantic.adapters.stores.tiered import SharedTiers

    if not (isinstance(store, SharedTiers) and isinstance(store.cold, BackgroundStore)):
        return None
    from semantic.adapters.stores.remote.remote_store import RemoteStore

    return store.cold.inner if isinstance(store.cold.inner, RemoteStore) else None


def durable_tier(store: CacheStorePort) -> CacheStorePort:
    """The most durable tier on this machine of a store of `open_store`, without the queue before
    it."""
    from semantic.adapters.stores.background import BackgroundStore
    from semantic.adapters.stores.tiered import SharedTiers, TieredStore

    if isinstance(store, SharedTiers):
        store = store.warm
    if isinstance(store, TieredStore):
        store = store.cold
    return store.inner if isinstance(store, BackgroundStore) else store


def open_disk(settings: Settings) -> DiskStore:
    """The disk tier of `settings`. Raises StoreError when its folder cannot be used."""
    from semantic.adapters.stores.disk.store import DiskStore
    from semantic.adapters.stores.disk.wear import WriteLimits

    folder, secret = store_folder(settings), fleet_secret(settings)
    writes = WriteLimits(settings.disk_bytes_a_day, settings.disk_rated_bytes)
    if settings.disk_bytes is not None:
        return DiskStore.open(folder, settings.disk_bytes, secret=secret, writes=writes)
    free = _free_bytes(folder)

    def quota(used: int) -> int:
        return default_disk_bytes(free, used + _INDEX_GROWTH_BYTES)

    return DiskStore.open(folder, quota, secret=secret, writes=writes)


def fleet_secret(settings: Settings) -> bytes | None:
    """The secret that the stores of a fleet have in common; None without one.

    Raises InvalidRequestError for a file that cannot be used.
    """
    from semantic.adapters.stores.fleet_secret import read_fleet_secret

    given = settings.fleet_secret or os.environ.get(FLEET_VARIABLE)
    return read_fleet_secret(Path(given)) if given else None


def open_responses(
    settings: Settings, warn: Callable[[str], None]
) -> FallbackResponses | SharedResponses:
    """The store of responses that clients can continue: in the store's folder, or in memory; and
    in a fleet's object store. Raises as `open_remote`.

    It is opened on first use, when the block store must be open. `warn` is called with a sentence
    when the file cannot be used; memory is used then.
    """
    from semantic.adapters.stores.disk_responses import FallbackResponses, SqliteResponses
    from semantic.application.chat.memory_responses import MemoryResponses

    memory = MemoryResponses(_RESPONSES_MEMORY_BYTES)
    folder: Path | None = None
    if settings.use_disk:
        with suppress(StoreError):  # reported when the block store is opened
            folder = store_folder(settings)
    path = (folder or Path()) / RESPONSES_FILE
    responses = FallbackResponses(SqliteResponses(path, _RESPONSES_DISK_BYTES, warn), memory, warn)
    if folder is None:
        responses.disable_disk()
    records = _open_records(settings, "responses", warn)
    if records is None:
        return responses
    from semantic.adapters.stores.remote.remote_records import SharedResponses

    return SharedResponses(responses, *records)


def open_turns(settings: Settings, warn: Callable[[str], None]) -> TurnCache:
    """The cache of turns: in memory, and with `use_disk` also in the store's folder.

    `warn` is called with a sentence when the file cannot be used.
    """
    from semantic.adapters.stores.disk_turns import DiskTurns
    from semantic.application.chat.turn_cache import TurnCache

    below = None
    if settings.use_disk:
        with suppress(StoreError):  # reported when the block store is opened
            below = DiskTurns(store_folder(settings) / TURNS_FILE, _TURNS_DISK_BYTES, warn)
    records = _open_records(settings, "turns", warn)
    if records is None:
        return TurnCache(_TURNS_MEMORY_BYTES, below)
    from semantic.adapters.stores.remote.remote_records import RemoteTurns

    return TurnCache(_TURNS_MEMORY_BYTES, below, shared=RemoteTurns(records[0]))


def _open_records(
    settings: Settings, noun: str, warn: Callable[[str], None]
) -> tuple[Records, bytes] | None:
    """A fleet's records of one kind and its secret; None without one. Raises as `open_remote`."""
    opened = _open_objects(settings)
    if opened is None:
        return None
    from semantic.adapters.stores.remote.remote_records import Records

    return Records(*opened, noun, warn), opened[1]


def store_folder(settings: Settings) -> Path:
    """The store's folder. Raises StoreError when there is no home folder."""
    return default_store_folder() if settings.store is None else settings.store


def unfinished_folder(settings: Settings) -> Path | None:
    """The folder of the open store for files that are not finished; None without a disk tier."""
    return store_folder(settings) / "tmp" if settings.use_disk else None


def default_store_folder() -> Path:
    """$SEMANTIC_STORE, else "semantic/store" in the user's folder of caches.

    Raises StoreError when there is no home folder.
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


def default_disk_bytes(free: int, used: int) -> int:
    """The quota of a store of `used` bytes on a file system with `free` bytes left.

    What it uses and a tenth of what is free, at most 32 GiB. Never less than it uses: a missing
    limit evicts nothing.
    """
    return max(used, min(_MAX_DISK_BYTES, free // _DISK_FRACTION + used))


def default_memory_tier_bytes(memory: int) -> int:
    """The limit of the store's memory tier: a sixteenth of the memory, at least 64 MiB."""
    return max(_MIN_MEMORY_TIER_BYTES, memory // _MEMORY_TIER_FRACTION)


def load(
    model_id: str = DEFAULT_MODEL, *, any_chip: bool = False
) -> tuple[MLXBackend, MLXTokenizer]:
    """A model and its tokenizer, from a folder, a hub id, an alias or the embedded model.

    Raises ModelNotFoundError or UnsupportedModelError, and OperatorError when MLX is not usable.
    """
    model = model_of(model_id)
    with _suggesting(model):
        return _provider(Settings(any_chip=any_chip)).load_model(model)


def load_tokenizer(model_id: str) -> MLXTokenizer:
    """A model's tokenizer without its weights; under an adapter it is that of its base. Raises as
    `load`."""
    _provider()
    from semantic.adapters.mlx.model.provider import load_tokenizer

    base, mark, adapter = model_id.rpartition(_ADAPTER_MARK)
    is_label = mark and "/" not in adapter and not model_path(model_id).is_dir()
    model = model_of(base if is_label else model_id)
    with _suggesting(model):
        return load_tokenizer(model)


def describe_model(
    folder: Path, weights_bytes: int | None = None, adapter: Path | None = None
) -> ModelDescription:
    """What the model in `folder` takes, without its weights; see `description.describe`.

    Raises as that, and OperatorError when MLX is not usable.
    """
    _provider()
    from semantic.adapters.mlx.model.description import describe

    return describe(folder, weights_bytes, adapter)


def find_model(model: str) -> Path:
    """The folder of `model`, downloaded if it is a hub id that is not here. Raises as `load`."""
    _provider()
    from semantic.adapters.mlx.model.provider import find_folder

    with _suggesting(model):
        return find_folder(model)


def file_states(settings: Settings) -> Mapping[str, object]:
    """The files of a model and of its adapter, with what changes whenever their content does.

    Raises as `find_model`, and OSError.
    """
    from semantic.adapters.mlx.model.adapter import adapter_files
    from semantic.adapters.mlx.model.digest_cache import FileState
    from semantic.adapters.mlx.model.fingerprint import file_states as of_model

    folder = settings.adapter_folder
    own = () if folder is None else adapter_files(folder)
    return {**of_model(find_model(settings.model)), **{str(one): FileState.of(one) for one in own}}


def find_remote(hub_id: str) -> RemoteModel:
    """A model on the hub. Raises as `look_up`, and ModelNotFoundError if it has no weights."""
    from semantic.adapters.hub.remote import look_up
    from semantic.adapters.mlx.model.provider import HUB_FILES

    model = look_up(hub_id, HUB_FILES)
    if not model.weights_bytes:
        raise ModelNotFoundError(f"{hub_id!r} has no *.safetensors: it is no model for MLX")
    return model


def fetch_model(
    model: RemoteModel, on_arrived: OnArrived, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Complete `model` in the hub's cache. `on_arrived` is called from several threads. Raises as
    `download.pull`, also once `is_stopped`."""
    from semantic.adapters.hub import download
    from semantic.adapters.mlx.model.provider import HUB_FILES
    from semantic.ports.models import Arrived

    download.require_space(model)
    here, lock = model.n_bytes - download.missing_bytes(model), threading.Lock()
    on_arrived(Arrived(model.commit, here, model.n_bytes))

    def on_bytes(n_bytes: int) -> None:
        nonlocal here
        if is_stopped():
            raise OperatorError(f"the download of {model.hub_id} was stopped")
        with lock:
            here += n_bytes
            on_arrived(Arrived(model.commit, here, model.n_bytes))

    download.pull(model, HUB_FILES, on_bytes)


def memory_of(settings: Settings) -> int:
    """Bytes of memory that the process may have: what is set, at most the device's."""
    device = read_device()
    if settings.process_bytes is None:
        return default_process_bytes(device)
    return min(device.memory_bytes, settings.process_bytes)


def default_process_bytes(device: Device, weights: int = 0) -> int:
    """The memory that the process promises to keep to: nine tenths of what the system says that it
    may have on `device`, and more, up to all memory, if `weights` need that."""
    part, whole = _PROCESS_SHARE
    share = device.free_bytes * part // whole
    return min(device.memory_bytes, max(share, least_process_bytes(weights)))


def least_process_bytes(weights: int) -> int:
    """The least memory in which a model of so many bytes is of use."""
    least = _BASE_BYTES + weights + _MIN_POOL_BYTES
    unplanned, tier = _UNPLANNED_FRACTION, _MEMORY_TIER_FRACTION
    with_part = least * unplanned * tier // (unplanned * tier - unplanned - tier)
    with_least_tier = (least + _MIN_MEMORY_TIER_BYTES) * unplanned // (unplanned - 1)
    return max(with_part, with_least_tier) + unplanned * tier  # divisions round down


def promised(
    settings: Settings, others: Sequence[str] = (), embedding: str | None = None
) -> Settings:
    """`settings` with the memory that the process may have, if none is set; on MLX's thread.

    `others` are models of which one at a time must fit, as that of `settings`, beside `embedding`.
    Raises as `load`, and CapacityError, before any weights are read, if that does not fit.
    """
    device, (beside, *answering) = (
        read_device(),
        map(_weights_of, (embedding, settings.model, *others)),
    )
    weights = beside + max(answering)
    promise = settings.process_bytes
    if promise is None:
        promise = default_process_bytes(device, weights)
    most = promise - promise // _UNPLANNED_FRACTION
    if weights > most:
        raise CapacityError(
            f"the weights of {settings.model} have {weights / _GIB:.3g} GiB: expected at most "
            f"{most / _GIB:.3g} of the {promise / _GIB:.3g} GiB that the process may have, of "
            f"{device.memory_bytes / _GIB:.3g} GiB of memory"
        )
    return replace(settings, process_bytes=promise)


def _weights_of(model: str | None) -> int:
    """Bytes of a model's weights when they are loaded."""
    if model is None:
        return 0
    from semantic.adapters.mlx.model.description import weights_bytes

    return weights_bytes(find_model(model))


def guard_memory(loop: StepLoop, settings: Settings, report: Callable[[str], None]) -> None:
    """Have caches be given up so that the process stays below its `process_bytes`, if it is set."""
    from semantic.application.engine.memory_guard import Memory, MemoryGuard

    if settings.process_bytes is None:
        return
    from semantic.adapters.mlx.device import (
        give_memory_back,
        memory_in_use,
        memory_kept,
        memory_to_spare,
    )

    loop.guard = MemoryGuard(
        settings.process_bytes,
        Memory(memory_in_use, give_memory_back, memory_to_spare, memory_kept),
        clock=time.monotonic,
        report=report,
        most=read_device().memory_bytes,
    )


def guarded_loop(settings: Settings, report: Callable[[str], None]) -> StepLoop:
    """A loop with `guard_memory`."""
    from semantic.application.engine.step_loop import StepLoop

    loop = StepLoop()
    guard_memory(loop, settings, report)
    return loop


def give_up_under_pressure(loop: StepLoop, store: CacheStorePort) -> None:
    """Let the guard of `loop` give up the memory tier of `store`, then idle caches.

    Raises InvalidRequestError if what is in use now leaves no room.
    """
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.adapters.stores.tiered import TieredStore

    guard = loop.guard
    if guard is None:
        return
    if (used := guard.lacks_room()) is not None:
        raise InvalidRequestError(
            f"--memory-gb {guard.max_bytes / _GIB:.3g}: expected clearly more than the "
            f"{used / _GIB:.3g} that the process has without a request"
        )
    tier = store
    while isinstance(tier, TieredStore):
        tier = tier.warm
    if isinstance(tier, MemoryStore):
        guard.add("the memory tier", tier.release)
    guard.add("idle caches", loop.evict_idle)


def free_memory() -> None:
    """Give back what models took that nothing refers to any more; on MLX's thread."""
    from semantic.adapters.mlx.device import free_memory

    free_memory()


def read_device() -> Device:
    """The device that models run on. Raises OperatorError when MLX is not usable."""
    _provider()
    from semantic.adapters.mlx import device

    return device.read_device()


def blas_status() -> BlasStatus:
    """The BLAS of CPU computations; see `adapters.mlx.load_openblas`."""
    from semantic.adapters.mlx import BLAS_STATUS

    return BLAS_STATUS


def blas_kernel() -> str:
    """The kernel of CPU computations; see `adapters.mlx.blas_kernel`."""
    from semantic.adapters.mlx import blas_kernel

    return blas_kernel()


def read_bare_model(model: object) -> ModelCacheSpec | None:
    """The spec of a framework's own model object; None for any other object."""
    from semantic.adapters.mlx.kv_cache.model_spec import read_spec

    return read_spec(model)


def register_readers() -> None:
    """Let `ModelCacheSpec.from_model` read bare models. Idempotent."""
    from semantic.domain.value_objects import ModelCacheSpec

    if read_bare_model not in ModelCacheSpec.readers:
        ModelCacheSpec.readers.append(read_bare_model)


def _provider(settings: Settings | None = None) -> MLXModelProvider:
    """What loads models; `settings` are those of a model whose weights are to be loaded."""
    try:
        if settings is not None:
            from semantic.adapters.mlx.model import first_kernels

            first_kernels.begin()  # first: the other imports take as long
        from semantic.adapters.mlx.model.provider import MLXModelProvider
    except ImportError as error:
        from semantic.adapters.mlx.missing import what_to_install

        raise OperatorError(f"MLX cannot be loaded: {error}. {what_to_install()}") from error
    return MLXModelProvider(any_chip=settings is not None and settings.any_chip)


def _free_bytes(folder: Path) -> int:
    """Free bytes on the file system of `folder`, which need not exist. Raises StoreError."""
    existing = next(
        (path for path in (folder, *folder.absolute().parents) if path.exists()), folder
    )
    try:
        return shutil.disk_usage(existing).free
    except OSError as error:
        raise StoreError(f"cannot use {folder}: {error.strerror}") from error

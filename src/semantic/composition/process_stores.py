"""The stores of a process: tiers of blocks, turns and responses, chosen from settings.

Knows folders, quotas and a fleet's object store; no engine. Adapters are imported inside functions.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from semantic.composition.engine_settings import Settings
from semantic.composition.memory_shares import default_memory_tier_bytes, memory_of
from semantic.domain.errors import (
    InvalidRequestError,
    OperatorError,
    StoreError,
)

if TYPE_CHECKING:
    from semantic.adapters.stores.disk.store import DiskStore
    from semantic.adapters.stores.disk_responses import FallbackResponses
    from semantic.adapters.stores.kv_publisher import KVPublisher
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.adapters.stores.remote.objects import Objects
    from semantic.adapters.stores.remote.remote_records import Records, SharedResponses
    from semantic.adapters.stores.remote.remote_store import RemoteStore
    from semantic.application.chat.turn_cache import TurnCache
    from semantic.domain.stored import Tier
    from semantic.ports.generation import StepObserver
    from semantic.ports.store import BlockObserver, CacheStorePort, LookUpPort

logger = logging.getLogger("semantic.server")

_MIB = 1 << 20
_GIB = 1 << 30

STORE_VARIABLE = "SEMANTIC_STORE"
"""Environment variable with the store's folder."""

FLEET_VARIABLE = "SEMANTIC_FLEET_SECRET_FILE"
"""Environment variable with the path of the file of the fleet's secret."""

RESPONSES_FILE = "responses.db"
"""In the store's folder."""

TURNS_FILE = "turns.db"
"""In the store's folder."""

# Write-behind queue in front of the disk tier, as a part of the memory tier: all of it. What is
# queued is the newest in the memory tier, and both hold the same bytes.
_QUEUE_FRACTION = 1

_MIN_QUEUE_BYTES = 64 * _MIB

# Threads that upload to a fleet's object store, at least one: a part of the cores. One seals and
# sends less than a network of 10 Gbit/s takes.
_CORES_PER_UPLOAD = 4

_MOST_UPLOADS = 8

# A stop waits so long for what is still to be uploaded: over a slow line it may be hours.
_UPLOAD_AT_STOP_SECONDS = 15.0

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

_SHARED: WeakValueDictionary[tuple[str, ...], Objects] = WeakValueDictionary()

_CLOUDS = ("AWS_", "GOOGLE_", "AZURE_")
"""Begin the names of what the environment says of object stores."""

_SHARING = threading.Lock()


def open_store(settings: Settings, observer: BlockObserver | None = None) -> CacheStorePort:
    """The store of `settings`, whose tiers of this machine report to `observer`.

    Raises StoreError when its folder cannot be used.
    """
    from semantic.adapters.stores.background import BackgroundStore
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.adapters.stores.tiered import SharedTiers, TieredStore
    from semantic.application.cache.upload_pace import UploadPace
    from semantic.domain.stored import Tier

    memory_bytes = settings.memory_bytes
    if memory_bytes is None:
        memory_bytes = default_memory_tier_bytes(memory_of(settings))
    queue_bytes = max(_MIN_QUEUE_BYTES, memory_bytes // _QUEUE_FRACTION)
    fleet = open_objects(settings)
    if settings.use_disk:
        disk = open_disk(settings, observer)
        memory = MemoryStore(memory_bytes, secret=disk.secret, observer=observer)
        own: CacheStorePort = TieredStore(memory, BackgroundStore(disk, queue_bytes))
    else:
        own = MemoryStore(memory_bytes, secret=fleet_secret(settings), observer=observer)
    if fleet is None:
        return own
    uploads = BackgroundStore(
        _remote_tier(settings, *fleet),
        queue_bytes,
        tier=Tier.UPLOADS,
        pace=UploadPace(time.monotonic),
        threads=upload_threads(os.cpu_count() or 1),
        forgets_at_once=True,
        close_seconds=_UPLOAD_AT_STOP_SECONDS,
    )
    return SharedTiers(own, uploads)


def upload_threads(cores: int) -> int:
    """How many blocks are uploaded at a time."""
    return max(1, min(_MOST_UPLOADS, cores // _CORES_PER_UPLOAD))


def _remote_tier(settings: Settings, objects: Objects, secret: bytes) -> RemoteStore:
    """The tier that a fleet shares; with a budget its janitor too, on a connection of its own."""
    from semantic.adapters.stores.remote.remote_store import RemoteStore

    if settings.remote_bytes is None:
        return RemoteStore(objects, secret)
    from semantic.adapters.stores.remote.janitor import BackgroundJanitor

    own, _ = require_objects(settings)
    janitor = BackgroundJanitor(own, secret, settings.remote_bytes, logger.info)
    return RemoteStore(objects, secret, janitor=janitor)


def open_objects(settings: Settings) -> tuple[Objects, bytes] | None:
    """The object store of a fleet, and the fleet's secret; None without one. Asks it nothing.

    All stores of a process that have one URL, and credentials, share it: its connections, its
    circuit breaker, so that a request waits once for one that hangs, and what the log says of its
    outages.

    Raises InvalidRequestError for a URL that is none, or without the fleet's secret, and
    OperatorError if the packages for it are missing.
    """
    fleet = _fleet_of(settings)
    if fleet is None:
        return None
    url, secret = fleet
    named = (f"{name}={value}" for name, value in os.environ.items() if name.startswith(_CLOUDS))
    key = (url, *sorted(named))
    with _SHARING:
        objects = _SHARED.get(key)
        if objects is None:
            objects = _SHARED[key] = _new_objects(url, logger.warning)
    return objects, secret


def require_objects(settings: Settings) -> tuple[Objects, bytes]:
    """The same with connections and a breaker of its own, which reports nothing: for a janitor, and
    for commands. Raises InvalidRequestError for settings without a URL too."""
    fleet = _fleet_of(settings)
    if fleet is None:
        raise InvalidRequestError("remote_store: expected a URL")
    return _new_objects(fleet[0]), fleet[1]


def _fleet_of(settings: Settings) -> tuple[str, bytes] | None:
    """The URL of a fleet's object store, and its secret; None without one."""
    if settings.remote is None:
        if settings.remote_bytes is not None:
            raise InvalidRequestError("remote_gb: expected remote_store too")
        return None
    secret = fleet_secret(settings)
    if secret is None:
        raise InvalidRequestError(
            "remote_store: expected fleet_secret_file too, the same for every replica"
        )
    return settings.remote, secret


def _new_objects(url: str, notify: Callable[[str], None] | None = None) -> Objects:
    try:
        from semantic.adapters.stores.remote.objects import Objects
    except ImportError as error:
        raise OperatorError(f"remote_store: {error}; install semantic-engine[fleet]") from error
    return Objects.open(url, notify)


def try_remote(settings: Settings) -> float:
    """Write, read, list and delete an object of the fleet's store; the seconds that it took.

    Raises as `open_objects`, and StoreError if the object store fails.
    """
    objects, _ = require_objects(settings)
    from semantic.adapters.stores.remote.objects import UnavailableError

    path, data = f"probes/{os.urandom(8).hex()}", os.urandom(64)
    started = time.monotonic()
    try:
        was_new = objects.create(path, data)
        try:
            again, found = objects.create(path, b""), bytes(objects.get(path))
            is_listed = path in {one.path for page in objects.pages("probes") for one in page}
        finally:
            objects.delete(path)
    except (UnavailableError, FileNotFoundError) as error:
        raise StoreError(f"the object store failed: {error}") from error
    if not was_new or again or found != data:
        raise StoreError("the object store replaces objects that are to be created only once")
    if not is_listed:
        raise StoreError("the object store does not list what it has")
    return time.monotonic() - started


def new_step_observer(store: CacheStorePort) -> StepObserver | None:
    """What an engine in front of a store of `open_store` reports its steps to, if anything."""
    from semantic.adapters.stores.background import BackgroundStore
    from semantic.adapters.stores.tiered import SharedTiers

    if not (isinstance(store, SharedTiers) and isinstance(store.cold, BackgroundStore)):
        return None
    pace = store.cold.pace
    return None if pace is None else pace.new_observer()


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


def local_tiers(store: CacheStorePort) -> dict[Tier, MemoryStore | DiskStore]:
    """The tiers on this machine of a store of `open_store`."""
    from semantic.adapters.stores.disk.store import DiskStore
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.adapters.stores.tiered import SharedTiers, TieredStore
    from semantic.domain.stored import Tier

    own = store.warm if isinstance(store, SharedTiers) else store
    warm = own.warm if isinstance(own, TieredStore) else own
    tiers: dict[Tier, MemoryStore | DiskStore] = {}
    if isinstance(warm, MemoryStore):
        tiers[Tier.MEMORY] = warm
    cold = durable_tier(store)
    if isinstance(cold, DiskStore):
        tiers[Tier.DISK] = cold
    return tiers


def open_publisher(endpoint: str, topic: str) -> KVPublisher:
    """What publishes changes of the tiers. Raises as `KVPublisher`, and OperatorError if the
    packages for it are missing. Warns of an address that other machines reach."""
    from semantic.adapters.http.settings import is_loopback

    try:
        from semantic.adapters.stores.kv_publisher import KVPublisher
    except ImportError as error:
        raise OperatorError(f"kv_events: {error}; install semantic-engine[fleet]") from error
    publisher = KVPublisher(endpoint, topic)
    place = urlsplit(endpoint)
    if place.scheme == "tcp" and not is_loopback(place.hostname or ""):
        logger.warning("kv_events: all that can reach %s can read every prompt there", endpoint)
    return publisher


def open_disk(settings: Settings, observer: BlockObserver | None = None) -> DiskStore:
    """The disk tier of `settings`. Raises StoreError when its folder cannot be used."""
    from semantic.adapters.stores.disk.store import DiskStore
    from semantic.adapters.stores.disk.wear import WriteLimits

    folder, secret = store_folder(settings), fleet_secret(settings)
    writes = WriteLimits(settings.disk_bytes_a_day, settings.disk_rated_bytes)
    free, given = _free_bytes(folder), settings.disk_bytes

    def quota(used: int) -> int:
        if given is None:
            return default_disk_bytes(free, used + _INDEX_GROWTH_BYTES)
        if given > used + free:
            logger.warning(
                "disk_gb: its disk has room for %.1f GiB of these %.1f: that is the limit",
                (used + free) / _GIB, given / _GIB,
            )  # fmt: skip
        return min(given, max(1, used + free))

    return DiskStore.open(folder, quota, secret=secret, writes=writes, observer=observer)


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
    in a fleet's object store. Raises as `open_objects`.

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
    records = _open_records(settings, "responses")
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
    records = _open_records(settings, "turns")
    if records is None:
        return TurnCache(_TURNS_MEMORY_BYTES, below)
    from semantic.adapters.stores.remote.remote_records import RemoteTurns

    return TurnCache(_TURNS_MEMORY_BYTES, below, shared=RemoteTurns(records[0]))


def _open_records(settings: Settings, noun: str) -> tuple[Records, bytes] | None:
    """A fleet's records of one kind and its secret; None without one. Raises as `open_objects`."""
    opened = open_objects(settings)
    if opened is None:
        return None
    from semantic.adapters.stores.remote.remote_records import Records

    return Records(*opened, noun), opened[1]


def store_folder(settings: Settings) -> Path:
    """The store's folder, where a link of this user's leads. Raises StoreError when there is no
    home folder."""
    path = default_store_folder() if settings.store is None else settings.store
    if not path.is_symlink() or path.lstat().st_uid != os.geteuid():
        return path
    return Path(os.path.realpath(path))


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


def _free_bytes(folder: Path) -> int:
    """Free bytes on the file system of `folder`, which need not exist. Raises StoreError."""
    existing = next(
        (path for path in (folder, *folder.absolute().parents) if path.exists()), folder
    )
    try:
        return shutil.disk_usage(existing).free
    except OSError as error:
        raise StoreError(f"cannot use {folder}: {error.strerror}") from error

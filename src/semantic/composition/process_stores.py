"""Opens the stores of a process: the tiers of blocks, the turns and the responses."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from semantic.composition.engine_settings import STORE_VARIABLE, Settings
from semantic.composition.memory_shares import default_memory_tier_bytes, memory_of
from semantic.composition.plugins import opener
from semantic.domain.errors import InvalidRequestError, StoreError
from semantic.domain.identity import digest
from semantic.ports.store import LookUpPort

if TYPE_CHECKING:
    from semantic.adapters.stores.disk.store import DiskStore
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.application.chat.turn_cache import TurnCache
    from semantic.domain.stored import Tier
    from semantic.ports.generation import StepObserver
    from semantic.ports.store import (
        BlockObserver,
        DiskResponsesPort,
        EventsPort,
        OpensEvents,
        OpensShared,
        SharedStorePort,
        StorePort,
    )


logger = logging.getLogger("semantic.server")

_MIB = 1 << 20
_GIB = 1 << 30


FLEET_VARIABLE = "SEMANTIC_FLEET_SECRET_FILE"
"""The environment variable with the path of the fleet's secret."""

RESPONSES_FILE = "responses.db"
"""The name of the file with responses in the store's folder."""

TURNS_FILE = "turns.db"
"""The name of the file with turns in the store's folder."""

# Write-behind queue in front of the disk tier, as large as the memory tier. Queued blocks are the
# newest in the memory tier, which shares their bytes with the queue.
_QUEUE_FRACTION = 1

_MIN_QUEUE_BYTES = 64 * _MIB

# Cores per thread that uploads to a fleet's object store. One thread sends below 10 Gbit/s.
_CORES_PER_UPLOAD = 4

_MOST_UPLOADS = 8

# Seconds that a stop waits for uploads, which could take hours on a slow line.
_UPLOAD_AT_STOP_SECONDS = 15.0

# Disk tier: a fraction of the free space, so that a forgotten store does not fill a disk.
_DISK_FRACTION = 10

_MAX_DISK_BYTES = 32 * _GIB

_INDEX_GROWTH_BYTES = 4 * _MIB  # so that the quota never evicts existing blocks

# Responses that clients can continue: the text of each request, stored once, and its tools.
_RESPONSES_DISK_BYTES = 512 * _MIB

_RESPONSES_MEMORY_BYTES = 64 * _MIB

# Tokens of past turns: four bytes each; each turn is stored once.
_TURNS_DISK_BYTES = 512 * _MIB

_TURNS_MEMORY_BYTES = 64 * _MIB


def open_store(settings: Settings, observer: BlockObserver | None = None) -> StorePort:
    """Open the store. Its tiers on this machine report changes to `observer`. Raises StoreError."""
    from semantic.adapters.stores.background import BackgroundStore
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.adapters.stores.tiered import SharedTiers, TieredStore
    from semantic.adapters.stores.write_order import UploadPace
    from semantic.domain.stored import Tier

    memory_bytes = settings.memory_bytes
    if memory_bytes is None:
        memory_bytes = default_memory_tier_bytes(memory_of(settings))
    queue_bytes = max(_MIN_QUEUE_BYTES, memory_bytes // _QUEUE_FRACTION)
    shared = shared_store(settings)
    if settings.use_disk:
        disk = open_disk(settings, observer)
        memory = MemoryStore(memory_bytes, secret=disk.secret, observer=observer)
        own: StorePort = TieredStore(memory, BackgroundStore(disk, queue_bytes))
    else:
        own = MemoryStore(memory_bytes, secret=fleet_secret(settings), observer=observer)
    if shared is None:
        return own
    uploads = BackgroundStore(
        shared.blocks(),
        queue_bytes,
        tier=Tier.UPLOADS,
        pace=UploadPace(time.monotonic),
        threads=upload_threads(os.cpu_count() or 1),
        forgets_at_once=True,
        close_seconds=_UPLOAD_AT_STOP_SECONDS,
    )
    return SharedTiers(own, uploads)


def shared_store(settings: Settings) -> SharedStorePort | None:
    """Return the store that a fleet shares, or None without a URL. Sends no request yet. Raises the
    same errors as `shared_place`, InvalidRequestError for a malformed URL, and OperatorError if
    packages are missing."""
    place = shared_place(settings)
    if place is None:
        return None
    opening = cast("OpensShared", opener("remote store"))
    return opening(*place, settings.remote_bytes)


def require_shared(settings: Settings) -> SharedStorePort:
    """Return the store that a fleet shares. Raises InvalidRequestError without a URL."""
    shared = shared_store(settings)
    if shared is None:
        raise InvalidRequestError("remote_store: expected a URL")
    return shared


def shared_place(settings: Settings) -> tuple[str, bytes] | None:
    """Return the URL of a fleet's object store, and the fleet's secret. Returns None without a URL.
    Raises InvalidRequestError for a URL without a secret, and for a budget without a URL."""
    if settings.remote is None:
        if settings.remote_bytes is not None:
            raise InvalidRequestError("remote_gb also requires remote_store")
        return None
    secret = fleet_secret(settings)
    if secret is None:
        raise InvalidRequestError(
            "remote_store also requires fleet_secret_file, the same for every replica"
        )
    return settings.remote, secret


def upload_threads(cores: int) -> int:
    """Return the number of concurrent uploads for a machine with `cores` cores."""
    return max(1, min(_MOST_UPLOADS, cores // _CORES_PER_UPLOAD))


def new_step_observer(store: StorePort) -> StepObserver | None:
    """Return an observer that limits the uploads by the engine's steps, or None."""
    from semantic.adapters.stores.background import BackgroundStore

    queues = (one for one in _parts(store) if isinstance(one, BackgroundStore))
    pace = next((one.pace for one in queues if one.pace is not None), None)
    return None if pace is None else pace.new_observer()


def remote_tier(store: StorePort) -> LookUpPort | None:
    """Return the remote tier, or None."""
    return next((one for one in _parts(store) if isinstance(one, LookUpPort)), None)


def durable_tier(store: StorePort) -> StorePort:
    """Return the most durable tier on this machine."""
    from semantic.adapters.stores.background import BackgroundStore
    from semantic.adapters.stores.tiered import TieredStore

    made_of_others = TieredStore, BackgroundStore
    *_, last = (one for one in _parts(store) if not isinstance(one, (*made_of_others, LookUpPort)))
    return last


def local_tiers(store: StorePort) -> dict[Tier, MemoryStore | DiskStore]:
    """Return the tiers on this machine."""
    from semantic.adapters.stores.disk.store import DiskStore
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.domain.stored import Tier

    tiers: dict[Tier, MemoryStore | DiskStore] = {}
    for one in _parts(store):
        if isinstance(one, MemoryStore):
            tiers[Tier.MEMORY] = one
        elif isinstance(one, DiskStore):
            tiers[Tier.DISK] = one
    return tiers


def _parts(store: StorePort) -> Iterator[StorePort]:
    """Yield a store and all stores that it consists of, the fastest first."""
    from semantic.adapters.stores.background import BackgroundStore
    from semantic.adapters.stores.tiered import TieredStore

    yield store
    if isinstance(store, TieredStore):
        yield from _parts(store.warm)
        yield from _parts(store.cold)
    elif isinstance(store, BackgroundStore):
        yield from _parts(store.inner)


def open_events(endpoint: str, topic: str) -> EventsPort:
    """Open the publisher of changes. Raises the same errors as `OpensEvents`."""
    return cast("OpensEvents", opener("kv_events"))(endpoint, topic)


def open_disk(settings: Settings, observer: BlockObserver | None = None) -> DiskStore:
    """Open the disk tier of `settings`. Raises StoreError for an unusable folder."""
    from semantic.adapters.stores.disk.quota import WriteLimits
    from semantic.adapters.stores.disk.store import DiskStore

    folder, secret = store_folder(settings), fleet_secret(settings)
    writes = WriteLimits(settings.disk_bytes_a_day, settings.disk_rated_bytes)
    free, given = _free_bytes(folder), settings.disk_bytes

    def quota(used: int) -> int:
        if given is None:
            return default_disk_bytes(free, used + _INDEX_GROWTH_BYTES)
        if given > used + free:
            logger.warning(
                "disk_gb: the disk has room for only %.1f of %.1f GiB, which is now the limit",
                (used + free) / _GIB, given / _GIB,
            )  # fmt: skip
        return min(given, max(1, used + free))

    return DiskStore.open(folder, quota, secret=secret, writes=writes, observer=observer)


def require_chosen_store(settings: Settings) -> None:
    """Open and close a disk tier whose folder the user chose. Raises InvalidRequestError if that
    fails. Only the default folder may be unusable: a process then works in memory."""
    if settings.use_disk and (settings.store or os.environ.get(STORE_VARIABLE)):
        try:
            open_disk(replace(settings, disk_bytes=None)).close()  # the quota warns once, later
        except StoreError as error:
            raise InvalidRequestError(f"{error}; choose another --store, or --no-store") from error


def fleet_secret(settings: Settings) -> bytes | None:
    """Return the fleet's secret. Returns None if the settings do not name a file. Raises the same
    errors as `read_fleet_secret`."""
    given = settings.fleet_secret or os.environ.get(FLEET_VARIABLE)
    return read_fleet_secret(Path(given)) if given else None


def open_responses(settings: Settings, warn: Callable[[str], None]) -> DiskResponsesPort:
    """Return the store of responses. Open the block store first. If the file fails, the store calls
    `warn` and keeps responses in memory. Raises the same errors as `shared_store`."""
    from semantic.adapters.stores.conversations import FallbackResponses, SqliteResponses
    from semantic.application.chat.memory_responses import MemoryResponses

    memory = MemoryResponses(_RESPONSES_MEMORY_BYTES)
    folder: Path | None = None
    if settings.use_disk:
        with suppress(StoreError):  # opening the block store reports it
            folder = store_folder(settings)
    path = (folder or Path()) / RESPONSES_FILE
    responses = FallbackResponses(SqliteResponses(path, _RESPONSES_DISK_BYTES, warn), memory, warn)
    if folder is None:
        responses.disable_disk()
    shared = shared_store(settings)
    return responses if shared is None else shared.responses(responses)


def open_turns(settings: Settings, warn: Callable[[str], None]) -> TurnCache:
    """Return the cache of turns in memory. The cache is also on disk if `use_disk` is true. Calls
    `warn` if its file fails."""
    from semantic.adapters.stores.conversations import DiskTurns
    from semantic.application.chat.turn_cache import TurnCache

    below = None
    if settings.use_disk:
        with suppress(StoreError):  # opening the block store reports it
            below = DiskTurns(store_folder(settings) / TURNS_FILE, _TURNS_DISK_BYTES, warn)
    shared = shared_store(settings)
    return TurnCache(_TURNS_MEMORY_BYTES, below, shared=None if shared is None else shared.turns())


def store_folder(settings: Settings) -> Path:
    """Return the store's folder. Raises StoreError without a home folder."""
    path = default_store_folder() if settings.store is None else settings.store
    if not path.is_symlink() or path.lstat().st_uid != os.geteuid():
        return path
    return Path(os.path.realpath(path))


def unfinished_folder(settings: Settings) -> Path | None:
    """Return the folder for unfinished files, or None without a disk tier."""
    return store_folder(settings) / "tmp" if settings.use_disk else None


def default_store_folder() -> Path:
    """Return $SEMANTIC_STORE. If it is unset, return "semantic/store" in the user's cache folder.
    Raises StoreError without a home folder."""
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
    """Return the default quota of a store in bytes: `used` plus a tenth of `free`, at most 32 GiB.
    The quota is at least `used`, so that the default evicts nothing."""
    return max(used, min(_MAX_DISK_BYTES, free // _DISK_FRACTION + used))


def _free_bytes(folder: Path) -> int:
    existing = next(
        (path for path in (folder, *folder.absolute().parents) if path.exists()), folder
    )
    try:
        return shutil.disk_usage(existing).free
    except OSError as error:
        raise StoreError(f"cannot use {folder}: {error.strerror}") from error


FEWEST_BYTES = 32
"""The minimum number of bytes of a secret."""
_MOST_BYTES = 4096
_FEWEST_DIFFERENT = 8
_FOR_OTHERS = 0o037
"""The permissions that a secret's file must not have."""


def read_fleet_secret(path: Path) -> bytes:
    """Return a secret of 32 bytes, derived from the file `path`. Raises InvalidRequestError if
    other users can read or write the file, or if it is too short or too long."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _require_private(path, os.fstat(fd))
            data = os.read(fd, _MOST_BYTES + 1).rstrip(b"\r\n")
        finally:
            os.close(fd)
    except OSError as error:
        raise InvalidRequestError(
            f"fleet_secret_file: cannot read {path}: {error.strerror}"
        ) from error
    if not FEWEST_BYTES <= len(data) <= _MOST_BYTES or len(set(data)) < _FEWEST_DIFFERENT:
        raise InvalidRequestError(
            f"fleet_secret_file: {path} is not a secret: expected {FEWEST_BYTES} to {_MOST_BYTES} "
            "random bytes, as `openssl rand -hex 32` writes them"
        )
    return digest("fleet-secret-v1", data)


def _require_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRequestError(f"fleet_secret_file: {path} is not a file")
    if found.st_uid not in (os.geteuid(), 0):
        raise InvalidRequestError(
            f"fleet_secret_file: {path} belongs to user {found.st_uid}; expected a file of user "
            f"{os.geteuid()} or root"
        )
    if found.st_mode & _FOR_OTHERS:
        raise InvalidRequestError(
            f"fleet_secret_file: {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o});"
            " expected at most 0640"
        )

"""Opens a fleet's object store, evicts objects from it, and deletes a tenant's objects."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import shared_place
from semantic.domain.block_hash import tenant_tag
from semantic.domain.errors import InvalidRequestError, OperatorError, StoreError
from semantic.domain.identity import turns_owner

if TYPE_CHECKING:
    from semantic.ports.store import DiskResponsesPort
    from semantic_fleet.kv_publisher import KVPublisher
    from semantic_fleet.objects.janitor import Report
    from semantic_fleet.objects.objects import Objects
    from semantic_fleet.objects.remote_records import RemoteTurns, SharedResponses
    from semantic_fleet.objects.remote_store import RemoteStore

logger = logging.getLogger("semantic.server")

_CLOUDS = ("AWS_", "GOOGLE_", "AZURE_")
"""The prefixes of environment variables that configure object stores."""

_SHARED: WeakValueDictionary[tuple[str, ...], Objects] = WeakValueDictionary()

_SHARING = threading.Lock()


class FleetStore:
    """Implements `SharedStorePort` with an object store. All `FleetStore`s of a process with the
    same URL and credentials share a connection."""

    def __init__(self, url: str, secret: bytes, max_bytes: int | None = None) -> None:
        """See `OpensShared`."""
        self._url = url
        self._secret = secret
        self._max_bytes = max_bytes
        named = (f"{name}={value}" for name, value in os.environ.items() if _is_of_cloud(name))
        key = (url, *sorted(named))
        with _SHARING:
            objects = _SHARED.get(key)
            if objects is None:
                objects = _SHARED[key] = _new_objects(url, logger.warning)
        self.objects = objects

    def blocks(self) -> RemoteStore:
        """See `SharedStorePort.blocks`. If the store has a budget, this starts a janitor."""
        from semantic_fleet.objects.remote_store import RemoteStore

        if self._max_bytes is None:
            return RemoteStore(self.objects, self._secret)
        from semantic_fleet.objects.janitor import BackgroundJanitor

        own = _new_objects(self._url)
        janitor = BackgroundJanitor(own, self._secret, self._max_bytes, logger.info)
        return RemoteStore(self.objects, self._secret, janitor=janitor)

    def turns(self) -> RemoteTurns:
        from semantic_fleet.objects.remote_records import Records, RemoteTurns

        return RemoteTurns(Records(self.objects, self._secret, "turns"))

    def responses(self, own: DiskResponsesPort) -> SharedResponses:
        from semantic_fleet.objects.remote_records import Records, SharedResponses

        records = Records(self.objects, self._secret, "responses")
        return SharedResponses(own, records, self._secret)

    def try_out(self) -> tuple[float, bool]:
        objects = _new_objects(self._url)
        with _failures():
            return try_objects(objects), objects.keeps_versions()

    def last_pass(self) -> tuple[str, Mapping[str, object]] | None:
        from semantic_fleet.objects.janitor import read_report

        with _failures():
            found = read_report(_new_objects(self._url))
        return None if found is None else (str(found), asdict(found))


def require_objects(settings: Settings) -> tuple[Objects, bytes]:
    """Return a new connection to the object store, and the fleet's secret. Raises
    InvalidRequestError without a URL, and the same errors as `FleetStore`."""
    place = shared_place(settings)
    if place is None:
        raise InvalidRequestError("remote_store must be a URL")
    return _new_objects(place[0]), place[1]


def _is_of_cloud(name: str) -> bool:
    return name.startswith(_CLOUDS)


def _new_objects(url: str, notify: Callable[[str], None] | None = None) -> Objects:
    try:
        from semantic_fleet.objects.objects import Objects
    except ImportError as error:
        raise OperatorError(f"remote_store: {error}; install semantic-engine[fleet]") from error
    return Objects.open(url, notify)


def try_objects(objects: Objects) -> float:
    """Write, read, list and delete an object. Return the seconds that this took. Raises StoreError
    if the store misbehaves, and the same errors as `objects`."""
    path, data = f"probes/{os.urandom(8).hex()}", os.urandom(64)
    started = time.monotonic()
    was_new = objects.create(path, data)
    try:
        again, found = objects.create(path, b""), bytes(objects.get(path))
        is_listed = path in {one.path for page in objects.pages("probes") for one in page}
    finally:
        objects.delete(path)
    if not was_new or again or found != data:
        raise StoreError("the object store overwrites objects that it should create only once")
    if not is_listed:
        raise StoreError("the object store does not list an object that it has")
    return time.monotonic() - started


def open_publisher(endpoint: str, topic: str) -> KVPublisher:
    """Return the publisher of changes of the tiers. Warns if other machines can reach its address.
    Raises the same errors as `KVPublisher`, and OperatorError for missing packages."""
    from semantic_server.http.settings import is_loopback

    try:
        from semantic_fleet.kv_publisher import KVPublisher
    except ImportError as error:
        raise OperatorError(f"kv_events: {error}; install semantic-engine[fleet]") from error
    publisher = KVPublisher(endpoint, topic)
    place = urlsplit(endpoint)
    if place.scheme == "tcp" and not is_loopback(place.hostname or ""):
        logger.warning("kv_events: clients that can reach %s can read every prompt", endpoint)
    return publisher


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The data of a deleted tenant in the object store."""

    n_objects: int
    had_keys: bool
    keeps_versions: bool
    """True if the bucket keeps old versions of deleted objects."""


def evict_remote(
    settings: Settings,
    wait: Callable[[float], None] = time.sleep,
    notify: Callable[[str], None] = lambda _: None,
) -> Report | None:
    """Run the janitor once and return its report. Returns None if another process is the janitor.
    Raises the same errors as `require_objects`, and StoreError if the store fails."""
    if settings.remote_bytes is None:
        raise InvalidRequestError("remote_gb: expected the GiB that the object store may use")
    objects, secret = require_objects(settings)
    from semantic_fleet.objects.janitor import Janitor
    from semantic_fleet.objects.lease import PERIOD, RENEWALS, Lease

    lease, has_waited = Lease(objects), False
    with _failures():
        while not lease.acquire():
            if lease.is_renewed:
                return None
            if not has_waited:
                notify(
                    "another process has the janitor's lease: waiting to see whether it is alive, "
                    f"{PERIOD / RENEWALS:.0f} to {PERIOD:.0f} seconds"
                )
            has_waited = True
            wait(PERIOD / RENEWALS)
        try:
            return Janitor(objects, secret, lease, settings.remote_bytes).run()
        finally:
            lease.release()


def forget_tenant(settings: Settings, name: str) -> Forgotten:
    """Delete all keys and objects of the tenant `name`. Raises the same errors as
    `evict_remote`."""
    objects, secret = require_objects(settings)
    from semantic_fleet.objects.remote_records import records_tag
    from semantic_fleet.objects.sealing import Vault

    vault = Vault(objects, secret)
    tags = tenant_tag(secret, name), records_tag(secret, turns_owner(name))
    with _failures():
        # All keys first: without them the objects are unreadable.
        had_keys = sum(vault.forget(tag) for tag in tags) > 0
        return Forgotten(sum(map(vault.erase, tags)), had_keys, objects.keeps_versions())


@contextmanager
def _failures() -> Iterator[None]:
    from semantic_fleet.objects.lease import LostLeaseError
    from semantic_fleet.objects.objects import UnavailableError

    try:
        yield
    except (UnavailableError, LostLeaseError, FileNotFoundError) as error:
        raise StoreError(f"the object store failed: {error}") from error

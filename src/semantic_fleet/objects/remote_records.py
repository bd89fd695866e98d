"""Turns and responses in the object store of a fleet, so that any replica can continue a
conversation.

    responses/TENANT/KEY   a response
    turns/TENANT/KEY       a turn
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from semantic.adapters.stores.conversations import decoded_turn, encoded_turn, turn_key
from semantic.adapters.stores.disk.entries import UnreadableError
from semantic.application.chat.turn_cache import Writes
from semantic.domain.block_hash import tenant_tag
from semantic.domain.chat import Point, Turn
from semantic.domain.identity import digest
from semantic.domain.responses import StoredResponse, encoded, key_of, response_in
from semantic.ports.store import MOST_WAIT, DiskResponsesPort
from semantic_fleet.objects.objects import Objects, UnavailableError
from semantic_fleet.objects.sealing import Vault, seal, unsealed

_AHEAD = 8
"""The number of turns to read at a time."""
_MOST_TURNS = 1000
"""The maximum number of turns of one conversation to look for."""
_UPLOADS = 8
"""The number of responses to upload at once."""
_UPLOAD_BYTES = 64 << 20
"""The maximum number of bytes of responses that wait for an upload."""


class Records:
    """Small records of tenants, each under a 32-byte key. Thread-safe. Failures raise nothing."""

    def __init__(self, objects: Objects, secret: bytes, noun: str) -> None:
        self._objects = objects
        self._secret = secret
        self._vault = Vault(objects, secret)
        self._noun = noun

    def get(self, tag: bytes, key: bytes) -> bytes | None:
        """Return a tenant's record. Returns None if the record is missing or damaged."""
        try:
            tenant = self._vault.tenant(tag)
            data = self._objects.get(self._path(tenant.folder, key))
            return unsealed(tenant.key, self._identity(key), data)
        except (FileNotFoundError, UnreadableError, UnavailableError):
            return None

    @property
    def has_failed(self) -> bool:
        """True if the last call to the object store failed or the upload of a record is late."""
        return self._objects.has_failed

    def put(self, tag: bytes, key: bytes, data: bytes, *, replaces: bool = True) -> None:
        """Write a record. `replaces` allows overwriting a record. A failure drops the record."""
        with self._objects.urgent(), suppress(UnavailableError):
            tenant = self._vault.tenant(tag)
            sealed = seal(tenant.key, self._identity(key), data)
            write = self._objects.replace if replaces else self._objects.create
            write(self._path(tenant.folder, key), sealed)

    def delete(self, tag: bytes, key: bytes) -> bool:
        """Delete a record. Returns True if the record existed."""
        try:
            path = self._path(self._vault.tenant(tag).folder, key)
            if self._objects.size(path) is None:
                return False
            self._objects.delete(path)
        except UnavailableError:
            return False
        return True

    def tag(self, name: bytes) -> bytes:
        """Return the tag of the tenant called `name`."""
        return records_tag(self._secret, name)

    def _path(self, folder: str, key: bytes) -> str:
        return f"{self._noun}/{folder}/{hmac.digest(self._secret, key, 'sha256').hex()}"

    def _identity(self, key: bytes) -> bytes:
        return digest("remote-record-v1", self._noun.encode(), key)


def records_tag(secret: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, b"remote-records-v1" + name, "sha256")


class SharedResponses:
    """Implements `ResponsesPort` with the responses on this machine and in the fleet's records."""

    def __init__(self, own: DiskResponsesPort, records: Records, secret: bytes) -> None:
        self._own = own
        self._records = records
        self._secret = secret
        self._uploads = Writes(_UPLOADS, _UPLOAD_BYTES, "remote")
        self._uploading: dict[bytes, Future[None]] = {}  # the last upload of each key
        self._lock = threading.Lock()

    def disable_disk(self) -> None:
        self._own.disable_disk()

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        found = self._own.get(tenant, response_id)
        if found is not None:
            return found
        data = self._records.get(tenant_tag(self._secret, tenant), key_of(tenant, response_id))
        return response_in(data, response_id)

    def put(self, tenant: str, response: StoredResponse) -> None:
        """See `ResponsesPort.put`. Waits for the upload, but at most `MOST_WAIT`."""
        is_in_doubt = self._records.has_failed
        uploading = self._upload(tenant, response)
        self._own.put(tenant, response)
        if uploading is not None and not is_in_doubt:
            wait((uploading,), MOST_WAIT)

    def delete(self, tenant: str, response_id: str) -> bool:
        """See `ResponsesPort.delete`. Deletes the response here and in the object store."""
        tag, key = tenant_tag(self._secret, tenant), key_of(tenant, response_id)
        with self._lock:
            uploading = self._uploading.get(key)
        if uploading is not None:
            wait((uploading,))  # otherwise the upload would restore it
        there = self._records.delete(tag, key)
        return self._own.delete(tenant, response_id) or there

    def close(self) -> None:
        wait(self._uploads.waiting, MOST_WAIT)
        self._uploads.close()
        self._own.close()

    def _upload(self, tenant: str, response: StoredResponse) -> Future[None] | None:
        tag, key = tenant_tag(self._secret, tenant), key_of(tenant, response.id)
        data = encoded(response)
        uploading = self._uploads.add(len(data), lambda: self._records.put(tag, key, data))
        if uploading is not None:
            with self._lock:
                self._uploading[key] = uploading
            uploading.add_done_callback(lambda done: self._uploaded(key, done))
        return uploading

    def _uploaded(self, key: bytes, done: Future[None]) -> None:
        with self._lock:
            if self._uploading.get(key) is done:
                del self._uploading[key]


class RemoteTurns:
    """Implements `SharedTurnsPort` with the fleet's records."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._threads = ThreadPoolExecutor(_AHEAD, thread_name_prefix="remote")

    @property
    def has_failed(self) -> bool:
        return self._records.has_failed

    def put(self, turn: Turn) -> None:
        tag, key = self._records.tag(turn.owner), turn_key(turn.point)
        self._records.put(tag, key, encoded_turn(turn), replaces=bool(turn.tokens))

    def look_up(self, owner: bytes, points: Sequence[Point]) -> list[Turn]:
        """See `SharedTurnsPort.look_up`."""
        newest = [self._get(owner, point) for point in points[-2:]]
        if not any(newest):
            return []
        older = points[:-2][-_MOST_TURNS:]
        found = [*self._threads.map(lambda point: self._get(owner, point), older), *newest]
        return [turn for turn in found if turn is not None]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _get(self, owner: bytes, point: Point) -> Turn | None:
        data = self._records.get(self._records.tag(owner), turn_key(point))
        return None if data is None else decoded_turn(point, data, owner)

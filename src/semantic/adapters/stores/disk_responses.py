"""Responses on disk: in one SQLite file that survives the process, with a fallback to memory.

Knows records and which failures are permanent; no wires.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from semantic.adapters.stores.records import Records, UnusableFileError
from semantic.domain.errors import StoreError
from semantic.domain.responses import (
    DamagedRecordError,
    StoredResponse,
    decoded,
    encoded,
    key_of,
    owner_of,
)
from semantic.ports.store import ResponsesPort


def _ignore(_: str) -> None:
    """The default of `notify`."""


class SqliteResponses:
    """Implements `ResponsesPort`; beyond `max_bytes` the oldest responses are deleted, those of the
    tenant with most first.

    The file is created on first use; its folder must exist. `notify` receives a sentence when a
    corrupt file was quarantined.
    """

    def __init__(self, path: Path, max_bytes: int, notify: Callable[[str], None] = _ignore) -> None:
        self._records = Records(path, max_bytes, "responses", notify)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        data = self._records.get(key_of(tenant, response_id))
        if data is None:
            return None
        try:
            found = decoded(data)
        except DamagedRecordError:
            return None
        return found if found.id == response_id else None

    def put(self, tenant: str, response: StoredResponse) -> None:
        self._records.put(key_of(tenant, response.id), encoded(response), owner_of(tenant))

    def delete(self, tenant: str, response_id: str) -> bool:
        """See `ResponsesPort.delete`. The text is overwritten, in the log too."""
        return self._records.delete(key_of(tenant, response_id))

    def close(self) -> None:
        self._records.close()


class FallbackResponses:
    """Implements `ResponsesPort` by `disk`, and by `memory` for what the disk fails to store.

    While the process lives, a full or locked disk loses no response. `notify` receives one
    sentence, at the first failure.
    """

    def __init__(
        self, disk: ResponsesPort, memory: ResponsesPort, notify: Callable[[str], None]
    ) -> None:
        self._disk = disk
        self._memory = memory
        self._notify = notify
        self._notified = False
        self._off = False
        self._mutex = threading.Lock()

    def disable_disk(self) -> None:
        """Use memory only from now on."""
        self._off = True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        found = self._memory.get(tenant, response_id)
        if found is not None or self._off:
            return found
        try:
            return self._disk.get(tenant, response_id)
        except UnusableFileError as error:
            self._give_up(error)
            return None

    def put(self, tenant: str, response: StoredResponse) -> None:
        """See `ResponsesPort.put`. Raises nothing when the disk fails."""
        if not self._off:
            try:
                self._disk.put(tenant, response)
            except UnusableFileError as error:
                self._give_up(error)
            except StoreError as error:
                self._report(error)
            else:
                return
        self._memory.put(tenant, response)

    def delete(self, tenant: str, response_id: str) -> bool:
        on_disk = False
        if not self._off:
            try:
                on_disk = self._disk.delete(tenant, response_id)
            except UnusableFileError as error:
                self._give_up(error)
        return self._memory.delete(tenant, response_id) or on_disk

    def close(self) -> None:
        self._disk.close()
        self._memory.close()

    def _give_up(self, error: StoreError) -> None:
        self._off = True
        self._report(error)

    def _report(self, error: StoreError) -> None:
        with self._mutex:
            notified, self._notified = self._notified, True
        if not notified:
            self._notify(f"{error}; they are stored in memory until the process ends")

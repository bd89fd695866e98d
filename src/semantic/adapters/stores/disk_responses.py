"""Responses in one SQLite file, inside one budget of bytes. They survive the process. Knows no
wires."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from semantic.adapters.stores.records import Records, UnusableFileError
from semantic.domain.errors import StoreError
from semantic.domain.response_record import DamagedRecordError, decoded, encoded, key_of
from semantic.domain.responses import StoredResponse
from semantic.ports.responses import ResponsesPort


def _nobody(_: str) -> None:
    """Where nobody is there to be told."""


class SqliteResponses:
    """Implements `ResponsesPort`. The file is made when it is first needed; its folder must be
    there. `tell` gets a sentence when a broken file was moved aside."""

    def __init__(self, path: Path, max_bytes: int, tell: Callable[[str], None] = _nobody) -> None:
        self._records = Records(path, max_bytes, "responses", tell)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See `ResponsesPort.get`."""
        data = self._records.get(key_of(tenant, response_id))
        if data is None:
            return None
        try:
            found = decoded(data)
        except DamagedRecordError:
            return None
        return found if found.id == response_id else None

    def put(self, tenant: str, response: StoredResponse) -> None:
        """See `ResponsesPort.put`."""
        self._records.put(key_of(tenant, response.id), encoded(response))

    def delete(self, tenant: str, response_id: str) -> bool:
        """See `ResponsesPort.delete`. Its text is overwritten, in the log too."""
        return self._records.delete(key_of(tenant, response_id))

    def close(self) -> None:
        """See `ResponsesPort.close`."""
        self._records.close()


class SteadyResponses:
    """Implements `ResponsesPort` by `disk`, and by `memory` where that fails.

    `tell` gets one sentence, the first time.
    """

    def __init__(
        self, disk: ResponsesPort, memory: ResponsesPort, tell: Callable[[str], None]
    ) -> None:
        self._disk = disk
        self._memory = memory
        self._tell = tell
        self._told = False
        self._off = False
        self._mutex = threading.Lock()

    def keep_in_memory(self) -> None:
        """Leave the disk alone from now on."""
        self._off = True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See `ResponsesPort.get`."""
        found = self._memory.get(tenant, response_id)
        if found is not None or self._off:
            return found
        try:
            return self._disk.get(tenant, response_id)
        except UnusableFileError as error:
            self._give_up(error)
            return None

    def put(self, tenant: str, response: StoredResponse) -> None:
        """See `ResponsesPort.put`. Does not fail where the disk does."""
        if not self._off:
            try:
                self._disk.put(tenant, response)
            except UnusableFileError as error:
                self._give_up(error)
            except StoreError as error:
                self._say(error)
            else:
                return
        self._memory.put(tenant, response)

    def delete(self, tenant: str, response_id: str) -> bool:
        """See `ResponsesPort.delete`."""
        on_disk = False
        if not self._off:
            try:
                on_disk = self._disk.delete(tenant, response_id)
            except UnusableFileError as error:
                self._give_up(error)
        return self._memory.delete(tenant, response_id) or on_disk

    def close(self) -> None:
        """See `ResponsesPort.close`."""
        self._disk.close()
        self._memory.close()

    def _give_up(self, error: StoreError) -> None:
        self._off = True
        self._say(error)

    def _say(self, error: StoreError) -> None:
        with self._mutex:
            told, self._told = self._told, True
        if not told:
            self._tell(f"{error}; they are kept in memory, and are gone after a restart")

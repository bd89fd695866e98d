"""Responses in one SQLite file, inside one budget of bytes. They survive the process. Knows no
wires."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from semantic.adapters.stores.records.records import Records
from semantic.domain.response_record import DamagedRecordError, decoded, encoded, key_of
from semantic.domain.responses import StoredResponse


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

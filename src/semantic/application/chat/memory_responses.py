"""MemoryResponses: responses in this process's memory, within a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from semantic.domain.response_record import decoded, encoded, key_of
from semantic.domain.responses import StoredResponse

ROW_BYTES: Final = 512
"""Bytes of a response beside its own: keys, objects and table entries."""


class MemoryResponses:
    """Implements `ResponsesPort`; evicts the oldest. Stores encoded bytes: counted, immutable."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._n_bytes = 0
        self._mutex = threading.Lock()

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See `ResponsesPort.get`."""
        with self._mutex:
            data = self._kept.get(key_of(tenant, response_id))
        return None if data is None else decoded(data)

    def put(self, tenant: str, response: StoredResponse) -> None:
        """See `ResponsesPort.put`."""
        key, data = key_of(tenant, response.id), encoded(response)
        with self._mutex:
            self._drop(key)
            if len(data) + ROW_BYTES > self._max_bytes:
                return
            self._kept[key] = data
            self._n_bytes += len(data) + ROW_BYTES
            while self._n_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def delete(self, tenant: str, response_id: str) -> bool:
        """See `ResponsesPort.delete`."""
        with self._mutex:
            return self._drop(key_of(tenant, response_id))

    def close(self) -> None:
        """See `ResponsesPort.close`."""

    def _drop(self, key: bytes) -> bool:
        data = self._kept.pop(key, None)
        if data is None:
            return False
        self._n_bytes -= len(data) + ROW_BYTES
        return True

"""MemoryResponses: responses in this process's memory, within a budget of bytes."""

from __future__ import annotations

import threading
from typing import Final

from semantic.domain.fair_share import FairLru
from semantic.domain.responses import StoredResponse, decoded, encoded

ROW_BYTES: Final = 512
"""Bytes of a stored response in addition to its encoding."""


class MemoryResponses:
    """Implements `ResponsesPort` in memory."""

    def __init__(self, max_bytes: int) -> None:
        self._kept: FairLru[str, bytes] = FairLru(max_bytes)
        self._mutex = threading.Lock()

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        with self._mutex:
            data = self._kept.peek(tenant, response_id)
        return None if data is None else decoded(data)

    def put(self, tenant: str, response: StoredResponse) -> None:
        data = encoded(response)
        with self._mutex:
            self._kept.put(tenant, response.id, data, len(data) + ROW_BYTES)

    def delete(self, tenant: str, response_id: str) -> bool:
        with self._mutex:
            return self._kept.remove(tenant, response_id)

    def close(self) -> None:
        """See `ResponsesPort.close`."""

"""ResponsesPort: responses stored under their ids. A tenant finds only its own."""

from __future__ import annotations

from typing import Protocol

from semantic.domain.responses import StoredResponse


class ResponsesPort(Protocol):
    """Responses by tenant and id, within a budget of bytes; the oldest are evicted, those of the
    tenant that has most first.

    Thread-safe; calls may block and must not be made on an event loop. Each raises StoreError if it
    cannot be done now. Nothing may be called after `close`.
    """

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response as it was put, or None: unknown, another tenant's, deleted or damaged."""
        ...

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Store `response`, replacing one with its id. One larger than the budget is dropped."""
        ...

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; returns whether there was one."""
        ...

    def close(self) -> None:
        """Release files. Idempotent."""
        ...

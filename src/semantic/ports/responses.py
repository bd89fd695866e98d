"""Where responses are kept under their ids. A tenant finds its own and no others."""

from __future__ import annotations

from typing import Protocol

from semantic.domain.responses import StoredResponse


class ResponsesPort(Protocol):
    """Responses by tenant and id, within a budget of bytes: the oldest go first.

    Any thread may call any method, and may have to wait; none may be called on an event loop.
    Each raises StoreError when it cannot be done now. After `close` nothing else is called.
    """

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Exactly what was put, or None: unknown, another tenant's, deleted, dropped or damaged."""
        ...

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Keep `response`, in place of another with its id. One larger than the whole budget is
        not kept."""
        ...

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        ...

    def close(self) -> None:
        """Let go of files. Closing twice changes nothing."""
        ...

"""ExchangePort: agents with their cached blocks as archives, one stream of bytes each.

Every call may wait for the disk: none is for an event loop or the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from semantic.domain.stored import Manifest

Check = Callable[[], None]
"""Called before each piece of work; what it raises ends the work."""


class OutgoingArchive(Protocol):
    """An archive to be sent."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all pieces."""
        ...

    def pieces(self) -> Iterator[bytes]:
        """Its bytes in order, at most a MiB at once, and one block's body in memory.

        Raises StoreError when a block is not what it was, as one that was evicted meanwhile.
        """
        ...


class IncomingArchive(Protocol):
    """An archive that is being received. Nothing of it is in the store before `put`."""

    def write(self, data: bytes) -> None:
        """The next bytes. Raises InvalidRequestError at the first that cannot be part of it, and
        CapacityError when there is no room for them."""
        ...

    def put(self, tenant: bytes, name: str | None, check: Check) -> Manifest:
        """Verify everything, store it for the tenant with this tag, and save the agent under
        `name` or its own. What fails leaves nothing.

        Raises InvalidRequestError for an archive that is incomplete or damaged, and CapacityError
        when the store does not take it.
        """
        ...

    def close(self) -> None:
        """Delete what was received."""
        ...


class ExchangePort(Protocol):
    """Writes and reads archives of one model's agents. Thread-safe."""

    def export(self, manifest: Manifest, check: Check) -> OutgoingArchive:
        """The agent with those of its blocks that are stored, all of which it reads once."""
        ...

    def receive(self, accept: Callable[[str], None]) -> IncomingArchive:
        """Begin to receive. `accept` is called with the agent's own name before any of its bodies
        is taken, before they are stored, and before the agent is saved; it may raise."""
        ...

"""TurnsPort: recorded turns of conversations. A history whose turn is missing is rendered anew."""

from __future__ import annotations

from typing import Protocol

from semantic.domain.history import Point, Turn


class TurnsPort(Protocol):
    """Turns by their points. Thread-safe."""

    def get(self, point: Point) -> Turn | None:
        """The turn that ends at `point`; None if it is unknown or damaged."""
        ...

    def put(self, turn: Turn) -> None:
        """Store `turn`, replacing an earlier one at its point. Never raises: a turn that cannot be
        stored is dropped."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...

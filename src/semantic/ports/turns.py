"""Where turns of conversations are remembered. Losing one costs time, never a token."""

from __future__ import annotations

from typing import Protocol

from semantic.domain.history import Point, Turn


class TurnsPort(Protocol):
    """Turns by their points. Any thread may call it."""

    def get(self, point: Point) -> Turn | None:
        """The turn that ends at `point`; None when it is not known, or not as it was put."""
        ...

    def put(self, turn: Turn) -> None:
        """Remember `turn`, in the place of an earlier one at its point. Never raises: what cannot
        be kept is forgotten."""
        ...

    def close(self) -> None:
        """Return when all that was put is as safe as it will be."""
        ...

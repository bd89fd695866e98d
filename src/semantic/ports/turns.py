"""TurnsPort: recorded turns of conversations. A history whose turn is missing is rendered anew."""

from __future__ import annotations

from collections.abc import Sequence
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

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """Let `get` know what a fleet has of the turns at `points`, of one conversation in order,
        and of one owner. May wait for a network, one deadline at most; nothing without a fleet."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class SharedTurnsPort(Protocol):
    """Turns that several machines share. Thread-safe; raises nothing."""

    def put(self, turn: Turn) -> None:
        """Store `turn`; it is dropped if that fails."""
        ...

    def look_up(self, owner: bytes, points: Sequence[Point]) -> Sequence[Turn]:
        """Those of the turns at `points` that are there; none if the newest are not. May wait."""
        ...

    def close(self) -> None:
        """End its threads."""
        ...

"""TurnsPort: recorded turns of conversations. A history whose turn is missing is rendered anew."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from semantic.domain.history import Point, Turn

MOST_WAIT = 2.0
"""Seconds that the end of an answer waits at most for what another machine needs to continue it."""


class TurnsPort(Protocol):
    """Turns by their points. Thread-safe."""

    def get(self, point: Point) -> Turn | None:
        """The turn that ends at `point`; None if it is unknown or damaged."""
        ...

    def put(self, turn: Turn) -> Future[None] | None:
        """Store `turn`, replacing an earlier one at its point; one without tokens replaces none.

        Never raises: a turn that cannot be stored is dropped. The future ends when other machines
        of a fleet find the turn, or never will; the end of an answer waits for it, `MOST_WAIT` at
        most. None if there is no fleet, or if its store failed last or is late.
        """
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

    @property
    def has_failed(self) -> bool:
        """True if the last call failed or a `put` is late. Late is sooner than `MOST_WAIT`, so that
        one answer waits for a store that hangs, and the next does not. Does not wait."""
        ...

    def put(self, turn: Turn) -> None:
        """Store `turn`, and return when other machines find it; it is dropped if that fails. One
        without tokens replaces none. May wait."""
        ...

    def look_up(self, owner: bytes, points: Sequence[Point]) -> Sequence[Turn]:
        """Those of the turns at `points` that are there; none if the newest are not. May wait."""
        ...

    def close(self) -> None:
        """End its threads."""
        ...

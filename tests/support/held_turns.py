"""Turns of a fleet in memory, whose uploads are held until they are let."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from semantic.domain.chat import Point, Turn

PATIENCE = 60.0
"""Seconds after which something that should happen is taken never to."""


class HeldTurns:
    """Implements `SharedTurnsPort`. `begun` counts uploads; each goes on when `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.fails = False
        self.is_closed = False
        self._turns: dict[tuple[bytes, Point], Turn] = {}

    @property
    def has_failed(self) -> bool:
        return self.fails

    def put(self, turn: Turn) -> None:
        self.begun.release()
        assert self.go.wait(PATIENCE), "it was never let go on"
        at = turn.owner, turn.point
        if not self.fails and (turn.tokens or at not in self._turns):
            self._turns[at] = turn

    def look_up(self, owner: bytes, points: Sequence[Point]) -> list[Turn]:
        found = {one: self._turns[owner, one] for one in points if (owner, one) in self._turns}
        return list(found.values()) if found.keys() & set(points[-2:]) else []

    def close(self) -> None:
        self.is_closed = True

    def wait_for(self, n: int) -> None:
        """Return when `n` further uploads have begun."""
        for _ in range(n):
            assert self.begun.acquire(timeout=PATIENCE), "too few uploads begin"

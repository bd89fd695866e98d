"""TurnCache: an LRU cache of conversation turns in memory, in front of a slower store of turns.

Knows turns and their port; not what they are used for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from semantic.domain.history import Point, Turn
from semantic.ports.turns import TurnsPort

_TURN_BYTES = 512
"""Bytes of a turn beside its tokens: objects and table entries."""
_TOKEN_BYTES = 8
"""Bytes of a token in a tuple; integers above 256 take as much again."""


class TurnCache:
    """Implements `TurnsPort`. A turn is readable at once; a thread writes it to `below`."""

    def __init__(self, max_bytes: int, below: TurnsPort | None = None) -> None:
        self._max_bytes = max_bytes
        self._below = below
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="turns")
        self._turns: OrderedDict[Point, Turn] = OrderedDict()  # least recently used first
        self._n_bytes = 0
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return self._n_bytes

    def get(self, point: Point) -> Turn | None:
        """See `TurnsPort.get`."""
        with self._lock:
            turn = self._turns.get(point)
            if turn is not None:
                self._turns.move_to_end(point)
                return turn
        turn = None if self._below is None else self._below.get(point)
        if turn is not None:
            self._remember(turn)
        return turn

    def put(self, turn: Turn) -> None:
        """See `TurnsPort.put`."""
        self._remember(turn)
        if self._below is not None:
            self._writer.submit(self._below.put, turn)

    def close(self) -> None:
        """See `TurnsPort.close`."""
        self._writer.shutdown()
        if self._below is not None:
            self._below.close()

    def _remember(self, turn: Turn) -> None:
        with self._lock:
            self._drop(turn.point)
            self._turns[turn.point] = turn
            self._n_bytes += _bytes_of(turn)
            while self._n_bytes > self._max_bytes:
                self._drop(next(iter(self._turns)))

    def _drop(self, point: Point) -> None:
        turn = self._turns.pop(point, None)
        if turn is not None:
            self._n_bytes -= _bytes_of(turn)


def _bytes_of(turn: Turn) -> int:
    return _TURN_BYTES + _TOKEN_BYTES * len(turn.tokens)

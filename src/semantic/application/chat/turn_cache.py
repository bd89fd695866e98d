"""TurnCache: an LRU cache of conversation turns in memory, in front of a slower store of turns.

Knows turns and their port; not what they are used for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from semantic.domain.block_hash import pack_tokens, unpack_tokens
from semantic.domain.history import Point, Turn
from semantic.ports.turns import SharedTurnsPort, TurnsPort

_TURN_BYTES = 768
"""Bytes of a turn beside its tokens: objects and table entries."""

_QUEUE_BYTES = 16 << 20
"""Turns that wait to be written, at most; beyond it a turn is in memory only."""
_CLOSE_SECONDS = 2.0
"""How long `close` waits for them: another process may hold the file's lock for long."""

_Packed = tuple[Turn, bytes]
"""A turn without its tokens, and these packed: a tuple of integers takes ten times as much."""


class BorrowedTurns:
    """Implements `TurnsPort` with turns that another one closes."""

    def __init__(self, turns: TurnsPort) -> None:
        self._turns = turns

    def get(self, point: Point) -> Turn | None:
        """See `TurnsPort.get`."""
        return self._turns.get(point)

    def put(self, turn: Turn) -> None:
        """See `TurnsPort.put`."""
        self._turns.put(turn)

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """See `TurnsPort.look_up`."""
        self._turns.look_up(owner, points)

    def close(self) -> None:
        """See `TurnsPort.close`: nothing, they stay open."""


class TurnCache:
    """Implements `TurnsPort`. A turn is readable at once; a thread writes it to `below`."""

    def __init__(
        self,
        max_bytes: int,
        below: TurnsPort | None = None,
        queue_bytes: int = _QUEUE_BYTES,
        close_seconds: float = _CLOSE_SECONDS,
        shared: SharedTurnsPort | None = None,
    ) -> None:
        """At most `queue_bytes` of turns wait to be written; `close` drops those that are left
        after `close_seconds`. `shared` has those of a fleet."""
        self._max_bytes = max_bytes
        self._below = below
        self._shared = shared
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="turns")
        self._turns: OrderedDict[Point, _Packed] = OrderedDict()  # least recently used first
        self._n_bytes = 0
        self._queue_bytes = queue_bytes
        self._close_seconds = close_seconds
        self._queued: Future[None] | None = None
        self._n_queued = 0
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return self._n_bytes

    def get(self, point: Point) -> Turn | None:
        """See `TurnsPort.get`."""
        with self._lock:
            packed = self._turns.get(point)
            if packed is not None:
                self._turns.move_to_end(point)
        if packed is not None:
            return _unpacked(packed)
        turn = None if self._below is None else self._below.get(point)
        if turn is not None:
            self._remember(_packed(turn))
        return turn

    def put(self, turn: Turn) -> None:
        """See `TurnsPort.put`."""
        packed = _packed(turn)
        self._remember(packed)
        if self._below is None and self._shared is None:
            return
        with self._lock:
            if self._n_queued + _bytes_of(packed) > self._queue_bytes:
                return
            self._n_queued += _bytes_of(packed)
            self._queued = self._writer.submit(self._write, packed)

    def close(self) -> None:
        """See `TurnsPort.close`."""
        if self._queued is not None:
            wait([self._queued], self._close_seconds)
        self._writer.shutdown(cancel_futures=True)
        for store in (self._below, self._shared):
            if store is not None:
                store.close()

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """See `TurnsPort.look_up`. What is found is written below too: asked for once."""
        if self._shared is None or not points or self.get(points[-1]) is not None:
            return
        unknown = [point for point in points if self.get(point) is None]
        for turn in self._shared.look_up(owner, unknown):
            self._remember(_packed(turn))
            if self._below is not None:
                self._below.put(turn)

    def _write(self, packed: _Packed) -> None:
        for store in (self._below, self._shared):
            if store is not None:
                store.put(_unpacked(packed))
        with self._lock:
            self._n_queued -= _bytes_of(packed)

    def _remember(self, packed: _Packed) -> None:
        point = packed[0].point
        with self._lock:
            self._drop(point)
            self._turns[point] = packed
            self._n_bytes += _bytes_of(packed)
            while self._n_bytes > self._max_bytes:
                self._drop(next(iter(self._turns)))

    def _drop(self, point: Point) -> None:
        packed = self._turns.pop(point, None)
        if packed is not None:
            self._n_bytes -= _bytes_of(packed)


def _packed(turn: Turn) -> _Packed:
    return replace(turn, tokens=()), pack_tokens(turn.tokens)


def _unpacked(packed: _Packed) -> Turn:
    return replace(packed[0], tokens=unpack_tokens(packed[1]))


def _bytes_of(packed: _Packed) -> int:
    return _TURN_BYTES + len(packed[1])

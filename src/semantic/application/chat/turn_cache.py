"""TurnCache: an LRU cache of conversation turns in memory, in front of slower stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from semantic.domain.block_hash import pack_tokens, unpack_tokens
from semantic.domain.chat import Point, Turn
from semantic.domain.fair_share import FairLru
from semantic.ports.store import SharedTurnsPort, TurnsPort

_TURN_BYTES = 768
"""The size of a turn in bytes, without its tokens."""

_QUEUE_BYTES = 16 << 20
"""The maximum size in bytes of turns that wait for the disk."""
_CLOSE_SECONDS = 2.0
"""The maximum number of seconds that `close` waits for writes."""
_ANY = ""
"""The tenant of all turns: a point does not reveal its tenant."""
_UPLOADS = 8
"""The number of turns to upload at the same time."""

_Packed = tuple[Turn, bytes]
"""A turn without its tokens, and the packed tokens."""


class Writes:
    """Runs writes on `n_threads` threads, with at most `max_bytes` in the queue. Thread-safe."""

    def __init__(self, n_threads: int, max_bytes: int, name: str) -> None:
        """The names of the threads begin with `name`."""
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._waiting: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def waiting(self) -> frozenset[Future[None]]:
        with self._lock:
            return frozenset(self._waiting)

    def add(self, n_bytes: int, write: Callable[[], None]) -> Future[None] | None:
        """Queue `write`; return its future, or None if the queue is full."""
        with self._lock:
            if self._is_closed or self._n_bytes + n_bytes > self._max_bytes:
                return None
            self._n_bytes += n_bytes
            begun = self._threads.submit(write)
            self._waiting.add(begun)
        begun.add_done_callback(lambda done: self._ended(done, n_bytes))
        return begun

    def close(self) -> None:
        """Drop waiting writes, and wait for the running writes."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(cancel_futures=True)

    def _ended(self, done: Future[None], n_bytes: int) -> None:
        with self._lock:
            self._waiting.discard(done)
            self._n_bytes -= n_bytes


class TurnCache:
    """Implements `TurnsPort` in memory. Threads also write each turn to `below`, and upload it to
    `shared`."""

    def __init__(
        self,
        max_bytes: int,
        below: TurnsPort | None = None,
        queue_bytes: int = _QUEUE_BYTES,
        close_seconds: float = _CLOSE_SECONDS,
        shared: SharedTurnsPort | None = None,
    ) -> None:
        """Queue at most `queue_bytes` of turns for the disk, and the same amount for uploads."""
        self._below = below
        self._shared = shared
        self._writer = Writes(1, queue_bytes, "turns")
        self._uploads = Writes(_UPLOADS, queue_bytes, "remote")
        self._turns: FairLru[Point, _Packed] = FairLru(max_bytes)
        self._close_seconds = close_seconds
        self._lock = threading.Lock()

    def get(self, point: Point) -> Turn | None:
        with self._lock:
            packed = self._turns.get(_ANY, point)
        if packed is not None:
            return _unpacked(packed)
        turn = None if self._below is None else self._below.get(point)
        if turn is not None:
            self._remember(_packed(turn))
        return turn

    def put(self, turn: Turn) -> Future[None] | None:
        with self._lock:
            is_known = self._turns.peek(_ANY, turn.point) is not None
        if is_known and not turn.tokens:
            return None
        packed = _packed(turn)
        if turn.tokens or self._below is None:
            self._remember(packed)
        if self._below is not None:
            self._queue(self._writer, self._below, packed)
        if self._shared is None:
            return None
        is_in_doubt = self._shared.has_failed
        uploading = self._queue(self._uploads, self._shared, packed)
        return None if is_in_doubt else uploading

    def close(self) -> None:
        wait(self._writer.waiting | self._uploads.waiting, self._close_seconds)
        self._writer.close()
        self._uploads.close()
        for store in (self._below, self._shared):
            if store is not None:
                store.close()

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """See `TurnsPort.look_up`."""
        if self._shared is None or not points or self.get(points[-1]) is not None:
            return
        unknown = [point for point in points if self.get(point) is None]
        for turn in self._shared.look_up(owner, unknown):
            packed = _packed(turn)
            self._remember(packed)
            if self._below is not None:
                self._queue(self._writer, self._below, packed)

    def _queue(
        self, writes: Writes, store: TurnsPort | SharedTurnsPort, packed: _Packed
    ) -> Future[None] | None:
        def write() -> None:
            store.put(_unpacked(packed))

        return writes.add(_bytes_of(packed), write)

    def _remember(self, packed: _Packed) -> None:
        with self._lock:
            self._turns.put(_ANY, packed[0].point, packed, _bytes_of(packed))


def _packed(turn: Turn) -> _Packed:
    return replace(turn, tokens=()), pack_tokens(turn.tokens)


def _unpacked(packed: _Packed) -> Turn:
    return replace(packed[0], tokens=unpack_tokens(packed[1]))


def _bytes_of(packed: _Packed) -> int:
    return _TURN_BYTES + len(packed[1])

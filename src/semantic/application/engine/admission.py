"""Whether one more order may wait, and when to come again if not.

Counts orders and the bytes that their caches may need. Knows no engine; any thread may ask.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from semantic.domain.errors import InvalidRequestError, OverloadedError
from semantic.domain.services import BlockPool
from semantic.ports.outbound import Clock

_POOLS = 4
"""Without a limit, so many pools may be waited for."""

_SOONEST, _LATEST = 1, 60
_UNKNOWN = 10
"""Seconds to come again in: at least, at most, and before anything was measured."""
_MEASURED = 32
"""The rate is that of so many orders that left the queue last, since it was empty."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait, beside what runs: so many orders, and bytes of what their caches may need.

    `max_waiting_bytes` of None is four times the pool. Raises InvalidRequestError below 1.
    """

    max_waiting: int = 256
    max_waiting_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_waiting_bytes"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {limit}")


def limit_bytes(pool: BlockPool) -> int:
    """The bytes that `pool` can give; where it counts blocks, as many of each layer."""
    by_bytes = [] if pool.max_bytes is None else [pool.max_bytes]
    if pool.total_blocks is not None:
        of_all_layers = sum(layer.bytes_per_block for layer in pool.spec.layers)
        by_bytes.append(pool.total_blocks * of_all_layers // pool.spec.n_layers)
    return min(by_bytes)


class Admission:
    """The queue's account."""

    def __init__(self, limits: QueueLimits, pool: BlockPool, clock: Clock) -> None:
        pool_bytes = limit_bytes(pool)
        self._spec = pool.spec
        self._most = limits.max_waiting
        self._most_bytes = limits.max_waiting_bytes or _POOLS * pool_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, int] = {}
        self._n_bytes = 0
        self._left: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=_MEASURED + 1)

    @property
    def waiting(self) -> int:
        """Orders in the queue."""
        return len(self._waiting)

    @property
    def n_bytes(self) -> int:
        """Bytes that the orders in the queue may need."""
        return self._n_bytes

    def enter(self, order: Hashable, n_tokens: int) -> None:
        """Let `order`, of at most `n_tokens`, wait. Raises OverloadedError when there is no room.

        In an empty queue there is always room: what could never fit is not told to come again.
        """
        n_bytes = self._spec.bytes_for(n_tokens)
        with self._lock:
            many = len(self._waiting) >= self._most
            excess = self._n_bytes + n_bytes - self._most_bytes
            if self._waiting and (many or excess > 0):
                raise OverloadedError(
                    f"{len(self._waiting)} requests are waiting for {self._n_bytes} bytes; "
                    f"at most {self._most} may, for {self._most_bytes} bytes",
                    retry_after=self._retry_after(excess),
                )
            if not self._waiting:
                self._left.clear()
                self._left.append((self._clock(), 0))
            self._waiting[order] = n_bytes
            self._n_bytes += n_bytes

    def leave(self, order: Hashable) -> None:
        """`order` runs or has ended. Doing it again changes nothing."""
        with self._lock:
            n_bytes = self._waiting.pop(order, None)
            if n_bytes is not None:
                self._n_bytes -= n_bytes
                self._left.append((self._clock(), n_bytes))

    def _retry_after(self, excess: int) -> int:
        """Seconds until, at the rate of late, one order and `excess` bytes have left the queue."""
        (since, _), *left = self._left
        if not left:
            return _UNKNOWN
        # Until now, not until the last one: while nobody leaves, the rate falls.
        seconds = self._clock() - since
        n_bytes = sum(size for _, size in left)
        shares = (1 / len(left), excess / n_bytes if n_bytes else 0.0)
        return math.ceil(min(max(_SOONEST, seconds * max(shares)), _LATEST))

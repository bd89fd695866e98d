"""Admission: limits the requests in the queue, and computes Retry-After. Thread-safe.

Tokens with which several queued prompts begin count once, as only one request computes them.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from semantic.domain.errors import InvalidRequestError, OverloadedError, TenantLimitError
from semantic.domain.fair_share import FairRoom
from semantic.domain.prefix import PromptDigests, digests_of
from semantic.domain.services import BlockPool
from semantic.ports.generation import Clock

_POOLS = 4
"""The default limit on queued bytes, as a multiple of the pool's size."""

_MIN_RETRY, _MAX_RETRY = 1, 60
_DEFAULT_RETRY = 10
"""The minimum, maximum and first value of Retry-After, in seconds."""
_MEASURED = 32
"""The number of latest departures from the queue that determine its rate."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits on the number of queued requests and on the bytes of their caches. If `shared`, a
    tenant leaves a part of each limit free. Raises InvalidRequestError for a limit below 1."""

    max_waiting: int = 256
    max_waiting_bytes: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        for name, limit in (
            ("max_waiting", self.max_waiting),
            ("max_waiting_bytes", self.max_waiting_bytes),
        ):
            if limit is not None and limit < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {limit}")


def limit_bytes(pool: BlockPool) -> int:
    """Return the bytes that `pool` can allocate."""
    by_bytes = [] if pool.max_bytes is None else [pool.max_bytes]
    if pool.total_blocks is not None:
        of_all_layers = sum(layer.bytes_per_block for layer in pool.spec.layers)
        by_bytes.append(pool.total_blocks * of_all_layers // pool.spec.n_layers)
    return min(by_bytes)


_NOTHING = digests_of(())


class Admission:
    def __init__(self, limits: QueueLimits, pool: BlockPool, clock: Clock) -> None:
        pool_bytes = limit_bytes(pool)
        self._spec = pool.spec
        self._requests = FairRoom(limits.max_waiting)
        self._bytes = FairRoom(limits.max_waiting_bytes or _POOLS * pool_bytes)
        self._shared = limits.shared
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, tuple[int, str, PromptDigests]] = {}
        self._left: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=_MEASURED + 1)

    @property
    def waiting(self) -> int:
        """The number of queued requests."""
        return len(self._waiting)

    @property
    def n_bytes(self) -> int:
        """The bytes that the queued requests may need."""
        return self._bytes.used

    def enter(
        self,
        submission: Hashable,
        n_tokens: int,
        tenant: str = "",
        prompt: PromptDigests = _NOTHING,
    ) -> None:
        """Add a request of at most `n_tokens`. Raises OverloadedError if the queue is full, and
        TenantLimitError if the tenant's part of the queue is full."""
        with self._lock:
            n_bytes = self._spec.bytes_for(n_tokens - self._common(tenant, prompt))
            if self._waiting and not (self._requests.fits(1) and self._bytes.fits(n_bytes)):
                raise OverloadedError(
                    f"the queue is full: it holds at most {self._requests.most} requests and "
                    f"{self._bytes.most} bytes",
                    retry_after=self._retry_after(self._bytes.used + n_bytes - self._bytes.most),
                )
            if self._shared:
                self._require_room_beside(tenant, n_bytes)
            if not self._waiting:
                self._left.clear()
                self._left.append((self._clock(), 0))
            self._waiting[submission] = n_bytes, tenant, prompt
            self._requests.take(tenant, 1)
            self._bytes.take(tenant, n_bytes)

    def leave(self, submission: Hashable) -> None:
        """Remove a request from the queue. Idempotent."""
        with self._lock:
            if submission not in self._waiting:
                return
            n_bytes, tenant, _ = self._waiting.pop(submission)
            self._requests.give(tenant, 1)
            self._bytes.give(tenant, n_bytes)
            self._left.append((self._clock(), n_bytes))

    def _common(self, tenant: str, prompt: PromptDigests) -> int:
        others = (one for _, of, one in self._waiting.values() if of == tenant)
        return max((prompt.common(one) for one in others), default=0)

    def _require_room_beside(self, tenant: str, n_bytes: int) -> None:
        own, own_bytes = self._requests.of(tenant), self._bytes.of(tenant)
        if self._requests.leaves_room(tenant, 1) and self._bytes.leaves_room(tenant, n_bytes):
            return
        excess = own_bytes + 2 * n_bytes + self._bytes.used - self._bytes.most
        raise TenantLimitError(
            f"{own} of your requests ({own_bytes} bytes) are waiting: the rest of the queue stays "
            "free for other tenants",
            retry_after=self._retry_after(excess),
        )

    def _retry_after(self, excess: int) -> int:
        """Estimate the seconds until one request and `excess` bytes have left the queue."""
        (since, _), *left = self._left
        if not left:
            return _DEFAULT_RETRY
        # Measured until now, not until the last departure: the rate falls while nothing leaves.
        seconds = self._clock() - since
        n_bytes = sum(size for _, size in left)
        shares = (1 / len(left), excess / n_bytes if n_bytes else 0.0)
        return math.ceil(min(max(_MIN_RETRY, seconds * max(shares)), _MAX_RETRY))

"""BackgroundStore: a write-behind queue in front of a slow store.

`put` returns at once, and threads write. Queued blocks can be read from the queue.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from semantic.adapters.stores.agent_index import QueuedAgents
from semantic.adapters.stores.memory import data_of, fill
from semantic.adapters.stores.neighbours import Children
from semantic.adapters.stores.write_order import UploadPace
from semantic.adapters.stores.write_queue import WriteQueue
from semantic.domain.block_hash import PUBLIC_TENANT, BlockHash, BlockKey, Part, tenant_tag
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import BlockHeader, BlockRead, Found, StoredBlock, StoreStats, Tier
from semantic.ports.store import StorePort

QUEUED_BLOCK_BYTES = 1024
"""Bytes counted for a queued block in addition to its body."""
_KEPT_FOR_OTHERS = 8
"""A single tenant must leave one part in this many of the queue free."""
MAX_TOUCHES = 1000
"""The maximum number of touches in the queue. Dropping a touch makes eviction less exact."""


@dataclass(slots=True, eq=False)
class _Put:
    block: StoredBlock
    number: int = 0

    @property
    def n_bytes(self) -> int:
        return QUEUED_BLOCK_BYTES + len(self.block.body)

    @property
    def tenant(self) -> bytes:
        return self.block.header.link.scope.tenant


@runtime_checkable
class _Bounded(Protocol):
    """A tier with a quota."""

    @property
    def refused(self) -> bool:
        """True if the last `put` returned False because the block exceeds the quota."""


class BackgroundStore:
    """Accepts writes at once; threads pass them to `inner`. Thread-safe.

    Drops blocks beyond `max_queued_bytes`, and all writes during a back-off. A process that ends
    without `close` loses the queue. `flush` and `close` raise IntegrityError if a bug has ended a
    thread. Methods without a docstring: see `CacheStorePort`.
    """

    def __init__(
        self,
        inner: StorePort,
        max_queued_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        tier: Tier = Tier.QUEUE,
        pace: UploadPace | None = None,
        threads: int = 1,
        forgets_at_once: bool = False,
        close_seconds: float = math.inf,
    ) -> None:
        """`stats` reports the queue as `tier`. `pace` decides when a block may go to `inner`. If
        `forgets_at_once`, `inner` orders writes and removals itself. Raises InvalidRequestError if
        `max_queued_bytes` is below 1."""
        if max_queued_bytes < 1:
            raise InvalidRequestError(
                f"max_queued_bytes must be at least 1, got {max_queued_bytes}"
            )
        self.inner = inner
        self.pace = pace
        self.secret = inner.secret
        self._tier = tier
        self._waits = not forgets_at_once
        self._queue = WriteQueue(
            max_queued_bytes, clock=clock, pace=pace, threads=threads, close_seconds=close_seconds
        )
        self._changed = self._queue.changed
        self.agents = QueuedAgents(self._queue, inner.agents, waits=self._waits)
        self._blocks: dict[BlockKey, _Put] = {}
        self._dropped: set[BlockKey] = set()  # dropped while being written, and not put again
        self._children = Children()  # of `_blocks`
        self._tenants: Counter[bytes] = Counter()  # bytes of each tenant ever seen
        self._public = tenant_tag(inner.secret, PUBLIC_TENANT)
        self._touches = 0

    @property
    def holds_back(self) -> bool:
        """See `CacheStorePort.holds_back`."""
        if self._waits or self.inner.holds_back:
            return self.inner.holds_back
        with self._changed:
            return not self._queue.accepts() or self._queue.is_over_half

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        """See `CacheStorePort.put`. Returns True if the queue accepts the block."""
        job = _Put(block)
        with self._changed:
            if block.header.key in self._blocks:
                if not block.interim:
                    self._queue.order.hasten(block.header.key)
                    self._changed.notify_all()
                return True
            self._tenants.setdefault(job.tenant, 0)
            if not self._queue.accepts() or not self._has_room(job):
                self._queue.counts["dropped"] += 1
                return False
            self._drop_superseded(block.header)
            self._blocks[block.header.key] = job
            self._dropped.discard(block.header.key)
            self._children.add(block.header)
            self._queue.n_bytes += job.n_bytes
            self._tenants[job.tenant] += job.n_bytes
            write, ended = partial(self._write, job), partial(self._ended, job)
            job.number = self._queue.add(job, write, ended, block)
            self._drop_deferred()
            return True

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.drop`. Waits for a running write of the block unless
        `forgets_at_once`."""
        gone = frozenset(keys)
        with self._changed:
            if not self._waits:
                for job in self._writing(gone):
                    self._dropped.add(job.block.header.key)
                    if self._blocks.get(job.block.header.key) is job:
                        self._forget(job)
            for queued in [self._blocks[key] for key in gone if key in self._blocks]:
                if self._queue.take(queued.number) is not None:
                    self._forget(queued)
            self._changed.wait_for(lambda: not (self._waits and self._writing(gone)))
        self.inner.drop(keys)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        with self._changed:
            queued = {key: self._blocks[key].block for key in keys if key in self._blocks}
        found = dict(self.inner.find([key for key in keys if key not in queued]))
        found.update((key, Found(len(one.body), self._tier)) for key, one in queued.items())
        return found

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        with self._changed:
            if not self._queue.accepts() or self._queue.n_bytes >= self._queue.max_bytes:
                return frozenset()
            # The end of a turn writes held-back blocks at once.
            unqueued = [
                key for key in keys if key not in self._blocks or self._queue.order.holds(key)
            ]
        return self.inner.lacking(unqueued)

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        with self._changed:
            queued = self._children.of(parent, part)
        return _joined(self.inner.children(parent, part), queued)

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        with self._changed:
            queued = self._children.nearest(parent, part, like)
        return _joined(self.inner.nearest(parent, part, like), queued)

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        with self._changed:
            blocks = [self._queued(header) for header in headers]
        found = dict(self.inner.resident(headers))
        for header, block in zip(headers, blocks, strict=True):
            data = data_of(block, header)
            if data is not None:
                found[header.key] = data
        self._count_hits(len(found))
        return found

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        with self._changed:
            blocks = [self._queued(read.header) for read in reads]
        filled = [fill(read, block) for read, block in zip(reads, blocks, strict=True)]
        self._count_hits(sum(filled))
        rest = [i for i, done in enumerate(filled) if not done]
        written = self.inner.read_into([reads[i] for i in rest]) if rest else ()
        for i, done in zip(rest, written, strict=True):
            filled[i] = done
        return filled

    def read(self, header: BlockHeader) -> bytes | None:
        with self._changed:
            block = self._queued(header)
        data = data_of(block, header)
        if data is None:
            return self.inner.read(header)
        self._count_hits(1)
        return bytes(data)

    def prefetch(self, header: BlockHeader) -> bool:
        """See `CacheStorePort.prefetch`. Does nothing for a queued block."""
        with self._changed:
            is_queued = header.key in self._blocks
        return is_queued or self.inner.prefetch(header)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.touch`. Drops touches beyond `MAX_TOUCHES`."""
        with self._changed:
            if self._queue.error is None and self._touches < MAX_TOUCHES:
                self._touches += 1
                used = tuple(keys)
                self._queue.add(used, partial(self.inner.touch, used), self._touched)

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`. The first entry is the queue."""
        with self._changed:
            queue = StoreStats(
                self._tier,
                n_blocks=len(self._blocks),
                n_bytes=self._queue.n_bytes,
                max_bytes=self._queue.max_bytes,
                n_agents=len(self.agents),
                counts={**self._queue.counts, "back-offs": self._queue.backoff.times},
            )
        return [queue, *self.inner.stats()]

    def flush(self) -> None:
        """See `CacheStorePort.flush`. Raises IntegrityError if a bug has ended a thread."""
        self._queue.drain()
        self.inner.flush()

    def close(self) -> None:
        """See `CacheStorePort.close`. Raises IntegrityError if a bug has ended a thread."""
        try:
            self._queue.close()
        finally:
            self.inner.close()

    def _count_hits(self, n: int) -> None:
        with self._changed:
            self._queue.counts["hits"] += n

    def _put(self, block: StoredBlock) -> bool:
        """Return False if a write failed. The quota does not count as one."""
        inner = self.inner
        return inner.put(block) or (isinstance(inner, _Bounded) and inner.refused)

    def _write(self, job: _Put) -> None:
        try:
            self._queue.attempt(lambda: self._put(job.block), "dropped")
        finally:
            if self.pace is not None:
                self.pace.end()
        with self._changed:
            if job.block.header.key in self._dropped:  # possibly before `put` began
                self.inner.drop([job.block.header.key])

    # Callers of the following methods hold `_changed`

    def _queued(self, header: BlockHeader) -> StoredBlock | None:
        job = self._blocks.get(header.key)
        return None if job is None else job.block

    def _ended(self, job: _Put) -> None:
        key = job.block.header.key
        if self._blocks.get(key) is job:  # still queued, not dropped meanwhile
            self._forget(job)
        if not self._writing([key]):
            self._dropped.discard(key)

    def _touched(self) -> None:
        self._touches -= 1

    def _has_room(self, job: _Put) -> bool:
        own, most = self._tenants[job.tenant] + job.n_bytes, self._queue.max_bytes
        if len(self._tenants.keys() - {self._public}) > 1 and own > most - most // _KEPT_FOR_OTHERS:
            return False
        return self._queue.n_bytes + job.n_bytes <= most

    def _writing(self, keys: Collection[BlockKey]) -> list[_Put]:
        puts = [job for job in self._queue.current() if isinstance(job, _Put)]
        return [job for job in puts if job.block.header.key in keys]

    def _drop(self, number: int, why: str) -> None:
        job = self._queue.take(number)
        if isinstance(job, _Put):
            self._forget(job)
            self._queue.counts[why] += 1

    def _drop_superseded(self, longer: BlockHeader) -> None:
        for number in self._queue.order.replaced_by(longer):
            self._drop(number, "superseded")

    def _drop_deferred(self) -> None:
        while self._queue.is_over_half:
            number = self._queue.order.oldest_deferred()
            if number is None:
                return
            self._drop(number, "dropped")

    def _forget(self, job: _Put) -> None:
        del self._blocks[job.block.header.key]
        self._children.remove(job.block.header)
        self._queue.n_bytes -= job.n_bytes
        self._tenants[job.tenant] -= job.n_bytes


def _joined(written: Sequence[BlockHeader], queued: Sequence[BlockHeader]) -> list[BlockHeader]:
    # For a block in both lists, the header in `queued`
    keys = {one.key for one in queued}
    return [*(one for one in written if one.key not in keys), *queued]

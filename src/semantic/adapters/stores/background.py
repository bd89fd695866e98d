"""Write-behind queue in front of a slow store: puts return at once, threads write.

Implements `CacheStorePort` in front of another one. Queued blocks and manifests are found and read
from the queue. Knows the queue's size and whether writes fail; not where or how they are written.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeAlias

from semantic.adapters.stores.memory import data_of, fill
from semantic.adapters.stores.neighbours import Children
from semantic.adapters.stores.write_order import UploadPace, WriteOrder
from semantic.application.agents.footprint import walk
from semantic.domain.block_hash import (
    PUBLIC_TENANT,
    BlockHash,
    BlockKey,
    Part,
    Scope,
    tenant_tag,
)
from semantic.domain.errors import IntegrityError, InvalidRequestError
from semantic.domain.stored import (
    QUEUE_COUNTERS,
    AgentName,
    BlockHeader,
    BlockRead,
    Found,
    Manifest,
    Pinned,
    Place,
    StoredBlock,
    StoreStats,
    Tier,
)
from semantic.ports.store import CacheStorePort

QUEUED_BLOCK_BYTES = 1024
"""What a queued block counts beside its body, so that empty ones are bounded too."""
_KEPT_FOR_OTHERS = 8
"""The part of the queue, 1/8, that no tenant alone may take: a full queue drops what others put."""
MAX_TOUCHES = 1000
"""Queued touches; further ones are dropped, which only worsens the order of eviction."""
FAILURES = 3
"""Consecutive failed writes before the queue backs off."""
FIRST_PAUSE = 1.0
"""Seconds of the first back-off; each further failure doubles it."""
MAX_PAUSE = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class _Put:
    block: StoredBlock

    @property
    def n_bytes(self) -> int:
        return QUEUED_BLOCK_BYTES + len(self.block.body)

    @property
    def tenant(self) -> bytes:
        return self.block.header.link.scope.tenant


@dataclass(slots=True, eq=False)
class _Save:
    number: int
    manifest: Manifest
    generation: int | None = None
    """The one it will get; determined when it is first needed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Touch:
    keys: Sequence[BlockKey]


_Job: TypeAlias = _Put | _Save | _Touch
_Agent: TypeAlias = tuple[Scope, str]


class BackgroundStore:
    """Accepts writes at once, and threads pass them to `inner`, in `WriteOrder`. Thread-safe.

    At most `max_queued_bytes` of blocks are queued (each counts `QUEUED_BLOCK_BYTES` beside its
    body), and of several tenants at most 7/8 of that for each, public prefixes not counted as one;
    what would exceed that is dropped (backpressure), and so is everything during a back-off. Of an
    agent's manifests only the newest is queued; a replaced one gets no generation. After `close`
    everything else that was accepted has been passed to `inner`; a process that ends without it
    loses the queue. A bug that ends the thread is raised by `flush` and `close`.

    Methods without a docstring: see `CacheStorePort`.
    """

    def __init__(
        self,
        inner: CacheStorePort,
        max_queued_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        tier: Tier = Tier.QUEUE,
        pace: UploadPace | None = None,
        threads: int = 1,
        forgets_at_once: bool = False,
        close_seconds: float = math.inf,
    ) -> None:
        """`tier` is what the queue is called. Blocks are passed on when `pace` allows, unless a
        `flush` or `close` waits for them: writing takes time from computing. With a pace
        checkpoints behind a turn's end come last, and are dropped while the queue is half full. Of
        several `threads` each passes on a block at a time; all else waits for what was put before
        it, as with one. With `forgets_at_once` it is `inner` that keeps what is written and what is
        removed in order, and neither `drop` nor `remove` waits for a write. `close` drops what is
        not passed on `close_seconds` after its begin.

        Raises InvalidRequestError for a bound below 1.
        """
        if max_queued_bytes < 1:
            raise InvalidRequestError(
                f"max_queued_bytes must be at least 1, got {max_queued_bytes}"
            )
        self._inner = inner
        self._max_bytes = max_queued_bytes
        self._tier = tier
        self._pace = pace
        self._waits = not forgets_at_once
        self._clock = clock
        self._backoff = Backoff(clock)
        self._changed = threading.Condition()
        self._queue: OrderedDict[int, _Job] = OrderedDict()
        self._numbers = 0
        self._current: dict[int, _Job] = {}  # by number, the oldest first
        self._blocks: dict[BlockKey, _Put] = {}
        self._dropped: set[BlockKey] = set()  # while they were passed on, and not put again
        self._children = Children()  # of `_blocks`
        self._order = WriteOrder(clock, defers=pace is not None)
        self._saves: OrderedDict[_Agent, _Save] = OrderedDict()
        self._n_bytes = 0
        self._tenants: Counter[bytes] = Counter()  # the bytes of each, of all that were ever seen
        self._public = tenant_tag(inner.secret, PUBLIC_TENANT)
        self._touches = 0
        self._flushing = 0
        self._counts: Counter[str] = Counter(dict.fromkeys(QUEUE_COUNTERS, 0))
        self._closing = False
        self._close_seconds = close_seconds
        self._ends = math.inf
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name="store writer", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def inner(self) -> CacheStorePort:
        """The store behind the queue."""
        return self._inner

    @property
    def pace(self) -> UploadPace | None:
        """When blocks may be passed on."""
        return self._pace

    @property
    def secret(self) -> bytes:
        return self._inner.secret

    @property
    def holds_back(self) -> bool:
        """See `CacheStorePort.holds_back`. With `forgets_at_once` also while the queue may drop
        blocks: the end of a turn puts again what is lacking then."""
        if self._waits or self._inner.holds_back:
            return self._inner.holds_back
        with self._changed:
            return not self._accepts() or self._n_bytes > self._max_bytes // 2

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        """See `CacheStorePort.put`. True means accepted."""
        job = _Put(block)
        with self._changed:
            if block.header.key in self._blocks:
                if not block.interim:
                    self._order.hasten(block.header.key)
                    self._changed.notify_all()
                return True
            self._tenants.setdefault(job.tenant, 0)
            if not self._accepts() or not self._has_room(job):
                self._counts["dropped"] += 1
                return False
            self._drop_superseded(block.header)
            self._blocks[block.header.key] = job
            self._dropped.discard(block.header.key)
            self._children.add(block.header)
            self._n_bytes += job.n_bytes
            self._tenants[job.tenant] += job.n_bytes
            self._enqueue(job)
            self._drop_deferred()
            return True

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.drop`. Not queued; waits for a block that is being written, unless
        the queue `forgets_at_once`."""
        gone = frozenset(keys)
        with self._changed:
            if not self._waits:
                for job in self._writing(gone):
                    self._dropped.add(job.block.header.key)
                    if self._blocks.get(job.block.header.key) is job:
                        self._forget(job)
            for number, queued in list(self._queue.items()):
                if isinstance(queued, _Put) and queued.block.header.key in gone:
                    self._take(number)
                    self._forget(queued)
            self._changed.wait_for(lambda: not (self._waits and self._writing(gone)))
        self._inner.drop(keys)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        with self._changed:
            queued = {key: self._blocks[key].block for key in keys if key in self._blocks}
        found = dict(self._inner.find([key for key in keys if key not in queued]))
        found.update((key, Found(len(one.body), self._tier)) for key, one in queued.items())
        return found

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        with self._changed:
            if not self._accepts() or self._n_bytes >= self._max_bytes:
                return frozenset()
            # The end of a turn writes a block at once that is held back.
            unqueued = [key for key in keys if key not in self._blocks or self._order.holds(key)]
        return self._inner.lacking(unqueued)

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        with self._changed:
            queued = self._children.of(parent, part)
        return _joined(self._inner.children(parent, part), queued)

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        with self._changed:
            queued = self._children.nearest(parent, part, like)
        return _joined(self._inner.nearest(parent, part, like), queued)

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        with self._changed:
            jobs = [self._blocks.get(header.key) for header in headers]
        found = dict(self._inner.resident(headers))
        for header, job in zip(headers, jobs, strict=True):
            data = None if job is None or job.block.header != header else data_of(job.block)
            if data is not None:
                found[header.key] = data
        self._count_hits(len(found))
        return found

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        with self._changed:
            jobs = [self._blocks.get(read.header.key) for read in reads]
        filled = [
            job is not None and fill(read, job.block) for read, job in zip(reads, jobs, strict=True)
        ]
        self._count_hits(sum(filled))
        rest = [i for i, done in enumerate(filled) if not done]
        written = self._inner.read_into([reads[i] for i in rest]) if rest else ()
        for i, done in zip(rest, written, strict=True):
            filled[i] = done
        return filled

    def read(self, header: BlockHeader) -> bytes | None:
        with self._changed:
            job = self._blocks.get(header.key)
        data = None if job is None or job.block.header != header else data_of(job.block)
        if data is None:
            return self._inner.read(header)
        self._count_hits(1)
        return bytes(data)

    def prefetch(self, header: BlockHeader) -> bool:
        """See `CacheStorePort.prefetch`. Not queued; what is queued is in memory."""
        with self._changed:
            is_queued = header.key in self._blocks
        return is_queued or self._inner.prefetch(header)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.touch`. Dropped when `MAX_TOUCHES` are queued."""
        with self._changed:
            if self._error is None and self._touches < MAX_TOUCHES:
                self._touches += 1
                self._enqueue(_Touch(tuple(keys)))

    # Agents

    def save(self, manifest: Manifest) -> bool:
        """See `CacheStorePort.save`. True means accepted."""
        agent = manifest.scope, manifest.agent_id
        with self._changed:
            if not self._accepts():
                self._counts["dropped manifests"] += 1
                return False
            older = self._saves.pop(agent, None)
            # A waiting `flush` waits for the older one.
            if older is not None and not self._flushing:
                self._take(older.number)
            save = _Save(self._numbers + 1, manifest)
            self._saves[agent] = save
            self._enqueue(save)
            return True

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        with self._changed:
            save = self._saves.get((scope, agent_id))
        return (
            self._inner.manifest(scope, agent_id) if save is None else self._with_generation(save)
        )

    def manifests(self) -> Sequence[Manifest]:
        with self._changed:
            saves = dict(self._saves)
        queued = [self._with_generation(save) for save in reversed(saves.values())]
        written = self._inner.manifests()
        return [
            *queued,
            *(one for one in written if (one.scope, one.agent_id) not in saves),
        ]

    def scopes(self) -> Sequence[Scope]:
        with self._changed:
            queued = [scope for scope, _ in self._saves]
        return list(dict.fromkeys([*queued, *self._inner.scopes()]))

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        with self._changed:
            saves = {name: save for (of, name), save in self._saves.items() if of == scope}
        queued = map(self._with_generation, saves.values())
        places = sorted((one for one in queued if after is None or one.place < after), key=_place)
        written = (
            one for one in walk(self._inner, scope, limit, after) if one.agent_id not in saves
        )
        merged = heapq.merge(reversed(places), written, key=_place, reverse=True)
        return list(itertools.islice(merged, limit))

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        with self._changed:
            queued = {
                name: save.manifest.parent
                for (of, name), save in self._saves.items()
                if of == scope
            }
        written = (one for one in self._inner.child_agents(scope, parent) if one not in queued)
        return sorted({*written, *(name for name, of in queued.items() if of == parent)})

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """See `CacheStorePort.users`. Queued manifests do not count yet."""
        return self._inner.users(hashes)

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """See `CacheStorePort.remove`. Not queued: the agent is removed on return."""
        with self._changed:
            was_queued = self._saves.pop((scope, agent_id), None) is not None
            for number, job in list(self._queue.items()):
                if isinstance(job, _Save) and _agent(job) == (scope, agent_id):
                    self._take(number)
            self._changed.wait_for(lambda: not (self._waits and self._is_saving((scope, agent_id))))
        return self._inner.remove(scope, agent_id) or was_queued

    def pinned(self, tenant: bytes) -> Pinned:
        """See `CacheStorePort.pinned`. Queued manifests do not count yet."""
        return self._inner.pinned(tenant)

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`. The first entry is the queue: its "dropped" were never
        passed to the inner store, its "back-offs" count the pauses after failed writes.
        """
        with self._changed:
            queue = StoreStats(
                self._tier,
                n_blocks=len(self._blocks),
                n_bytes=self._n_bytes,
                max_bytes=self._max_bytes,
                n_agents=len(self._saves),
                counts={**self._counts, "back-offs": self._backoff.times},
            )
        return [queue, *self._inner.stats()]

    def flush(self) -> None:
        """See `CacheStorePort.flush`. Raises IntegrityError when a bug has ended the thread."""
        self._drain()
        self._inner.flush()

    def close(self) -> None:
        """See `CacheStorePort.close`. Raises IntegrityError when a bug has ended the thread."""
        with self._changed:
            self._ends = self._clock() + self._close_seconds
        try:
            self._drain()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()
            self._inner.close()

    def _drain(self) -> None:
        with self._changed:
            last = self._numbers
            self._flushing += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._error is not None or self._is_done(last))
            finally:
                self._flushing -= 1
            if self._error is not None:
                raise IntegrityError(
                    f"the thread that writes blocks died: {self._error!r}"
                ) from self._error

    def _with_generation(self, save: _Save) -> Manifest:
        """The queued manifest with the generation that it will have."""
        with self._changed:
            generation = save.generation
        if generation is None:
            before = self._inner.manifest(*_agent(save))
            with self._changed:
                # The thread may have written it meanwhile; then `before` may be this manifest.
                if save.generation is None:
                    save.generation = 1 + (before.generation if before else 0)
                generation = save.generation
        return replace(save.manifest, generation=generation)

    def _count_hits(self, n: int) -> None:
        with self._changed:
            self._counts["hits"] += n

    # With `_changed` held

    def _accepts(self) -> bool:
        return self._error is None and not self._backoff.is_on()

    def _has_room(self, job: _Put) -> bool:
        """Whether it fits, and leaves a part to other tenants, if there are any."""
        own = self._tenants[job.tenant] + job.n_bytes
        is_shared = len(self._tenants.keys() - {self._public}) > 1
        most = self._max_bytes - self._max_bytes // _KEPT_FOR_OTHERS if is_shared else own
        return own <= most and self._n_bytes + job.n_bytes <= self._max_bytes

    def _enqueue(self, job: _Job) -> None:
        self._numbers += 1
        self._queue[self._numbers] = job
        self._order.add(self._numbers, job.block if isinstance(job, _Put) else None)
        self._changed.notify_all()

    def _is_done(self, number: int) -> bool:
        """Whether everything up to `number` has been written."""
        return all(one > number for one in self._current) and (
            next(iter(self._queue), number + 1) > number
        )

    def _is_saving(self, agent: _Agent) -> bool:
        jobs = self._current.values()
        return any(isinstance(job, _Save) and _agent(job) == agent for job in jobs)

    def _writing(self, keys: Collection[BlockKey]) -> list[_Put]:
        puts = [job for job in self._current.values() if isinstance(job, _Put)]
        return [job for job in puts if job.block.header.key in keys]

    def _take(self, number: int) -> _Job | None:
        """Take a job from the queue; None if it is no longer there."""
        self._order.discard(number)
        return self._queue.pop(number, None)

    def _drop(self, number: int, why: str) -> None:
        """Give up a queued block."""
        job = self._take(number)
        if isinstance(job, _Put):
            self._forget(job)
            self._counts[why] += 1

    def _drop_superseded(self, longer: BlockHeader) -> None:
        for number in self._order.replaced_by(longer):
            self._drop(number, "superseded")

    def _drop_deferred(self) -> None:
        """Keep half of the queue for what does not give way."""
        while 2 * self._n_bytes > self._max_bytes:
            number = self._order.oldest_deferred()
            if number is None:
                return
            self._drop(number, "dropped")

    def _due(self) -> int | None:
        """The number of the next job to do; None if there is none, or all of them linger."""
        hurries = self._flushing or self._closing or 2 * self._n_bytes > self._max_bytes
        return self._order.next(lingers=not hurries)

    def _forget(self, job: _Put) -> None:
        """The block is no longer queued."""
        del self._blocks[job.block.header.key]
        self._children.remove(job.block.header)
        self._n_bytes -= job.n_bytes
        self._tenants[job.tenant] -= job.n_bytes

    # The threads

    def _run(self) -> None:
        with contextlib.ExitStack() as at_exit:
            at_exit.push(self._on_exit)
            while (found := self._next()) is not None:
                number, job = found
                self._write(job)
                self._done(number, job)

    def _on_exit(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        """Record the error for `flush` and `close`, and wake every waiting thread."""
        with self._changed:
            self._error = self._error or error
            self._current.clear()
            self._changed.notify_all()
        return True

    def _next(self) -> tuple[int, _Job] | None:
        """Wait for the next job, and take it; None when there will be none."""
        with self._changed:
            while self._error is None:
                number = self._due()
                if number is None and self._closing and not self._queue:
                    return None
                wait = self._order.delay() if number is None else self._until_start(number)
                if number is not None and wait == 0:
                    self._order.discard(number)
                    job = self._current[number] = self._queue.pop(number)
                    if self._pace is not None and isinstance(job, _Put):
                        self._pace.begin()
                    return number, job
                self._changed.wait(wait)
        return None

    def _until_start(self, number: int) -> float | None:
        """Seconds after which to ask again whether a job may be done; None when another one has
        ended."""
        if not isinstance(self._queue[number], _Put):
            return None if self._current else 0.0
        hurries = self._flushing or self._closing
        return 0.0 if self._pace is None or hurries else self._pace.delay()

    def _write(self, job: _Job) -> None:
        match job:
            case _Touch(keys):
                self._inner.touch(keys)
            case _Put(block):
                try:
                    self._attempt(lambda: self._inner.put(block), "dropped")
                finally:
                    if self._pace is not None:
                        self._pace.end()
                with self._changed:
                    if block.header.key in self._dropped:  # maybe before `put` began
                        self._inner.drop([block.header.key])
            case _Save():
                self._with_generation(job)
                self._attempt(lambda: self._inner.save(job.manifest), "dropped manifests")
                if not self._waits and _agent(job) not in self._saves:  # removed before
                    self._inner.remove(*_agent(job))

    def _attempt(self, write: Callable[[], bool], dropped: str) -> None:
        with self._changed:
            if self._backoff.is_on() or self._clock() >= self._ends:
                self._counts[dropped] += 1
                return
        succeeded = write()
        with self._changed:
            self._backoff.record(succeeded=succeeded)

    def _done(self, number: int, job: _Job) -> None:
        with self._changed:
            self._current.pop(number, None)
            match job:
                case _Touch():
                    self._touches -= 1
                case _Put(block):
                    if self._blocks.get(block.header.key) is job:  # not dropped meanwhile
                        self._forget(job)
                    if not self._writing([block.header.key]):
                        self._dropped.discard(block.header.key)
                case _Save():
                    if self._saves.get(_agent(job)) is job:
                        del self._saves[_agent(job)]
            self._changed.notify_all()


def _joined(written: Sequence[BlockHeader], queued: Sequence[BlockHeader]) -> list[BlockHeader]:
    """Each block once; the queued header of one that is being written."""
    keys = {one.key for one in queued}
    return [*(one for one in written if one.key not in keys), *queued]


def _place(manifest: Manifest) -> Place:
    return manifest.place


def _agent(save: _Save) -> _Agent:
    return save.manifest.scope, save.manifest.agent_id


class Backoff:
    """Exponential back-off: after `FAILURES` consecutive failures no writes for a while.

    After the pause one write is tried: it ends the back-off, or begins one twice as long, up to
    `MAX_PAUSE` seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: float | None = None
        self._pause = FIRST_PAUSE
        self._failures = 0
        self.times = 0

    def is_on(self) -> bool:
        """Whether writes are paused now."""
        return self._until is not None and self._clock() < self._until

    @property
    def has_begun(self) -> bool:
        """Whether writes are or were paused, and none has succeeded since."""
        return self._until is not None

    def record(self, *, succeeded: bool) -> None:
        """Record the result of a write."""
        if succeeded:
            self._failures, self._until, self._pause = 0, None, FIRST_PAUSE
            return
        self._failures += 1
        if self._failures >= FAILURES:
            self._until = self._clock() + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
            self.times += 1

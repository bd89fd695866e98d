"""ReadAhead: brings stored prefixes from disk into memory shortly before they are needed.

In a thread of its own, one body after the other. Knows when agents are expected and which requests
wait; neither what is in the pool nor how a body is read. ToolTimes says when they are expected: how
long an agent is usually away after a call of a tool.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from semantic.application.cache.prefix_lookup import StoredPrefix
from semantic.domain.fair_share import FairLru
from semantic.domain.stored import BlockHeader
from semantic.domain.value_objects import CacheKey
from semantic.ports.generation import Clock

LEAD = 3.0
"""Seconds before an agent is expected: in `benchmarks.returns` longer ones read what is evicted
again before it is used, and shorter ones end too late for long histories."""
_LATE = 60.0
"""Seconds after which what was read for an agent that is not back no longer counts."""
_MOST_EXPECTED = 1000
_REST = 3
"""How many times as long as it took to read a body nothing is read then: on a CPU a decode has its
cores back, and the drive is free for what is needed at once."""
_PATIENCE = 0.05
"""Seconds to wait for the loads of requests before asking whether the agent is still expected."""


class Prefixes(Protocol):
    """The store of prefixes. `ReadAhead` calls its methods without a lock."""

    @property
    def ahead_bytes(self) -> int:
        """Bytes of memory that may be filled ahead of need."""
        ...

    def stored_prefix(self, agent_id: str, tenant: str) -> StoredPrefix | None:
        """What is stored of the agent's last turn, or None."""
        ...

    def prefetch(self, header: BlockHeader) -> bool: ...

    def wait_until_loaded(self, seconds: float) -> bool:
        """Return when no request's prefix is being read, or after `seconds`; whether none is."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A prefix to read at `due`; that of the agent's last turn if it is None."""

    due: float
    prefix: StoredPrefix | None = None


class ReadAhead:
    """Reads for one engine. Thread-safe; the thread starts with the first agent that is expected.

    Requests that load go first. All that is read and not used yet takes at most
    `Prefixes.ahead_bytes`; an agent whose cache is in the pool costs nothing.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        in_pool: Callable[[CacheKey], bool],
        clock: Clock = time.monotonic,
    ) -> None:
        """`in_pool` says whether an agent's cache is in the pool; any thread may call it."""
        self._prefixes = prefixes
        self._in_pool = in_pool
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[CacheKey, _Job] = {}
        self._reading: CacheKey | None = None
        self._held: dict[CacheKey, tuple[float, int]] = {}  # until when, and bytes
        self._thread: threading.Thread | None = None
        self._closed = False

    def expect(self, key: CacheKey, seconds: float) -> None:
        """The agent will send its next request in so many seconds."""
        self._add(key, _Job(self._clock() + max(0.0, seconds - LEAD)))

    def waits(self, key: CacheKey, prefix: StoredPrefix) -> None:
        """A request of the agent waits for blocks; it will be restored from `prefix`."""
        self._add(key, _Job(self._clock(), prefix))

    def arrived(self, key: CacheKey) -> None:
        """The agent is back, or its request waits no more: nothing is read for it any longer."""
        with self._changed:
            self._jobs.pop(key, None)
            self._held.pop(key, None)
            if self._reading == key:
                self._reading = None
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread, after the body that it reads."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._reading = None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def read_due(self) -> float | None:
        """Read what is due; seconds until the next is, None if nothing is expected."""
        while (found := self._take()) is not None:
            self._read(*found)
        return self._seconds()

    def _add(self, key: CacheKey, job: _Job) -> None:
        with self._changed:
            if self._closed:
                return
            self._jobs[key] = job
            if len(self._jobs) > _MOST_EXPECTED:
                del self._jobs[max(self._jobs, key=lambda one: self._jobs[one].due)]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._closed:
            self.read_due()
            self._wait()

    def _wait(self) -> None:
        """Return when an agent may be due."""
        with self._changed:
            seconds = self._seconds()
            if not self._closed and seconds != 0:
                self._changed.wait(seconds)

    def _seconds(self) -> float | None:
        with self._changed:
            due = min((job.due for job in self._jobs.values()), default=None)
        return None if due is None else max(0.0, due - self._clock())

    def _take(self) -> tuple[CacheKey, _Job] | None:
        """The job that is due first, if one is."""
        with self._changed:
            key = min(self._jobs, key=lambda one: self._jobs[one].due, default=None)
            if key is None or self._jobs[key].due > self._clock():
                return None
            self._reading = key
            return key, self._jobs.pop(key)

    def _read(self, key: CacheKey, job: _Job) -> None:
        if self._in_pool(key):
            return
        prefix = job.prefix or self._prefixes.stored_prefix(key.agent_id, key.tenant)
        if prefix is None:
            return
        most, n_bytes = self._left(key), 0
        for header in prefix.headers:
            found = prefix.found.get(header.key)
            n_bytes += 0 if found is None else found.n_bytes
            if n_bytes > most or not self._may_read(key):
                return
            began = self._clock()
            if not self._prefixes.prefetch(header):
                return
            rest = _REST * (self._clock() - began)
            with self._changed:
                if self._reading == key:
                    self._held[key] = job.due + LEAD + _LATE, n_bytes
                self._changed.wait_for(lambda: self._reading != key, rest)

    def _left(self, key: CacheKey) -> int:
        """Bytes that may be read for an agent beside what others have not used yet."""
        now, most = self._clock(), self._prefixes.ahead_bytes  # not under the lock: it may be slow
        with self._changed:
            others = ((one, *held) for one, held in self._held.items() if one != key)
            self._held = {one: (until, n) for one, until, n in others if until > now}
            return most - sum(n for _, n in self._held.values())

    def _may_read(self, key: CacheKey) -> bool:
        """Wait for the loads of requests; False if the agent is no longer expected."""
        while self._reading == key:
            if self._prefixes.wait_until_loaded(_PATIENCE):
                return True
        return False


_LATEST = 32
"""Absences after each tool that the median is taken of."""
_FEWEST = 3
"""Absences before which nothing is expected: one of them may be any pause."""
_MOST_TOOLS = 1000
_MOST_AWAY = 10_000
_LONGEST_NAME = 128
"""Characters. Tools with longer names are not remembered."""


class ToolTimes:
    """The median of the latest absences after each tool of a tenant, which no outlier moves far.

    What is remembered is bounded, and tenants share the bound. Not thread-safe.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._seconds: FairLru[str, deque[float]] = FairLru(_MOST_TOOLS)
        self._away: FairLru[str, tuple[str, float]] = FairLru(_MOST_AWAY)

    def called(self, agent: str, tenant: str, tools: Collection[str]) -> float | None:
        """The agent has got calls of `tools`; in how many seconds it is usually back.

        That is when the slowest known one has ended; None if none is known. Only calls of one tool
        are learned from: of several it is not known which took how long.
        """
        names = {name for name in tools if len(name) <= _LONGEST_NAME}
        self._away.remove(tenant, agent)
        if len(names) == len(set(tools)) == 1:
            self._away.put(tenant, agent, (next(iter(names)), self._clock()))
        usual = [self._usual(tenant, name) for name in names]
        return max((seconds for seconds in usual if seconds is not None), default=None)

    def returned(self, agent: str, tenant: str) -> None:
        """The agent has sent its next request."""
        away = self._away.peek(tenant, agent)
        if away is None:
            return
        self._away.remove(tenant, agent)
        name, since = away
        seconds = self._seconds.get(tenant, name)
        if seconds is None:
            seconds = deque(maxlen=_LATEST)
            self._seconds.put(tenant, name, seconds)
        seconds.append(self._clock() - since)

    def _usual(self, tenant: str, name: str) -> float | None:
        seconds = self._seconds.get(tenant, name)
        return statistics.median(seconds) if seconds and len(seconds) >= _FEWEST else None

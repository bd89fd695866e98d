"""ReadAhead: brings stored prefixes from disk into memory shortly before requests need them.

ToolTimes predicts an agent's return from earlier calls of the same tool.
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
"""The seconds between the start of a read and the agent's expected return. Measured by
`benchmarks.returns`."""
_LATE = 60.0
"""The seconds after an agent's expected return for which its bodies stay reserved."""
_MOST_EXPECTED = 1000
_REST = 3
"""The rest after a read, as a multiple of the read's time. Decoding on a CPU needs the cores."""
_PATIENCE = 0.05
"""Seconds between checks whether requests still load."""


class Prefixes(Protocol):
    """The stored prefixes for `ReadAhead`, which calls these methods without a lock."""

    @property
    def ahead_bytes(self) -> int:
        """The maximum size in bytes of bodies that no request needs yet."""

    def stored_prefix(self, agent_id: str, tenant: str) -> StoredPrefix | None:
        """Return the stored prefix of the agent's last turn; None if the store has none."""

    def prefetch(self, header: BlockHeader) -> bool: ...

    def wait_until_loaded(self, seconds: float) -> bool:
        """Wait at most `seconds` for all loads of requests; return whether all ended."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    due: float
    prefix: StoredPrefix | None = None


class ReadAhead:
    """Reads prefixes ahead for one engine, on its own thread. Waits while requests load.
    Thread-safe."""

    def __init__(
        self, prefixes: Prefixes, in_pool: Callable[[CacheKey], bool], clock: Clock = time.monotonic
    ) -> None:
        """`in_pool` says whether an agent's cache is in the pool. Any thread may call it."""
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
        """Expect the agent's next request in `seconds`."""
        self._add(key, _Job(self._clock() + max(0.0, seconds - LEAD)))

    def waits(self, key: CacheKey, prefix: StoredPrefix) -> None:
        """Read `prefix` ahead for an agent's waiting request."""
        self._add(key, _Job(self._clock(), prefix))

    def arrived(self, key: CacheKey) -> None:
        """Stop reading ahead for an agent."""
        with self._changed:
            self._jobs.pop(key, None)
            self._held.pop(key, None)
            if self._reading == key:
                self._reading = None
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread after the current body."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._reading = None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def read_due(self) -> float | None:
        """Run all jobs that are due; return the seconds until the next job, or None without one."""
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
        with self._changed:
            seconds = self._seconds()
            if not self._closed and seconds != 0:
                self._changed.wait(seconds)

    def _seconds(self) -> float | None:
        with self._changed:
            due = min((job.due for job in self._jobs.values()), default=None)
        return None if due is None else max(0.0, due - self._clock())

    def _take(self) -> tuple[CacheKey, _Job] | None:
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
        now, most = self._clock(), self._prefixes.ahead_bytes  # without the lock: this may be slow
        with self._changed:
            others = ((one, *held) for one, held in self._held.items() if one != key)
            self._held = {one: (until, n) for one, until, n in others if until > now}
            return most - sum(n for _, n in self._held.values())

    def _may_read(self, key: CacheKey) -> bool:
        """Wait until no request loads; return whether the agent is still away."""
        while self._reading == key:
            if self._prefixes.wait_until_loaded(_PATIENCE):
                return True
        return False


_LATEST = 32
"""The number of latest absences after a tool that the median covers."""
_FEWEST = 3
"""The minimum number of absences after a tool for a prediction."""
_MOST_TOOLS = 1000
_MOST_AWAY = 10_000
_LONGEST_NAME = 128
"""The maximum length of a tool's name. `ToolTimes` ignores longer names."""


class ToolTimes:
    """Learns how long agents are away after they call a tool: the median of recent absences. Not
    thread-safe."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._seconds: FairLru[str, deque[float]] = FairLru(_MOST_TOOLS)
        self._away: FairLru[str, tuple[str, float]] = FairLru(_MOST_AWAY)

    def called(self, agent: str, tenant: str, tools: Collection[str]) -> float | None:
        """Record a call of `tools`; return the usual seconds of absence, or None. Learns only from
        calls of a single tool."""
        names = {name for name in tools if len(name) <= _LONGEST_NAME}
        self._away.remove(tenant, agent)
        if len(names) == len(set(tools)) == 1:
            self._away.put(tenant, agent, (next(iter(names)), self._clock()))
        usual = [self._usual(tenant, name) for name in names]
        return max((seconds for seconds in usual if seconds is not None), default=None)

    def returned(self, agent: str, tenant: str) -> None:
        """Record that the agent has sent its next request."""
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
